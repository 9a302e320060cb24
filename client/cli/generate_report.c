/* SPDX-License-Identifier: Apache-2.0 */
/* The report of a generation as tables or JSON. */
#include "generate_report.h"

#include <inttypes.h>

static const char *node_name(const ep_cli_node *node)
{
    return node->name[0] != '\0'                                   ? node->name
           : node->status != NULL && node->status->node[0] != '\0' ? node->status->node
                                                                   : node->url;
}

static uint64_t rows_of(const ep_cli_node *node)
{
    return node->status != NULL ? node->status->rows_served : node->rows_served;
}

static const char *state_of(const ep_cli_node *node)
{
    return node->status != NULL ? node->status->state : "unreachable";
}

static bool print_layers(ep_cli_generate_result *result, FILE *out)
{
    ep_cli_table *table =
        ep_cli_table_create(">LAYER|>CALLS|>P50 US|>P99 US|>MEAN US|>FRAMES|>RE-ROUTED");
    for (uint32_t i = 0; table != NULL && i < result->layers_count; i++) {
        ep_cli_layer_record *layer = &result->layers[i];
        ep_cli_table_cell(table, "%" PRIu32, layer->layer);
        ep_cli_table_cell(table, "%" PRIu64, layer->latency.count);
        ep_cli_table_cell(table, "%" PRIu64, ep_latency_percentile(&layer->latency, 50));
        ep_cli_table_cell(table, "%" PRIu64, ep_latency_percentile(&layer->latency, 99));
        ep_cli_table_cell(table, "%.0f", ep_latency_mean(&layer->latency));
        ep_cli_table_cell(table, "%" PRIu64, layer->frames);
        ep_cli_table_cell(table, "%" PRIu64, layer->rerouted_frames);
    }
    bool good = ep_cli_table_print(table, out);
    ep_cli_table_destroy(table);
    return good;
}

static bool print_nodes(const ep_cli_node_list *nodes, FILE *out)
{
    ep_cli_table *table = ep_cli_table_create("NODE|STATE|>ROWS SERVED|URL");
    for (size_t i = 0; table != NULL && i < nodes->count; i++) {
        const ep_cli_node *node = &nodes->nodes[i];
        ep_cli_table_cell(table, "%s", node_name(node));
        ep_cli_table_cell(table, "%s", state_of(node));
        ep_cli_table_cell(table, "%" PRIu64 "%s", rows_of(node),
                          node->status != NULL ? "" : " (last known)");
        ep_cli_table_cell(table, "%s", node->url);
    }
    bool good = ep_cli_table_print(table, out);
    ep_cli_table_destroy(table);
    return good;
}

static json_t *layers_json(ep_cli_generate_result *result)
{
    json_t *layers = json_array();
    for (uint32_t i = 0; i < result->layers_count; i++) {
        ep_cli_layer_record *layer = &result->layers[i];
        json_array_append_new(
            layers,
            json_pack("{s:I, s:I, s:I, s:I, s:f, s:I, s:I}", "layer", (json_int_t)layer->layer,
                      "calls", (json_int_t)layer->latency.count, "p50_us",
                      (json_int_t)ep_latency_percentile(&layer->latency, 50), "p99_us",
                      (json_int_t)ep_latency_percentile(&layer->latency, 99), "mean_us",
                      ep_latency_mean(&layer->latency), "frames", (json_int_t)layer->frames,
                      "rerouted_frames", (json_int_t)layer->rerouted_frames));
    }
    return layers;
}

static json_t *nodes_json(const ep_cli_node_list *nodes)
{
    json_t *list = json_array();
    for (size_t i = 0; i < nodes->count; i++) {
        const ep_cli_node *node = &nodes->nodes[i];
        json_array_append_new(
            list,
            json_pack("{s:o, s:o, s:o, s:I, s:b}", "name", ep_cli_json_text(node_name(node)), "url",
                      ep_cli_json_text(node->url), "state", ep_cli_json_text(state_of(node)),
                      "rows_served", (json_int_t)rows_of(node), "answered", node->status != NULL));
    }
    return list;
}

bool ep_cli_generate_report_print(const ep_cli_generate_report *report, ep_cli_format format,
                                  FILE *out)
{
    ep_cli_generate_result *result = report->result;
    double seconds = (double)result->total_us / 1e6;
    uint64_t rerouted = 0;
    for (uint32_t i = 0; i < result->layers_count; i++) {
        rerouted += result->layers[i].rerouted_frames;
    }
    if (format == EP_CLI_JSON) {
        return ep_cli_json_print(json_pack("{s:o, s:o, s:I, s:f, s:o, s:{s:I, s:I}, s:I, s:o, s:o}",
                                           "model", ep_cli_json_text(report->request->model),
                                           "version", ep_cli_json_text(report->shape->version),
                                           "bytes", (json_int_t)report->request->bytes, "seconds",
                                           seconds, "numerics", ep_cli_json_text(result->numerics),
                                           "epoch", "term", (json_int_t)result->epoch_term,
                                           "number", (json_int_t)result->epoch_number,
                                           "rerouted_frames", (json_int_t)rerouted, "layers",
                                           layers_json(result), "nodes", nodes_json(report->nodes)),
                                 out);
    }
    ep_cli_line(out,
                "%" PRIu32 " bytes from model %s version %s in %.2f s, %.0f bytes/s, epoch %" PRIu64
                "/%" PRIu64 ", %" PRIu64 " re-routed frames",
                report->request->bytes, report->request->model, report->shape->version, seconds,
                seconds > 0.0 ? report->request->bytes / seconds : 0.0, result->epoch_term,
                result->epoch_number, rerouted);
    fputc('\n', out);
    bool good = print_layers(result, out);
    fputc('\n', out);
    return print_nodes(report->nodes, out) && good;
}
