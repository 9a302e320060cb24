/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a client is made of, for the files of this folder.
 *
 * Ownership  a client is counted: its owner and every call object hold it. `uses` counts what still
 *            runs on its threads: calls under way, answers not yet processed, timers, functions of
 *            the public interface. ep_client_destroy waits for 0.
 */
#ifndef EP_CLIENT_CLIENT_CORE_H
#define EP_CLIENT_CLIENT_CORE_H

#include "base/host.h"
#include "call/call_registry.h"
#include "call/call_workers.h"
#include "cluster/cluster.h"
#include "expertd/client.h"
#include "call/flow.h"
#include "common/config.h"
#include "common/fork_guard.h"
#include "call/retry_budget.h"

#define EP_CLIENT_NORMS 8 /* more models share them */

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
    ep_rpc_credentials *credentials; /* the token that is shown; config's is the first one */
    ep_timer_service *timers;
    ep_call_workers *workers;
    ep_buffer_pool *pool;
    ep_cluster *cluster;
    ep_call_registry registry;
    const ep_rpc_method *forward_method;
    ep_retry_budget budget;
    ep_client_counters counters;
    ep_flow_limits flow;
    /* by model: experts of one may be larger than another's */
    ep_answer_norm norms[EP_PEER_CLASSES][EP_CLIENT_NORMS];
    uint64_t sequence;     /* atomic: calls begun, spreads them over copies */
    uint64_t window_bytes; /* atomic: reply rows that windows under way expect */
    uint64_t window_bytes_max;
    char host[EP_HOST_BYTES]; /* ours; "" not known */
};

#define EP_HEDGE_PERMILLE_DEFAULT 30

/* What the program says, else the table's policy, else the default. */
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
/* A use is a reference, too: its end still reads the client. ep_client_leave ends it. */
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

#endif
