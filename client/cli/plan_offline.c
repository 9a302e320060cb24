/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_offline.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/model_config.h"
#include "model/model_files.h"
#include "placement/placement.h"
#include "plan_load.h"
#include "plan_machine.h"

#define DTYPE_ASSUMED EP_DTYPE_BF16

/* Defaults: a server without a device. */
static const ep_plan_machine machine_assumed = {.memory_bytes_per_s = (double)(UINT64_C(200) << 30),
                                                .compute_per_s = 4e12,
                                                .link_bytes_per_s = (double)(UINT64_C(12) << 30),
                                                .round_trip_s = 50e-6};

/* The result of a placement policy, per layer and in total. */
typedef struct policy_result {
    ep_placement **placements; /* [placed_count] one for all layers, or one per layer */
    uint32_t placed_count;
    bool is_cut;
    ep_layer_balance *balances;   /* [layers] */
    ep_plan_cost *costs;          /* [layers] */
    double *node_bytes;           /* [nodes] of weights */
    double over_mean, over_bound; /* the worst layer's */
    double bytes_max, bytes_min;  /* of a node */
    ep_plan_cost sum; /* total of all layers; nodes_per_token and read_bytes: average per layer */
} policy_result;

typedef struct plan {
    const ep_cli_plan_offline *options;
    ep_model_config config;
    ep_dtype dtype; /* of x and y */
    double weight_bits;
    ep_plan_machine machine;
    ep_plan_load load;
    ep_placement_node *nodes;   /* [options->nodes] */
    char (*hosts)[16];          /* [options->nodes] names */
    ep_placement_layer *layers; /* [moe layers] */
    policy_result uniform, balanced;
} plan;

static ep_err no_memory(ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the plan");
}

/* ---- the model ---- */

static ep_err read_config(const char *path, ep_model_config *out_config, ep_error *out_error)
{
    char *text = NULL;
    size_t count;
    ep_err err = ep_model_file_read_path(path, EP_MODEL_CONFIG_BYTES_MAX, &text, &count, out_error);
    err = err != EP_OK ? err : ep_model_config_parse(path, text, count, out_config, out_error);
    free(text);
    return err;
}

static ep_err check_layer(const ep_cli_plan_offline *options, const ep_layer_shape *layer,
                          ep_error *out_error)
{
    const uint64_t room =
        (uint64_t)(layer->experts + layer->shared_experts) * (options->nodes - options->copies);
    if (layer->top_k < 1 || layer->top_k > layer->experts) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: layer %" PRIu32 ": %" PRIu32
                            " experts a token, allowed 1..%" PRIu32,
                            options->config_file, layer->layer, layer->top_k, layer->experts);
    }
    if (options->spare_copies > room) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "--spare-copies is %" PRIu32 ", allowed: 0..%" PRIu64 ": layer %" PRIu32
                            " of %s has %" PRIu32 " experts, and a node takes one copy of each",
                            options->spare_copies, room, layer->layer, options->config_file,
                            layer->experts + layer->shared_experts);
    }
    return EP_OK;
}

static ep_err check_layers(const ep_cli_plan_offline *options, const ep_model_info *info,
                           ep_error *out_error)
{
    ep_err err = EP_OK;
    if (info->moe_layers_count == 0) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: the model has no MoE layers, so nothing is placed",
                            options->config_file);
    }
    for (uint32_t l = 0; err == EP_OK && l < info->moe_layers_count; l++) {
        err = check_layer(options, &info->moe_layers[l], out_error);
    }
    return err;
}

static ep_err read_model(plan *p, ep_error *out_error)
{
    const char *path = p->options->config_file;
    ep_err err = read_config(path, &p->config, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (p->config.is_quantised && p->options->weight_bits == 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%s: its weights are quantised, and their tensors say how: give the "
                            "bits of a weight with --weight-bits",
                            path);
    }
    p->dtype = p->config.info.dtype != EP_DTYPE_NONE ? p->config.info.dtype : DTYPE_ASSUMED;
    p->weight_bits = p->options->weight_bits != 0 ? p->options->weight_bits
                                                  : 8.0 * (double)ep_dtype_bytes(p->dtype);
    const bool callers =
        p->config.type != NULL && (p->config.type->marks & EP_TYPE_SHARED_CALLERS) != 0;
    for (uint32_t l = 0; callers && l < p->config.info.moe_layers_count; l++) {
        p->config.info.moe_layers[l].shared_experts = 0; /* the caller computes it */
    }
    return check_layers(p->options, &p->config.info, out_error);
}

