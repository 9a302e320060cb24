/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For clients without a coordinator: asks the nodes twice a second which experts they hold, since a
 * Hello does not tell of experts loaded or dropped later.
 *
 * Ownership  peers are borrowed; they are closed before _destroy.
 * Threads    on_models runs on library threads, with no lock held.
 */
#ifndef EP_CLIENT_SEED_REFRESH_H
#define EP_CLIENT_SEED_REFRESH_H

#include "expert.pb-c.h"
#include "cluster/peers.h"

typedef struct ep_seed_refresh ep_seed_refresh;

typedef struct ep_seed_refresh_config {
    ep_timer_service *timers;
    ep_peer *const *seeds;
    size_t seeds_count;
    void (*on_models)(void *arg, ep_peer *seed, const Expertd__V1__DescribeReply *models);
    void *arg;
} ep_seed_refresh_config;

/* Errors: NO_MEMORY. */
ep_err ep_seed_refresh_create(const ep_seed_refresh_config *config, ep_seed_refresh **out_refresh);
/* Sends no request after it returns; answers may still come until the peers are closed. NULL
 * allowed. Not from a callback. */
void ep_seed_refresh_stop(ep_seed_refresh *refresh);
/* After the peers are closed. NULL allowed. */
void ep_seed_refresh_destroy(ep_seed_refresh *refresh);

#endif
