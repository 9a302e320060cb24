/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keeps the node in its cluster: registers with the coordinator, sends heartbeats, loads the
 * experts assigned to the node and reports what is loaded. After a grace it drops experts that no
 * table in force needs. While the coordinator is away, the node keeps serving what it has; it
 * registers again when the coordinator is back.
 *
 * Threads    ep_membership_read on any thread, everything else on the loop's. RPC completions are
 *            passed to the loop.
 */
#ifndef EP_EXPERTD_MEMBERSHIP_H
#define EP_EXPERTD_MEMBERSHIP_H

#include "common/service_loop.h"
#include "coordinator.pb-c.h"
#include "expertd/node_epoch.h"
#include "expertd/node_models.h"
#include "rpc/rpc.h"

#define EP_HEARTBEAT_MS_MIN 20
#define EP_HEARTBEAT_MS_MAX 60000
#define EP_HEARTBEAT_MS_DEFAULT 500

typedef struct ep_membership ep_membership;

/* Memory for the texts of a heartbeat. */
typedef struct ep_membership_texts {
    char last_error[EP_ERROR_TEXT_BYTES];
    char tls_error[EP_ERROR_TEXT_BYTES];
} ep_membership_texts;

typedef struct ep_membership_config {
    const char *coordinator_url; /* everything here is borrowed */
    const char *node_url;        /* where callers reach us */
    const ep_tls_config *tls;
    const ep_rpc_common *common;
    uint64_t capacity_bytes;
    uint32_t drop_grace_ms;
    ep_service_loop *loop;
    const ep_node_models *models;
    ep_weight_store *store;
    ep_node_epoch *epoch;
    /* Fills in the node's state and work; texts lives until the request is sent. */
    void (*report)(void *arg, Expertd__V1__HeartbeatRequest *request, ep_membership_texts *texts);
    void (*on_change)(void *arg); /* connected, assigned or loaded changed; on the loop's thread */
    /* The other nodes of this host in the newest table. Called with every answer of a coordinator
     * that has a table, on the loop's thread */
    void (*on_neighbours)(void *arg, Expertd__V1__Neighbour *const *neighbours, size_t count);
    /* What operators set for all nodes, or NULL. Called with every answer, on the loop's thread. */
    void (*on_policy)(void *arg, const Expertd__V1__NodePolicy *policy);
    void *arg;
} ep_membership_config;

typedef struct ep_membership_view {
    bool is_connected;                  /* registered, and the last heartbeat was answered */
    char lost_why[EP_ERROR_TEXT_BYTES]; /* what failed last, while not connected; "": nothing yet */
    /* the first assignment is done: every expert of it is loaded or failed */
    bool was_assigned;
    bool said_draining; /* the coordinator has answered a heartbeat with state "draining" */
    /* its last answer, with copies_listed and note, was to a heartbeat with state "leaving" */
    bool said_leaving;
    uint32_t copies_listed;         /* copies on this node in the newest table */
    char note[EP_ERROR_TEXT_BYTES]; /* why they stay; "": no reason given */
    uint32_t node_id;
} ep_membership_view;

/* Starts dialling. Errors: as ep_rpc_channel_create; NO_MEMORY. */
ep_err ep_membership_create(const ep_membership_config *config, ep_membership **out_membership,
                            ep_error *out_error);
/* Not while the loop runs. NULL allowed. */
void ep_membership_destroy(ep_membership *membership);
/* The weight store changed. */
void ep_membership_on_weights(ep_membership *membership);
/* Sends a heartbeat at once, as the node's state has changed. */
void ep_membership_hurry(ep_membership *membership);
/* The same, and said_leaving is false until that heartbeat is answered. */
void ep_membership_leaving_changed(ep_membership *membership);
void ep_membership_read(ep_membership *membership, ep_membership_view *out_view);

#endif
