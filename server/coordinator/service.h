/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The Coordinator service over rpc: registration, heartbeats, placement watches, cluster status.
 *
 * With a store, watchers and nodes get a table, and the commit of an assignment, only after it has
 * been written. Until a write succeeds the former table is served.
 *
 * Threads    handlers run on lane threads; one lock protects the cluster and the watchers. Except
 *            for log lines no I/O is done under it: the store has a thread of its own
 *            (table_keeper.h).
 */
#ifndef EP_COORDINATOR_SERVICE_H
#define EP_COORDINATOR_SERVICE_H

#include "common/pool_watch.h"
#include "common/service_tls.h"
#include "coordinator/health.h"
#include "coordinator/load_sums.h"
#include "coordinator/policy.h"
#include "coordinator/table_store.h"
#include "rpc/rpc.h"

typedef struct ep_coordinator_service ep_coordinator_service;

/* store: borrowed, its term begun; kept: its content, used only during the call. Both NULL: state
 * in memory. */
ep_err ep_coordinator_service_create(const ep_coordinator_state_config *config,
                                     ep_table_store *store, const ep_coordinator_kept *kept,
                                     ep_coordinator_service **out_service);
/* After the rpc server is destroyed. NULL allowed. */
void ep_coordinator_service_destroy(ep_coordinator_service *service);
/* For ep_rpc_server_add_service. */
ProtobufCService *ep_coordinator_service_rpc(ep_coordinator_service *service);
/* Load reported by nodes and the gateway. */
ep_load_sums *ep_coordinator_service_loads(ep_coordinator_service *service);
/* Notices silent nodes; call every heartbeat_ms. */
void ep_coordinator_service_tick(ep_coordinator_service *service);
/* Refuses new watches. Present ones end with their connections when the rpc server is destroyed. */
void ep_coordinator_service_stop(ep_coordinator_service *service);

/* As ep_coordinator_state_drain. With a store the order becomes durable with the next write,
 * shortly after the call. Any thread. */
ep_err ep_coordinator_service_drain(ep_coordinator_service *service, const char *node, bool undo,
                                    ep_coordinator_drain *out_drain, ep_error *out_error);

/* As ep_coordinator_state_set_default. Any thread. */
ep_err ep_coordinator_service_set_default(ep_coordinator_service *service, const char *model,
                                          const char *version, char *out_before,
                                          ep_error *out_error);

/* A change of the policy; count 0: only a question. */
typedef struct ep_policy_order {
    const ep_policy_change *changes;
    size_t count;
    bool has_expect_revision;
    uint64_t expect_revision;
    const char *who;
} ep_policy_order;

typedef struct ep_policy_view {
    ep_policy policy;
    bool is_kept;      /* it is written, and the served table has it */
    const char *store; /* as in ClusterStatusReply, as the next */
    char store_error[EP_ERROR_TEXT_BYTES];
    ep_coordinator_state_config configured;
} ep_policy_view;

/* As ep_policy_apply and ep_coordinator_state_set_policy; FAILED_PRECONDITION if the revision is
 * not the expected one. Any thread. */
ep_err ep_coordinator_service_policy(ep_coordinator_service *service, const ep_policy_order *order,
                                     ep_policy_view *out_view, ep_error *out_error);
/* As ep_coordinator_state_plan. Any thread. */
ep_err ep_coordinator_service_plan(ep_coordinator_service *service, bool apply, bool with_copies,
                                   Expertd__V1__PlanReply **out_reply, ep_error *out_error);

/* As ep_coordinator_state_balance; service is an ep_coordinator_service: an
 * ep_statistics_balance_func. Any thread. */
bool ep_coordinator_service_balance(void *service, const char *model, const char *version,
                                    uint32_t layer, ep_coordinator_balance *out_balance);

typedef struct ep_coordinator_stats {
    ep_epoch epoch;        /* number 0: no table yet */
    uint32_t nodes_listed; /* starting, serving or degraded */
    uint64_t watchers;
    uint64_t registrations;
    uint64_t heartbeats;
    uint64_t tables_published;
    uint64_t store_writes;
    uint64_t store_errors; /* failed writes, each tried again */
    /* why the newest state is not written; code EP_OK: it is written, or there is no store */
    ep_error store_error;
} ep_coordinator_stats;
/* Makes frame memory and certificates part of the judgement. Both are borrowed until destroy. Call
 * it before the rpc server listens. */
void ep_coordinator_service_watch(ep_coordinator_service *service, const ep_pool_watch *pool,
                                  ep_tls_watch *tls);
/* Judges the service now; free() the result. NULL without memory. Any thread. */
ep_health *ep_coordinator_service_judge(ep_coordinator_service *service);
/* The answer of ClusterStatus, to be freed with protobuf_c_message_free_unpacked, and a reference
 * to the table of that moment (NULL: none yet). NULL without memory. Any thread. */
Expertd__V1__ClusterStatusReply *ep_coordinator_service_status(ep_coordinator_service *service,
                                                               ep_routing_table **out_table);
/* As ep_coordinator_state_layer. Any thread. */
bool ep_coordinator_service_layer(ep_coordinator_service *service, const char *model,
                                  const char *version, uint32_t layer,
                                  ep_coordinator_layer_view *out_view);
/* A reference to the served table; NULL: none yet. Any thread. */
ep_routing_table *ep_coordinator_service_table(ep_coordinator_service *service);
void ep_coordinator_service_read_stats(ep_coordinator_service *service,
                                       ep_coordinator_stats *out_stats);

#endif
