/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens and roles: who gets which role on which listener, and what each role may call. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "rpc/rpc_credentials.h"
#include "support/expect.h"

Test(credentials, tokens_are_equal_only_when_equal)
{
    const struct {
        const char *expected;
        const char *given;
        bool equal;
    } rows[] = {
        {"", "", true},
        {"a", "a", true},
        {"0123456789", "0123456789", true},
        {"", "a", false},
        {"a", "", false},
        {"ab", "a", false},
        {"a", "ab", false},
        {"abc", "abd", false},
        {"abc", "xbc", false},
        {"abc", "ABC", false},
        {"aaaa", "aaaaaaaa", false},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        cr_assert_eq(ep_rpc_token_equal(rows[i].expected, rows[i].given), rows[i].equal,
                     "%s against %s", rows[i].expected, rows[i].given);
    }
}

static const char CLIENT_TOKEN[] = "client-token-000";
static const char NODE_TOKEN[] = "node-token-000000";
static const char ADMIN_TOKEN[] = "admin-token-0000";

static ep_rpc_credentials *credentials;
static ep_error error;

static void give(const char *client, const char *node, const char *admin)
{
    ep_rpc_tokens tokens = {.of = {{client}, {node}, {admin}}};
    cr_assert_eq(ep_rpc_credentials_create(&tokens, &credentials, &error), EP_OK);
}

static void take(void)
{
    ep_rpc_credentials_destroy(credentials);
    credentials = NULL;
}

/* The refusal's name, or "" when the role is given. */
static const char *judged(unsigned roles, ep_rpc_role claimed, const char *token)
{
    ep_rpc_refusal refusal;
    ep_error_clear(&error);
    ep_err err = ep_rpc_credentials_judge(credentials, roles, claimed, token, &refusal, &error);
    if (err == EP_OK) {
        return "";
    }
    bool unknown = refusal == EP_REFUSED_TOKEN_MISSING || refusal == EP_REFUSED_TOKEN_WRONG;
    cr_expect_eq(err, unknown ? EP_ERR_UNAUTHENTICATED : EP_ERR_PERMISSION_DENIED);
    cr_expect(token[0] == 0 || strstr(error.text, token) == NULL, "shows the token: %s",
              error.text);
    return ep_rpc_refusal_name(refusal);
}

Test(credentials, a_token_is_good_for_its_role_and_lower_ones, .fini = take)
{
    give(CLIENT_TOKEN, NODE_TOKEN, ADMIN_TOKEN);
    const struct {
        const char *token;
        const char *as[EP_ROLES_COUNT];
    } rows[] = {
        {"", {"token-missing", "token-missing", "token-missing"}},
        {"client-token-00", {"token-wrong", "token-wrong", "token-wrong"}},
        {CLIENT_TOKEN, {"", "token-role", "token-role"}},
        {NODE_TOKEN, {"", "", "token-role"}},
        {ADMIN_TOKEN, {"", "", ""}},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (int role = 0; role < EP_ROLES_COUNT; role++) {
            cr_expect_str_eq(judged(EP_ROLES_ALL, (ep_rpc_role)role, rows[i].token),
                             rows[i].as[role], "%s as %d", rows[i].token, role);
        }
    }
}

Test(credentials, listeners_admit_their_roles_only, .fini = take)
{
    give(CLIENT_TOKEN, NODE_TOKEN, ADMIN_TOKEN);
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_OPERATOR, ADMIN_TOKEN), "listener");
    EXPECT_TEXT(error, "admin_listen");
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_CLIENT, ADMIN_TOKEN), "");
    cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_OPERATOR, ADMIN_TOKEN), "");
    cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_CLIENT, CLIENT_TOKEN), "listener");
    cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_NODE, NODE_TOKEN), "listener");
    /* strangers learn nothing about listeners */
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_OPERATOR, "0000000000000000"), "token-wrong");
}

