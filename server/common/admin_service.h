/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The Admin service of both daemons. Its methods are for operators only, who come in on
 * admin_listen; lib/rpc checks that (rpc/rpc.h).
 *
 * Threads    calls arrive on lane threads and are handled one by one on the loop's thread, like
 *            signals.
 */
#ifndef EP_SERVER_COMMON_ADMIN_SERVICE_H
#define EP_SERVER_COMMON_ADMIN_SERVICE_H

#include "admin.pb-c.h"
#include "common/reload.h"
#include "common/service_loop.h"
#include "rpc/rpc.h"

typedef struct ep_admin_service ep_admin_service;

typedef struct ep_admin_drain {
    char node[EP_NODE_NAME_BYTES];
    const char *state; /* static text */
    uint32_t copies_to_move;
    char note[EP_ERROR_TEXT_BYTES]; /* "" none */
} ep_admin_drain;

/* A value that overrides the configuration's. */
typedef struct ep_admin_override {
    char value[64];
    char origin[64];
} ep_admin_override;

/* Callbacks run on the loop's thread. */
typedef struct ep_admin_config {
    ep_service_loop *loop;   /* borrowed, like reload */
    const ep_reload *reload; /* has the options in force */
    /* As the Drain method; out_drain is zeroed. */
    ep_err (*drain)(void *arg, const char *node, bool undo, ep_admin_drain *out_drain,
                    ep_error *out_error);
    /* Exactly what SIGHUP does. */
    ep_err (*run_reload)(void *arg, ep_reload_report *out_report, ep_error *out_error);
    /* As the SetDefaultVersion method; out_before[EP_VERSION_BYTES]. NULL: not a coordinator, the
     * call is UNIMPLEMENTED. */
    ep_err (*set_default)(void *arg, const char *model, const char *version, char *out_before,
                          ep_error *out_error);
    /* As the Policy method; answers through closure. NULL: not a coordinator, the call is
     * UNIMPLEMENTED. */
    ep_err (*policy)(void *arg, const Expertd__V1__PolicyRequest *request,
                     Expertd__V1__PolicyReply_Closure closure, void *closure_data,
                     ep_error *out_error);
    /* True: the policy overrides the configuration of this key. NULL: never. */
    bool (*overrides)(void *arg, const char *key, ep_admin_override *out_override);
    /* As the PlanPlacement method; *out_reply is freed here. NULL as above. */
    ep_err (*plan)(void *arg, bool apply, bool with_copies, Expertd__V1__PlanReply **out_reply,
                   ep_error *out_error);
    void *arg;
} ep_admin_config;

/* Errors: NO_MEMORY. */
ep_err ep_admin_service_create(const ep_admin_config *config, ep_admin_service **out_service);
/* For ep_rpc_server_add_service. */
ProtobufCService *ep_admin_service_rpc(ep_admin_service *service);
/* Ends waiting calls now and later ones at once. Call it after the loop has run and before the rpc
 * server is destroyed. NULL allowed. */
void ep_admin_service_stop(ep_admin_service *service);
/* After the rpc server is destroyed. NULL allowed. */
void ep_admin_service_destroy(ep_admin_service *service);

#endif
