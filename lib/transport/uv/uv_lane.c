/* SPDX-License-Identifier: Apache-2.0 */
/* The uv-stream lane: its table, addresses, socket options. */
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "transport/uv/uv_lane.h"

ep_err ep_uv_lane_err_from_errno(int number)
{
    switch (number) {
    case 0:
        return EP_OK;
    case ENOMEM:
    case ENOBUFS:
        return EP_ERR_NO_MEMORY;
    case EMFILE:
    case ENFILE:
        return EP_ERR_RESOURCE_EXHAUSTED;
    case EACCES:
    case EPERM:
        return EP_ERR_PERMISSION_DENIED;
    default:
        return EP_ERR_UNAVAILABLE;
    }
}

static bool read_port(const char *text, uv_host_port *out)
{
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || digits > 5 || text[digits] != 0 || atoi(text) > 65535) {
        return false;
    }
    snprintf(out->port, sizeof(out->port), "%s", text);
    return true;
}

ep_err ep_uv_lane_read_url(const ep_lane_address *address, uv_host_port *out, ep_error *out_error)
{
    const char *host = address->url + strlen("tcp://");
    const char *colon = strrchr(address->url, ':');
    if (!ep_url_has_scheme(address->url, "tcp") ||
        strlen(address->url) + sizeof(":65535") > EP_ADDRESS_BYTES || colon < host ||
        !read_port(colon + 1, out)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "address '%.64s' must be tcp://host:port, port 0 to 65535",
                            address->url);
    }
    if (address->tls != NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "address %s has TLS settings but its scheme is not tls+tcp",
                            address->url);
    }
    size_t bytes = (size_t)(colon - host);
    bool bracketed = bytes >= 2 && host[0] == '[' && host[bytes - 1] == ']';
    if (memchr(host, ':', bytes) != NULL && !bracketed) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "address '%.64s': write an IPv6 address as [%.*s]", address->url,
                            (int)bytes, host);
    }
    snprintf(out->host, sizeof(out->host), "%.*s", (int)(bracketed ? bytes - 2 : bytes),
             bracketed ? host + 1 : host);
    if (strcmp(out->host, "*") == 0) {
        out->host[0] = 0;
    }
    return EP_OK;
}

/* Small frames must not wait for acknowledgements, and a peer whose machine vanished must be
 * noticed some day. */
void ep_uv_lane_set_options(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

static bool same_machine(const struct sockaddr_storage *peer, const struct sockaddr_storage *own)
{
    if (peer->ss_family != own->ss_family) {
        return false;
    }
    if (peer->ss_family == AF_INET) {
        uint32_t a = ntohl(((const struct sockaddr_in *)peer)->sin_addr.s_addr);
        uint32_t b = ntohl(((const struct sockaddr_in *)own)->sin_addr.s_addr);
        return a == b || (a >> 24 == IN_LOOPBACKNET && b >> 24 == IN_LOOPBACKNET);
    }
    const struct in6_addr *a = &((const struct sockaddr_in6 *)peer)->sin6_addr;
    const struct in6_addr *b = &((const struct sockaddr_in6 *)own)->sin6_addr;
    return peer->ss_family == AF_INET6 && memcmp(a, b, sizeof(*a)) == 0;
}

void ep_uv_lane_set_congestion(int fd, const struct sockaddr_storage *peer)
{
    static const char name[] = "reno";
    struct sockaddr_storage own;
    socklen_t bytes = sizeof(own);
    memset(&own, 0, sizeof(own));
    if (getsockname(fd, (struct sockaddr *)&own, &bytes) == 0 && same_machine(peer, &own)) {
        /* or it stays as it is */
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, sizeof(name) - 1);
    }
}

static void conn_allow_large(ep_conn *base, ep_buffer_pool *pool)
{
    ep_uv_conn *conn = (ep_uv_conn *)base;
    ep_lane_limits_allow_large(&conn->limits, pool, &conn->large_allowed);
}

static void conn_receiving(ep_conn *base, ep_conn_receiving *out_receiving)
{
    const ep_uv_conn *conn = (const ep_uv_conn *)base;
    out_receiving->heard_ns = __atomic_load_n(&conn->heard_ns, __ATOMIC_RELAXED);
    out_receiving->waits_for_memory = __atomic_load_n(&conn->memory_wait, __ATOMIC_RELAXED);
    ep_assembler_read_noted(&conn->assembler, out_receiving);
}

static uint64_t conn_unacked(ep_conn *base)
{
    ep_uv_conn *conn = (ep_uv_conn *)base;
    int bytes = 0;
    pthread_mutex_lock(&conn->lock);
    if (conn->fd < 0 || ioctl(conn->fd, SIOCOUTQ, &bytes) != 0) {
        bytes = 0;
    }
    pthread_mutex_unlock(&conn->lock);
    return (uint64_t)bytes;
}

static void conn_peer(ep_conn *base, char *out_address, size_t bytes)
{
    snprintf(out_address, bytes, "%s", ((ep_uv_conn *)base)->peer);
}

static bool conn_is_trusted(ep_conn *base)
{
    (void)base;
    return false;
}

static const char *const schemes[] = {"tcp", NULL};

const ep_lane_ops ep_uv_stream_lane = {
    .name = "uv-stream",
    .schemes = schemes,
    .listen = ep_uv_lane_listen,
    .listener_close = ep_uv_lane_listener_close,
    .listener_url = ep_uv_lane_listener_url,
    .dial = ep_uv_lane_dial,
    .dial_release = ep_uv_lane_dial_release,
    .conn_start = ep_uv_conn_start,
    .conn_send = ep_uv_conn_send,
    .conn_close = ep_uv_conn_close,
    .conn_release = ep_uv_conn_release,
    .conn_allow_large = conn_allow_large,
    .conn_receiving = conn_receiving,
    .conn_unacked = conn_unacked,
    .conn_peer = conn_peer,
    .conn_is_trusted = conn_is_trusted,
};
