/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl plan: shows what the placement solver would do. */
#include <inttypes.h>
#include <string.h>

#include "command_table.h"
#include "connect.h"
#include "control.h"
#include "moe/routing_table.h"
#include "placement/expert_map.h"
#include "plan_offline.h"

#define PATH_BYTES_MAX 4000
#define ZIPF_MAX 8
#define TOKENS 256

static struct {
    bool apply;
    bool has_zipf, has_seed;
    uint64_t memory_bandwidth, link_bandwidth, round_trip_us; /* of offline.machine; 0 not given */
    ep_cli_plan_offline offline;
} wanted = {.offline = {.seed = 1, .copies = 1, .tokens = TOKENS}};

static void check(struct argp_state *state)
{
    const ep_cli_plan_offline *offline = &wanted.offline;
    if (offline->config_file == NULL) {
        if (ep_cli_peer.asks_nobody != NULL) {
            argp_error(
                state,
                "--%s is given without --model, which plans for machines that do not exist yet",
                ep_cli_peer.asks_nobody);
        }
        return;
    }
    if (wanted.apply) {
        argp_error(state, "--apply and --model are both given, allowed: one of them; a plan from a "
                          "file runs nowhere");
    }
    ep_cli_reach_refuse(state, "model", "a plan from a file asks nobody");
    ep_cli_arg_required(state, "--nodes", offline->nodes != 0 ? offline : NULL);
    if (offline->copies > offline->nodes) {
        argp_error(state, "--copies is '%u', allowed: 1..%u, one on each of --nodes",
                   offline->copies, offline->nodes);
    }
    const uint32_t per_host =
        offline->machine.nodes_per_host > 0 ? offline->machine.nodes_per_host : 1;
    if (offline->machine.nodes_at_once > per_host) {
        argp_error(state, "--nodes-at-once is '%u', allowed: 1..%u, those of --nodes-per-host",
                   offline->machine.nodes_at_once, per_host);
    }
    if (wanted.has_zipf == (offline->trace_file != NULL)) {
        argp_error(state, wanted.has_zipf
                              ? "--trace and --zipf are both given, allowed: one of them"
                              : "--trace and --zipf are both missing; one of them is required");
    }
    if (offline->trace_file != NULL && wanted.has_seed) {
        argp_error(state, "--seed is given with --trace, of which nothing is drawn");
    }
}

static const ep_cli_option rows[] = {
    {"apply", 0, NULL, "Do it: nodes load their new copies, then the table changes; no call fails",
     1, .flag = &wanted.apply},
    {"write-map", 0, "FILE", "Also write what is planned as an expert map, for placement: static",
     1, .text = &wanted.offline.map_file, .max = PATH_BYTES_MAX},
};

