/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of a dial that all lanes share: it has one result, reported once: the lane's, or a
 * cancel by the owner, whichever comes first. A lane's dial has this as its first member and adds
 * what connects.
 *
 * Threads  any.
 */
#ifndef EP_TRANSPORT_LANE_DIAL_H
#define EP_TRANSPORT_LANE_DIAL_H

#include <pthread.h>

#include "transport/transport.h"

typedef enum ep_lane_dial_state {
    EP_DIAL_PENDING,
    EP_DIAL_RUNNING,
    EP_DIAL_DONE
} ep_lane_dial_state;

typedef struct ep_lane_dial {
    ep_dial base;
    /* Lock held: the owner cancelled, so the lane ends what is running. NULL: the lane polls. */
    void (*cancel)(struct ep_lane_dial *dial);
    ep_lane_limits limits;
    ep_dial_func on_dial;
    void *arg;
    char url[EP_ADDRESS_BYTES];
    uint32_t forks; /* ep_lane_forks of the process that began it */
    uint32_t refs;  /* atomic: those of the owner and the lane */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* the fields below are guarded by lock */
    ep_lane_dial_state state;
    pthread_t runner; /* while on_dial runs */
} ep_lane_dial;

void ep_lane_dial_ref(ep_lane_dial *dial);
void ep_lane_dial_unref(ep_lane_dial *dial);
bool ep_lane_dial_is_cancelled(ep_lane_dial *dial);
/* Reports the lane's result, conn or an error. One that comes after a cancel is released. */
void ep_lane_dial_report(ep_lane_dial *dial, ep_conn *taken_conn, const ep_error *error);
/* The lane has finished with the dial, after its report. */
void ep_lane_dial_over(ep_lane_dial *dial);

#endif
