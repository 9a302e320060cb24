/* SPDX-License-Identifier: Apache-2.0 */
#include "top.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "output.h"

#define HOT_MAX 64

void ep_top_sample_fini(ep_top_sample *sample)
{
    ep_cli_node_list_free(&sample->nodes);
    if (sample->statistics != NULL) {
        protobuf_c_message_free_unpacked(&sample->statistics->base, NULL);
        sample->statistics = NULL;
    }
}

double ep_top_rate(uint64_t before, uint64_t now, uint64_t ns)
{
    return now > before && ns > 0 ? (double)(now - before) * 1e9 / (double)ns : 0.0;
}

/* The same process in the sample before; NULL: it was not there, did not answer, or has restarted. */
static const Expertd__V1__NodeStatusReply *status_before(const ep_top_sample *before, const Expertd__V1__NodeStatusReply *now)
{
    for (size_t i = 0; i < before->nodes.count; i++) {
        const Expertd__V1__NodeStatusReply *status = before->nodes.nodes[i].status;
        if (status != NULL && status->incarnation == now->incarnation) {
            return status;
        }
    }
    return NULL;
}

/* Keeps the hottest first; cold ones do not count. */
static size_t keep(ep_top_hot *list, size_t count, size_t max, const ep_top_hot *hot)
{
    size_t at = count;
    while (at > 0 && list[at - 1].per_s < hot->per_s) {
        at--;
    }
    if (at == max || hot->per_s <= 0.0) {
        return count;
    }
    count += count < max;
    memmove(&list[at + 1], &list[at], (count - at - 1) * sizeof(*list));
    list[at] = *hot;
    return count;
}

static uint64_t layer_rows(const Expertd__V1__NodeStatusReply *status, const Expertd__V1__LayerStatus *layer)
{
    for (size_t l = 0; status != NULL && l < status->n_layers; l++) {
        const Expertd__V1__LayerStatus *other = status->layers[l];
        if (other->layer == layer->layer && strcmp(other->model, layer->model) == 0 && strcmp(other->version, layer->version) == 0) {
            return other->rows_served;
        }
    }
    return 0;
}

static bool is_same_layer(const Expertd__V1__LayerStatus *a, const Expertd__V1__LayerStatus *b)
{
    return a->layer == b->layer && strcmp(a->model, b->model) == 0 && strcmp(a->version, b->version) == 0;
}

static bool was_seen(const ep_top_sample *now, size_t node, const Expertd__V1__LayerStatus *layer)
{
    for (size_t i = 0; i < node; i++) {
        const Expertd__V1__NodeStatusReply *status = now->nodes.nodes[i].status;
        for (size_t l = 0; status != NULL && l < status->n_layers; l++) {
            if (is_same_layer(status->layers[l], layer)) {
                return true;
            }
        }
    }
    return false;
}

/* Rows per second of a layer on all nodes from this one on. */
static double layer_rate(const ep_top_sample *before, const ep_top_sample *now, size_t first, const Expertd__V1__LayerStatus *layer)
{
    double sum = 0.0;
    for (size_t i = first; i < now->nodes.count; i++) {
        const Expertd__V1__NodeStatusReply *status = now->nodes.nodes[i].status;
        const Expertd__V1__NodeStatusReply *was = status != NULL ? status_before(before, status) : NULL;
        if (was != NULL) {
            sum += ep_top_rate(layer_rows(was, layer), layer_rows(status, layer), now->at_ns - before->at_ns);
        }
    }
    return sum;
}

size_t ep_top_hot_layers(const ep_top_sample *before, const ep_top_sample *now, ep_top_hot *out_hot, size_t max)
{
    size_t count = 0;
    for (size_t i = 0; i < now->nodes.count; i++) {
        const Expertd__V1__NodeStatusReply *status = now->nodes.nodes[i].status;
        for (size_t l = 0; status != NULL && l < status->n_layers; l++) {
            const Expertd__V1__LayerStatus *layer = status->layers[l];
            if (!was_seen(now, i, layer)) {
                const ep_top_hot hot = {.model = layer->model,
                                        .version = layer->version,
                                        .layer = layer->layer,
                                        .expert = -1,
                                        .per_s = layer_rate(before, now, i, layer)};
                count = keep(out_hot, count, max, &hot);
            }
        }
    }
    return count;
}

static const Expertd__V1__LayerStatistics *statistics_before(const ep_top_sample *before, const Expertd__V1__LayerStatistics *now)
{
    for (size_t l = 0; before->statistics != NULL && l < before->statistics->n_layers; l++) {
        const Expertd__V1__LayerStatistics *layer = before->statistics->layers[l];
        if (layer->layer == now->layer && strcmp(layer->model, now->model) == 0 && strcmp(layer->version, now->version) == 0 &&
            layer->n_counts == now->n_counts) {
            return layer;
        }
    }
    return NULL;
}

