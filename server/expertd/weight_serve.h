/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serves pieces of this node's model files to nodes that mirror them: service WeightFiles of
 * proto/expert.proto.
 *
 * One thread reads, at most weight_serve_rate, so fetching nodes cost this one no more than a busy
 * disk. At most EP_WEIGHT_READS_MAX requests wait; further ones are refused, and those nodes ask
 * elsewhere. Only files that the checkpoint was opened from are served; a path from a peer is never
 * opened. Clients get nothing. Where nodes may show a client's token, nobody does.
 *
 * Threads    one thread calls stop, once the server takes no more calls, and destroy, once it has
 *            none.
 */
#ifndef EP_EXPERTD_WEIGHT_SERVE_H
#define EP_EXPERTD_WEIGHT_SERVE_H

#include "expertd/node_models.h"
#include "rpc/rpc.h"

#define EP_WEIGHT_PIECE_BYTES (1u << 20) /* the most in one Read */
#define EP_WEIGHT_READS_MAX 16

typedef struct ep_weight_serve ep_weight_serve;

typedef struct ep_weight_serve_config {
    const ep_node_models *models; /* borrowed, as the next */
    ep_rpc_credentials *credentials;
    uint64_t bytes_per_s; /* 0: unlimited */
} ep_weight_serve_config;

ep_err ep_weight_serve_create(const ep_weight_serve_config *config, ep_weight_serve **out_serve,
                              ep_error *out_error);
/* Ends waiting and all later calls. Idempotent; NULL allowed. */
void ep_weight_serve_stop(ep_weight_serve *serve);
void ep_weight_serve_destroy(ep_weight_serve *serve);
ProtobufCService *ep_weight_serve_rpc(ep_weight_serve *serve);
/* Bytes served so far. */
uint64_t ep_weight_serve_bytes(const ep_weight_serve *serve);

#endif