static ep_err read_machine(plan *p, ep_error *out_error)
{
    const ep_plan_machine *given = &p->options->machine;
    ep_plan_machine m = machine_assumed;
    ep_err err = p->options->measured_file != NULL
                     ? ep_plan_machine_read(p->options->measured_file, &m, out_error)
                     : EP_OK;
    m.memory_bytes_per_s =
        given->memory_bytes_per_s > 0 ? given->memory_bytes_per_s : m.memory_bytes_per_s;
    m.compute_per_s = given->compute_per_s > 0 ? given->compute_per_s : m.compute_per_s;
    m.link_bytes_per_s = given->link_bytes_per_s > 0 ? given->link_bytes_per_s : m.link_bytes_per_s;
    m.round_trip_s = given->round_trip_s > 0 ? given->round_trip_s : m.round_trip_s;
    m.nodes_per_host = given->nodes_per_host > 0 ? given->nodes_per_host : 1;
    m.nodes_at_once = given->nodes_at_once > 0 ? given->nodes_at_once : m.nodes_per_host;
    p->machine = m;
    return err;
}

static double expert_weights(const plan *p, uint32_t layer, uint32_t inner)
{
    const ep_layer_shape *shape = &p->config.info.moe_layers[layer];
    const double matrices = ep_activation_has_gate(shape->activation) ? 3 : 2;
    return matrices * shape->hidden * inner;
}

static double expert_bytes(const plan *p, uint32_t layer, uint32_t inner)
{
    return expert_weights(p, layer, inner) * p->weight_bits / 8;
}

/* ---- placing ---- */

static ep_err init_problem(plan *p, ep_error *out_error)
{
    const ep_model_info *info = &p->config.info;
    p->nodes = calloc(p->options->nodes, sizeof(*p->nodes));
    p->hosts = calloc(p->options->nodes, sizeof(*p->hosts));
    p->layers = calloc(info->moe_layers_count, sizeof(*p->layers));
    if (p->nodes == NULL || p->hosts == NULL || p->layers == NULL) {
        return no_memory(out_error);
    }
    for (uint32_t n = 0; n < p->options->nodes; n++) {
        snprintf(p->hosts[n], sizeof(p->hosts[n]), "%" PRIu32, n / p->machine.nodes_per_host);
        p->nodes[n] =
            (ep_placement_node){.node_id = n, .name = "a planned node", .host = p->hosts[n]};
    }
    for (uint32_t l = 0; l < info->moe_layers_count; l++) {
        p->layers[l] =
            (ep_placement_layer){.shape = info->moe_layers[l], .heat = p->load.shares[l]};
    }
    return EP_OK;
}

static ep_placement_input input_of(const plan *p, uint32_t first, uint32_t count,
                                   uint32_t spare_copies)
{
    return (ep_placement_input){.nodes_count = p->options->nodes,
                                .nodes = p->nodes,
                                .layers_count = count,
                                .layers = p->layers + first,
                                .copies = p->options->copies,
                                .spare_copies = spare_copies,
                                .moves_max = UINT32_MAX};
}

static const ep_placed_layer *placed_layer(const policy_result *of, uint32_t layer)
{
    return of->placed_count <= 1 ? &of->placements[0]->layers[layer]
                                 : &of->placements[layer]->layers[0];
}

/* More than the coordinator balances, so each layer is placed on its own. */
static bool is_beyond(const plan *p)
{
    uint64_t cells = 0;
    for (uint32_t l = 0; l < p->config.info.moe_layers_count; l++) {
        const ep_layer_shape *shape = &p->layers[l].shape;
        cells += (uint64_t)(shape->experts + shape->shared_experts) * p->options->nodes;
    }
    return cells > EP_PLACEMENT_CELLS_MAX;
}