static const ep_cli_option offline_rows[] = {
    {.help = "For machines that do not exist yet:", .group = 2},
    {"model", 0, "FILE",
     "The model's config.json, as of Hugging Face; no coordinator is asked then", 2,
     .text = &wanted.offline.config_file, .max = PATH_BYTES_MAX},
    {"nodes", 0, "N", "Nodes", 2, .u32 = &wanted.offline.nodes, .min = 1, .max = EP_NODES_MAX},
    {"trace", 0, "FILE", "Load as expertctl stats --experts -o json wrote it, of this model", 2,
     .text = &wanted.offline.trace_file, .max = PATH_BYTES_MAX},
    {"zipf", 0, "S",
     "Load drawn instead: the r-th expert of a layer gets r^-S, up to one slot of each token; "
     "which one is the r-th is drawn for each layer",
     2, .f64 = &wanted.offline.zipf, .most = ZIPF_MAX, .given = &wanted.has_zipf},
    {"seed", 0, "N", "What --zipf draws with (default: 1)", 2, .u64 = &wanted.offline.seed,
     .max = INT64_MAX, .given = &wanted.has_seed},
    {"copies", 0, "N", "Copies of each expert (default: 1)", 2, .u32 = &wanted.offline.copies,
     .min = 1, .max = 64},
    {"spare-copies", 0, "N",
     "Copies of each layer beyond these, for its hottest experts (default: 0)", 2,
     .u32 = &wanted.offline.spare_copies, .min = 0, .max = EP_EXPERTS_MAX},
    {"tokens", 0, "T", "Tokens that all callers together bring to a layer at a time (default: 256)",
     2, .u64 = &wanted.offline.tokens, .min = 1, .max = UINT32_MAX},
    {"weight-bits", 0, "N",
     "Bits of an expert's weight, with its part of the scales: mxfp4 has 4.25 (default: of the "
     "config's dtype, bf16 where it names none; quantised weights need it)",
     2, .f64 = &wanted.offline.weight_bits, .least = 1, .most = 64},
    {.help = "Of each host:", .group = 3},
    {"measured", 0, "FILE", "What expertctl tune -o json wrote; the next four go before it", 3,
     .text = &wanted.offline.measured_file, .max = PATH_BYTES_MAX},
    {"memory-bandwidth", 0, "SIZE", "Bytes a second that it reads weights with (default: 200G)", 3,
     .u64 = &wanted.memory_bandwidth, .unit = EP_UNIT_BYTES, .min = EP_PLAN_BANDWIDTH_MIN,
     .max = EP_PLAN_BANDWIDTH_MAX},
    {"compute-rate", 0, "N", "Operations a second, two for each weight and row (default: 4e12)", 3,
     .f64 = &wanted.offline.machine.compute_per_s, .least = EP_PLAN_COMPUTE_RATE_MIN,
     .most = EP_PLAN_COMPUTE_RATE_MAX},
    {"link-bandwidth", 0, "SIZE", "Bytes a second of its network, each way (default: 12G)", 3,
     .u64 = &wanted.link_bandwidth, .unit = EP_UNIT_BYTES, .min = EP_PLAN_BANDWIDTH_MIN,
     .max = EP_PLAN_BANDWIDTH_MAX},
    {"round-trip", 0, "TIME", "Of a call without its bytes (default: 50us)", 3,
     .u64 = &wanted.round_trip_us, .unit = EP_UNIT_US, .plain = EP_UNIT_S, .min = 1,
     .max = EP_PLAN_ROUND_TRIP_US_MAX},
    {"nodes-per-host", 0, "N", "Nodes on it, which share all of this (default: 1)", 3,
     .u32 = &wanted.offline.machine.nodes_per_host, .min = 1, .max = EP_NODES_MAX},
    {"nodes-at-once", 0, "N",
     "So many of them keep it busy, and one alone has such a part of its memory and computing: on "
     "2 cores two nodes of one thread (default: all of them)",
     3, .u32 = &wanted.offline.machine.nodes_at_once, .min = 1, .max = EP_NODES_MAX},
};

static const ep_cli_options offline_options = {
    .rows = offline_rows, .count = EP_ARRAY_COUNT(offline_rows), .first = &ep_cli_peer.asks_nobody};

/* ---- at a running coordinator ---- */

typedef struct plan_sum {
    uint64_t copies_to_load, copies_given_up, bytes_to_load;
    Expertd__V1__LayerBalance before, after; /* the worst of the layers */
    size_t layers_without_load;
} plan_sum;

static void keep_worse(Expertd__V1__LayerBalance *worst, const Expertd__V1__LayerBalance *layer)
{
    if (layer->busiest_over_mean > worst->busiest_over_mean) {
        worst->busiest_over_mean = layer->busiest_over_mean;
    }
    if (layer->busiest_over_bound > worst->busiest_over_bound) {
        worst->busiest_over_bound = layer->busiest_over_bound;
    }
}

static plan_sum sum_up(const Expertd__V1__PlanReply *reply)
{
    plan_sum sum = {.copies_to_load = 0};
    for (size_t l = 0; l < reply->n_layers; l++) {
        const Expertd__V1__LayerPlan *layer = reply->layers[l];
        sum.copies_to_load += layer->copies_to_load;
        sum.copies_given_up += layer->copies_given_up;
        sum.bytes_to_load += layer->bytes_to_load;
        sum.layers_without_load += !layer->has_heat;
        keep_worse(&sum.before, layer->before);
        keep_worse(&sum.after, layer->after);
    }
    return sum;
}

/* ---- json ---- */

static json_t *balance_json(const Expertd__V1__LayerBalance *balance)
{
    return json_pack("{s:f, s:f}", "busiest_over_mean", balance->busiest_over_mean,
                     "busiest_over_bound", balance->busiest_over_bound);
}

static json_t *layer_json(const Expertd__V1__LayerPlan *layer)
{
    return json_pack("{s:o, s:o, s:I, s:I, s:b, s:o, s:o, s:I, s:I, s:I, s:I}", "model",
                     ep_cli_json_text(layer->model), "version", ep_cli_json_text(layer->version),
                     "layer", (json_int_t)layer->layer, "experts", (json_int_t)layer->experts,
                     "load_known", (int)layer->has_heat, "before", balance_json(layer->before),
                     "after", balance_json(layer->after), "copies", (json_int_t)layer->copies,
                     "copies_to_load", (json_int_t)layer->copies_to_load, "copies_given_up",
                     (json_int_t)layer->copies_given_up, "bytes_to_load",
                     (json_int_t)layer->bytes_to_load);
}

