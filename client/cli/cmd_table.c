/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl table: which node holds which expert. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "command_table.h"
#include "placement.h"

static struct {
    const char *model;   /* NULL all */
    const char *version; /* NULL all */
    uint32_t layer;
    bool has_layer; /* else all */
} wanted;

static const ep_cli_option rows[] = {
    {"model", 'm', "NAME", "Only this model (all its versions)", 1, .text = &wanted.model,
     .max = EP_MODEL_NAME_BYTES - 1},
    {"version", 0, "V", "Only this version", 1, .text = &wanted.version,
     .max = EP_VERSION_BYTES - 1},
    {"layer", 'l', "L", "Only this layer", 1, .u32 = &wanted.layer, .max = UINT32_MAX,
     .given = &wanted.has_layer},
};

static bool is_chosen(const ep_routing_table *table, const ep_routing_layer *layer)
{
    const ep_routing_model *model = &table->models[layer->model_index];
    return (wanted.model == NULL || strcmp(wanted.model, model->name) == 0) &&
           (wanted.version == NULL || strcmp(wanted.version, model->version) == 0) &&
           (!wanted.has_layer || wanted.layer == layer->shape.layer);
}

/* ---- JSON ---- */

static json_t *placement_json(const ep_routing_table *table, const ep_routing_layer *layer)
{
    json_t *experts = json_array();
    for (uint32_t e = 0; e < layer->shape.experts + layer->shape.shared_experts; e++) {
        json_t *nodes = json_array();
        for (uint32_t c = layer->offsets[e]; c < layer->offsets[e + 1]; c++) {
            json_array_append_new(nodes, ep_cli_json_text(table->nodes[layer->copies[c]].name));
        }
        json_array_append_new(experts, nodes);
    }
    return experts;
}

static json_t *layer_json(const ep_routing_table *table, const ep_routing_layer *layer)
{
    const ep_routing_model *model = &table->models[layer->model_index];
    const ep_layer_shape *shape = &layer->shape;
    uint32_t copies_min;
    uint32_t copies_max;
    ep_cli_placement_copies(layer, &copies_min, &copies_max);
    return json_pack("{s:o, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "model",
                     ep_cli_json_text(model->name), "version", ep_cli_json_text(model->version),
                     "layer", (json_int_t)shape->layer, "hidden", (json_int_t)shape->hidden,
                     "inner", (json_int_t)shape->inner, "experts", (json_int_t)shape->experts,
                     "shared_experts", (json_int_t)shape->shared_experts, "top_k",
                     (json_int_t)shape->top_k, "copies_min", (json_int_t)copies_min, "copies_max",
                     (json_int_t)copies_max, "nodes_of_expert", placement_json(table, layer));
}

static bool print_json(const ep_routing_table *table)
{
    json_t *nodes = json_array();
    json_t *layers = json_array();
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        json_array_append_new(nodes, json_pack("{s:I, s:o, s:o, s:o}", "id",
                                               (json_int_t)table->nodes[n].node_id, "name",
                                               ep_cli_json_text(table->nodes[n].name), "url",
                                               ep_cli_json_text(table->nodes[n].url), "host",
                                               ep_cli_json_text(table->nodes[n].host)));
    }
    for (uint32_t l = 0; l < table->layers_count; l++) {
        if (is_chosen(table, &table->layers[l])) {
            json_array_append_new(layers, layer_json(table, &table->layers[l]));
        }
    }
    return ep_cli_json_print(
        json_pack("{s:{s:I, s:I}, s:o, s:o, s:o}", "epoch", "term", (json_int_t)table->epoch.term,
                  "number", (json_int_t)table->epoch.number, "policy",
                  ep_cli_json_text(table->policy), "nodes", nodes, "layers", layers),
        stdout);
}

/* ---- table ---- */

static void node_names(const ep_routing_table *table, const ep_routing_layer *layer,
                       uint32_t expert, char *out_text, size_t bytes)
{
    size_t used = 0;
    snprintf(out_text, bytes, "none");
    for (uint32_t c = layer->offsets[expert]; c < layer->offsets[expert + 1] && used < bytes; c++) {
        used += (size_t)snprintf(out_text + used, bytes - used, "%s%s", used > 0 ? " " : "",
                                 table->nodes[layer->copies[c]].name);
    }
}

static bool print_table(const ep_routing_table *table)
{
    char names[EP_CLI_CELL_BYTES_MAX];
    ep_cli_table *out = ep_cli_table_create("2MODEL|1VERSION|>LAYER|>EXPERT|NODES");
    ep_cli_line(stdout, "epoch %" PRIu64 "/%" PRIu64 ", %s placement, %" PRIu32 " nodes",
                table->epoch.term, table->epoch.number,
                table->policy[0] != '\0' ? table->policy : "own", table->nodes_count);
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        for (uint32_t e = 0;
             is_chosen(table, layer) && e < layer->shape.experts + layer->shape.shared_experts;
             e++) {
            bool shared = e >= layer->shape.experts;
            node_names(table, layer, e, names, sizeof(names));
            ep_cli_table_cell(out, "%s", table->models[layer->model_index].name);
            ep_cli_table_cell(out, "%s", table->models[layer->model_index].version);
            ep_cli_table_cell(out, "%" PRIu32, layer->shape.layer);
            ep_cli_table_cell(out, "%s%" PRIu32, shared ? "shared " : "",
                              shared ? e - layer->shape.experts : e);
            ep_cli_table_cell(out, "%s", names);
        }
    }
    return ep_cli_table_print(out, stdout);
}

/* The error if the named model, version or layer does not exist. */
static ep_err check_filter(const ep_routing_table *table, ep_error *out_error)
{
    for (uint32_t l = 0; l < table->layers_count; l++) {
        if (is_chosen(table, &table->layers[l])) {
            return EP_OK;
        }
    }
    bool is_all = wanted.model == NULL && wanted.version == NULL && !wanted.has_layer;
    return is_all
               ? EP_OK
               : ep_cli_placement_missing(table, wanted.model, wanted.version,
                                          wanted.has_layer ? (int64_t)wanted.layer : -1, out_error);
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_routing_table *table = NULL;
    ep_err err = ep_cli_placement_read(NULL, &ep_cli_peer, &table, out_error);
    err = err != EP_OK ? err : check_filter(table, out_error);
    if (err == EP_OK) {
        call->failed =
            !(ep_cli_output_format == EP_CLI_JSON ? print_json(table) : print_table(table));
    }
    ep_routing_table_unref(table);
    return err;
}

const ep_cli_command ep_cli_table_command = {
    .name = "table",
    .help = "the placement: expert -> nodes, per model and layer",
    .doc = "Prints the routing table: for each model and layer, expert -> nodes that hold a copy."
           "\vWith --node the table is made of what the given nodes say they own. Experts after "
           "the routed ones are shared experts.\n\n"
           "Examples:\n"
           "  expertctl table\n"
           "  expertctl table --model demo --layer 3\n"
           "  expertctl table -o json --node tcp://127.0.0.1:7420\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options},
    .run = run,
};
