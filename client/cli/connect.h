/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How commands reach the service: the common options, and a client made from them.
 *
 *     --coordinator URL | --node URL...   else EP_CLI_COORDINATOR_DEFAULT
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_CONNECT_H
#define EP_CLI_CONNECT_H

#include "arguments.h"
#include "expertd/client.h"
#include "transport/transport.h"

#define EP_CLI_NODES_MAX 256
#define EP_CLI_TOKEN_BYTES_MAX 1024
#define EP_CLI_COORDINATOR_DEFAULT "tcp://127.0.0.1:7410"
#define EP_CLI_TIMEOUT_US_DEFAULT 10000000u

/* Texts are borrowed from argv. */
typedef struct ep_cli_connect {
    const char *coordinator_url; /* NULL: nodes are addressed directly */
    const char *node_urls[EP_CLI_NODES_MAX];
    size_t node_urls_count;
    const char *admin_url; /* from ep_cli_admin_options */
    /* set while options are read: an option with which no program is asked. ep_cli_connect_options
     * and ep_cli_admin_options then require and check nothing */
    const char *asks_nobody;
    const char *token_file;                 /* NULL none */
    char token[EP_CLI_TOKEN_BYTES_MAX + 2]; /* "" none */
    const char *admin_token_file;           /* NULL none */
    char admin_token[EP_CLI_TOKEN_BYTES_MAX + 2];
    uint64_t timeout_us;
    ep_tls_config tls;
    bool payload_crc;
    const char *numerics; /* from ep_cli_numerics_options; NULL: one id */
} ep_cli_connect;

/* Values of the command line. */
extern ep_cli_connect ep_cli_peer;

/* The common options. */
extern const ep_cli_options ep_cli_connect_options;
/* The same for operators' commands to one program's admin listener; --admin URL is required. */
extern const ep_cli_options ep_cli_admin_options;
/* Option --numerics, for commands that make calls with a client. */
extern const ep_cli_options ep_cli_numerics_options;
/* The flags that a context may set: --admin, and ep_cli_connect_options without --context. */
extern const ep_cli_options ep_cli_context_admin_options, ep_cli_reach_options;
extern const ep_cli_options *const ep_cli_context_uses[EP_CLI_USES_MAX];
/* Refuses these flags on the command line beside --option, with which no program is asked. From a
 * context or a variable, which hold for all commands, they are ignored. */
void ep_cli_reach_refuse(struct argp_state *state, const char *option, const char *why);

/* Whether a flag accepts the address: EP_CLI_URL_ALLOWED, with EP_ADDRESS_BYTES - 1. */
#define EP_CLI_URL_ALLOWED                                                                         \
    "tcp://host:port or tls+tcp://host:port, port 1..65535, up to %d characters"
bool ep_cli_url_is_good(const char *url);

/* The coordinator, else the first of the nodes. */
const char *ep_cli_connect_url(const ep_cli_connect *connect);

/* Reads the token of a private file for an option. Ends the program on failure. */
void ep_cli_token_read(struct argp_state *state, const char *option, const char *path,
                       char out_token[EP_CLI_TOKEN_BYTES_MAX + 2]);

/*
 * Makes a client and waits for its routing table and nodes. Errors: UNAVAILABLE (no answer, or no
 * table and nodes within the timeout; with the last report), UNAUTHENTICATED, those of
 * ep_client_create.
 */
ep_err ep_cli_connect_client(const ep_cli_connect *connect, ep_client **out_client,
                             ep_error *out_error);

#endif
