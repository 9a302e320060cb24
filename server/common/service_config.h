/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Options of both daemons (listeners, tokens, TLS, limits, log): their rows of the option table,
 * and their values for the lower layers.
 */
#ifndef EP_SERVER_COMMON_SERVICE_CONFIG_H
#define EP_SERVER_COMMON_SERVICE_CONFIG_H

#include "options/options.h"
#include "rpc/rpc.h"
#include "rpc/rpc_door.h"
#include "transport/address.h"

#define EP_STEP_GROUP_US_MAX 1000000 /* a node's option, and a key of the coordinator's policy */
#define EP_LISTEN_MAX 8

extern const ep_option ep_listen_fields[1]; /* {"url"} */

#define EP_SERVICE_OPTIONS(default_listen, default_probe, default_admin, default_door)             \
    {.name = "listen",                                                                             \
     .type = EP_OPTION_LIST,                                                                       \
     .min = 1,                                                                                     \
     .max = EP_LISTEN_MAX,                                                                         \
     .default_text = default_listen,                                                               \
     .fields = ep_listen_fields,                                                                   \
     .fields_count = 1,                                                                            \
     .help = "Where calls are accepted: tcp://host:port or tls+tcp://host:port; port 0 takes any " \
             "free one"},                                                                          \
        {.name = "admin_listen",                                                                   \
         .type = EP_OPTION_STRING,                                                                 \
         .max = EP_ADDRESS_BYTES - 1,                                                              \
         .default_text = default_admin,                                                            \
         .help = "Where commands of operators are accepted: tcp:// or tls+tcp://; empty: off"},    \
        {.name = "door_listen",                                                                    \
         .type = EP_OPTION_STRING,                                                                 \
         .max = EP_ADDRESS_BYTES - 1,                                                              \
         .default_text = default_door,                                                             \
         .help = "Where any nng REQ client is answered: tcp:// or tls+tcp://; empty: off"},        \
        {.name = "door_contexts",                                                                  \
         .type = EP_OPTION_INT,                                                                    \
         .min = 1,                                                                                 \
         .max = EP_RPC_DOOR_CONTEXTS_MAX,                                                          \
         .default_text = "64",                                                                     \
         .help = "Requests in work at once at door_listen; four times as many wait"},              \
        {.name = "probe_address",                                                                  \
         .type = EP_OPTION_STRING,                                                                 \
         .max = 80,                                                                                \
         .default_text = default_probe,                                                            \
         .help = "host:port of /livez, /readyz, /metrics and, of a coordinator, /status, open to " \
                 "all who "                                                                        \
                 "reach it; empty: off"},                                                          \
        {.name = "ports_file",                                                                     \
         .type = EP_OPTION_PATH,                                                                   \
         .min = 1,                                                                                 \
         .help = "File that gets the real URLs as JSON once the program listens"},                 \
        {.name = "token_file",                                                                     \
         .type = EP_OPTION_PATH,                                                                   \
         .min = 1,                                                                                 \
         .reloadable = true,                                                                       \
         .help = "File with the tokens clients may show, one per line, mode 0600; this program "   \
                 "shows the first. A space and a label, for the log, may follow a token"},         \
        {.name = "node_token_file",                                                                \
         .type = EP_OPTION_PATH,                                                                   \
         .min = 1,                                                                                 \
         .reloadable = true,                                                                       \
         .help = "The same for nodes; not set: token_file's"},                                     \
        {.name = "admin_token_file",                                                               \
         .type = EP_OPTION_PATH,                                                                   \
         .min = 1,                                                                                 \
         .reloadable = true,                                                                       \
         .help = "The same for operators; not set while token_file is: they are refused"},         \
        {.name = "admin_tls_ca_file",                                                              \
         .type = EP_OPTION_PATH,                                                                   \
         .min = 1,                                                                                 \
         .help =                                                                                   \
             "CA that operators' certificates must be of, on admin_listen; not set: tls_ca_file"}, \
        {.name = "tls_ca_file",                                                                    \
         .type = EP_OPTION_PATH,                                                                   \
         .min = 1,                                                                                 \
         .help = "CA certificates (PEM) for tls+tcp"},                                             \
        {.name = "tls_cert_key_file",                                                              \
         .type = EP_OPTION_PATH,                                                                   \
         .min = 1,                                                                                 \
         .help = "Own certificate and key (PEM) for tls+tcp"},                                     \
        {.name = "tls_server_name",                                                                \
         .type = EP_OPTION_STRING,                                                                 \
         .min = 1,                                                                                 \
         .max = 255,                                                                               \
         .help = "Name that peers we dial must prove"},                                            \
        {.name = "tls_client_certs",                                                               \
         .type = EP_OPTION_BOOL,                                                                   \
         .default_text = "false",                                                                  \
         .help = "Ask callers for a certificate of tls_ca_file"},                                  \
        {.name = "insecure",                                                                       \
         .type = EP_OPTION_BOOL,                                                                   \
         .default_text = "false",                                                                  \
         .help = "Allow listening beyond loopback without TLS and token"},                         \
        {.name = "payload_crc",                                                                    \
         .type = EP_OPTION_BOOL,                                                                   \
         .default_text = "true",                                                                   \
         .help = "Checksum payloads on connections without TLS; all peers must agree"},            \
        {.name = "frame_bytes_max",                                                                \
         .type = EP_OPTION_SIZE,                                                                   \
         .min = 64 << 10,                                                                          \
         .max = 1 << 30,                                                                           \
         .default_text = "16M",                                                                    \
         .help = "Largest frame sent or accepted"},                                                \
        {.name = "header_bytes_max",                                                               \
         .type = EP_OPTION_SIZE,                                                                   \
         .min = 4 << 10,                                                                           \
         .max = 16 << 20,                                                                          \
         .default_text = "64K",                                                                    \
         .help = "Largest message header in a frame"},                                             \
        {.name = "connections_max",                                                                \
         .type = EP_OPTION_INT,                                                                    \
         .min = 1,                                                                                 \
         .max = 65536,                                                                             \
         .default_text = "4096",                                                                   \
         .help = "Connections at once"},                                                           \
        {.name = "calls_per_connection_max",                                                       \
         .type = EP_OPTION_INT,                                                                    \
         .min = 1,                                                                                 \
         .max = 65536,                                                                             \
         .default_text = "1024",                                                                   \
         .help = "Calls in flight on one connection"},                                             \
        {.name = "buffer_bytes_max",                                                               \
         .type = EP_OPTION_SIZE,                                                                   \
         .min = 16 << 20,                                                                          \
         .max = 1ull << 46,                                                                        \
         .default_text = "1G",                                                                     \
         .help = "Memory for frames of all connections together"},                                 \
        {.name = "drain_ms",                                                                       \
         .type = EP_OPTION_MS,                                                                     \
         .max = 3600000,                                                                           \
         .default_text = "10s",                                                                    \
         .reloadable = true,                                                                       \
         .help = "How long a stopping program waits for calls in flight"},                         \
        {.name = "stream_lane",                                                                    \
         .type = EP_OPTION_ENUM,                                                                   \
         .allowed = "uv|nng",                                                                      \
         .default_text = "uv",                                                                     \
         .help =                                                                                   \
             "Library that carries tcp:// connections; both speak the same bytes, uv is faster. "  \
             "tls+tcp:// is always nng's"},                                                        \
        {.name = "busy_poll_us",                                                                   \
         .type = EP_OPTION_US,                                                                     \
         .max = 100000,                                                                            \
         .default_text = "0",                                                                      \
         .help = "How long a network thread polls before it sleeps: saves wake-ups, takes CPU "    \
                 "time. Needs stream_lane uv"},                                                    \
        {.name = "log_level",                                                                      \
         .type = EP_OPTION_ENUM,                                                                   \
         .allowed = "error|warn|info|debug",                                                       \
         .default_text = "info",                                                                   \
         .reloadable = true,                                                                       \
         .help = "Least important line that is logged"},                                           \
        {.name = "tracing",                                                                        \
         .type = EP_OPTION_ENUM,                                                                   \
         .allowed = "auto|off",                                                                    \
         .default_text = "auto",                                                                   \
         .help =                                                                                   \
             "auto: LTTng sessions can record this program if libexpertd-trace.so and LTTng are "  \
             "installed; off: LTTng is never loaded"},                                             \
    {                                                                                              \
        .name = "log_format", .type = EP_OPTION_ENUM, .allowed = "auto|text|json|journal",         \
        .default_text = "auto", .reloadable = true,                                                \
        .help = "Form of log lines; text: logfmt (key=value); json: an object each; auto: "        \
                "journal under "                                                                   \
                "systemd, else text"                                                               \
    }

