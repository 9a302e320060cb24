/* SPDX-License-Identifier: Apache-2.0 */
/* The common options and the client made from them. */
#include "connect.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/private_file.h"
#include "control.h"
#include "moe/routing_table.h"
#include "origin.h"
#include "transport/address.h"

#define TIMEOUT_US_MIN 1000u
#define TIMEOUT_US_MAX 86400000000u

ep_cli_connect ep_cli_peer = {.timeout_us = EP_CLI_TIMEOUT_US_DEFAULT, .payload_crc = true};

static bool is_port(const char *text)
{
    const size_t digits = strspn(text, "0123456789");
    return digits > 0 && digits <= 5 && text[digits] == '\0' && atoi(text) >= 1 &&
           atoi(text) <= UINT16_MAX;
}

bool ep_cli_url_is_good(const char *url)
{
    const bool is_known = ep_url_has_scheme(url, "tcp") || ep_url_has_scheme(url, "tls+tcp");
    const char *host = is_known ? strstr(url, "://") + 3 : NULL;
    const char *colon = host != NULL ? strrchr(host, ':') : NULL;
    return colon != NULL && colon != host && is_port(colon + 1) && strlen(url) < EP_ADDRESS_BYTES;
}

static const char *check_url(struct argp_state *state, const char *option, const char *url)
{
    if (!ep_cli_url_is_good(url)) {
        argp_error(state, "%s is '%s', allowed: " EP_CLI_URL_ALLOWED,
                   ep_cli_setting_name(option, url), url, EP_ADDRESS_BYTES - 1);
    }
    return url;
}

static void take_coordinator(struct argp_state *state, const char *option, char *url)
{
    ep_cli_peer.coordinator_url = check_url(state, option, url);
}

static void take_node(struct argp_state *state, const char *option, char *url)
{
    if (ep_cli_peer.node_urls_count == EP_CLI_NODES_MAX) {
        argp_error(state, "%s is given more than %d times, allowed: 1..%d", option,
                   EP_CLI_NODES_MAX, EP_CLI_NODES_MAX);
    }
    ep_cli_peer.node_urls[ep_cli_peer.node_urls_count++] = check_url(state, option, url);
}

static void take_admin(struct argp_state *state, const char *option, char *url)
{
    ep_cli_peer.admin_url = check_url(state, option, url);
}

void ep_cli_token_read(struct argp_state *state, const char *option, const char *path,
                       char out_token[EP_CLI_TOKEN_BYTES_MAX + 2])
{
    struct stat st;
    option = ep_cli_setting_name(option, path);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0) {
        char why[EP_ERRNO_TEXT_BYTES];
        argp_error(state, "%s %s cannot be opened: %s", option, path, ep_errno_text(errno, why));
    }
    bool regular = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    ssize_t n = regular ? read(fd, out_token, EP_CLI_TOKEN_BYTES_MAX + 1) : -1;
    close(fd);
    if (n < 0) {
        argp_error(state, "%s %s cannot be read, allowed: a regular file", option, path);
    }
    if (!ep_file_is_private(&st)) {
        argp_error(state, "%s %s has mode %04o, allowed: %s", option, path,
                   (unsigned)(st.st_mode & 07777), EP_PRIVATE_FILE_ALLOWED);
    }
    out_token[strcspn(out_token, " \r\n")] = '\0'; /* a label may follow */
    size_t bytes = strlen(out_token);
    if (bytes == 0 || bytes > EP_CLI_TOKEN_BYTES_MAX) {
        argp_error(state, "the first line of %s %s has %zu characters, allowed: 1..%d", option,
                   path, bytes, EP_CLI_TOKEN_BYTES_MAX);
    }
}

static void check_tls(struct argp_state *state, const char *url)
{
    if (ep_url_has_scheme(url, "tls+tcp") &&
        (ep_cli_peer.tls.ca_file == NULL || ep_cli_peer.tls.server_name == NULL)) {
        argp_error(state, "%s needs --tls-ca and --tls-server-name", url);
    }
}

static void read_tokens(struct argp_state *state)
{
    if (ep_cli_peer.token_file != NULL) {
        ep_cli_token_read(state, "--token-file", ep_cli_peer.token_file, ep_cli_peer.token);
    }
    if (ep_cli_peer.admin_token_file != NULL) {
        ep_cli_token_read(state, "--admin-token-file", ep_cli_peer.admin_token_file,
                          ep_cli_peer.admin_token);
    }
}

