/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gives pieces of this node's model files to nodes that have none: service WeightFiles of
 * proto/expert.proto.
 *
 * One thread reads, at most weight_serve_rate, so a node that fetches costs those that serve one
 * busy disk and no more. At most EP_WEIGHT_READS_MAX requests wait for it, the next is refused and
 * its node asks elsewhere. Files are found among those the checkpoint was opened from, and no path
 * of a peer is opened. Clients get nothing: where their tokens are good for nodes, nobody does.
 *
 * Threads    stop and destroy from one thread, after the server takes no more calls and has none,
 *            respectively.
 */
#ifndef EP_EXPERTD_WEIGHT_SERVE_H
#define EP_EXPERTD_WEIGHT_SERVE_H

#include "expertd/node_models.h"
#include "rpc/rpc.h"

#define EP_WEIGHT_PIECE_BYTES (1u << 20) /* of one Read at most */
#define EP_WEIGHT_READS_MAX 16

typedef struct ep_weight_serve ep_weight_serve;

typedef struct ep_weight_serve_config {
    const ep_node_models *models; /* borrowed, as the next */
    ep_rpc_credentials *credentials;
    uint64_t bytes_per_s; /* 0: unlimited */
} ep_weight_serve_config;

ep_err ep_weight_serve_create(const ep_weight_serve_config *config, ep_weight_serve **out_serve,
                              ep_error *out_error);
/* Ends what waits, and every later call. Idempotent; NULL allowed. */
void ep_weight_serve_stop(ep_weight_serve *serve);
void ep_weight_serve_destroy(ep_weight_serve *serve);
ProtobufCService *ep_weight_serve_rpc(ep_weight_serve *serve);
/* Given so far. */
uint64_t ep_weight_serve_bytes(const ep_weight_serve *serve);

#endif
