/* SPDX-License-Identifier: Apache-2.0 */
/* Probes and metrics over libmicrohttpd. */
#include "common/probes.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "transport/address.h"

#define CONNECTION_MEMORY_BYTES (16u << 10)
#define BODY_BYTES 4096
#define HELD_LINE_NS (60 * EP_NS_PER_S) /* least time between two such lines */

/* One connection, which is one request. */
typedef struct probe_conn {
    bool used;
    bool dropped; /* shut down, not closed yet */
    int fd;
    uint64_t due_ns;
} probe_conn;

struct ep_probes {
    struct MHD_Daemon *daemon;
    ep_probes_config config;
    pthread_mutex_t lock;
    probe_conn conns[EP_PROBES_CONNECTIONS_MAX]; /* lock */
    uint64_t line_due_ns;                        /* lock */
    /* fires when the oldest connection's time is over */
    ep_timer timer;
    char host[64]; /* as in a URL: IPv6 in brackets */
};

typedef union socket_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} socket_address;

static const struct {
    const char *path;
    ep_probe_kind kind;
    bool empty_body;
} paths[] = {
    {"/livez", EP_PROBE_LIVE, false},         {"/readyz", EP_PROBE_READY, false},
    {"/startupz", EP_PROBE_STARTUP, false},   {"/health", EP_PROBE_READY, false},
    {"/v2/health/live", EP_PROBE_LIVE, true}, {"/v2/health/ready", EP_PROBE_READY, true},
};

/* "host:port" with a numeric host; out_host gets it as written. */
static ep_err parse_address(const char *text, socket_address *out_address, char *out_host,
                            size_t host_bytes, ep_error *out_error)
{
    const char *colon = strrchr(text, ':');
    char host[64] = "";
    char *end = NULL;
    size_t length = colon != NULL ? (size_t)(colon - text) : 0;
    unsigned long port =
        colon != NULL && colon[1] >= '0' && colon[1] <= '9' ? strtoul(colon + 1, &end, 10) : 65536;
    bool bracket = text[0] == '[' && length >= 2 && text[length - 1] == ']';
    socket_address address = {0};

    if (length > 0 && length < sizeof(host)) {
        memcpy(host, text + (bracket ? 1 : 0), length - (bracket ? 2 : 0));
    }
    bool ok = port <= 65535 && end != NULL && *end == 0;
    if (ok && bracket) {
        address.v6.sin6_family = AF_INET6;
        address.v6.sin6_port = htons((uint16_t)port);
        ok = inet_pton(AF_INET6, host, &address.v6.sin6_addr) == 1;
    } else if (ok) {
        address.v4.sin_family = AF_INET;
        address.v4.sin_port = htons((uint16_t)port);
        ok = inet_pton(AF_INET, host, &address.v4.sin_addr) == 1;
    }
    if (!ok) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "'%.80s' is not an address; allowed: IPv4:port or [IPv6]:port, port 0..65535", text);
    }
    *out_address = address;
    snprintf(out_host, host_bytes, bracket ? "[%s]" : "%s", host);
    return EP_OK;
}

ep_err ep_probes_check_address(const char *address, ep_error *out_error)
{
    socket_address parsed;
    char host[64];
    return parse_address(address, &parsed, host, sizeof(host), out_error);
}