static void check_reach(struct argp_state *state)
{
    ep_cli_connect *connect = &ep_cli_peer;
    if (connect->asks_nobody != NULL) {
        return;
    }
    if (connect->coordinator_url != NULL && connect->node_urls_count > 0) {
        argp_error(state, "%s %s and %s %s are both given, allowed: one of them",
                   ep_cli_setting_name("--coordinator", connect->coordinator_url),
                   connect->coordinator_url, ep_cli_setting_name("--node", connect->node_urls[0]),
                   connect->node_urls[0]);
    }
    if (connect->coordinator_url == NULL && connect->node_urls_count == 0) {
        /* a context's tokens are sent only to its own addresses */
        if (ep_cli_settings_context() != NULL) {
            argp_error(state, "context %s names neither coordinator nor node",
                       ep_cli_settings_context());
        }
        connect->coordinator_url = EP_CLI_COORDINATOR_DEFAULT;
    }
    if (connect->coordinator_url != NULL) {
        check_tls(state, connect->coordinator_url);
    }
    for (size_t i = 0; i < connect->node_urls_count; i++) {
        check_tls(state, connect->node_urls[i]);
    }
    read_tokens(state);
}

static void check_admin(struct argp_state *state)
{
    const char *url = ep_cli_peer.admin_url;
    if (ep_cli_peer.asks_nobody != NULL) {
        return;
    }
    if (url == NULL && ep_cli_settings_context() != NULL) {
        argp_error(state, "--admin is missing; context %s names none", ep_cli_settings_context());
    }
    ep_cli_arg_required(state, "--admin", url);
    check_tls(state, url);
    read_tokens(state);
    ep_cli_settings_say(state->name, url);
}

static void check_context_admin(struct argp_state *state)
{
    if (ep_cli_peer.admin_url != NULL) {
        check_tls(state, ep_cli_peer.admin_url);
    }
}

#define CONTEXT_HELP                                                                               \
    "The context whose settings are used; " EP_CLI_CONTEXT_NONE                                    \
    ": without any (default: that of expertctl context use)"
static const char *context; /* settings.h looks it up before the command line is parsed */

static const ep_cli_option reach_rows[] = {
    {"context", 0, "CONTEXT", CONTEXT_HELP, 10, .text = &context},
    {.help = "How to reach the service (EXPERTCTL_* variables or a context may say it, see "
             "expertctl --help):",
     .group = 10},
    {"coordinator", 0, "URL",
     "The coordinator, tcp://host:port (default: " EP_CLI_COORDINATOR_DEFAULT ")", 10,
     .take = take_coordinator},
    {"node", 0, "URL", "A node instead of a coordinator; may be repeated", 10, .take = take_node},
    {"timeout", 0, "TIME", "For connecting, and for each call (default: 10s)", 10,
     .u64 = &ep_cli_peer.timeout_us, .unit = EP_UNIT_US, .plain = EP_UNIT_S, .min = TIMEOUT_US_MIN,
     .max = TIMEOUT_US_MAX},
    {"token-file", 0, "FILE", "File that only we can read (mode 0600) with the token to show", 10,
     .text = &ep_cli_peer.token_file},
    {"admin-token-file", 0, "FILE",
     "The same for commands of operators, which connect to admin_listen", 10,
     .text = &ep_cli_peer.admin_token_file},
    {"tls-ca", 0, "FILE", "CA certificates (PEM), for tls+tcp", 10,
     .text = &ep_cli_peer.tls.ca_file},
    {"tls-cert-key", 0, "FILE", "Own certificate and key (PEM), where the service asks for one", 10,
     .text = &ep_cli_peer.tls.cert_key_file},
    {"tls-server-name", 0, "NAME", "Name the service must prove, for tls+tcp", 10,
     .text = &ep_cli_peer.tls.server_name},
    {"no-payload-crc", 0, NULL, "No checksum of payloads; the service must be set the same", 10,
     .off = &ep_cli_peer.payload_crc},
};

const ep_cli_options ep_cli_connect_options = {
    .rows = reach_rows, .count = EP_ARRAY_COUNT(reach_rows), .check = check_reach};
const ep_cli_options ep_cli_reach_options = {
    .rows = reach_rows + 1, .count = EP_ARRAY_COUNT(reach_rows) - 1, .check = check_reach};