Test(credentials, without_tokens_roles_are_as_claimed_but_bound_to_listeners)
{
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_NODE, ""), "");
    cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_OPERATOR, ""), "");
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_OPERATOR, ""), "listener");
    give(NULL, "", NULL);
    cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_OPERATOR, "whatever"), "");
    cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_CLIENT, ""), "listener");
    take();
}

Test(credentials, operators_are_never_let_in_by_another_roles_token, .fini = take)
{
    give(CLIENT_TOKEN, CLIENT_TOKEN, NULL);
    static const char *const tokens[] = {"", CLIENT_TOKEN, ADMIN_TOKEN};
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
        cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_OPERATOR, tokens[i]), "operators-off");
        EXPECT_TEXT(error, "admin_token_file");
    }
}

Test(credentials, operators_alone_may_have_a_token, .fini = take)
{
    give(NULL, NULL, ADMIN_TOKEN);
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_CLIENT, ""), "");
    cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_OPERATOR, ""), "token-missing");
    cr_expect_str_eq(judged(EP_ROLES_ADMIN, EP_ROLE_OPERATOR, ADMIN_TOKEN), "");
}

Test(credentials, two_tokens_are_let_in_and_the_first_is_shown, .fini = take)
{
    ep_rpc_tokens tokens = {.of = {{CLIENT_TOKEN, "the-token-before"}}};
    char shown[EP_TOKEN_BYTES_MAX + 1];
    cr_assert_eq(ep_rpc_credentials_create(&tokens, &credentials, &error), EP_OK);
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_CLIENT, CLIENT_TOKEN), "");
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_CLIENT, "the-token-before"), "");
    ep_rpc_credentials_show(credentials, EP_ROLE_CLIENT, shown);
    cr_expect_str_eq(shown, CLIENT_TOKEN);
    tokens = (ep_rpc_tokens){.of = {{"the-next-token-0", CLIENT_TOKEN}}};
    cr_assert_eq(ep_rpc_credentials_replace(credentials, &tokens, &error), EP_OK);
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_CLIENT, "the-token-before"), "token-wrong");
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_CLIENT, "the-next-token-0"), "");
    char *long_token = malloc(EP_TOKEN_BYTES_MAX + 2);
    memset(long_token, 'x', EP_TOKEN_BYTES_MAX + 1);
    long_token[EP_TOKEN_BYTES_MAX + 1] = 0;
    tokens.of[EP_ROLE_NODE][0] = long_token;
    cr_expect_eq(ep_rpc_credentials_replace(credentials, &tokens, &error), EP_ERR_INVALID_ARGUMENT);
    cr_expect_str_eq(judged(EP_ROLES_MAIN, EP_ROLE_CLIENT, "the-next-token-0"), "",
                     "kept as they were");
    free(long_token);
}

Test(credentials, nodes_are_proven_by_tokens_that_no_client_has)
{
    cr_expect_not(ep_rpc_credentials_prove_nodes(NULL));
    const struct {
        const char *client, *node;
        bool proves;
    } rows[] = {{NULL, NULL, false},
                {CLIENT_TOKEN, NULL, false},
                {CLIENT_TOKEN, CLIENT_TOKEN, false},
                {CLIENT_TOKEN, NODE_TOKEN, true},
                {NULL, NODE_TOKEN, true}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        give(rows[i].client, rows[i].node, ADMIN_TOKEN);
        cr_expect_eq(ep_rpc_credentials_prove_nodes(credentials), rows[i].proves, "row %zu", i);
        take();
    }
    ep_rpc_tokens second = {
        .of = {{CLIENT_TOKEN, "shared-token-000"}, {NODE_TOKEN, "shared-token-000"}}};
    cr_assert_eq(ep_rpc_credentials_create(&second, &credentials, &error), EP_OK);
    cr_expect_not(ep_rpc_credentials_prove_nodes(credentials), "the second tokens are the same");
    take();
}