static json_t *node_json(const Expertd__V1__NodePlan *node)
{
    return json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:I}", "node", ep_cli_json_text(node->name),
                     "copies_before", (json_int_t)node->copies_before, "copies_after",
                     (json_int_t)node->copies_after, "bytes_before", (json_int_t)node->bytes_before,
                     "bytes_after", (json_int_t)node->bytes_after, "copies_to_load",
                     (json_int_t)node->copies_to_load, "bytes_to_load",
                     (json_int_t)node->bytes_to_load);
}

static bool print_json(const Expertd__V1__PlanReply *reply, const plan_sum *sum)
{
    json_t *layers = json_array(), *nodes = json_array(), *loading = json_array();
    for (size_t l = 0; l < reply->n_layers; l++) {
        json_array_append_new(layers, layer_json(reply->layers[l]));
    }
    for (size_t n = 0; n < reply->n_nodes; n++) {
        json_array_append_new(nodes, node_json(reply->nodes[n]));
    }
    for (size_t n = 0; n < reply->n_loading; n++) {
        json_array_append_new(loading, ep_cli_json_text(reply->loading[n]));
    }
    return ep_cli_json_print(
        json_pack("{s:o, s:b, s:b, s:o, s:o, s:{s:I, s:I, s:I, s:o, s:o}, s:o, s:o}", "policy",
                  ep_cli_json_text(reply->policy), "applied", (int)reply->applied, "is_cut",
                  (int)reply->is_cut, "loading", loading, "note", ep_cli_json_text(reply->note),
                  "sum", "copies_to_load", (json_int_t)sum->copies_to_load, "copies_given_up",
                  (json_int_t)sum->copies_given_up, "bytes_to_load", (json_int_t)sum->bytes_to_load,
                  "worst_before", balance_json(&sum->before), "worst_after",
                  balance_json(&sum->after), "layers", layers, "nodes", nodes),
        stdout);
}

/* ---- tables ---- */

static const char *policy_text(const char *policy)
{
    return strcmp(policy, "balanced") == 0 ? "by load"
           : strcmp(policy, "static") == 0 ? "the expert map alone decides"
                                           : "equal counts, whatever the load";
}

static void print_sum(const Expertd__V1__PlanReply *reply, const plan_sum *sum)
{
    char bytes[EP_CLI_BRIEF_BYTES];
    ep_cli_line(stdout, "placement %s (%s): %s%" PRIu64 " copies to load, %s; %" PRIu64 " given up",
                reply->policy, policy_text(reply->policy), reply->applied ? "applied, " : "",
                sum->copies_to_load, ep_cli_bytes_text(sum->bytes_to_load, bytes),
                sum->copies_given_up);
    ep_cli_line(
        stdout,
        "busiest node, worst layer: %.3f of the mean, after %.3f; %.3f of the bound, after %.3f",
        sum->before.busiest_over_mean, sum->after.busiest_over_mean, sum->before.busiest_over_bound,
        sum->after.busiest_over_bound);
    if (sum->layers_without_load > 0) {
        ep_cli_line(stdout, "no load is known yet of %zu of %zu layers: their experts count alike",
                    sum->layers_without_load, reply->n_layers);
    }
    for (size_t n = 0; n < reply->n_loading; n++) {
        ep_cli_line(stdout, "node %s still loads what it was given before, which counts as loaded",
                    reply->loading[n]);
    }
    if (reply->is_cut) {
        ep_cli_line(stdout, "the solver looked at as much as it may at once: when this is applied, "
                            "plan again for more");
    }
    if (reply->note[0] != '\0') {
        ep_cli_line(stdout, "%s", reply->note);
    }
}

static bool print_nodes(const Expertd__V1__PlanReply *reply)
{
    ep_cli_table *table =
        ep_cli_table_create("NODE|>COPIES|>AFTER|>BYTES|>BYTES AFTER|>TO LOAD|>BYTES TO LOAD");
    for (size_t n = 0; n < reply->n_nodes; n++) {
        const Expertd__V1__NodePlan *node = reply->nodes[n];
        ep_cli_table_cell(table, "%s", node->name);
        ep_cli_table_cell(table, "%" PRIu32, node->copies_before);
        ep_cli_table_cell(table, "%" PRIu32, node->copies_after);
        ep_cli_table_bytes(table, node->bytes_before);
        ep_cli_table_bytes(table, node->bytes_after);
        ep_cli_table_cell(table, "%" PRIu32, node->copies_to_load);
        ep_cli_table_bytes(table, node->bytes_to_load);
    }
    return ep_cli_table_print(table, stdout);
}

