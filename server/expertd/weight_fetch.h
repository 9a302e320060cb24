/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Brings the files of models that this node mirrors (weights_from) from nodes that serve them,
 * service WeightFiles of proto/expert.proto, or from a checkpoint on shared storage, in the
 * configured order. The coordinator tells which nodes there are. They are asked in turn, the one
 * that gave last first; one that fails, is busy, has not got the bytes or serves another version is
 * passed over, until the coordinator has been asked again.
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
    const char *coordinator_url; /* "": no model is from nodes */
    bool insecure;
} ep_weight_fetch_config;

ep_err ep_weight_fetch_create(const ep_weight_fetch_config *config, ep_weight_fetch **out_fetch,
                              ep_error *out_error);
/* Fetches that run end with UNAVAILABLE, and all later ones. Idempotent; NULL allowed. */
void ep_weight_fetch_stop(ep_weight_fetch *fetch);
/* After the mirrors. NULL allowed. */
void ep_weight_fetch_destroy(ep_weight_fetch *fetch);

/*
 * Opens a model's mirror; in an empty directory makes it first, of what the storage has, else of
 * what the nodes serve, for which it waits up to a minute: the version that all of them have,
 * unless one is configured. Storage that fails is fatal only where no mirror and no node stands in.
 * config: borrowed.
 * Errors: UNAVAILABLE (no node has it), FAILED_PRECONDITION (they have several versions, or mirror
 * or storage have another), and those of ep_checkpoint_open, ep_mirror_create and _open.
 */
ep_err ep_weight_fetch_open(ep_weight_fetch *fetch, const ep_node_model_config *config,
                            ep_mirror **out_mirror, ep_error *out_error);
/* All models are open: what is read from here on fails, UNAVAILABLE, once all sources were asked;
 * before, it waits for one. NULL allowed. */
void ep_weight_fetch_opened(ep_weight_fetch *fetch);
/* Received so far; NULL: 0. */
uint64_t ep_weight_fetch_bytes(const ep_weight_fetch *fetch);

#endif
