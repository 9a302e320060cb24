/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl plan: what the placement solver would do. */
#include "arguments.h"
#include "command_table.h"
#include "exit_code.h"
#include "moe/routing_table.h"
#include "plan_live.h"
#include "plan_offline.h"

enum {
    KEY_APPLY = 0x200,
    KEY_WRITE_MAP,
    KEY_MODEL,
    KEY_NODES,
    KEY_TRACE,
    KEY_ZIPF,
    KEY_SEED,
    KEY_COPIES,
    KEY_SPARE_COPIES,
    KEY_TOKENS,
    KEY_WEIGHT_BITS,
    KEY_MEASURED,
    KEY_MEMORY_BANDWIDTH,
    KEY_COMPUTE_RATE,
    KEY_LINK_BANDWIDTH,
    KEY_ROUND_TRIP,
    KEY_NODES_PER_HOST,
    KEY_NODES_AT_ONCE
};

#define PATH_BYTES_MAX 4000
#define ZIPF_MAX 8
#define TOKENS 256

typedef struct plan_options {
    ep_cli_connect connect;
    ep_cli_format format;
    bool apply;
    bool has_zipf, has_seed;
    const char *map_file;
    const char *first_given; /* of the options that need --model; NULL: none */
    ep_cli_plan_offline offline;
} plan_options;

static double bandwidth(struct argp_state *state, const char *option, const char *arg)
{
    return (double)ep_cli_arg_quantity(state, option, arg, EP_UNIT_BYTES, EP_UNIT_BYTES,
                                       EP_PLAN_BANDWIDTH_MIN, EP_PLAN_BANDWIDTH_MAX);
}

