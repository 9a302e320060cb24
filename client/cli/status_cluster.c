/* SPDX-License-Identifier: Apache-2.0 */
/* The status by a coordinator. */
#include <inttypes.h>
#include <string.h>

#include "status.h"

void ep_cli_cluster_check(const Expertd__V1__ClusterStatusReply *cluster,
                          ep_cli_problems *out_problems)
{
    if (!cluster->judged) {
        ep_cli_problem_add(
            out_problems,
            "the coordinator runs '%s', which does not judge the service's health yet: upgrade it",
            cluster->software);
    }
    for (size_t i = 0; i < cluster->n_problems; i++) {
        ep_cli_problem_add(out_problems, "%s", cluster->problems[i]->text);
    }
    if (cluster->problems_dropped > 0) {
        ep_cli_problem_add(out_problems, "%" PRIu32 " problems more", cluster->problems_dropped);
    }
}

typedef struct model_summary {
    uint32_t layers;
    uint32_t experts_max;
    uint32_t copies_min;
    uint32_t copies_max;
} model_summary;

static model_summary summarise(const ep_routing_table *table, uint32_t model_index)
{
    model_summary summary = {.copies_min = UINT32_MAX};
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        uint32_t min;
        uint32_t max;
        if (layer->model_index != model_index) {
            continue;
        }
        ep_cli_placement_copies(layer, &min, &max);
        summary.layers++;
        summary.experts_max =
            layer->shape.experts > summary.experts_max ? layer->shape.experts : summary.experts_max;
        summary.copies_min = min < summary.copies_min ? min : summary.copies_min;
        summary.copies_max = max > summary.copies_max ? max : summary.copies_max;
    }
    summary.copies_min = summary.layers > 0 ? summary.copies_min : 0;
    return summary;
}

/* ---- JSON ---- */

static json_t *nodes_json(const Expertd__V1__ClusterStatusReply *cluster)
{
    json_t *nodes = json_array();
    for (size_t i = 0; i < cluster->n_nodes; i++) {
        const Expertd__V1__NodeEntry *node = cluster->nodes[i];
        json_array_append_new(
            nodes,
            json_pack(
                "{s:I, s:o, s:o, s:o, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:o, "
                "s:o, s:o}",
                "id", (json_int_t)node->node_id, "name", ep_cli_json_text(node->name), "url",
                ep_cli_json_text(node->url), "host", ep_cli_json_text(node->host), "state",
                ep_cli_json_text(node->state), "rows_served", (json_int_t)node->rows_served,
                "requests_failed", (json_int_t)node->requests_failed, "requests_hedged",
                (json_int_t)node->requests_hedged, "requests_refused",
                (json_int_t)node->requests_refused, "weight_bytes", (json_int_t)node->weight_bytes,
                "copies_to_load", (json_int_t)node->copies_to_load, "copies_to_drop",
                (json_int_t)node->copies_to_drop, "last_seen_ms", (json_int_t)node->last_seen_ms,
                "devices", (json_int_t)node->devices, "devices_lost",
                __builtin_popcountll(node->devices_lost), "speed", ep_cli_json_ratio(node->speed),
                "weight_quant_error", ep_cli_json_ratio(node->weight_quant_error),
                "weight_quant_output_error", ep_cli_json_ratio(node->weight_quant_output_error)));
    }
    return nodes;
}

static json_t *models_json(const ep_routing_table *table)
{
    json_t *models = json_array();
    for (uint32_t m = 0; table != NULL && m < table->models_count; m++) {
        const ep_routing_model *model = &table->models[m];
        model_summary summary = summarise(table, m);
        json_t *numerics = json_array();
        for (uint32_t i = 0; i < model->numerics_count; i++) {
            json_array_append_new(numerics, ep_cli_json_text(model->numerics[i]));
        }
        json_array_append_new(models,
                              json_pack("{s:o, s:o, s:b, s:I, s:I, s:I, s:I, s:o}", "name",
                                        ep_cli_json_text(model->name), "version",
                                        ep_cli_json_text(model->version), "is_default",
                                        model->is_default, "layers", (json_int_t)summary.layers,
                                        "experts_max", (json_int_t)summary.experts_max,
                                        "copies_min", (json_int_t)summary.copies_min, "copies_max",
                                        (json_int_t)summary.copies_max, "numerics", numerics));
    }
    return models;
}