/* Releases the body in any case, also on failure. */
static enum MHD_Result reply(struct MHD_Connection *connection, const ep_probe_page *page,
                             const char *location)
{
    struct MHD_Response *response =
        page->release == NULL
            ? MHD_create_response_from_buffer(page->bytes, (void *)(uintptr_t)page->body,
                                              MHD_RESPMEM_PERSISTENT)
            : MHD_create_response_from_buffer_with_free_callback_cls(
                  page->bytes, (void *)(uintptr_t)page->body, page->release, page->release_arg);
    if (response == NULL) {
        if (page->release != NULL) {
            page->release(page->release_arg);
        }
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, page->type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    if (page->policy != NULL) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_SECURITY_POLICY, page->policy);
    }
    if (location != NULL) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_LOCATION, location);
    }
    enum MHD_Result result = MHD_queue_response(connection, page->status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result reply_text(struct MHD_Connection *connection, unsigned status,
                                  const char *text, const char *location)
{
    char *copy = strdup(text);
    if (copy == NULL) {
        return MHD_NO;
    }
    const ep_probe_page page = {.status = status,
                                .type = "text/plain; charset=utf-8",
                                .body = copy,
                                .bytes = strlen(copy),
                                .release = free,
                                .release_arg = copy};
    return reply(connection, &page, location);
}

const char *ep_probe_query_value(const ep_probe_query *query, const char *key)
{
    struct MHD_Connection *connection = (struct MHD_Connection *)(uintptr_t)query;
    const char *value = NULL;
    /* A plain look-up could not tell a key without a value from an absent key. */
    bool is_there = MHD_lookup_connection_value_n(connection, MHD_GET_ARGUMENT_KIND, key,
                                                  strlen(key), &value, NULL) == MHD_YES;
    return is_there && value == NULL ? "" : value;
}

static const ep_probe_query *query_of(struct MHD_Connection *connection)
{
    return (const ep_probe_query *)(const void *)connection;
}

static size_t put_check(char *body, size_t n, const ep_probe_check *check)
{
    if (n >= BODY_BYTES) {
        return n;
    }
    const char *separator = check->text[0] != 0 ? ": " : "";
    return n + (size_t)snprintf(body + n, BODY_BYTES - n, "[%c] %s%s%s\n", check->ok ? '+' : '-',
                                check->name, separator, check->text);
}

static enum MHD_Result reply_probe(const ep_probes *probes, struct MHD_Connection *connection,
                                   ep_probe_kind kind, bool empty_body)
{
    ep_probe_check checks[EP_PROBE_CHECKS_MAX] = {0};
    char body[BODY_BYTES] = "";
    size_t n = 0;
    bool ok = true;
    size_t count = probes->config.checks(probes->config.arg, kind, checks);
    EP_ASSERT(count <= EP_PROBE_CHECKS_MAX);
    bool verbose = ep_probe_query_value(query_of(connection), "verbose") != NULL;
    for (size_t i = 0; i < count; i++) {
        ok = ok && checks[i].ok;
        if (verbose || !checks[i].ok) {
            n = put_check(body, n, &checks[i]);
        }
    }
    if (n < sizeof(body)) {
        snprintf(body + n, sizeof(body) - n, "%s\n", ok ? "ok" : "not ok");
    }
    return reply_text(connection, ok ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE,
                      empty_body ? "" : body, NULL);
}

static enum MHD_Result reply_metrics(const ep_probes *probes, struct MHD_Connection *connection)
{
    char *text;
    size_t bytes;
    if (ep_metrics_write(probes->config.metrics, &text, &bytes) != EP_OK) {
        return reply_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory\n", NULL);
    }
    const ep_probe_page page = {.status = MHD_HTTP_OK,
                                .type = "text/plain; version=0.0.4; charset=utf-8",
                                .body = text,
                                .bytes = bytes,
                                .release = free,
                                .release_arg = text};
    return reply(connection, &page, NULL);
}

/* Says what this port is. At / it also redirects to the front page, for browsers. */
static enum MHD_Result reply_unknown(const ep_probes_config *config,
                                     struct MHD_Connection *connection, bool is_root)
{
    char text[BODY_BYTES];
    bool is_node = config->node != NULL;
    bool has_admin = config->admin_url[0] != 0;
    bool has_front = config->page != NULL;
    snprintf(
        text, sizeof(text),
        "expertd: %s%s: calls go to %s%s%s\nno such path; there are %s%s%s/livez /readyz /startupz "
        "/health /metrics\n",
        is_node ? "node " : "the coordinator", is_node ? config->node : "", config->rpc_url,
        has_admin ? ", operators' orders to " : "", config->admin_url, has_front ? "/" : "",
        has_front ? config->front : "", has_front ? " " : "");
    return is_root && has_front ? reply_text(connection, MHD_HTTP_FOUND, text, config->front)
                                : reply_text(connection, MHD_HTTP_NOT_FOUND, text, NULL);
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload_data,
                                  size_t *upload_bytes, void **request_state)
{
    const ep_probes *probes = arg;
    (void)version;
    (void)upload_data;
    (void)upload_bytes;
    (void)request_state;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0) {
        return reply_text(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "GET and HEAD only\n", NULL);
    }
    if (strcmp(url, "/metrics") == 0) {
        return reply_metrics(probes, connection);
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(paths); i++) {
        if (strcmp(url, paths[i].path) == 0) {
            return reply_probe(probes, connection, paths[i].kind, paths[i].empty_body);
        }
    }
    ep_probe_page page = {0};
    if (probes->config.page != NULL &&
        probes->config.page(probes->config.arg, url, query_of(connection), &page)) {
        return reply(connection, &page, NULL);
    }
    return reply_unknown(&probes->config, connection, strcmp(url, "/") == 0);
}

static void drop(ep_probes *probes, probe_conn *conn, uint64_t now_ns, const char *why)
{
    socket_address peer;
    socklen_t peer_bytes = sizeof(peer);
    char host[64] = "";
    if (now_ns >= probes->line_due_ns) {
        probes->line_due_ns = now_ns + HELD_LINE_NS;
        if (getpeername(conn->fd, &peer.any, &peer_bytes) == 0) {
            getnameinfo(&peer.any, peer_bytes, host, sizeof(host), NULL, 0, NI_NUMERICHOST);
        }
        ep_log(EP_LOG_WARN, "probe-held", EP_KV(peer, host[0] != 0 ? host : NULL),
               EP_KV(reason, why), EP_KV(effect, "its connection is closed"),
               EP_KV(next_line_ms, HELD_LINE_NS / EP_NS_PER_MS));
    }
    shutdown(conn->fd, SHUT_RDWR); /* the daemon notices and closes it */
    conn->dropped = true;
}