/* Options of plans for machines that do not exist yet. */
static error_t parse_offline(int key, char *arg, struct argp_state *state,
                             ep_cli_plan_offline *offline)
{
    switch (key) {
    case KEY_NODES:
        offline->nodes = (uint32_t)ep_cli_arg_whole(state, "--nodes", arg, 1, EP_NODES_MAX);
        return 0;
    case KEY_TRACE:
        offline->trace_file = ep_cli_arg_text(state, "--trace", arg, PATH_BYTES_MAX);
        return 0;
    case KEY_ZIPF:
        offline->zipf = (double)ep_cli_arg_float(state, "--zipf", arg, 0, ZIPF_MAX);
        return 0;
    case KEY_SEED:
        offline->seed = ep_cli_arg_whole(state, "--seed", arg, 0, INT64_MAX);
        return 0;
    case KEY_COPIES:
        offline->copies = (uint32_t)ep_cli_arg_whole(state, "--copies", arg, 1, 64);
        return 0;
    case KEY_SPARE_COPIES:
        offline->spare_copies =
            (uint32_t)ep_cli_arg_whole(state, "--spare-copies", arg, 0, EP_EXPERTS_MAX);
        return 0;
    case KEY_TOKENS:
        offline->tokens = ep_cli_arg_whole(state, "--tokens", arg, 1, UINT32_MAX);
        return 0;
    case KEY_WEIGHT_BITS:
        offline->weight_bits = (double)ep_cli_arg_float(state, "--weight-bits", arg, 1, 64);
        return 0;
    case KEY_MEMORY_BANDWIDTH:
        offline->machine.memory_bytes_per_s = bandwidth(state, "--memory-bandwidth", arg);
        return 0;
    case KEY_COMPUTE_RATE:
        offline->machine.compute_per_s = (double)ep_cli_arg_float(
            state, "--compute-rate", arg, EP_PLAN_COMPUTE_RATE_MIN, EP_PLAN_COMPUTE_RATE_MAX);
        return 0;
    case KEY_LINK_BANDWIDTH:
        offline->machine.link_bytes_per_s = bandwidth(state, "--link-bandwidth", arg);
        return 0;
    case KEY_ROUND_TRIP:
        offline->machine.round_trip_s =
            (double)ep_cli_arg_time_us(state, "--round-trip", arg, 1, EP_PLAN_ROUND_TRIP_US_MAX) /
            1e6;
        return 0;
    case KEY_MEASURED:
        offline->measured_file = ep_cli_arg_text(state, "--measured", arg, PATH_BYTES_MAX);
        return 0;
    case KEY_NODES_PER_HOST:
        offline->machine.nodes_per_host =
            (uint32_t)ep_cli_arg_whole(state, "--nodes-per-host", arg, 1, EP_NODES_MAX);
        return 0;
    case KEY_NODES_AT_ONCE:
        offline->machine.nodes_at_once =
            (uint32_t)ep_cli_arg_whole(state, "--nodes-at-once", arg, 1, EP_NODES_MAX);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    {"apply", KEY_APPLY, NULL, 0,
     "Do it: nodes load their new copies, then the table changes; no call fails", 1},
    {"write-map", KEY_WRITE_MAP, "FILE", 0,
     "Also write what is planned as an expert map, for placement: static", 1},
    {NULL, 0, NULL, 0, "For machines that do not exist yet:", 2},
    {"model", KEY_MODEL, "FILE", 0,
     "The model's config.json, as of Hugging Face; no coordinator is asked then", 2},
    {"nodes", KEY_NODES, "N", 0, "Nodes", 2},
    {"trace", KEY_TRACE, "FILE", 0,
     "Load as expertctl stats --experts -o json wrote it, of this model", 2},
    {"zipf", KEY_ZIPF, "S", 0,
     "Load drawn instead: the r-th expert of a layer gets r^-S, up to one slot of each token; "
     "which one is "
     "the r-th "
     "is drawn "
     "for each layer",
     2},
    {"seed", KEY_SEED, "N", 0, "What --zipf draws with (default: 1)", 2},
    {"copies", KEY_COPIES, "N", 0, "Copies of each expert (default: 1)", 2},
    {"spare-copies", KEY_SPARE_COPIES, "N", 0,
     "Copies of each layer beyond these, for its hottest experts (default: 0)", 2},
    {"tokens", KEY_TOKENS, "T", 0,
     "Tokens that all callers together bring to a layer at a time (default: 256)", 2},
    {"weight-bits", KEY_WEIGHT_BITS, "N", 0,
     "Bits of an expert's weight, with its part of the scales: mxfp4 has 4.25 (default: of the "
     "config's "
     "dtype, bf16 "
     "where it names none; quantised weights need it)",
     2},
    {NULL, 0, NULL, 0, "Of each host:", 3},
    {"measured", KEY_MEASURED, "FILE", 0,
     "What expertctl tune -o json wrote; the next four go before it", 3},
    {"memory-bandwidth", KEY_MEMORY_BANDWIDTH, "SIZE", 0,
     "Bytes a second that it reads weights with (default: 200G)", 3},
    {"compute-rate", KEY_COMPUTE_RATE, "N", 0,
     "Operations a second, two for each weight and row (default: 4e12)", 3},
    {"link-bandwidth", KEY_LINK_BANDWIDTH, "SIZE", 0,
     "Bytes a second of its network, each way (default: 12G)", 3},
    {"round-trip", KEY_ROUND_TRIP, "TIME", 0, "Of a call without its bytes (default: 50us)", 3},
    {"nodes-per-host", KEY_NODES_PER_HOST, "N", 0,
     "Nodes on it, which share all of this (default: 1)", 3},
    {"nodes-at-once", KEY_NODES_AT_ONCE, "N", 0,
     "So many of them keep it busy, and one alone has such a part of its memory and computing: on "
     "2 cores "
     "two nodes of "
     "one thread (default: all of them)",
     3},
    {0},
};

static const char *name_of(int key)
{
    const struct argp_option *option = option_list;
    while (option->name == NULL || option->key != key) {
        option++;
    }
    return option->name;
}

static void complete(struct argp_state *state, const plan_options *options)
{
    const ep_cli_plan_offline *offline = &options->offline;
    if (offline->config_file == NULL) {
        if (options->first_given != NULL) {
            argp_error(
                state,
                "--%s is given without --model, which plans for machines that do not exist yet",
                options->first_given);
        }
        return;
    }
    if (options->apply) {
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
    if (options->has_zipf == (offline->trace_file != NULL)) {
        argp_error(state, options->has_zipf
                              ? "--trace and --zipf are both given, allowed: one of them"
                              : "--trace and --zipf are both missing; one of them is required");
    }
    if (offline->trace_file != NULL && options->has_seed) {
        argp_error(state, "--seed is given with --trace, of which nothing is drawn");
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    plan_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        return 0;
    case KEY_APPLY:
        options->apply = true;
        return 0;
    case KEY_WRITE_MAP:
        options->map_file = options->offline.map_file =
            ep_cli_arg_text(state, "--write-map", arg, PATH_BYTES_MAX);
        return 0;
    case KEY_MODEL:
        options->offline.config_file = ep_cli_arg_text(state, "--model", arg, PATH_BYTES_MAX);
        options->connect.asks_nobody = true;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    case ARGP_KEY_END:
        complete(state, options);
        return 0;
    default: {
        const error_t known = parse_offline(key, arg, state, &options->offline);
        if (known == 0) {
            options->has_zipf |= key == KEY_ZIPF;
            options->has_seed |= key == KEY_SEED;
            options->connect.asks_nobody = true;
            options->first_given =
                options->first_given != NULL ? options->first_given : name_of(key);
        }
        return known;
    }
    }
}

static const struct argp_child children[] = {
    {&ep_cli_admin_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    option_list,
    parse,
    NULL,
    "Prints what the coordinator's placement would do now if all copies that help moved at once, "
    "and changes "
    "nothing "
    "without --apply. With --model: what placement would come to on machines that do not exist yet."
    "\vOf each layer: the load of the busiest node over the mean of all nodes, and over the least "
    "that any "
    "placement "
    "of as many copies can have (the bound; without what nodes' memory holds), before and after; "
    "copies and "
    "bytes to "
    "load. With placement: balanced the coordinator does the same by itself, 64 copies at a "
    "time.\n\n"
    "With --model, of uniform and balanced: steps are drawn, each token with K experts by their "
    "shares of "
    "the load, "
    "and copies are chosen as clients do. A layer takes, on the average of the draws, the round "
    "trip and "
    "what its "
    "slowest host takes: its nodes' computing, and rows in and out / link bandwidth. An expert "
    "takes the "
    "longer of "
    "reading its weights and computing its rows, where both are alike up to 1.4 of it; experts of "
    "a node go "
    "one after "
    "another. A token's row goes once to each of its nodes, and each expert's row comes back. With "
    "the part "
    "q of the "
    "slots a node gets a token with 1 - (1 - q)^K. Attention is not counted.\n\n"
    "Examples:\n"
    "  expertctl plan --admin tcp://127.0.0.1:7412\n"
    "  expertctl plan --apply --admin tcp://127.0.0.1:7412\n"
    "  expertctl plan --write-map map.json --admin tcp://127.0.0.1:7412\n"
    "  expertctl plan --model config.json --nodes 32 --zipf 1 --spare-copies 32\n"
    "  expertctl plan --model config.json --nodes 32 --trace stats.json -o json\n"
    "  expertctl tune --model demo --layer 0 -o json > host.json\n"
    "  expertctl plan --model config.json --nodes 32 --zipf 1 --measured "
    "host.json\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static int run(int argc, char **argv)
{
    static plan_options options = {.offline = {.seed = 1, .copies = 1, .tokens = TOKENS}};
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    if (options.offline.config_file != NULL) {
        return ep_cli_plan_offline_run(argv[0], options.format, &options.offline);
    }
    const ep_cli_plan_live live = {.apply = options.apply, .map_file = options.map_file};
    return ep_cli_plan_live_run(argv[0], &options.connect, options.format, &live);
}

const ep_cli_command ep_cli_plan = {"plan", "what placement would do, and does with --apply", &argp,
                                    run, NULL};