static ep_err place(const plan *p, bool by_load, policy_result *of, ep_error *out_error)
{
    const uint32_t layers = p->config.info.moe_layers_count,
                   wanted = by_load && is_beyond(p) ? layers : 1;
    of->placements = calloc(wanted, sizeof(ep_placement *));
    ep_err err = of->placements != NULL ? EP_OK : no_memory(out_error);
    while (err == EP_OK && of->placed_count < wanted) {
        ep_placement **out = &of->placements[of->placed_count];
        const ep_placement_input input =
            input_of(p, of->placed_count, layers / wanted, by_load ? p->options->spare_copies : 0);
        err = by_load ? ep_placement_balanced(&input, out, out_error)
                      : ep_placement_uniform(&input, out, out_error);
        of->is_cut |= err == EP_OK && (*out)->is_cut;
        of->placed_count += err == EP_OK;
    }
    return err;
}

static ep_err cost_layer(const plan *p, uint32_t layer, uint32_t spare_copies, policy_result *of)
{
    const ep_placed_layer *placed = placed_layer(of, layer);
    const ep_layer_shape *shape = &p->layers[layer].shape;
    const ep_placement_input input = input_of(p, layer, 1, spare_copies);
    const ep_plan_layer in = {
        .nodes = p->options->nodes,
        .experts = shape->experts,
        .has_shared = shape->shared_experts > 0,
        .top_k = shape->top_k,
        .shares = p->load.shares[layer],
        .offsets = placed->offsets,
        .copies = placed->copies,
        .expert_weights = expert_weights(p, layer, shape->inner),
        .shared_weights = expert_weights(p, layer, p->config.info.shared_inner[layer]),
        .weight_bytes = p->weight_bits / 8,
        .row_bytes = (double)shape->hidden * (double)ep_dtype_bytes(p->dtype)};
    for (uint32_t e = 0; e < placed->experts; e++) {
        for (uint32_t c = placed->offsets[e]; c < placed->offsets[e + 1]; c++) {
            of->node_bytes[placed->copies[c]] +=
                (e < in.experts ? in.expert_weights : in.shared_weights) * in.weight_bytes;
        }
    }
    ep_err err =
        ep_placement_judge(&input, 0, placed->offsets, placed->copies, &of->balances[layer]);
    return err != EP_OK
               ? err
               : ep_plan_cost_of(&in, &p->machine, (double)p->options->tokens, &of->costs[layer]);
}

static ep_err judge(const plan *p, bool by_load, policy_result *of, ep_error *out_error)
{
    const uint32_t layers = p->config.info.moe_layers_count;
    of->balances = calloc(layers, sizeof(*of->balances));
    of->costs = calloc(layers, sizeof(*of->costs));
    of->node_bytes = calloc(p->options->nodes, sizeof(double));
    if (of->balances == NULL || of->costs == NULL || of->node_bytes == NULL) {
        return no_memory(out_error);
    }
    for (uint32_t l = 0; l < layers; l++) {
        if (cost_layer(p, l, by_load ? p->options->spare_copies : 0, of) != EP_OK) {
            return no_memory(out_error);
        }
        of->over_mean = fmax(of->over_mean, of->balances[l].busiest / of->balances[l].mean);
        of->over_bound = fmax(of->over_bound, of->balances[l].busiest / of->balances[l].bound);
        of->sum.nodes_per_token += of->costs[l].nodes_per_token / layers;
        of->sum.read_bytes += of->costs[l].read_bytes / layers;
        of->sum.dispatch_bytes += of->costs[l].dispatch_bytes;
        of->sum.combine_bytes += of->costs[l].combine_bytes;
        of->sum.time_s += of->costs[l].time_s;
    }
    of->bytes_min = of->node_bytes[0];
    for (uint32_t n = 0; n < p->options->nodes; n++) {
        of->bytes_max = fmax(of->bytes_max, of->node_bytes[n]);
        of->bytes_min = fmin(of->bytes_min, of->node_bytes[n]);
    }
    return EP_OK;
}

