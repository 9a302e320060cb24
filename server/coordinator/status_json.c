/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/status_json.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/printable.h"

#define TEXT_BYTES 1024
#define DAY_S 86400

/* Escapes a text from a node, which may have any bytes. */
static json_t *text(const char *said)
{
    char plain[EP_TEXT_ESCAPED_BYTES(TEXT_BYTES)];
    return json_string(ep_text_escape(said, plain, sizeof(plain)));
}

static json_t *count(uint64_t n)
{
    return json_integer(n < INT64_MAX ? (json_int_t)n : INT64_MAX);
}

static char *dump(json_t *taken_json)
{
    char *out =
        taken_json != NULL ? json_dumps(taken_json, JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
    json_decref(taken_json);
    return out;
}

static json_t *epoch_json(uint64_t term, uint64_t number)
{
    char digits[24];
    snprintf(digits, sizeof(digits), "%" PRIu64, term);
    return json_pack("{s:s, s:o}", "term", digits, "number", count(number));
}

/* ---- status ---- */

/* The judgement in one sentence; the problems are listed beside it. */
static json_t *summary_json(const Expertd__V1__ClusterStatusReply *cluster, bool stopping)
{
    char sentence[TEXT_BYTES];
    size_t errors = 0;
    for (size_t i = 0; i < cluster->n_problems; i++) {
        errors += cluster->problems[i]->is_error;
    }
    const size_t warnings = cluster->n_problems - errors;
    if (stopping) {
        snprintf(sentence, sizeof(sentence), "The coordinator is stopping.");
    } else if (cluster->n_problems == 0) {
        snprintf(sentence, sizeof(sentence),
                 "Healthy: %zu node%s, and every expert has its copies.", cluster->n_nodes,
                 cluster->n_nodes == 1 ? "" : "s");
    } else if (cluster->problems[0]->ends_service) {
        snprintf(sentence, sizeof(sentence), "No call can be answered: %s.",
                 cluster->problems[0]->text);
    } else {
        snprintf(sentence, sizeof(sentence),
                 "Calls are answered, with %zu error%s and %zu warning%s%s.", errors,
                 errors == 1 ? "" : "s", warnings, warnings == 1 ? "" : "s",
                 cluster->problems_dropped > 0 ? ", and more" : "");
    }
    return text(sentence);
}

static json_t *problems_json(const Expertd__V1__ClusterStatusReply *cluster)
{
    json_t *problems = json_array();
    for (size_t i = 0; i < cluster->n_problems; i++) {
        const Expertd__V1__Problem *problem = cluster->problems[i];
        json_array_append_new(problems,
                              json_pack("{s:o, s:b, s:b, s:o, s:o}", "code", text(problem->code),
                                        "is_error", problem->is_error, "ends_service",
                                        problem->ends_service, "text", text(problem->text),
                                        "advice", text(problem->advice)));
    }
    return problems;
}

/* Number of copies per node of the table. NULL without memory. */
static uint64_t *count_experts(const ep_routing_table *table)
{
    uint64_t *experts = calloc((table != NULL ? table->nodes_count : 0) + 1, sizeof(*experts));
    for (uint32_t l = 0; experts != NULL && table != NULL && l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        const uint32_t copies = layer->offsets[layer->shape.experts + layer->shape.shared_experts];
        for (uint32_t c = 0; c < copies; c++) {
            experts[layer->copies[c]]++;
        }
    }
    return experts;
}

/* likely: the node's index in the status, where it usually is. */
static uint32_t find_node(const ep_routing_table *table, size_t likely, uint32_t node_id)
{
    for (uint32_t n = 0; table != NULL && n < table->nodes_count; n++) {
        const uint32_t index = (uint32_t)((likely + n) % table->nodes_count);
        if (table->nodes[index].node_id == node_id) {
            return index;
        }
    }
    return UINT32_MAX;
}

/* A positive number or null: nodes may report any double, also ones that JSON lacks. */
static json_t *ratio(double said)
{
    return isfinite(said) && said > 0 ? json_real(said) : json_null();
}

static json_t *node_json(const Expertd__V1__NodeEntry *node, uint64_t experts, uint64_t unix_now)
{
    json_t *tls_days = json_null();
    if (node->tls_expiry != 0) {
        tls_days = node->tls_expiry > unix_now
                       ? count((node->tls_expiry - unix_now) / DAY_S)
                       : json_integer(-1 - (json_int_t)((unix_now - node->tls_expiry) / DAY_S));
    }
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, "
                     "s:o, s:o, s:o, s:i, s:o}",
                     "id", count(node->node_id), "name", text(node->name), "url", text(node->url),
                     "host", text(node->host), "state", text(node->state), "last_seen_ms",
                     count(node->last_seen_ms), "behind_ms", count(node->behind_ms), "rows_served",
                     count(node->rows_served), "requests_failed", count(node->requests_failed),
                     "requests_hedged", count(node->requests_hedged), "requests_refused",
                     count(node->requests_refused), "weight_bytes", count(node->weight_bytes),
                     "weight_quant_error", ratio(node->weight_quant_error),
                     "weight_quant_output_error", ratio(node->weight_quant_output_error), "experts",
                     count(experts), "copies_to_load", count(node->copies_to_load),
                     "copies_to_drop", count(node->copies_to_drop), "devices", count(node->devices),
                     "devices_lost", __builtin_popcountll(node->devices_lost), "tls_days",
                     tls_days);
}

