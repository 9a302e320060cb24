/* SPDX-License-Identifier: Apache-2.0 */
/* The uv-stream lane's table. */
#include "transport/uv/uv_lane.h"

static const char *const schemes[] = {"tcp", NULL};

const ep_lane_ops ep_uv_stream_lane = {
    .name = "uv-stream",
    .schemes = schemes,
    .listen = ep_uv_listen,
    .listener_close = ep_uv_listener_close,
    .dial = ep_uv_dial,
    .conn_send = ep_uv_conn_send,
    .conn_unacked = ep_uv_conn_unacked,
    .fini = ep_uv_fini,
};
