/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parts of a client, its users, and lists of its calls under one short lock: running calls,
 * calls that wait for a newer table or a node, and spare calls for reuse.
 *
 * Ownership  a client is reference-counted by its owner and every call object. `uses` counts what
 *            still runs on its threads: calls under way, answers not yet processed, timers, public
 *            functions. ep_client_destroy waits until it is 0.
 */
#ifndef EP_CLIENT_CLIENT_CORE_H
#define EP_CLIENT_CLIENT_CORE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "base/host.h"
#include "call/call_workers.h"
#include "cluster/cluster.h"
#include "expertd/client.h"
#include "call/flow.h"
#include "common/config.h"
#include "common/fork_guard.h"
#include "call/retry_budget.h"

#define EP_CLIENT_NORMS 8 /* further models share these */
#define EP_CALLS_SPARE_MAX 16
#define EP_CALLS_SPARE_BYTES_MAX ((size_t)64 << 20) /* arrays of all spare calls together */

typedef struct ep_call_links { /* in ep_call; guarded by the registry's lock */
    LIST_ENTRY(ep_call) entry; /* among the running or the spare calls */
    TAILQ_ENTRY(ep_call) waiting_entry;
    uint64_t waiting_since; /* wake_generation when it began to wait */
    bool running;
    bool waiting;
    bool cancelled;     /* ep_call_registry_next_to_cancel has returned it */
    size_t spare_bytes; /* size of its arrays, while spare */
} ep_call_links;

typedef struct ep_call_registry {
    pthread_mutex_t lock;
    pthread_cond_t idle;
    uint64_t uses;            /* atomic: ep_client_use */
    uint64_t wake_generation; /* atomic */
    LIST_HEAD(, ep_call) running;
    uint32_t running_count;
    uint32_t running_max;
    TAILQ_HEAD(, ep_call) waiting; /* in the order in which they began to wait */
    LIST_HEAD(, ep_call) spare;
    uint32_t spare_count;
    size_t spare_bytes;
    bool closing; /* atomic */
} ep_call_registry;

typedef struct ep_client_counters { /* atomic */
    uint64_t calls;
    uint64_t calls_failed;
    uint64_t frames_sent;
    uint64_t frames_rerouted;
    uint64_t frames_hedged;
    uint64_t late_replies;
    uint64_t nonfinite_rows;
    uint64_t bytes_sent;
    uint64_t bytes_received;
} ep_client_counters;

struct ep_client {
    uint32_t refs;
    ep_fork_guard guard;
    ep_client_config config;         /* strings are copies */
    ep_rpc_credentials *credentials; /* the token in use; at first the one in config */
    ep_timer_service *timers;
    ep_call_workers *workers;
    ep_buffer_pool *pool;
    ep_cluster *cluster;
    ep_call_registry registry;
    const ep_rpc_method *forward_method;
    ep_retry_budget budget;
    ep_client_counters counters;
    ep_flow_limits flow;
    /* by model, as their experts differ in size */
    ep_answer_norm norms[EP_PEER_CLASSES][EP_CLIENT_NORMS];
    uint64_t sequence;     /* atomic: number of calls begun; spreads calls over copies */
    uint64_t window_bytes; /* atomic: bytes of reply rows expected by windows under way */
    uint64_t window_bytes_max;
    char host[EP_HOST_BYTES]; /* this process's; "": not known */
};

#define EP_HEDGE_PERMILLE_DEFAULT 30

/* The program's setting, else the table's policy, else the default. */
static inline uint32_t ep_client_hedge_permille(const ep_client_config *config,
                                                const ep_routing_table *table)
{
    return config->hedge_permille != EP_HEDGE_BY_POLICY ? config->hedge_permille
           : table->caller_policy.has_hedge_permille    ? table->caller_policy.hedge_permille
                                                        : EP_HEDGE_PERMILLE_DEFAULT;
}

static inline ep_client *ep_client_ref(ep_client *client)
{
    __atomic_fetch_add(&client->refs, 1, __ATOMIC_RELAXED);
    return client;
}
void ep_client_unref(ep_client *client);
/* A use holds a reference too, because ending it reads the client. ep_client_leave ends it. */
static inline void ep_client_use(ep_client *client)
{
    ep_client_ref(client);
    __atomic_fetch_add(&client->registry.uses, 1, __ATOMIC_ACQ_REL);
}

/* Begins a public function: FAILED_PRECONDITION in a forked child, CLOSED while being destroyed.
 * Pair with ep_client_leave. */
ep_err ep_client_enter(ep_client *client, ep_error *out_error);
void ep_client_leave(ep_client *client);

static inline void ep_count(uint64_t *counter, uint64_t amount)
{
    __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED);
}

/* ---- lists of its calls ---- */

void ep_call_registry_init(ep_call_registry *out_registry, uint32_t running_max);

/* Errors: RESOURCE_EXHAUSTED (calls_max, named), CLOSED. */
ep_err ep_call_registry_add(ep_call_registry *registry, ep_call *call, ep_error *out_error);
/* Also takes it out of the waiting calls. */
void ep_call_registry_remove(ep_call_registry *registry, ep_call *call);
/* Adds the call to those that the next wake returns. seen: wake_generation as the caller read it.
 * False: there was a wake since, so check again instead. */
bool ep_call_registry_wait(ep_call_registry *registry, ep_call *call, uint64_t seen);
/* Begins a wake; returns its generation. */
uint64_t ep_call_registry_wake(ep_call_registry *registry);
/* The next call that has waited since before this wake, with a use; NULL: none. */
ep_call *ep_call_registry_next_woken(ep_call_registry *registry, uint64_t generation);

/* NULL when there is none. */
ep_call *ep_call_registry_take_spare(ep_call_registry *registry);
/* bytes: size of its arrays. False: enough are kept already; the call stays the caller's. */
bool ep_call_registry_keep_spare(ep_call_registry *registry, ep_call *call, size_t bytes);

/* From now on no call is added or becomes spare. */
void ep_call_registry_close(ep_call_registry *registry);
/* After that: the next running call, each once, with a use; NULL: none. */
ep_call *ep_call_registry_next_to_cancel(ep_call_registry *registry);
/* Waits until uses is 0 (true), at most timeout_us. */
bool ep_call_registry_wait_idle(ep_call_registry *registry, uint64_t timeout_us);

#endif