static const ep_cli_option admin_rows[] = {
    {.help = "How to reach the program (EXPERTCTL_* variables or a context may say it, see "
             "expertctl --help):",
     .group = 10},
    {"context", 0, "CONTEXT", CONTEXT_HELP, 10, .text = &context},
    {"admin", 0, "URL",
     "Its admin listener, tcp://host:port or tls+tcp://host:port: admin_listen of the "
     "coordinator's or the node's configuration",
     10, .take = take_admin},
    {"admin-token-file", 0, "FILE", "File of mode 0600 with the token of operators", 10,
     .text = &ep_cli_peer.admin_token_file},
    {"timeout", 0, "TIME", "For the call (default: 10s)", 10, .u64 = &ep_cli_peer.timeout_us,
     .unit = EP_UNIT_US, .plain = EP_UNIT_S, .min = TIMEOUT_US_MIN, .max = TIMEOUT_US_MAX},
    {"tls-ca", 0, "FILE", "CA certificates (PEM), for tls+tcp", 10,
     .text = &ep_cli_peer.tls.ca_file},
    {"tls-cert-key", 0, "FILE", "Own certificate and key (PEM), where the program asks for one", 10,
     .text = &ep_cli_peer.tls.cert_key_file},
    {"tls-server-name", 0, "NAME", "Name the program must prove, for tls+tcp", 10,
     .text = &ep_cli_peer.tls.server_name},
    {"no-payload-crc", 0, NULL, "No checksum of payloads; the program must be set the same", 10,
     .off = &ep_cli_peer.payload_crc},
};

const ep_cli_options ep_cli_admin_options = {
    .rows = admin_rows, .count = EP_ARRAY_COUNT(admin_rows), .check = check_admin};

static const ep_cli_option context_admin_rows[] = {
    {"admin", 0, "URL", "The coordinator's admin listener, for commands of operators", 10,
     .take = take_admin},
};

const ep_cli_options ep_cli_context_admin_options = {
    .rows = context_admin_rows, .count = 1, .check = check_context_admin};
const ep_cli_options *const ep_cli_context_uses[EP_CLI_USES_MAX] = {&ep_cli_context_admin_options,
                                                                    &ep_cli_reach_options};

static const ep_cli_option numerics_rows[] = {
    {"numerics", 0, "ID|any",
     "Only rows of this numerics id; any: results of unlike ids may meet in a call, which gives up "
     "equal bits (default: the first id that has all experts)",
     3, .text = &ep_cli_peer.numerics, .max = EP_NUMERICS_BYTES - 1},
};

const ep_cli_options ep_cli_numerics_options = {.rows = numerics_rows, .count = 1};

void ep_cli_reach_refuse(struct argp_state *state, const char *option, const char *why)
{
    for (size_t u = 0; u < EP_CLI_USES_MAX && ep_cli_context_uses[u] != NULL; u++) {
        const ep_cli_options *uses = ep_cli_context_uses[u];
        for (size_t i = 0; i < uses->count; i++) {
            const char *name = uses->rows[i].name;
            if (name != NULL && ep_cli_setting_is_given(name)) {
                argp_error(state, "--%s and --%s are both given, allowed: one of them; %s", name,
                           option, why);
            }
        }
    }
}

const char *ep_cli_connect_url(const ep_cli_connect *connect)
{
    return connect->coordinator_url != NULL ? connect->coordinator_url : connect->node_urls[0];
}

ep_err ep_cli_connect_client(const ep_cli_connect *connect, ep_client **out_client,
                             ep_error *out_error)
{
    ep_client_config config;
    ep_client *client = NULL;
    ep_client_config_init(&config);
    config.coordinator_url = connect->coordinator_url;
    config.node_urls = connect->node_urls;
    config.node_urls_count = connect->node_urls_count;
    config.token = connect->token[0] != '\0' ? connect->token : NULL;
    config.tls_ca_file = connect->tls.ca_file;
    config.tls_cert_key_file = connect->tls.cert_key_file;
    config.tls_server_name = connect->tls.server_name;
    config.deadline_us = connect->timeout_us;
    config.payload_crc = connect->payload_crc;
    config.numerics = connect->numerics;
    ep_err err = ep_cli_control_probe(connect, out_error);
    err = err != EP_OK ? err : ep_client_create(&config, &client, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_client_wait_ready(client, connect->timeout_us, out_error);
    if (err != EP_OK) {
        ep_client_destroy(client);
        /* no call has timed out: the service could not be reached */
        if (err == EP_ERR_DEADLINE_EXCEEDED) {
            err = EP_ERR_UNAVAILABLE;
            if (out_error != NULL) {
                out_error->code = err;
            }
        }
        return err;
    }
    *out_client = client;
    return EP_OK;
}