static bool print_layers(const Expertd__V1__PlanReply *reply)
{
    ep_cli_table *table =
        ep_cli_table_create("MODEL|1VERSION|>LAYER|>/MEAN|>/MEAN AFTER|>/BOUND|>/BOUND AFTER|>TO "
                            "LOAD|3>GIVEN UP|2>BYTES TO LOAD");
    for (size_t l = 0; l < reply->n_layers; l++) {
        const Expertd__V1__LayerPlan *layer = reply->layers[l];
        ep_cli_table_cell(table, "%s", layer->model);
        ep_cli_table_cell(table, "%s", layer->version);
        ep_cli_table_cell(table, "%" PRIu32, layer->layer);
        ep_cli_table_cell(table, "%.3f", layer->before->busiest_over_mean);
        ep_cli_table_cell(table, "%.3f", layer->after->busiest_over_mean);
        ep_cli_table_cell(table, "%.3f", layer->before->busiest_over_bound);
        ep_cli_table_cell(table, "%.3f", layer->after->busiest_over_bound);
        ep_cli_table_cell(table, "%" PRIu32, layer->copies_to_load);
        ep_cli_table_cell(table, "%" PRIu32, layer->copies_given_up);
        ep_cli_table_bytes(table, layer->bytes_to_load);
    }
    return ep_cli_table_print(table, stdout);
}

static bool print_tables(const Expertd__V1__PlanReply *reply, const plan_sum *sum)
{
    print_sum(reply, sum);
    ep_cli_line(stdout, "%s", "");
    bool good = print_nodes(reply);
    ep_cli_line(stdout, "%s", "");
    return print_layers(reply) && good;
}

/* ---- the map ---- */

static ep_err check_reply(const Expertd__V1__PlanReply *reply, bool with_copies,
                          ep_error *out_error)
{
    for (size_t l = 0; l < reply->n_layers; l++) {
        const Expertd__V1__LayerPlan *layer = reply->layers[l];
        bool good = layer->before != NULL && layer->after != NULL;
        if (good && with_copies) {
            good = layer->experts <= EP_EXPERTS_MAX &&
                   layer->n_offsets == (size_t)layer->experts + 1 && layer->offsets[0] == 0 &&
                   layer->offsets[layer->experts] == layer->n_node_indexes;
            for (uint32_t e = 0; good && e < layer->experts; e++) {
                good = layer->offsets[e] <= layer->offsets[e + 1];
            }
            for (size_t i = 0; good && i < layer->n_node_indexes; i++) {
                good = layer->node_indexes[i] < reply->n_nodes;
            }
        }
        if (!good) {
            return ep_error_set(out_error, EP_ERR_PROTOCOL,
                                "the coordinator's plan of layer %" PRIu32 " contradicts itself",
                                layer->layer);
        }
    }
    return EP_OK;
}

static ep_err check_one_model(const Expertd__V1__PlanReply *reply, ep_error *out_error)
{
    for (size_t l = 1; l < reply->n_layers; l++) {
        const Expertd__V1__LayerPlan *a = reply->layers[0], *b = reply->layers[l];
        if (strcmp(a->model, b->model) != 0 || strcmp(a->version, b->version) != 0) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "--write-map: %.100s version %.40s and %.100s version %.40s are "
                                "placed, an expert map is of one model",
                                a->model, a->version, b->model, b->version);
        }
    }
    return EP_OK;
}

/* Says which node is which device, since the map has only device numbers. */
static void say_written(const char *program, const Expertd__V1__PlanReply *reply,
                        const ep_expert_map *map)
{
    uint32_t least = UINT32_MAX, most = 0;
    for (uint32_t l = 0; l < map->layers_count; l++) {
        for (uint32_t d = 0; d < map->layers[l].devices_count; d++) {
            const uint32_t count = map->layers[l].offsets[d + 1] - map->layers[l].offsets[d];
            least = count < least ? count : least;
            most = count > most ? count : most;
        }
    }
    ep_cli_line(
        stderr,
        "%s: %s is the %s of %u layers; its devices are the %zu nodes in order of name, %s first",
        program, wanted.offline.map_file, reply->applied ? "new placement" : "plan",
        map->layers_count, reply->n_nodes, reply->nodes[0]->name);
    if (least != most) {
        ep_cli_line(stderr,
                    "%s: its devices hold %u..%u experts of a layer: placement: static takes that, "
                    "vllm-ascend wants equal counts",
                    program, least, most);
    }
}