static void result_fini(policy_result *of)
{
    for (uint32_t i = 0; i < of->placed_count; i++) {
        ep_placement_destroy(of->placements[i]);
    }
    free(of->placements);
    free(of->balances);
    free(of->costs);
    free(of->node_bytes);
}

/* ---- json ---- */

static json_t *result_json(const policy_result *of)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "worst_busiest_over_mean",
                     of->over_mean, "worst_busiest_over_bound", of->over_bound, "node_bytes_max",
                     of->bytes_max, "node_bytes_min", of->bytes_min, "nodes_per_token",
                     of->sum.nodes_per_token, "dispatch_bytes_per_token", of->sum.dispatch_bytes,
                     "combine_bytes_per_token", of->sum.combine_bytes, "read_bytes_per_layer",
                     of->sum.read_bytes, "step_seconds", of->sum.time_s);
}

static json_t *layer_result_json(const policy_result *of, uint32_t layer)
{
    const ep_layer_balance *balance = &of->balances[layer];
    const ep_plan_cost *cost = &of->costs[layer];
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "busiest_over_mean",
                     balance->busiest / balance->mean, "busiest_over_bound",
                     balance->busiest / balance->bound, "nodes_per_token", cost->nodes_per_token,
                     "dispatch_bytes_per_token", cost->dispatch_bytes, "combine_bytes_per_token",
                     cost->combine_bytes, "read_bytes", cost->read_bytes, "seconds", cost->time_s);
}

static json_t *assumptions_json(const plan *p)
{
    const ep_cli_plan_offline *options = p->options;
    json_t *json = ep_plan_machine_json(&p->machine);
    json_object_set_new(json, "tokens_per_step", json_integer((json_int_t)options->tokens));
    json_object_set_new(json, "nodes_per_host", json_integer(p->machine.nodes_per_host));
    json_object_set_new(json, "nodes_at_once", json_integer(p->machine.nodes_at_once));
    json_object_set_new(json, "weight_bits", json_real(p->weight_bits));
    json_object_set_new(json, "dtype", json_string(ep_dtype_name(p->dtype)));
    if (options->trace_file == NULL) {
        json_object_set_new(json, "zipf", json_real(options->zipf));
        json_object_set_new(json, "seed", json_integer((json_int_t)options->seed));
    }
    return json;
}

static bool print_json(const plan *p)
{
    const ep_model_info *info = &p->config.info;
    json_t *layers = json_array();
    for (uint32_t l = 0; l < info->moe_layers_count; l++) {
        const ep_layer_shape *shape = &info->moe_layers[l];
        json_array_append_new(layers, json_pack("{s:I, s:I, s:I, s:I, s:f, s:o, s:o}", "layer",
                                                (json_int_t)shape->layer, "experts",
                                                (json_int_t)shape->experts, "shared_experts",
                                                (json_int_t)shape->shared_experts, "top_k",
                                                (json_int_t)shape->top_k, "expert_bytes",
                                                expert_bytes(p, l, shape->inner), "uniform",
                                                layer_result_json(&p->uniform, l), "balanced",
                                                layer_result_json(&p->balanced, l)));
    }
    return ep_cli_json_print(
        json_pack("{s:o, s:I, s:I, s:I, s:b, s:b, s:o*, s:o, s:o, s:o, s:o}", "model_type",
                  ep_cli_json_text(info->model_type), "nodes", (json_int_t)p->options->nodes,
                  "copies", (json_int_t)p->options->copies, "spare_copies",
                  (json_int_t)p->options->spare_copies, "layers_on_their_own", (int)is_beyond(p),
                  "is_cut", (int)p->balanced.is_cut, "trace",
                  p->options->trace_file != NULL ? ep_cli_json_text(p->options->trace_file) : NULL,
                  "assumptions", assumptions_json(p), "uniform", result_json(&p->uniform),
                  "balanced", result_json(&p->balanced), "layers", layers),
        stdout);
}

