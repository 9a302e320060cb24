/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl plan: what the placement solver would do. */
#include "command_table.h"
#include "connect.h"
#include "moe/routing_table.h"
#include "plan_live.h"
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

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_plan_machine *machine = &wanted.offline.machine;
    if (wanted.offline.config_file == NULL) {
        return ep_cli_plan_live_run(call, wanted.apply, wanted.offline.map_file, out_error);
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
