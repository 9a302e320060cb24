/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The documents of the status page. Pure: facts in, text out. They have no tokens, no secrets or
 * incarnations of nodes, and no paths.
 *
 * /status.json     {"software", "stopping", "healthy", "answers" (calls can be answered), "summary"
 *                  (one sentence),
 *                  "problems": [{"code", "is_error", "ends_service", "text", "advice"}],
 *                  "problems_more",
 *                  "epoch": {"term" (text: above 2^53), "number"}, "policy", "copies",
 *                  "copies_waiting" (for move_rate), "watchers", "uptime_ms", "nodes": [{"id",
 *                  "name", "url", "host", "state", "last_seen_ms", "behind_ms", "rows_served",
 *                  "requests_failed", "requests_hedged", "requests_refused",
 *                  "weight_bytes" (experts in its memory), "weight_quant_error",
 *                  "weight_quant_output_error" (the greatest of its layers; null: none), "experts"
 *                  (copies in the table),
 *                  "copies_to_load", "copies_to_drop", "devices", "devices_lost",
 *                  "tls_days" (until the first certificate ends, below 0 it has; null: no TLS)}],
 *                  "models": [{"name", "version", "is_default", "layers": [n, ..]}]}
 * /placement.json  of one layer: {"model", "version", "layer", "epoch", "experts",
 *                  "shared_experts", "top_k",
 *                  "copies": [[id of a node, ..] for each expert, the shared ones last],
 *                  "heat": [work of late for each routed expert, in slots; a pass is 16]
 *                  (null: not yet),
 *                  "slots": [slots since the coordinator began] (null: nobody computed),
 *                  "to_load": [[expert, id], ..], "to_load_more", "to_drop", "to_drop_more"}
 */
#ifndef EP_COORDINATOR_STATUS_JSON_H
#define EP_COORDINATOR_STATUS_JSON_H

#include "coordinator/load_sums.h"
#include "coordinator/state.h"

/* The text is for free(); NULL without memory. table may be NULL. unix_now in seconds. */
char *ep_status_json(const Expertd__V1__ClusterStatusReply *cluster, const ep_routing_table *table,
                     bool stopping, uint64_t unix_now);
/* load: of the layer; NULL: none. */
char *ep_placement_json(const ep_routing_table *table, const ep_routing_layer *layer,
                        const ep_coordinator_layer_view *view, const ep_load_layer *load);

#endif