/* ---- tables ---- */

static void print_head(const plan *p)
{
    const ep_cli_plan_offline *options = p->options;
    const ep_model_info *info = &p->config.info;
    const ep_layer_shape *first = &info->moe_layers[0];
    char size[EP_CLI_BRIEF_BYTES], memory[EP_CLI_BRIEF_BYTES], link[EP_CLI_BRIEF_BYTES];
    ep_cli_line(stdout,
                "%s: %u MoE layers of %u experts, %u a token, %s each at %g bits a weight; on %u "
                "nodes, copies %u, spare copies %u a layer",
                info->model_type, info->moe_layers_count, first->experts, first->top_k,
                ep_cli_bytes_text((uint64_t)expert_bytes(p, 0, first->inner), size), p->weight_bits,
                options->nodes, options->copies, options->spare_copies);
    if (is_beyond(p)) {
        ep_cli_line(stdout,
                    "a coordinator spreads evenly beyond %" PRIu64
                    " experts times nodes: balanced is what it would be with each layer on its own",
                    EP_PLACEMENT_CELLS_MAX);
    }
    if (p->balanced.is_cut) {
        ep_cli_line(
            stdout,
            "the solver's limit of work ended its search: balanced may get better than this");
    }
    if (options->trace_file != NULL) {
        ep_cli_line(stdout, "load: %s", options->trace_file);
    } else {
        ep_cli_line(stdout, "load: assumed, drawn by zipf %g with seed %" PRIu64, options->zipf,
                    options->seed);
    }
    ep_cli_line(stdout,
                "%s: %" PRIu64 " tokens a step, rows of %s; a host of %u nodes, %u at once: memory "
                "%s/s, computing %.3g T/s, link %s/s, round trip %.3gus",
                options->measured_file != NULL ? options->measured_file : "assumed",
                options->tokens, ep_dtype_name(p->dtype), p->machine.nodes_per_host,
                p->machine.nodes_at_once,
                ep_cli_bytes_text((uint64_t)p->machine.memory_bytes_per_s, memory),
                p->machine.compute_per_s / 1e12,
                ep_cli_bytes_text((uint64_t)p->machine.link_bytes_per_s, link),
                p->machine.round_trip_s * 1e6);
}

static void ratio_row(ep_cli_table *table, const char *what, double uniform, double balanced)
{
    ep_cli_table_cell(table, "%s", what);
    ep_cli_table_cell(table, "%.3f", uniform);
    ep_cli_table_cell(table, "%.3f", balanced);
}

static void bytes_row(ep_cli_table *table, const char *what, double uniform, double balanced)
{
    ep_cli_table_cell(table, "%s", what);
    ep_cli_table_bytes(table, (uint64_t)(uniform + 0.5));
    ep_cli_table_bytes(table, (uint64_t)(balanced + 0.5));
}

static bool print_sums(const policy_result *a, const policy_result *b)
{
    ep_cli_table *table = ep_cli_table_create("ALL LAYERS|>UNIFORM|>BALANCED");
    ratio_row(table, "busiest node over the mean, worst layer", a->over_mean, b->over_mean);
    ratio_row(table, "busiest node over the bound, worst layer", a->over_bound, b->over_bound);
    bytes_row(table, "weights on the fullest node", a->bytes_max, b->bytes_max);
    bytes_row(table, "weights on the emptiest node", a->bytes_min, b->bytes_min);
    ratio_row(table, "nodes a token goes to, mean", a->sum.nodes_per_token, b->sum.nodes_per_token);
    bytes_row(table, "dispatch of a token", a->sum.dispatch_bytes, b->sum.dispatch_bytes);
    bytes_row(table, "combine of a token", a->sum.combine_bytes, b->sum.combine_bytes);
    bytes_row(table, "weights read in a layer, by the node that reads most", a->sum.read_bytes,
              b->sum.read_bytes);
    ratio_row(table, "milliseconds of a step", a->sum.time_s * 1e3, b->sum.time_s * 1e3);
    return ep_cli_table_print(table, stdout);
}

