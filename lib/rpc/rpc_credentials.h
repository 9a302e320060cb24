/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may do what: the tokens of each role, whether a peer gets the role that it claims, and which
 * role may call which method. Tokens decide, because the network library does not tell whose
 * certificate a connection showed.
 *
 * Rules      A connection gets the role it claims if its token is good for that role and its
 *            listener admits the role. A token of a higher role (client < node < operator) is good
 *            for a lower one. A role without tokens of its own needs none. Exception: operators
 *            need one as soon as any role has a token.
 * Threads    all calls from any thread. The time to compare tokens does not depend on where they
 *            differ.
 */
#ifndef EP_RPC_RPC_CREDENTIALS_H
#define EP_RPC_RPC_CREDENTIALS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

typedef enum ep_rpc_role { EP_ROLE_CLIENT, EP_ROLE_NODE, EP_ROLE_OPERATOR } ep_rpc_role;
#define EP_ROLES_COUNT 3
const char *ep_rpc_role_name(ep_rpc_role role);
/* The role that a Hello names: "" and "client", "node" and "coordinator", "operator". Errors:
 * INVALID_ARGUMENT with the allowed names; *out_role is then CLIENT. */
ep_err ep_rpc_role_read(const char *name, ep_rpc_role *out_role, ep_error *out_error);

/* Sets of roles, for listeners. */
#define EP_ROLE_BIT(role) (1u << (role))
#define EP_ROLES_MAIN (EP_ROLE_BIT(EP_ROLE_CLIENT) | EP_ROLE_BIT(EP_ROLE_NODE))
#define EP_ROLES_ADMIN EP_ROLE_BIT(EP_ROLE_OPERATOR)
#define EP_ROLES_ALL (EP_ROLES_MAIN | EP_ROLES_ADMIN)

/* Why somebody was refused: the "reason" of audit lines and of expertd_rpc_refused_total. */
typedef enum ep_rpc_refusal {
    EP_REFUSED_TOKEN_MISSING, /* "token-missing" */
    EP_REFUSED_TOKEN_WRONG,   /* "token-wrong": no role has this token */
    EP_REFUSED_TOKEN_ROLE,    /* "token-role": of a lower role than the claimed one */
    EP_REFUSED_OPERATORS_OFF, /* "operators-off": tokens are in use, but operators have none */
    EP_REFUSED_LISTENER,      /* "listener": it does not admit this role */
    EP_REFUSED_METHOD,        /* "method": needs another role */
    EP_REFUSED_HELLO,         /* "hello": version, features, checksum or names */
    EP_REFUSED_NO_HELLO,      /* "no-hello": the connection ended without a readable Hello */
    EP_REFUSED_SLOW, /* "slow": a frame came byte by byte; at the door also: nothing came */
    /* "connections": connections_max reached, or too many from one address without Hello */
    EP_REFUSED_CONNECTIONS,
} ep_rpc_refusal;
#define EP_REFUSALS_COUNT 10
const char *ep_rpc_refusal_name(ep_rpc_refusal refusal);

#define EP_TOKENS_PER_ROLE 16 /* we show the first one to others */
#define EP_TOKEN_BYTES_MAX 1024
#define EP_TOKEN_LABEL_BYTES 33 /* the label names a token's owner in audit lines */

/* NULL and "" are no token. */
typedef struct ep_rpc_tokens {
    const char *of[EP_ROLES_COUNT][EP_TOKENS_PER_ROLE];
    /* NULL and "" none; cut to EP_TOKEN_LABEL_BYTES */
    const char *labels[EP_ROLES_COUNT][EP_TOKENS_PER_ROLE];
} ep_rpc_tokens;

typedef struct ep_rpc_credentials ep_rpc_credentials;

/* The tokens are copied. Errors: NO_MEMORY, INVALID_ARGUMENT (longer than EP_TOKEN_BYTES_MAX). */
ep_err ep_rpc_credentials_create(const ep_rpc_tokens *tokens, ep_rpc_credentials **out_credentials,
                                 ep_error *out_error);
/* NULL allowed. Everything that uses the credentials must be gone. */
void ep_rpc_credentials_destroy(ep_rpc_credentials *credentials);
/* Replaces the tokens for new connections; open ones stay. Errors: as _create, nothing changed. */
ep_err ep_rpc_credentials_replace(ep_rpc_credentials *credentials, const ep_rpc_tokens *tokens,
                                  ep_error *out_error);

/*
 * Checks a claimed role; roles is what the listener admits. credentials NULL: nobody has a token.
 * Errors: UNAUTHENTICATED (missing, wrong), PERMISSION_DENIED (token of a lower role, operators
 * off, listener); they also set *out_refusal.
 */
ep_err ep_rpc_credentials_judge(ep_rpc_credentials *credentials, unsigned roles,
                                ep_rpc_role claimed, const char *token, ep_rpc_refusal *out_refusal,
                                ep_error *out_error);
/* The label of a token, for the highest role that has it; "" none. credentials NULL allowed. */
void ep_rpc_credentials_label(ep_rpc_credentials *credentials, const char *token,
                              char out[EP_TOKEN_LABEL_BYTES]);
/* The token to show in this role; "" when there is none. The caller wipes out after use. */
void ep_rpc_credentials_show(ep_rpc_credentials *credentials, ep_rpc_role role,
                             char out[EP_TOKEN_BYTES_MAX + 1]);

/* Whether tokens tell nodes from clients: nodes have tokens, and no client has one of these.
 * credentials NULL allowed. */
bool ep_rpc_credentials_prove_nodes(ep_rpc_credentials *credentials);

/* Whether they are equal. The time depends on the length of given, not on where they differ. */
bool ep_rpc_token_equal(const char *expected, const char *given);

#endif
