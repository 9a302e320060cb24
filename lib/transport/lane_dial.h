/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A dial as all lanes have it: one result, told once, whoever is quicker, the lane or the owner who
 * gives up. A lane's dial has this as its first member and brings what connects.
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
    /* Lock held: the owner gave up. The lane ends what is under way; NULL: it looks by itself. */
    void (*cancel)(struct ep_lane_dial *dial);
    ep_lane_limits limits;
    ep_dial_func on_dial;
    void *arg;
    char url[EP_ADDRESS_BYTES];
    uint32_t forks; /* ep_lane_forks of the process that began it */
    uint32_t refs;  /* atomic: its owner and the lane */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* guarded by lock */
    ep_lane_dial_state state;
    pthread_t runner; /* while on_dial runs */
} ep_lane_dial;

void ep_lane_dial_ref(ep_lane_dial *dial);
void ep_lane_dial_unref(ep_lane_dial *dial);
bool ep_lane_dial_is_cancelled(ep_lane_dial *dial);
/* The lane's result, conn or the reason. A connection that comes too late is released. */
void ep_lane_dial_report(ep_lane_dial *dial, ep_conn *taken_conn, const ep_error *error);
/* The lane is through with it, after its report. */
void ep_lane_dial_over(ep_lane_dial *dial);

#endif
