/* SPDX-License-Identifier: Apache-2.0 */
/* The shared-memory lane's table. */
#include "transport/shm/shm_lane.h"

static const char *const schemes[] = {"shm", NULL};

const ep_lane_ops ep_shm_lane = {
    .name = "shm",
    .schemes = schemes,
    .listen = ep_shm_listen,
    .listener_close = ep_shm_listener_close,
    .dial = ep_shm_dial,
    .conn_start = ep_shm_conn_start,
    .conn_send = ep_shm_conn_send,
    .conn_close = ep_shm_conn_close,
    .conn_release = ep_shm_conn_release,
    .conn_allow_large = ep_shm_conn_allow_large,
    .conn_receiving = ep_shm_conn_receiving,
    .conn_peer = ep_shm_conn_peer,
    .conn_is_trusted = ep_shm_conn_is_trusted,
};
