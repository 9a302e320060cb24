/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls of one client: those running, those that wait for a newer table or a node, and spare
 * ones kept for reuse. What is to be done with a call that comes out is its taker's matter.
 *
 * Threads  any.
 */
#ifndef EP_CLIENT_CALL_REGISTRY_H
#define EP_CLIENT_CALL_REGISTRY_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "expertd/client.h"

#define EP_CALLS_SPARE_MAX 16
#define EP_CALLS_SPARE_BYTES_MAX ((size_t)64 << 20) /* arrays of all spare calls together */

typedef struct ep_call_links { /* in ep_call; guarded by the registry's lock */
    ep_call *running_prev;
    ep_call *running_next;
    ep_call *waiting_prev;
    ep_call *waiting_next;
    uint64_t waiting_since; /* wake generation when it began to wait */
    bool running;
    bool waiting;
    bool cancelled;     /* ep_call_registry_next_to_cancel gave it out */
    size_t spare_bytes; /* of its arrays, while spare */
} ep_call_links;

typedef struct ep_call_registry {
    pthread_mutex_t lock;
    pthread_cond_t idle;
    uint64_t uses;            /* atomic: ep_client_use */
    uint64_t wake_generation; /* atomic */
    ep_call *running;
    uint32_t running_count;
    uint32_t running_max;
    ep_call *waiting_head;
    ep_call *waiting_tail;
    ep_call *spare; /* linked by running_next */
    uint32_t spare_count;
    size_t spare_bytes;
    bool closing; /* atomic */
} ep_call_registry;

void ep_call_registry_init(ep_call_registry *out_registry, uint32_t running_max);
/* Nothing is kept any more. */
void ep_call_registry_fini(ep_call_registry *registry);

/* A reference to the call that ep_client_destroy waits for; ep_call_unuse ends it. */
void ep_call_use(ep_call *call);

/* Errors: RESOURCE_EXHAUSTED (calls_max, named), CLOSED. */
ep_err ep_call_registry_add(ep_call_registry *registry, ep_call *call, ep_error *out_error);
/* Also ends waiting. */
void ep_call_registry_remove(ep_call_registry *registry, ep_call *call);
/* The next wake gives out the call. seen: wake_generation as the caller read it. False when a wake
 * came since: then look again instead. */
bool ep_call_registry_wait(ep_call_registry *registry, ep_call *call, uint64_t seen);
/* Begins a wake: its generation. */
uint64_t ep_call_registry_wake(ep_call_registry *registry);
/* The next call that waits since before this wake, with a use; NULL when there is none. */
ep_call *ep_call_registry_next_woken(ep_call_registry *registry, uint64_t generation);

/* NULL when there is none. */
ep_call *ep_call_registry_take_spare(ep_call_registry *registry);
/* bytes: what its arrays hold. False when enough are kept already; the call stays the caller's. */
bool ep_call_registry_keep_spare(ep_call_registry *registry, ep_call *call, size_t bytes);

/* No new calls, and none becomes spare. */
void ep_call_registry_close(ep_call_registry *registry);
/* After that: the next call that runs, once each, with a use; NULL when there is none. */
ep_call *ep_call_registry_next_to_cancel(ep_call_registry *registry);
/* Waits until uses is 0, at most timeout_us; true when it is. */
bool ep_call_registry_wait_idle(ep_call_registry *registry, uint64_t timeout_us);

#endif
