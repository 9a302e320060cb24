/* SPDX-License-Identifier: Apache-2.0 */
/* The uv-stream lane's table. */
#include <linux/sockios.h>
#include <stdio.h>
#include <sys/ioctl.h>

#include "transport/uv/uv_lane.h"

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
    .listen = ep_uv_listen,
    .listener_close = ep_uv_listener_close,
    .dial = ep_uv_dial,
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
