/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens, roles, and the check of a claimed role. */
#include "rpc/rpc_credentials.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

typedef struct token_set {
    char text[EP_ROLES_COUNT][EP_TOKENS_PER_ROLE][EP_TOKEN_BYTES_MAX + 1];
    char labels[EP_ROLES_COUNT][EP_TOKENS_PER_ROLE][EP_TOKEN_LABEL_BYTES];
} token_set;

struct ep_rpc_credentials {
    pthread_mutex_t lock;
    token_set tokens;
};

const char *ep_rpc_role_name(ep_rpc_role role)
{
    static const char *const names[EP_ROLES_COUNT] = {"client", "node", "operator"};
    EP_ASSERT((unsigned)role < EP_ROLES_COUNT);
    return names[role];
}

ep_err ep_rpc_role_read(const char *name, ep_rpc_role *out_role, ep_error *out_error)
{
    *out_role = EP_ROLE_CLIENT;
    if (name[0] == 0 || strcmp(name, "client") == 0) {
        return EP_OK;
    }
    /* a coordinator has the rights of a node */
    if (strcmp(name, "node") == 0 || strcmp(name, "coordinator") == 0) {
        *out_role = EP_ROLE_NODE;
        return EP_OK;
    }
    if (strcmp(name, "operator") == 0) {
        *out_role = EP_ROLE_OPERATOR;
        return EP_OK;
    }
    return ep_error_set(
        out_error, EP_ERR_INVALID_ARGUMENT,
        "peer's role is \"%.100s\", allowed are client, node, operator and coordinator", name);
}

const char *ep_rpc_refusal_name(ep_rpc_refusal refusal)
{
    static const char *const names[EP_REFUSALS_COUNT] = {
        "token-missing", "token-wrong", "token-role", "operators-off", "listener",
        "method",        "hello",       "no-hello",   "slow",          "connections",
    };
    return names[refusal];
}

bool ep_rpc_token_equal(const char *expected, const char *given)
{
    size_t expected_bytes = strlen(expected);
    size_t given_bytes = strlen(given);
    volatile unsigned char differ = expected_bytes != given_bytes;
    for (size_t i = 0; i < given_bytes; i++) {
        /* beyond the expected token, compare with its terminator, so that all lengths take one
         * path */
        unsigned char want = (unsigned char)expected[i < expected_bytes ? i : expected_bytes];
        differ = (unsigned char)(differ | (want ^ (unsigned char)given[i]));
    }
    return differ == 0;
}

static ep_err fill(const ep_rpc_tokens *tokens, token_set *out_set, ep_error *out_error)
{
    for (size_t role = 0; role < EP_ROLES_COUNT; role++) {
        for (size_t i = 0; i < EP_TOKENS_PER_ROLE; i++) {
            const char *text = tokens->of[role][i] != NULL ? tokens->of[role][i] : "";
            size_t bytes = strlen(text);
            if (bytes > EP_TOKEN_BYTES_MAX) {
                return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                    "a token of role %s has %zu bytes, allowed up to %d",
                                    ep_rpc_role_name((ep_rpc_role)role), bytes, EP_TOKEN_BYTES_MAX);
            }
            memcpy(out_set->text[role][i], text, bytes + 1);
            const char *label = tokens->labels[role][i];
            snprintf(out_set->labels[role][i], EP_TOKEN_LABEL_BYTES, "%s",
                     label != NULL ? label : "");
        }
    }
    return EP_OK;
}

ep_err ep_rpc_credentials_create(const ep_rpc_tokens *tokens, ep_rpc_credentials **out_credentials,
                                 ep_error *out_error)
{
    ep_rpc_credentials *credentials = calloc(1, sizeof(*credentials));
    if (credentials == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for tokens");
    }
    pthread_mutex_init(&credentials->lock, NULL);
    ep_err err = fill(tokens, &credentials->tokens, out_error);
    if (err != EP_OK) {
        ep_rpc_credentials_destroy(credentials);
        return err;
    }
    *out_credentials = credentials;
    return EP_OK;
}

void ep_rpc_credentials_destroy(ep_rpc_credentials *credentials)
{
    if (credentials != NULL) {
        explicit_bzero(&credentials->tokens, sizeof(credentials->tokens));
        pthread_mutex_destroy(&credentials->lock);
        free(credentials);
    }
}

ep_err ep_rpc_credentials_replace(ep_rpc_credentials *credentials, const ep_rpc_tokens *tokens,
                                  ep_error *out_error)
{
    token_set fresh;
    memset(&fresh, 0, sizeof(fresh));
    ep_err err = fill(tokens, &fresh, out_error);
    if (err == EP_OK) {
        pthread_mutex_lock(&credentials->lock);
        credentials->tokens = fresh;
        pthread_mutex_unlock(&credentials->lock);
    }
    explicit_bzero(&fresh, sizeof(fresh));
    return err;
}

/* Which roles have a token. It is always compared with all tokens of all roles. */
typedef struct token_worth {
    bool has_tokens[EP_ROLES_COUNT];
    bool is_of[EP_ROLES_COUNT];
} token_worth;

static token_worth weigh(ep_rpc_credentials *credentials, const char *token)
{
    token_worth worth = {0};
    if (credentials == NULL) {
        return worth;
    }
    pthread_mutex_lock(&credentials->lock);
    for (size_t role = 0; role < EP_ROLES_COUNT; role++) {
        for (size_t i = 0; i < EP_TOKENS_PER_ROLE; i++) {
            const char *expected = credentials->tokens.text[role][i];
            bool equal = ep_rpc_token_equal(expected, token);
            worth.has_tokens[role] |= expected[0] != 0;
            worth.is_of[role] |= equal && expected[0] != 0;
        }
    }
    pthread_mutex_unlock(&credentials->lock);
    return worth;
}