size_t ep_top_hot_experts(const ep_top_sample *before, const ep_top_sample *now, ep_top_hot *out_hot, size_t max)
{
    size_t count = 0;
    for (size_t l = 0; now->statistics != NULL && l < now->statistics->n_layers; l++) {
        const Expertd__V1__LayerStatistics *layer = now->statistics->layers[l];
        const Expertd__V1__LayerStatistics *was = statistics_before(before, layer);
        for (size_t e = 0; was != NULL && e < layer->n_counts; e++) {
            const ep_top_hot hot = {.model = layer->model,
                                    .version = layer->version,
                                    .layer = layer->layer,
                                    .expert = (int64_t)e,
                                    .per_s = ep_top_rate(was->counts[e], layer->counts[e], now->at_ns - before->at_ns)};
            count = keep(out_hot, count, max, &hot);
        }
    }
    return count;
}

static bool print_nodes(const ep_top_sample *before, const ep_top_sample *now, FILE *out)
{
    ep_cli_table *table =
        ep_cli_table_create("NODE|STATE|>ROWS/S|>CALLS/S|>IN FLIGHT|>WAITING|>TOKENS|>REFUSED/S|>FAILED/S|>HEDGED/S|URL");
    uint64_t ns = now->at_ns - before->at_ns;
    for (size_t i = 0; table != NULL && i < now->nodes.count; i++) {
        const ep_cli_node *node = &now->nodes.nodes[i];
        const Expertd__V1__NodeStatusReply *status = node->status;
        const Expertd__V1__NodeStatusReply *was = status != NULL ? status_before(before, status) : NULL;
        was = was != NULL ? was : status; /* no rates yet */
        ep_cli_table_cell(table, "%s", status != NULL ? status->node : node->name[0] != '\0' ? node->name : "-");
        ep_cli_table_cell(table, "%s", status != NULL ? status->state : "silent");
        if (status == NULL) {
            for (int c = 0; c < 8; c++) {
                ep_cli_table_cell(table, "-");
            }
        } else {
            ep_cli_table_cell(table, "%.0f", ep_top_rate(was->rows_served, status->rows_served, ns));
            ep_cli_table_cell(table, "%.0f", ep_top_rate(was->requests_served, status->requests_served, ns));
            ep_cli_table_cell(table, "%" PRIu64, status->requests_in_flight);
            ep_cli_table_cell(table, "%" PRIu64, status->jobs_waiting);
            ep_cli_table_cell(table, "%" PRIu64, status->tokens_in_flight);
            ep_cli_table_cell(table, "%.0f", ep_top_rate(was->requests_refused, status->requests_refused, ns));
            ep_cli_table_cell(table, "%.0f", ep_top_rate(was->requests_failed, status->requests_failed, ns));
            ep_cli_table_cell(table, "%.0f", ep_top_rate(was->requests_hedged, status->requests_hedged, ns));
        }
        ep_cli_table_cell(table, "%s", node->url);
    }
    bool good = ep_cli_table_print(table, out);
    ep_cli_table_destroy(table);
    return good;
}

static bool print_hot(const char *headings, const ep_top_hot *hot, size_t count, FILE *out)
{
    ep_cli_table *table = ep_cli_table_create(headings);
    for (size_t i = 0; table != NULL && i < count; i++) {
        ep_cli_table_cell(table, "%s", hot[i].model);
        ep_cli_table_cell(table, "%s", hot[i].version);
        ep_cli_table_cell(table, "%" PRIu32, hot[i].layer);
        if (hot[i].expert >= 0) {
            ep_cli_table_cell(table, "%" PRId64, hot[i].expert);
        }
        ep_cli_table_cell(table, "%.0f", hot[i].per_s);
    }
    fputc('\n', out);
    bool good = ep_cli_table_print(table, out);
    ep_cli_table_destroy(table);
    return good;
}

bool ep_top_print(const ep_top_sample *before, const ep_top_sample *now, size_t hottest, FILE *out)
{
    ep_top_hot hot[HOT_MAX];
    size_t max = hottest < HOT_MAX ? hottest : HOT_MAX;
    if (now->coordinator_error.code != EP_OK) {
        ep_cli_line(out, "coordinator lost, going on with the nodes: %s", now->coordinator_error.text);
    }
    bool good = print_nodes(before, now, out);
    good = print_hot("HOTTEST LAYERS|VERSION|>LAYER|>ROWS/S", hot, ep_top_hot_layers(before, now, hot, max), out) && good;
    if (now->statistics != NULL) {
        good = print_hot("HOTTEST EXPERTS|VERSION|>LAYER|>EXPERT|>SLOTS/S", hot, ep_top_hot_experts(before, now, hot, max), out) && good;
    }
    return good && ferror(out) == 0;
}