static void layer_cells(ep_cli_table *table, const policy_result *of, uint32_t layer)
{
    const ep_layer_balance *balance = &of->balances[layer];
    ep_cli_table_cell(table, "%.3f", balance->busiest / balance->mean);
    ep_cli_table_cell(table, "%.3f", balance->busiest / balance->bound);
    ep_cli_table_cell(table, "%.2f", of->costs[layer].nodes_per_token);
    ep_cli_table_cell(table, "%.1f", of->costs[layer].time_s * 1e6);
}

/* Prints policies in rows, since in columns they would not fit. */
static bool print_layers(const plan *p)
{
    ep_cli_table *table = ep_cli_table_create(">LAYER|POLICY|>/MEAN|>/BOUND|>NODES/TOKEN|>US");
    for (uint32_t l = 0; l < p->config.info.moe_layers_count; l++) {
        for (int is_balanced = 0; is_balanced < 2; is_balanced++) {
            ep_cli_table_cell(table, "%" PRIu32, p->config.info.moe_layers[l].layer);
            ep_cli_table_cell(table, "%s", is_balanced ? "balanced" : "uniform");
            layer_cells(table, is_balanced ? &p->balanced : &p->uniform, l);
        }
    }
    return ep_cli_table_print(table, stdout);
}

static bool print_tables(const plan *p)
{
    print_head(p);
    ep_cli_line(stdout, "%s", "");
    bool good = print_sums(&p->uniform, &p->balanced);
    ep_cli_line(stdout, "%s", "");
    return print_layers(p) && good;
}

/* ---- */

static ep_err write_map(const plan *p, ep_error *out_error)
{
    ep_expert_map *map = NULL;
    ep_err err = ep_expert_map_create(p->config.info.moe_layers_count, &map, out_error);
    for (uint32_t l = 0; err == EP_OK && l < p->config.info.moe_layers_count; l++) {
        const ep_placed_layer *placed = placed_layer(&p->balanced, l);
        err = ep_expert_map_set_layer(map, l, p->layers[l].shape.experts, placed->offsets,
                                      placed->copies, p->options->nodes, out_error);
    }
    err = err != EP_OK ? err : ep_expert_map_write_file(map, p->options->map_file, out_error);
    ep_expert_map_destroy(map);
    return err;
}

static ep_err make(plan *p, ep_error *out_error)
{
    const ep_cli_plan_offline *options = p->options;
    ep_err err = read_model(p, out_error);
    err = err != EP_OK ? err : read_machine(p, out_error);
    if (err != EP_OK) {
        return err;
    }
    const ep_layer_shape *layers = p->config.info.moe_layers;
    const uint32_t count = p->config.info.moe_layers_count;
    err = options->trace_file != NULL
              ? ep_plan_load_read(options->trace_file, layers, count, &p->load, out_error)
              : ep_plan_load_draw(options->zipf, options->seed, layers, count, &p->load, out_error);
    err = err != EP_OK ? err : init_problem(p, out_error);
    err = err != EP_OK ? err : place(p, false, &p->uniform, out_error);
    err = err != EP_OK ? err : place(p, true, &p->balanced, out_error);
    err = err != EP_OK ? err : judge(p, false, &p->uniform, out_error);
    return err != EP_OK ? err : judge(p, true, &p->balanced, out_error);
}

ep_err ep_cli_plan_offline_run(ep_cli_call *call, const ep_cli_plan_offline *options,
                               ep_error *out_error)
{
    plan p = {.options = options};
    ep_err err = make(&p, out_error);
    if (err == EP_OK) {
        call->failed = !(ep_cli_output_format == EP_CLI_JSON ? print_json(&p) : print_tables(&p));
        err = options->map_file != NULL ? write_map(&p, out_error) : EP_OK;
    }
    result_fini(&p.uniform);
    result_fini(&p.balanced);
    ep_plan_load_fini(&p.load);
    ep_model_config_fini(&p.config);
    free(p.nodes);
    free(p.hosts);
    free(p.layers);
    return err;
}
