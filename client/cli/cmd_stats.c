/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl stats: how evenly each layer's load is spread over its experts. */
#include <inttypes.h>

#include "command_table.h"
#include "control.h"
#include "moe/routing_table.h"

static struct {
    const char *model;   /* NULL all */
    const char *version; /* NULL all */
    uint32_t layer;
    bool has_layer;
    bool experts;
} wanted;

static void check(struct argp_state *state)
{
    if (ep_cli_peer.coordinator_url == NULL && ep_cli_peer.node_urls_count > 0) {
        argp_error(state,
                   "--node is given, allowed: --coordinator, which adds up what the nodes count");
    }
}

static const ep_cli_option rows[] = {
    {"model", 0, "NAME", "Only this model", 1, .text = &wanted.model,
     .max = EP_MODEL_NAME_BYTES - 1},
    {"version", 0, "V", "Only this version", 1, .text = &wanted.version,
     .max = EP_VERSION_BYTES - 1},
    {"layer", 0, "L", "Only this layer", 1, .u32 = &wanted.layer, .max = UINT32_MAX,
     .given = &wanted.has_layer},
    {"experts", 0, NULL, "Also every expert: slots, share of slots, mean gate probability", 1,
     .flag = &wanted.experts},
};

/* ---- json ---- */

static json_t *expert_json(const Expertd__V1__LayerStatistics *layer, size_t e)
{
    json_t *expert = json_pack(
        "{s:I, s:I, s:f}", "expert", (json_int_t)e, "slots", (json_int_t)layer->counts[e], "share",
        layer->slots > 0 ? (double)layer->counts[e] / (double)layer->slots : 0.0);
    if (e < layer->n_mean_probability) {
        json_object_set_new(expert, "mean_probability", json_real(layer->mean_probability[e]));
    }
    return expert;
}

static json_t *layer_json(const Expertd__V1__LayerStatistics *layer)
{
    json_t *json = json_pack(
        "{s:o, s:o, s:I, s:I, s:I, s:f, s:I, s:f, s:I}", "model", ep_cli_json_text(layer->model),
        "version", ep_cli_json_text(layer->version), "layer", (json_int_t)layer->layer, "experts",
        (json_int_t)layer->experts, "slots", (json_int_t)layer->slots, "max_over_mean",
        layer->max_over_mean, "max_expert", (json_int_t)layer->max_expert, "gini", layer->gini,
        "logit_tokens", (json_int_t)layer->logit_tokens);
    if (layer->logit_tokens > 0) {
        json_object_set_new(json, "auxiliary_loss", json_real(layer->auxiliary_loss));
    }
    if (layer->busiest_over_mean > 0) {
        json_object_set_new(json, "node_busiest_over_mean", json_real(layer->busiest_over_mean));
        json_object_set_new(json, "node_busiest_over_bound", json_real(layer->busiest_over_bound));
    }
    if (layer->n_counts > 0) {
        json_t *experts = json_array();
        for (size_t e = 0; e < layer->n_counts; e++) {
            json_array_append_new(experts, expert_json(layer, e));
        }
        json_object_set_new(json, "load", experts);
    }
    return json;
}

static bool print_json(const Expertd__V1__StatisticsReply *reply)
{
    json_t *layers = json_array();
    for (size_t i = 0; i < reply->n_layers; i++) {
        json_array_append_new(layers, layer_json(reply->layers[i]));
    }
    return ep_cli_json_print(json_pack("{s:o}", "layers", layers), stdout);
}

/* ---- tables ---- */

static void layer_cells(ep_cli_table *table, const Expertd__V1__LayerStatistics *layer)
{
    ep_cli_table_cell(table, "%s", layer->model);
    ep_cli_table_cell(table, "%s", layer->version);
    ep_cli_table_cell(table, "%" PRIu32, layer->layer);
}

static void ratio_cell(ep_cli_table *table, bool is_known, double ratio)
{
    if (is_known) {
        ep_cli_table_cell(table, "%.3f", ratio);
    } else {
        ep_cli_table_cell(table, "-");
    }
}