static ep_err write_map(const char *program, const Expertd__V1__PlanReply *reply,
                        ep_error *out_error)
{
    ep_expert_map *map = NULL;
    ep_err err = check_one_model(reply, out_error);
    err = err != EP_OK ? err : ep_expert_map_create((uint32_t)reply->n_layers, &map, out_error);
    for (uint32_t l = 0; err == EP_OK && l < reply->n_layers; l++) {
        const Expertd__V1__LayerPlan *layer = reply->layers[l];
        err = ep_expert_map_set_layer(map, l, layer->experts, layer->offsets, layer->node_indexes,
                                      (uint32_t)reply->n_nodes, out_error);
    }
    err = err != EP_OK ? err : ep_expert_map_write_file(map, wanted.offline.map_file, out_error);
    if (err == EP_OK) {
        say_written(program, reply, map);
    }
    ep_expert_map_destroy(map);
    return err;
}

static ep_err run_live(ep_cli_call *call, ep_error *out_error)
{
    Expertd__V1__PlanRequest request = EXPERTD__V1__PLAN_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    request.apply = wanted.apply;
    request.with_copies = wanted.offline.map_file != NULL;
    ep_err err =
        ep_cli_admin_call_once(&ep_cli_peer, "PlanPlacement", &request.base, &message, out_error);
    if (err != EP_OK) {
        return err;
    }
    const Expertd__V1__PlanReply *reply = (const Expertd__V1__PlanReply *)message;
    err = check_reply(reply, request.with_copies, out_error);
    if (err == EP_OK) {
        const plan_sum sum = sum_up(reply);
        call->failed = !(ep_cli_output_format == EP_CLI_JSON ? print_json(reply, &sum)
                                                             : print_tables(reply, &sum));
        err = request.with_copies ? write_map(call->program, reply, out_error) : EP_OK;
    }
    protobuf_c_message_free_unpacked(message, NULL);
    return err;
}

/* ---- */

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_plan_machine *machine = &wanted.offline.machine;
    if (wanted.offline.config_file == NULL) {
        return run_live(call, out_error);
    }
    machine->memory_bytes_per_s = (double)wanted.memory_bandwidth;
    machine->link_bytes_per_s = (double)wanted.link_bandwidth;
    machine->round_trip_s = (double)wanted.round_trip_us / 1e6;
    return ep_cli_plan_offline_run(call, &wanted.offline, out_error);
}

const ep_cli_command ep_cli_plan = {
    .name = "plan",
    .help = "what placement would do, and does with --apply",
    .doc = "Prints what the coordinator's placement would do now if all copies that help moved at "
           "once, and changes nothing without --apply. With --model: what placement would come to "
           "on machines that do not exist yet."
           "\vOf each layer: the load of the busiest node over the mean of all nodes, and over the "
           "least that any placement of as many copies can have (the bound; without what nodes' "
           "memory holds), before and after; copies and bytes to load. With placement: balanced "
           "the coordinator does the same by itself, 64 copies at a time.\n\n"
           "With --model, of uniform and balanced: steps are drawn, each token with K experts by "
           "their shares of the load, and copies are chosen as clients do. A layer takes, on the "
           "average of the draws, the round trip and what its slowest host takes: its nodes' "
           "computing, and rows in and out / link bandwidth. An expert takes the longer of reading "
           "its weights and computing its rows, where both are alike up to 1.4 of it; experts of a "
           "node go one after another. A token's row goes once to each of its nodes, and each "
           "expert's row comes back. With the part q of the slots a node gets a token with 1 - (1 "
           "- q)^K. Attention is not counted.\n\n"
           "Examples:\n"
           "  expertctl plan --admin tcp://127.0.0.1:7412\n"
           "  expertctl plan --apply --admin tcp://127.0.0.1:7412\n"
           "  expertctl plan --write-map map.json --admin tcp://127.0.0.1:7412\n"
           "  expertctl plan --model config.json --nodes 32 --zipf 1 --spare-copies 32\n"
           "  expertctl plan --model config.json --nodes 32 --trace stats.json -o json\n"
           "  expertctl tune --model demo --layer 0 -o json > host.json\n"
           "  expertctl plan --model config.json --nodes 32 --zipf 1 --measured "
           "host.json\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .check = check},
    .uses = {&offline_options, &ep_cli_admin_options, &ep_cli_output_options},
    .run = run,
};