/*
 * Held connections must not keep a kubelet out. Ends connections whose time is over, even if bytes
 * still trickle in, and the oldest one when more than half of the places are taken.
 */
static void make_place(ep_probes *probes)
{
    const uint64_t now_ns = ep_clock_now_ns();
    probe_conn *oldest = NULL;
    size_t count = 0;
    for (size_t i = 0; i < EP_ARRAY_COUNT(probes->conns); i++) {
        probe_conn *conn = &probes->conns[i];
        if (!conn->used || conn->dropped) {
            continue;
        }
        if (now_ns >= conn->due_ns) {
            drop(probes, conn, now_ns, "slow");
            continue;
        }
        count++;
        oldest = oldest == NULL || conn->due_ns < oldest->due_ns ? conn : oldest;
    }
    if (oldest != NULL) { /* without memory for the timer the next new connection checks */
        (void)ep_timer_arm(probes->config.timers, &probes->timer, oldest->due_ns);
    }
    if (count > EP_PROBES_CONNECTIONS_MAX / 2) {
        drop(probes, oldest, now_ns, "crowd");
    }
}

static void on_due(ep_timer *timer, void *arg)
{
    ep_probes *probes = arg;
    (void)timer;
    pthread_mutex_lock(&probes->lock);
    make_place(probes);
    pthread_mutex_unlock(&probes->lock);
}

static void on_connection(void *arg, struct MHD_Connection *connection, void **socket_context,
                          enum MHD_ConnectionNotificationCode code)
{
    ep_probes *probes = arg;
    probe_conn *conn = *socket_context;
    pthread_mutex_lock(&probes->lock);
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) { /* its socket stays open until this returns */
        if (conn != NULL) {
            conn->used = false;
        }
    } else {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        for (size_t i = 0; i < EP_ARRAY_COUNT(probes->conns) && info != NULL; i++) {
            conn = &probes->conns[i];
            if (!conn->used) {
                *conn =
                    (probe_conn){.used = true,
                                 .fd = info->connect_fd,
                                 .due_ns = ep_clock_now_ns() + EP_PROBES_TIMEOUT_S * EP_NS_PER_S};
                *socket_context = conn;
                break;
            }
        }
        make_place(probes);
    }
    pthread_mutex_unlock(&probes->lock);
}

/* Drops messages about bad requests, which anybody may send. */
static void __attribute__((format(printf, 2, 0)))
drop_log(void *arg, const char *format, va_list args)
{
    (void)arg;
    (void)format;
    (void)args;
}

ep_err ep_probes_start(const ep_probes_config *config, ep_probes **out_probes, ep_error *out_error)
{
    socket_address address;
    ep_probes *probes = calloc(1, sizeof(*probes));
    if (probes == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the probe server");
    }
    ep_err err =
        parse_address(config->address, &address, probes->host, sizeof(probes->host), out_error);
    if (err != EP_OK) {
        free(probes);
        return err;
    }
    probes->config = *config;
    probes->config.address = NULL;
    pthread_mutex_init(&probes->lock, NULL);
    ep_timer_init(&probes->timer, on_due, probes);
    unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_USE_ERROR_LOG;
    if (address.any.sa_family == AF_INET6) {
        flags |= MHD_USE_IPv6;
    }
    errno = 0;
    probes->daemon =
        MHD_start_daemon(flags, 0, NULL, NULL, on_request, probes, MHD_OPTION_EXTERNAL_LOGGER,
                         drop_log, NULL, MHD_OPTION_SOCK_ADDR, &address.any,
                         MHD_OPTION_CONNECTION_LIMIT, (unsigned)EP_PROBES_CONNECTIONS_MAX,
                         MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)EP_PROBES_TIMEOUT_S,
                         MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_MEMORY_BYTES,
                         MHD_OPTION_NOTIFY_CONNECTION, on_connection, probes, MHD_OPTION_END);
    if (probes->daemon == NULL) {
        const int failed = errno;
        err = ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                           "probe_address: cannot listen on %.80s: %s%s", config->address,
                           failed != 0 ? strerror(failed) : "no reason given",
                           ep_address_advice(failed, true));
        pthread_mutex_destroy(&probes->lock);
        free(probes);
        return err;
    }
    *out_probes = probes;
    return EP_OK;
}

void ep_probes_stop(ep_probes *probes)
{
    if (probes != NULL) {
        /* no connection is left, so nothing arms the timer again */
        MHD_stop_daemon(probes->daemon);
        ep_timer_cancel_wait(probes->config.timers, &probes->timer);
        pthread_mutex_destroy(&probes->lock);
        free(probes);
    }
}

void ep_probes_url(const ep_probes *probes, char *out_url, size_t bytes)
{
    const union MHD_DaemonInfo *info =
        MHD_get_daemon_info(probes->daemon, MHD_DAEMON_INFO_BIND_PORT);
    snprintf(out_url, bytes, "http://%s:%u", probes->host, info != NULL ? info->port : 0u);
}
