/* SPDX-License-Identifier: Apache-2.0 */
/* The common options and the client made from them. */
#include "connect.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "arguments.h"
#include "base/error.h"
#include "base/private_file.h"
#include "context_file.h"
#include "control.h"
#include "moe/routing_table.h"
#include "settings.h"

#define TIMEOUT_US_MIN 1000u
#define TIMEOUT_US_MAX 86400000000u

enum {
    KEY_CONTEXT = 0x100,
    KEY_COORDINATOR,
    KEY_NODE,
    KEY_TOKEN_FILE,
    KEY_ADMIN,
    KEY_ADMIN_TOKEN_FILE,
    KEY_TIMEOUT,
    KEY_TLS_CA,
    KEY_TLS_CERT_KEY,
    KEY_TLS_SERVER_NAME,
    KEY_NO_PAYLOAD_CRC,
    KEY_NUMERICS
};

void ep_cli_connect_init(ep_cli_connect *out_connect)
{
    memset(out_connect, 0, sizeof(*out_connect));
    out_connect->timeout_us = EP_CLI_TIMEOUT_US_DEFAULT;
    out_connect->payload_crc = true;
}

static bool is_tls(const char *url)
{
    return strncmp(url, "tls+tcp://", 10) == 0;
}

static bool is_port(const char *text)
{
    const size_t digits = strspn(text, "0123456789");
    return digits > 0 && digits <= 5 && text[digits] == '\0' && atoi(text) >= 1 &&
           atoi(text) <= UINT16_MAX;
}

