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
    .conn_send = ep_shm_conn_send,
    .fini = ep_shm_fini,
};