typedef struct ep_service_config {
    const char *listen[EP_LISTEN_MAX]; /* borrowed from the options */
    size_t listen_count;
    const char *admin_listen; /* "" off */
    const char *door_listen;  /* "" off */
    uint32_t door_contexts;
    const char *probe_address;       /* "" off */
    const char *ports_file;          /* "" none */
    ep_rpc_credentials *credentials; /* owned; of all roles, may be empty */
    ep_tls_config tls;               /* for listeners and for dialling; borrowed texts */
    ep_tls_config admin_tls;         /* for admin_listen */
    bool has_tls;
    bool insecure; /* allow listening beyond loopback without TLS and token */
    bool payload_crc;
    ep_rpc_limits limits;
    size_t buffer_bytes_max;
    uint32_t drain_ms;
} ep_service_config;

/*
 * Reads and checks these options: URLs, the probe address, token files, and that nothing listens
 * beyond loopback without TLS and token unless insecure is set. The result borrows from options.
 * Errors: BAD_CONFIG naming origin, key and rule; NO_MEMORY.
 */
ep_err ep_service_config_load(const ep_options *options, ep_service_config *out_config,
                              ep_error *out_error);
void ep_service_config_fini(ep_service_config *config);

/* Listens on every URL of listen for clients and nodes, on admin_listen for operators, then opens
 * the door. Errors: as ep_rpc_server_listen. */
ep_err ep_service_listen(const ep_service_config *config, ep_rpc_server *server,
                         ep_error *out_error);
/* The URL of admin_listen with its real port, once it listens; "" if off. */
void ep_service_admin_url(const ep_service_config *config, ep_rpc_server *server, char *out_url,
                          size_t bytes);

/* Logs, at the start, every listener that is allowed only by insecure: true. */
void ep_service_warn_exposed(const ep_options *options);

/* Starts the log by the options and logs the options' warnings. */
void ep_service_log_start(const ep_options *options);
/* Loads the trace probes in the background, unless tracing is off. They may be missing. */
void ep_service_trace_start(const ep_options *options);
/* Sets the lane of tcp:// and its busy polling for this process. Call it before the first listen or
 * dial. */
void ep_service_lane_start(const ep_options *options);
/* True for "tls+tcp://...". */
bool ep_url_is_tls(const char *url);

#endif