bool ep_cli_url_is_good(const char *url)
{
    const char *host = is_tls(url) ? url + 10 : strncmp(url, "tcp://", 6) == 0 ? url + 6 : NULL;
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

static void add_node(struct argp_state *state, ep_cli_connect *connect, const char *url)
{
    if (connect->node_urls_count == EP_CLI_NODES_MAX) {
        argp_error(state, "--node is given more than %d times, allowed: 1..%d", EP_CLI_NODES_MAX,
                   EP_CLI_NODES_MAX);
    }
    connect->node_urls[connect->node_urls_count++] = check_url(state, "--node", url);
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

static void check_tls(struct argp_state *state, const ep_cli_connect *connect, const char *url)
{
    if (is_tls(url) && (connect->tls.ca_file == NULL || connect->tls.server_name == NULL)) {
        argp_error(state, "%s needs --tls-ca and --tls-server-name", url);
    }
}

static void read_tokens(struct argp_state *state, ep_cli_connect *connect)
{
    if (connect->token_file != NULL) {
        ep_cli_token_read(state, "--token-file", connect->token_file, connect->token);
    }
    if (connect->admin_token_file != NULL) {
        ep_cli_token_read(state, "--admin-token-file", connect->admin_token_file,
                          connect->admin_token);
    }
}

/* All options are read: what they say together. */
static void complete(struct argp_state *state, ep_cli_connect *connect)
{
    if (connect->coordinator_url != NULL && connect->node_urls_count > 0) {
        argp_error(state, "%s %s and %s %s are both given, allowed: one of them",
                   ep_cli_setting_name("--coordinator", connect->coordinator_url),
                   connect->coordinator_url, ep_cli_setting_name("--node", connect->node_urls[0]),
                   connect->node_urls[0]);
    }
    if (connect->coordinator_url == NULL && connect->node_urls_count == 0) {
        if (ep_cli_settings_context() != NULL) { /* its tokens are for nobody else */
            argp_error(state, "context %s names neither coordinator nor node",
                       ep_cli_settings_context());
        }
        connect->coordinator_url = EP_CLI_COORDINATOR_DEFAULT;
    }
    if (connect->coordinator_url != NULL) {
        check_tls(state, connect, connect->coordinator_url);
    }
    for (size_t i = 0; i < connect->node_urls_count; i++) {
        check_tls(state, connect, connect->node_urls[i]);
    }
    read_tokens(state, connect);
}

static error_t parse_reach(int key, char *arg, struct argp_state *state)
{
    ep_cli_connect *connect = state->input;
    switch (key) {
    case KEY_COORDINATOR:
        connect->coordinator_url = check_url(state, "--coordinator", arg);
        return 0;
    case KEY_NODE:
        add_node(state, connect, arg);
        return 0;
    case KEY_TOKEN_FILE:
        connect->token_file = arg;
        return 0;
    case KEY_ADMIN_TOKEN_FILE:
        connect->admin_token_file = arg;
        return 0;
    case KEY_TIMEOUT:
        connect->timeout_us =
            ep_cli_arg_time_us(state, "--timeout", arg, TIMEOUT_US_MIN, TIMEOUT_US_MAX);
        return 0;
    case KEY_TLS_CA:
        connect->tls.ca_file = arg;
        return 0;
    case KEY_TLS_CERT_KEY:
        connect->tls.cert_key_file = arg;
        return 0;
    case KEY_TLS_SERVER_NAME:
        connect->tls.server_name = arg;
        return 0;
    case KEY_NO_PAYLOAD_CRC:
        connect->payload_crc = false;
        return 0;
    case ARGP_KEY_END:
        complete(state, connect);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option reach_options[] = {
    {NULL, 0, NULL, 0,
     "How to reach the service (EXPERTCTL_* variables or a context may say it, see expertctl "
     "--help):",
     10},
    {"coordinator", KEY_COORDINATOR, "URL", 0,
     "The coordinator, tcp://host:port (default: " EP_CLI_COORDINATOR_DEFAULT ")", 10},
    {"node", KEY_NODE, "URL", 0, "A node instead of a coordinator; may be repeated", 10},
    {"timeout", KEY_TIMEOUT, "TIME", 0, "For connecting, and for each call (default: 10s)", 10},
    {"token-file", KEY_TOKEN_FILE, "FILE", 0,
     "File that only we can read (mode 0600) with the token to show", 10},
    {"admin-token-file", KEY_ADMIN_TOKEN_FILE, "FILE", 0,
     "The same for commands of operators, which connect to admin_listen", 10},
    {"tls-ca", KEY_TLS_CA, "FILE", 0, "CA certificates (PEM), for tls+tcp", 10},
    {"tls-cert-key", KEY_TLS_CERT_KEY, "FILE", 0,
     "Own certificate and key (PEM), where the service asks for one", 10},
    {"tls-server-name", KEY_TLS_SERVER_NAME, "NAME", 0, "Name the service must prove, for tls+tcp",
     10},
    {"no-payload-crc", KEY_NO_PAYLOAD_CRC, NULL, 0,
     "No checksum of payloads; the service must be set the same", 10},
    {0},
};
static const struct argp reach_argp = {reach_options, parse_reach, NULL, NULL, NULL, NULL, NULL};
static const struct argp_child reach_children[] = {{&reach_argp, 0, NULL, 0}, {0}};

/* --context has been looked up before the command line is parsed (settings.h). */
static error_t parse_connect(int key, char *arg, struct argp_state *state)
{
    (void)arg;
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = state->input;
    }
    return key == ARGP_KEY_INIT || key == KEY_CONTEXT ? 0 : ARGP_ERR_UNKNOWN;
}

#define CONTEXT_HELP                                                                               \
    "The context whose settings are used; " EP_CLI_CONTEXT_NONE                                    \
    ": without any (default: that of expertctl context use)"
static const struct argp_option connect_options[] = {
    {"context", KEY_CONTEXT, "CONTEXT", 0, CONTEXT_HELP, 10}, {0}};
const struct argp ep_cli_connect_argp = {connect_options, parse_connect, NULL, NULL,
                                         reach_children,  NULL,          NULL};

static error_t parse_numerics(int key, char *arg, struct argp_state *state)
{
    ep_cli_connect *connect = state->input;
    if (key != KEY_NUMERICS) {
        return ARGP_ERR_UNKNOWN;
    }
    connect->numerics = ep_cli_arg_text(state, "--numerics", arg, EP_NUMERICS_BYTES - 1);
    return 0;
}

static const struct argp_option numerics_options[] = {
    {"numerics", KEY_NUMERICS, "ID|any", 0,
     "Only rows of this numerics id; any: results of unlike ids may meet in a call, which gives up "
     "equal bits "
     "(default: the first id that has all experts)",
     3},
    {0},
};
const struct argp ep_cli_numerics_argp = {
    numerics_options, parse_numerics, NULL, NULL, NULL, NULL, NULL};

static error_t parse_context(int key, char *arg, struct argp_state *state)
{
    ep_cli_connect *connect = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = connect;
        return 0;
    case KEY_ADMIN:
        connect->admin_url = check_url(state, "--admin", arg);
        return 0;
    case ARGP_KEY_END:
        if (connect->admin_url != NULL) {
            check_tls(state, connect, connect->admin_url);
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option context_options[] = {
    {"admin", KEY_ADMIN, "URL", 0, "The coordinator's admin listener, for commands of operators",
     10},
    {0},
};
const struct argp ep_cli_context_argp = {context_options, parse_context, NULL, NULL,
                                         reach_children,  NULL,          NULL};

static error_t parse_admin(int key, char *arg, struct argp_state *state)
{
    ep_cli_connect *connect = state->input;
    switch (key) {
    case KEY_CONTEXT:
        return 0;
    case KEY_ADMIN:
        connect->admin_url = check_url(state, "--admin", arg);
        return 0;
    case ARGP_KEY_END:
        if (connect->asks_nobody) {
            return 0;
        }
        if (connect->admin_url == NULL && ep_cli_settings_context() != NULL) {
            argp_error(state, "--admin is missing; context %s names none",
                       ep_cli_settings_context());
        }
        ep_cli_arg_required(state, "--admin", connect->admin_url);
        check_tls(state, connect, connect->admin_url);
        read_tokens(state, connect);
        ep_cli_settings_say(state->name, connect->admin_url);
        return 0;
    default:
        return parse_reach(key, arg, state);
    }
}

static const struct argp_option admin_options[] = {
    {NULL, 0, NULL, 0,
     "How to reach the program (EXPERTCTL_* variables or a context may say it, see expertctl "
     "--help):",
     10},
    {"context", KEY_CONTEXT, "CONTEXT", 0, CONTEXT_HELP, 10},
    {"admin", KEY_ADMIN, "URL", 0,
     "Its admin listener, tcp://host:port or tls+tcp://host:port: admin_listen of the "
     "coordinator's or the node's "
     "configuration",
     10},
    {"admin-token-file", KEY_ADMIN_TOKEN_FILE, "FILE", 0,
     "File of mode 0600 with the token of operators", 10},
    {"timeout", KEY_TIMEOUT, "TIME", 0, "For the call (default: 10s)", 10},
    {"tls-ca", KEY_TLS_CA, "FILE", 0, "CA certificates (PEM), for tls+tcp", 10},
    {"tls-cert-key", KEY_TLS_CERT_KEY, "FILE", 0,
     "Own certificate and key (PEM), where the program asks for one", 10},
    {"tls-server-name", KEY_TLS_SERVER_NAME, "NAME", 0, "Name the program must prove, for tls+tcp",
     10},
    {"no-payload-crc", KEY_NO_PAYLOAD_CRC, NULL, 0,
     "No checksum of payloads; the program must be set the same", 10},
    {0},
};
const struct argp ep_cli_admin_argp = {admin_options, parse_admin, NULL, NULL, NULL, NULL, NULL};

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
        /* no call ran out of time: there was nobody to call */
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
