/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ExpertService.Forward: decodes and validates a request once, admits it, groups its slots by
 * expert into works for the batcher, and answers when the last one is done. The backend writes
 * reply rows straight into the outgoing buffer.
 *
 * The call begins in the transport's callback, which does bounded work only; it ends on a backend
 * thread.
 * Threads    calls come from any thread. close and destroy: once, from the owner.
 */
#ifndef EP_EXPERTD_FORWARD_HANDLER_H
#define EP_EXPERTD_FORWARD_HANDLER_H

#include "expert.pb-c.h"
#include "expertd/admission.h"
#include "expertd/forward_metrics.h"
#include "expertd/node_epoch.h"
#include "expertd/node_models.h"
#include "expertd/relay.h"
#include "expertd/tenants.h"
#include "rpc/rpc.h"

/* multiplications that count 1 in ep_work_place.row_cost */
#define EP_NODE_ROW_COST_UNIT 65536u

typedef struct ep_forward_handler ep_forward_handler;

typedef struct ep_forward_handler_config {
    const char *node_name; /* everything here is borrowed */
    const ep_node_models *models;
    ep_weight_store *store;
    ep_batcher *batcher;
    ep_admission *admission;
    const ep_tenants *tenants;
    ep_node_epoch *epoch;
    ep_metrics *metrics;
    ep_relay *relay;              /* NULL: requests with relay parts are refused */
    size_t reply_bytes_max;       /* tensors of one reply */
    size_t bookkeeping_bytes_max; /* memory for requests in work, without their frames */
} ep_forward_handler_config;

ep_err ep_forward_handler_create(const ep_forward_handler_config *config,
                                 ep_forward_handler **out_handler, ep_error *out_error);
/* No request may be in work. NULL allowed. */
void ep_forward_handler_destroy(ep_forward_handler *handler);

/* The generated service's Forward. The call is ended exactly once, now or later. */
void ep_forward_handler_call(ep_forward_handler *handler,
                             const Expertd__V1__ForwardRequest *request,
                             Expertd__V1__ForwardReply_Closure closure, ep_rpc_call *call);
void ep_forward_handler_read_stats(ep_forward_handler *handler, ep_forward_stats *out_stats);

#endif