static bool print_layers(const Expertd__V1__StatisticsReply *reply)
{
    ep_cli_table *table =
        ep_cli_table_create("MODEL|2VERSION|>LAYER|1>EXPERTS|>SLOTS|>MAX/"
                            "MEAN|4>FULLEST|>GINI|3>AUX LOSS|>NODE/MEAN|5>NODE/BOUND");
    for (size_t i = 0; i < reply->n_layers; i++) {
        const Expertd__V1__LayerStatistics *layer = reply->layers[i];
        layer_cells(table, layer);
        ep_cli_table_cell(table, "%" PRIu32, layer->experts);
        ep_cli_table_count(table, layer->slots);
        ep_cli_table_cell(table, "%.3f", layer->max_over_mean);
        ep_cli_table_cell(table, "%" PRIu32, layer->max_expert);
        ep_cli_table_cell(table, "%.3f", layer->gini);
        ratio_cell(table, layer->logit_tokens > 0, layer->auxiliary_loss);
        ratio_cell(table, layer->busiest_over_mean > 0, layer->busiest_over_mean);
        ratio_cell(table, layer->busiest_over_mean > 0, layer->busiest_over_bound);
    }
    return ep_cli_table_print(table, stdout);
}

static bool print_experts(const Expertd__V1__StatisticsReply *reply)
{
    ep_cli_table *table =
        ep_cli_table_create("1MODEL|1VERSION|>LAYER|>EXPERT|>SLOTS|>SHARE|2>MEAN P");
    for (size_t i = 0; i < reply->n_layers; i++) {
        const Expertd__V1__LayerStatistics *layer = reply->layers[i];
        for (size_t e = 0; e < layer->n_counts; e++) {
            layer_cells(table, layer);
            ep_cli_table_cell(table, "%zu", e);
            ep_cli_table_count(table, layer->counts[e]);
            ep_cli_table_cell(table, "%.4f",
                              layer->slots > 0 ? (double)layer->counts[e] / (double)layer->slots
                                               : 0.0);
            if (e < layer->n_mean_probability) {
                ep_cli_table_cell(table, "%.4f", layer->mean_probability[e]);
            } else {
                ep_cli_table_cell(table, "-");
            }
        }
    }
    return ep_cli_table_print(table, stdout);
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    Expertd__V1__StatisticsRequest request = EXPERTD__V1__STATISTICS_REQUEST__INIT;
    ep_cli_control *control = NULL;
    ProtobufCMessage *message = NULL;
    if (wanted.model != NULL) {
        request.model = (char *)(uintptr_t)wanted.model;
    }
    if (wanted.version != NULL) {
        request.version = (char *)(uintptr_t)wanted.version;
    }
    request.has_layer = wanted.has_layer;
    request.layer = wanted.layer;
    request.per_expert = wanted.experts;
    ep_err err = ep_cli_control_open(&ep_cli_peer, &control, out_error);
    err = err != EP_OK ? err
                       : ep_cli_control_ask_one(control, ep_cli_peer.coordinator_url,
                                                "expertd.v1.Coordinator", "Statistics",
                                                &request.base, &message, out_error);
    ep_cli_control_close(control);
    if (err != EP_OK) {
        return err;
    }
    const Expertd__V1__StatisticsReply *reply =
        (const Expertd__V1__StatisticsReply *)(const void *)message;
    bool good = ep_cli_output_format == EP_CLI_JSON ? print_json(reply) : print_layers(reply);
    if (ep_cli_output_format == EP_CLI_TABLE && wanted.experts && good) {
        fputc('\n', stdout);
        good = print_experts(reply);
    }
    call->failed = !good;
    protobuf_c_message_free_unpacked(message, NULL);
    return EP_OK;
}

const ep_cli_command ep_cli_stats = {
    .name = "stats",
    .help = "how evenly each layer's load falls on its experts",
    .doc = "Prints how evenly slots fall on the routed experts of each layer: slots computed since "
           "the coordinator started, the fullest expert's load over the mean, the Gini coefficient "
           "(0 even), and, where the gateway saw logits, the load-balancing loss (1 even); and how "
           "evenly they fall on the nodes: the load of late of the busiest node over the mean, and "
           "over the least that any placement of as many copies could give it. Nodes report once a "
           "second; balance is told once a layer has 32 slots an expert and 1,024 a node."
           "\vExamples:\n"
           "  expertctl stats\n"
           "  expertctl stats --model mixtral --layer 3 --experts -o json\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .check = check},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options},
    .run = run,
};