static json_t *nodes_json(const Expertd__V1__ClusterStatusReply *cluster,
                          const ep_routing_table *table, uint64_t unix_now)
{
    uint64_t *experts = count_experts(table);
    json_t *nodes = experts != NULL ? json_array() : NULL;
    for (size_t i = 0; nodes != NULL && i < cluster->n_nodes; i++) {
        const uint32_t index = find_node(table, i, cluster->nodes[i]->node_id);
        json_array_append_new(nodes, node_json(cluster->nodes[i],
                                               index != UINT32_MAX ? experts[index] : 0, unix_now));
    }
    free(experts);
    return nodes;
}

static json_t *models_json(const ep_routing_table *table)
{
    json_t *models = json_array();
    for (uint32_t m = 0; table != NULL && m < table->models_count; m++) {
        json_t *layers = json_array();
        for (uint32_t l = 0; l < table->layers_count; l++) {
            if (table->layers[l].model_index == m) {
                json_array_append_new(layers, count(table->layers[l].shape.layer));
            }
        }
        json_array_append_new(models,
                              json_pack("{s:o, s:o, s:b, s:o}", "name", text(table->models[m].name),
                                        "version", text(table->models[m].version), "is_default",
                                        table->models[m].is_default, "layers", layers));
    }
    return models;
}

char *ep_status_json(const Expertd__V1__ClusterStatusReply *cluster, const ep_routing_table *table,
                     bool stopping, uint64_t unix_now)
{
    const bool answers = !stopping && (cluster->n_problems == 0 ||
                                       /* the worst problem is first */
                                       !cluster->problems[0]->ends_service);
    return dump(json_pack(
        "{s:o, s:b, s:b, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "software",
        text(cluster->software), "stopping", stopping, "healthy",
        !stopping && cluster->n_problems == 0, "answers", answers, "summary",
        summary_json(cluster, stopping), "problems", problems_json(cluster), "problems_more",
        count(cluster->problems_dropped), "epoch",
        epoch_json(cluster->epoch->term, cluster->epoch->number), "policy", text(cluster->policy),
        "copies", count(cluster->copies), "copies_waiting", count(cluster->copies_waiting),
        "watchers", count(cluster->watchers), "uptime_ms", count(cluster->uptime_us / 1000),
        "nodes", nodes_json(cluster, table, unix_now), "models", models_json(table)));
}

/* ---- placement ---- */

static json_t *copies_json(const ep_routing_table *table, const ep_routing_layer *layer)
{
    json_t *copies = json_array();
    for (uint32_t e = 0; e < layer->shape.experts + layer->shape.shared_experts; e++) {
        json_t *nodes = json_array();
        for (uint32_t c = layer->offsets[e]; c < layer->offsets[e + 1]; c++) {
            json_array_append_new(nodes, count(table->nodes[layer->copies[c]].node_id));
        }
        json_array_append_new(copies, nodes);
    }
    return copies;
}

static json_t *moves_json(const ep_coordinator_copies *copies)
{
    json_t *moves = json_array();
    for (size_t i = 0; i < copies->count && i < EP_COORDINATOR_MOVES_MAX; i++) {
        json_array_append_new(moves, json_pack("[o, o]", count(copies->list[i].expert),
                                               count(copies->list[i].node_id)));
    }
    return moves;
}

static json_t *more_json(const ep_coordinator_copies *copies)
{
    return count(copies->count > EP_COORDINATOR_MOVES_MAX ? copies->count - EP_COORDINATOR_MOVES_MAX
                                                          : 0);
}

static json_t *heat_json(const ep_coordinator_layer_view *view)
{
    json_t *heat = view->heat_count > 0 ? json_array() : json_null();
    for (uint32_t e = 0; e < view->heat_count; e++) {
        json_array_append_new(heat, count((uint64_t)view->heat[e]));
    }
    return heat;
}

static json_t *slots_json(const ep_load_layer *load)
{
    json_t *slots = load != NULL ? json_array() : json_null();
    for (uint32_t e = 0; load != NULL && e < load->experts; e++) {
        json_array_append_new(slots, count(load->counts[e]));
    }
    return slots;
}

char *ep_placement_json(const ep_routing_table *table, const ep_routing_layer *layer,
                        const ep_coordinator_layer_view *view, const ep_load_layer *load)
{
    const ep_routing_model *model = &table->models[layer->model_index];
    return dump(json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "model",
        text(model->name), "version", text(model->version), "layer", count(layer->shape.layer),
        "epoch", epoch_json(table->epoch.term, table->epoch.number), "experts",
        count(layer->shape.experts), "shared_experts", count(layer->shape.shared_experts), "top_k",
        count(layer->shape.top_k), "copies", copies_json(table, layer), "heat", heat_json(view),
        "slots", slots_json(load), "to_load", moves_json(&view->to_load), "to_load_more",
        more_json(&view->to_load), "to_drop", moves_json(&view->to_drop), "to_drop_more",
        more_json(&view->to_drop)));
}
