/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fetches the files of models that this node mirrors (weights_from): from nodes that serve them
 * (service WeightFiles of proto/expert.proto) or from a checkpoint on shared storage, in the
 * configured order. The coordinator names the nodes. They are asked in turn, beginning with the one
 * that gave bytes last. A node that fails, is busy, lacks the bytes or serves another version is
 * passed over until the coordinator has been asked again.
 *
 * Connections follow the rule of relays (ep_address_for_dial) and show the node's token.
 *
 * Threads    open, destroy: one thread. A mirror's reads, and stop: any.
 */
#ifndef EP_EXPERTD_WEIGHT_FETCH_H
#define EP_EXPERTD_WEIGHT_FETCH_H

#include "expertd/node_config.h"
#include "model/mirror.h"
#include "rpc/rpc.h"

typedef struct ep_weight_fetch ep_weight_fetch;

/* Borrowed. */
typedef struct ep_weight_fetch_config {
    const ep_rpc_common *common;
    const ep_tls_config *tls;
    const char *coordinator_url; /* "": no model comes from nodes */
    bool insecure;
} ep_weight_fetch_config;

ep_err ep_weight_fetch_create(const ep_weight_fetch_config *config, ep_weight_fetch **out_fetch,
                              ep_error *out_error);
/* Ends running and all later fetches with UNAVAILABLE. Idempotent; NULL allowed. */
void ep_weight_fetch_stop(ep_weight_fetch *fetch);
/* Call it after the mirrors are closed. NULL allowed. */
void ep_weight_fetch_destroy(ep_weight_fetch *fetch);

/*
 * Opens a model's mirror. In an empty directory it first makes one from the list of files that
 * storage has, else from that of the nodes, for which it waits up to a minute. Without a configured
 * version all nodes must have the same one. Failing storage is fatal only if neither a mirror nor a
 * node can replace it. config: borrowed. Errors: UNAVAILABLE (no node has it), FAILED_PRECONDITION
 * (they have several versions, or mirror or storage have another), and those of ep_checkpoint_open,
 * ep_mirror_create and _open.
 */
ep_err ep_weight_fetch_open(ep_weight_fetch *fetch, const ep_node_model_config *config,
                            ep_mirror **out_mirror, ep_error *out_error);
/* Tells that all models are open. Until then a read waits for a source; from then on it fails with
 * UNAVAILABLE once all sources have been asked. NULL allowed. */
void ep_weight_fetch_opened(ep_weight_fetch *fetch);
/* Bytes received from nodes so far; NULL: 0. */
uint64_t ep_weight_fetch_bytes(const ep_weight_fetch *fetch);

#endif