bool ep_rpc_credentials_prove_nodes(ep_rpc_credentials *credentials)
{
    bool proves = false, is_shared = false;
    if (credentials == NULL) {
        return false;
    }
    pthread_mutex_lock(&credentials->lock);
    for (size_t n = 0; n < EP_TOKENS_PER_ROLE; n++) {
        const char *of_node = credentials->tokens.text[EP_ROLE_NODE][n];
        proves |= of_node[0] != 0;
        for (size_t c = 0; c < EP_TOKENS_PER_ROLE && of_node[0] != 0; c++) {
            is_shared |= ep_rpc_token_equal(of_node, credentials->tokens.text[EP_ROLE_CLIENT][c]);
        }
    }
    pthread_mutex_unlock(&credentials->lock);
    return proves && !is_shared;
}

static ep_err refuse(ep_rpc_refusal refusal, ep_rpc_refusal *out_refusal)
{
    *out_refusal = refusal;
    return refusal == EP_REFUSED_TOKEN_MISSING || refusal == EP_REFUSED_TOKEN_WRONG
               ? EP_ERR_UNAUTHENTICATED
               : EP_ERR_PERMISSION_DENIED;
}

/* For messages: the key of a daemon and the option of expertctl that set a role's tokens. */
static const char *const token_keys[EP_ROLES_COUNT] = {
    "token_file (--token-file)", "node_token_file, or token_file where that is not set",
    "admin_token_file (--admin-token-file)"};

static ep_err judge_token(const token_worth *worth, ep_rpc_role claimed, const char *token,
                          ep_rpc_refusal *out_refusal, ep_error *out_error)
{
    bool in_use = worth->has_tokens[EP_ROLE_CLIENT] || worth->has_tokens[EP_ROLE_NODE];
    bool good = false;
    for (size_t role = claimed; role < EP_ROLES_COUNT; role++) {
        good |= worth->is_of[role];
    }
    if (good) {
        return EP_OK;
    }
    if (!worth->has_tokens[claimed]) {
        if (claimed != EP_ROLE_OPERATOR || !in_use) {
            return EP_OK;
        }
        return ep_error_set(
            out_error, refuse(EP_REFUSED_OPERATORS_OFF, out_refusal),
            "operators are refused: token_file is set here and admin_token_file is not");
    }
    for (size_t role = 0; role < claimed; role++) {
        if (worth->is_of[role]) {
            return ep_error_set(
                out_error, refuse(EP_REFUSED_TOKEN_ROLE, out_refusal),
                "the token is good for role %s, not for role %s: show one of the service's %s",
                ep_rpc_role_name((ep_rpc_role)role), ep_rpc_role_name(claimed),
                token_keys[claimed]);
        }
    }
    bool missing = token[0] == 0;
    return ep_error_set(
        out_error, refuse(missing ? EP_REFUSED_TOKEN_MISSING : EP_REFUSED_TOKEN_WRONG, out_refusal),
        "the token is %s: show one of the service's %s", missing ? "missing" : "wrong",
        token_keys[claimed]);
}

ep_err ep_rpc_credentials_judge(ep_rpc_credentials *credentials, unsigned roles,
                                ep_rpc_role claimed, const char *token, ep_rpc_refusal *out_refusal,
                                ep_error *out_error)
{
    token_worth worth = weigh(credentials, token);
    ep_err err = judge_token(&worth, claimed, token, out_refusal, out_error);
    if (err != EP_OK || (roles & EP_ROLE_BIT(claimed)) != 0) {
        return err;
    }
    return ep_error_set(
        out_error, refuse(EP_REFUSED_LISTENER, out_refusal),
        "role %s is not admitted on this listener; %s", ep_rpc_role_name(claimed),
        claimed == EP_ROLE_OPERATOR
            ? "operators connect to admin_listen (by default port 7412 of a coordinator, 7422 of a "
              "node)"
            : "it is for operators (admin_listen), others connect to listen (by default port 7410 "
              "of a "
              "coordinator, 7420 of a node)");
}

void ep_rpc_credentials_label(ep_rpc_credentials *credentials, const char *token,
                              char out[EP_TOKEN_LABEL_BYTES])
{
    out[0] = 0;
    if (credentials == NULL || token[0] == 0) {
        return;
    }
    pthread_mutex_lock(&credentials->lock);
    for (size_t role = 0; role < EP_ROLES_COUNT; role++) {
        for (size_t i = 0; i < EP_TOKENS_PER_ROLE; i++) {
            if (ep_rpc_token_equal(credentials->tokens.text[role][i], token)) {
                memcpy(out, credentials->tokens.labels[role][i], EP_TOKEN_LABEL_BYTES);
            }
        }
    }
    pthread_mutex_unlock(&credentials->lock);
}

void ep_rpc_credentials_show(ep_rpc_credentials *credentials, ep_rpc_role role,
                             char out[EP_TOKEN_BYTES_MAX + 1])
{
    pthread_mutex_lock(&credentials->lock);
    snprintf(out, EP_TOKEN_BYTES_MAX + 1, "%s", credentials->tokens.text[role][0]);
    pthread_mutex_unlock(&credentials->lock);
}
