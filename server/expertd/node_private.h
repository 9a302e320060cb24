/* SPDX-License-Identifier: Apache-2.0 */
/* The struct of a node, for the files that implement it. */
#ifndef EP_EXPERTD_NODE_PRIVATE_H
#define EP_EXPERTD_NODE_PRIVATE_H

#include "common/admin_service.h"
#include "common/metrics.h"
#include "common/probes.h"
#include "common/pool_watch.h"
#include "common/service_tls.h"
#include "common/service_loop.h"
#include "common/reload.h"
#include "expertd/forward_handler.h"
#include "expertd/liveness.h"
#include "expertd/membership.h"
#include "expertd/node.h"
#include "expertd/node_devices.h"
#include "expertd/weight_serve.h"

typedef enum ep_node_state {
    EP_NODE_STARTING,
    EP_NODE_SERVING,
    EP_NODE_DEGRADED,
    EP_NODE_DRAINING
} ep_node_state;
const char *ep_node_state_name(ep_node_state state);

typedef struct ep_node_expert_service {
    Expertd__V1__ExpertService_Service base;
    ep_node *node;
} ep_node_expert_service;

typedef struct ep_node_info_service {
    Expertd__V1__NodeInfo_Service base;
    ep_node *node;
} ep_node_info_service;

struct ep_node {
    const ep_node_config *config;
    ep_node_source source;
    ep_reload reload;
    ep_liveness liveness;
    uint64_t incarnation;
    uint64_t started_ns;
    ep_service_loop *loop;
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_metrics *metrics;
    ep_node_devices devices;
    ep_loop_task lost_task;   /* a device was lost */
    uint32_t inflight_tokens; /* of all devices */
    ep_weight_cache *cache;   /* NULL: none */
    ep_weight_store *store;
    ep_node_models models;
    ep_node_epoch epoch;
    ep_admission *admission;
    ep_batcher *batcher;
    ep_relay *relay;
    ep_forward_handler *handler;
    ep_rpc_common common;
    ep_rpc_server *server;
    ep_probes *probes;
    ep_membership *membership;
    ep_admin_service *admin;
    ep_weight_serve *weight_serve;
    ep_weight_fetch *weight_fetch; /* NULL: no model is mirrored */
    ep_node_expert_service expert_service;
    ep_node_info_service info_service;
    char url[EP_ADDRESS_BYTES]; /* first listener, real port */
    char probe_url[EP_ADDRESS_BYTES];
    char admin_url[EP_ADDRESS_BYTES]; /* "" off */
    char door_url[EP_ADDRESS_BYTES];  /* "" off */
    _Atomic uint32_t state;           /* ep_node_state */
    _Atomic bool has_started;         /* it has been ready once */
    bool is_draining;                 /* loop thread */
    /* an operator wants its experts moved away; it keeps serving. Written by the loop thread */
    _Atomic bool is_leaving;
    /* of the policy that set the window of step groups; 0: none. Loop thread, as the next */
    uint64_t policy_revision;
    uint64_t policy_refused; /* revision with a value that this build refuses */
    bool ports_written;
    uint32_t drain_ms;          /* reloadable */
    uint32_t compute_stall_ms;  /* reloadable */
    uint64_t last_report_ns;    /* of the last report of loading to the service manager */
    ep_loop_task change_task;   /* weights changed */
    ep_loop_timer *drain_timer; /* ends a drain that takes too long */
    ep_loop_timer *sweep_timer; /* closes links to neighbours that are not needed */
    ep_pool_watch pool_watch;
    ep_tls_watch tls_watch;
    ep_loop_timer *leave_timer; /* while draining: checks whether the last replies are out */
};

/* Name of the node's state; "leaving" while it serves and an operator drains it. Any thread. */
const char *ep_node_state_text(const ep_node *node);
/* node.c: what SIGHUP does. Loop thread. Errors: as ep_reload_run. */
ep_err ep_node_reload(void *arg, ep_reload_report *out_report, ep_error *out_error);
/* node_admin.c: orders of operators. Loop thread. */
ep_err ep_node_drain_order(void *arg, const char *name, bool undo, ep_admin_drain *out_drain,
                           ep_error *out_error);

/* Applies the coordinator's policy for all nodes. Loop thread. */
void ep_node_on_policy(void *arg, const Expertd__V1__NodePolicy *policy);
bool ep_node_overrides(void *arg, const char *key, ep_admin_override *out_override);

/* node_service.c: what peers may ask. */
void ep_node_services_init(ep_node *node);
void ep_node_hello_fill(void *arg, Expertd__V1__Hello *hello);
void ep_node_hello_free(void *arg, Expertd__V1__Hello *hello);

/* node_observe.c: what operators see. */
ep_err ep_node_observe_init(ep_node *node);
size_t ep_node_probe_checks(void *arg, ep_probe_kind kind, ep_probe_check *out);

#endif