static bool print_json(const char *url, const Expertd__V1__ClusterStatusReply *cluster,
                       const ep_routing_table *table, const ep_cli_problems *problems, FILE *out)
{
    return ep_cli_json_print(
        json_pack(
            "{s:b, s:o, s:o, s:o, s:o, s:o, s:I, s:{s:I, s:I}, s:o, s:I, s:I, s:I, s:I, s:o, s:o}",
            "healthy", problems->count == 0, "problems", ep_cli_problems_json(problems),
            "coordinator", ep_cli_json_text(url), "store", ep_cli_json_text(cluster->store),
            "store_error", ep_cli_json_text(cluster->store_error), "placement_error",
            ep_cli_json_text(cluster->placement_error), "min_nodes", (json_int_t)cluster->min_nodes,
            "epoch", "term", (json_int_t)(cluster->epoch != NULL ? cluster->epoch->term : 0),
            "number", (json_int_t)(cluster->epoch != NULL ? cluster->epoch->number : 0), "policy",
            ep_cli_json_text(cluster->policy), "copies", (json_int_t)cluster->copies,
            "copies_waiting", (json_int_t)cluster->copies_waiting, "watchers",
            (json_int_t)cluster->watchers, "uptime_us", (json_int_t)cluster->uptime_us, "nodes",
            nodes_json(cluster), "models", models_json(table)),
        out);
}

/* ---- tables ---- */

static bool print_nodes(const Expertd__V1__ClusterStatusReply *cluster, FILE *out)
{
    char seen[EP_CLI_BRIEF_BYTES];
    ep_cli_table *nodes = ep_cli_table_create(
        "NODE|STATE|3>ROWS SERVED|3>FAILED|4>WEIGHTS|5>SPEED|5>LAST SEEN|1HOST|2URL");
    for (size_t i = 0; i < cluster->n_nodes; i++) {
        const Expertd__V1__NodeEntry *node = cluster->nodes[i];
        ep_cli_table_cell(nodes, "%s", node->name);
        ep_cli_table_cell(nodes, "%s", node->state);
        ep_cli_table_count(nodes, node->rows_served);
        ep_cli_table_count(nodes, node->requests_failed);
        ep_cli_table_bytes(nodes, node->weight_bytes);
        ep_cli_table_cell(nodes, node->speed > 0 ? "%.2f" : "-", node->speed);
        ep_cli_table_cell(nodes, "%s",
                          ep_cli_duration_text((double)node->last_seen_ms / 1e3, seen));
        ep_cli_table_cell(nodes, "%.13s", node->host[0] != 0 ? node->host : "-");
        ep_cli_table_cell(nodes, "%s", node->url);
    }
    return ep_cli_table_print(nodes, out);
}

static bool print_models(const ep_routing_table *table, FILE *out)
{
    ep_cli_table *models =
        ep_cli_table_create("MODEL|VERSION|2>LAYERS|3>EXPERTS|>COPIES|1NUMERICS");
    for (uint32_t m = 0; m < table->models_count; m++) {
        const ep_routing_model *model = &table->models[m];
        model_summary summary = summarise(table, m);
        ep_cli_table_cell(models, "%s", model->name);
        ep_cli_table_cell(models, "%s%s", model->version, model->is_default ? " (default)" : "");
        ep_cli_table_cell(models, "%" PRIu32, summary.layers);
        ep_cli_table_cell(models, "%" PRIu32, summary.experts_max);
        if (summary.copies_min == summary.copies_max) {
            ep_cli_table_cell(models, "%" PRIu32, summary.copies_min);
        } else {
            ep_cli_table_cell(models, "%" PRIu32 "-%" PRIu32, summary.copies_min,
                              summary.copies_max);
        }
        ep_cli_table_cell(models, "%s%s", model->numerics_count > 0 ? model->numerics[0] : "-",
                          model->numerics_count > 1 ? ", ..." : "");
    }
    return ep_cli_table_print(models, out);
}

bool ep_cli_cluster_print(const char *url, const Expertd__V1__ClusterStatusReply *cluster,
                          const ep_routing_table *table, const ep_cli_problems *problems,
                          ep_cli_format format, FILE *out)
{
    if (format == EP_CLI_JSON) {
        return print_json(url, cluster, table, problems, out);
    }
    char uptime[EP_CLI_BRIEF_BYTES];
    ep_cli_line(out, "coordinator  %s", url);
    ep_cli_line(out, "epoch        %" PRIu64 "/%" PRIu64,
                cluster->epoch != NULL ? cluster->epoch->term : 0,
                cluster->epoch != NULL ? cluster->epoch->number : 0);
    ep_cli_line(out, "policy       %s, %" PRIu32 " copies", cluster->policy, cluster->copies);
    ep_cli_line(out, "state        %s", cluster->store);
    ep_cli_line(out, "watchers     %" PRIu64, cluster->watchers);
    ep_cli_line(out, "uptime       %s",
                ep_cli_duration_text((double)cluster->uptime_us / 1e6, uptime));
    fputc('\n', out);
    bool good = print_nodes(cluster, out);
    fputc('\n', out);
    if (table != NULL) {
        good = print_models(table, out) && good;
        fputc('\n', out);
    }
    ep_cli_problems_print(problems, out);
    return good && ferror(out) == 0;
}
