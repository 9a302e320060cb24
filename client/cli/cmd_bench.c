/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl bench: what a layer of the running service does per second. */
#include <stdlib.h>

#include "arguments.h"
#include "bench.h"
#include "bench_print.h"
#include "command_table.h"
#include "connect.h"
#include "exit_code.h"
#include "moe/flow.h"
#include "moe/routing_table.h"
#include "output.h"
#include "trace_option.h"

#define TOKENS_DEFAULT 1
#define SECONDS_DEFAULT 5.0
#define DURATION_US_MIN 10000u
#define DURATION_US_MAX 3600000000u

enum {
    KEY_MODEL = 0x200,
    KEY_VERSION,
    KEY_LAYER,
    KEY_TOKENS,
    KEY_TOP_K,
    KEY_THREADS,
    KEY_SECONDS,
    KEY_MODE,
    KEY_WIRE,
    KEY_COMM_ALG,
    KEY_COMBINE_AT,
    KEY_SEED
};

static const char *const dtype_words[] = {"bf16", "f16", "f32", NULL};
/* as ep_moe_comm */
static const char *const comm_words[] = {"auto", "fullmesh", "hierarchy", NULL};
/* as ep_moe_combine_at */
static const char *const combine_words[] = {"rows", "node_sum", NULL};

typedef struct bench_options {
    ep_cli_connect connect;
    ep_cli_format format;
    ep_cli_trace trace;
    ep_cli_bench_request request;
    bool has_layer;
} bench_options;

static error_t parse_load(int key, char *arg, struct argp_state *state,
                          ep_cli_bench_request *request)
{
    switch (key) {
    case KEY_TOKENS:
        request->tokens = (uint32_t)ep_cli_arg_whole(state, "--tokens", arg, 1, EP_TOKENS_MAX);
        return 0;
    case KEY_TOP_K:
        request->top_k = (uint32_t)ep_cli_arg_whole(state, "--top-k", arg, 1, EP_TOP_K_MAX);
        return 0;
    case KEY_THREADS:
        request->threads =
            (uint32_t)ep_cli_arg_whole(state, "--threads", arg, 1, EP_CLI_BENCH_THREADS_MAX);
        return 0;
    case KEY_SECONDS:
        request->duration_us =
            ep_cli_arg_time_us(state, "--seconds", arg, DURATION_US_MIN, DURATION_US_MAX);
        return 0;
    case KEY_MODE:
        request->mode = (ep_moe_mode)ep_cli_arg_word(state, "--mode", arg, ep_cli_bench_mode_words);
        return 0;
    case KEY_WIRE:
        request->wire_dtype =
            ep_dtype_from_name(dtype_words[ep_cli_arg_word(state, "--wire", arg, dtype_words)]);
        return 0;
    case KEY_COMM_ALG:
        request->comm_alg = (ep_moe_comm)ep_cli_arg_word(state, "--comm-alg", arg, comm_words);
        return 0;
    case KEY_COMBINE_AT:
        request->combine_at =
            (ep_moe_combine_at)ep_cli_arg_word(state, "--combine-at", arg, combine_words);
        return 0;
    case KEY_SEED:
        request->seed = ep_cli_arg_whole(state, "--seed", arg, 0, UINT64_MAX);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    bench_options *options = state->input;
    ep_cli_bench_request *request = &options->request;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        state->child_inputs[2] = &options->trace;
        state->child_inputs[3] = &options->connect;
        return 0;
    case KEY_MODEL:
        request->model = ep_cli_arg_text(state, "--model", arg, EP_MODEL_NAME_BYTES - 1);
        return 0;
    case KEY_VERSION:
        request->version = ep_cli_arg_text(state, "--version", arg, EP_VERSION_BYTES - 1);
        return 0;
    case KEY_LAYER:
        request->layer = (uint32_t)ep_cli_arg_whole(state, "--layer", arg, 0, UINT32_MAX);
        options->has_layer = true;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    case ARGP_KEY_END:
        ep_cli_arg_required(state, "--model", request->model);
        ep_cli_arg_required(state, "--layer", options->has_layer ? options : NULL);
        return 0;
    default:
        return parse_load(key, arg, state, request);
    }
}

static const struct argp_option option_list[] = {
    {"model", KEY_MODEL, "NAME", 0, "The model (required)", 1},
    {"version", KEY_VERSION, "V", 0, "Version of the model (default: the service's default for it)",
     1},
    {"layer", KEY_LAYER, "L", 0, "The MoE layer (required)", 1},
    {"tokens", KEY_TOKENS, "T", 0, "Tokens of a call (default: 1)", 2},
    {"top-k", KEY_TOP_K, "K", 0, "Experts per token (default: the model's)", 2},
    {"threads", KEY_THREADS, "N", 0, "Callers at once (default: 1)", 2},
    {"seconds", KEY_SECONDS, "TIME", 0, "How long (default: 5s)", 2},
    {"mode", KEY_MODE, "auto|decode|prefill", 0, "How rows travel (default: auto)", 2},
    {"wire", KEY_WIRE, "bf16|f16|f32", 0, "Type an expert's row is rounded to (default: bf16)", 2},
    {"comm-alg", KEY_COMM_ALG, "auto|fullmesh|hierarchy", 0,
     "Rows straight to each owner, or once per host (default: auto, which is fullmesh)", 2},
    {"combine-at", KEY_COMBINE_AT, "rows|node_sum", 0,
     "Where rows are summed (default: rows, the exact sum)", 2},
    {"seed", KEY_SEED, "S", 0, "Of the random batches (default: 1)", 2},
    {0},
};
static const struct argp_child children[] = {{&ep_cli_connect_argp, 0, NULL, 0},
                                             {&ep_cli_output_argp, 0, NULL, 0},
                                             {&ep_cli_trace_argp, 0, NULL, 0},
                                             {&ep_cli_numerics_argp, 0, NULL, 0},
                                             {0}};
static const struct argp argp = {
    option_list,
    parse,
    "--model NAME --layer L",
    "Sends random batches to one MoE layer and prints calls and tokens per "
    "second, latency, bytes per token, where the time of a call goes, and what "
    "was waited for at each node."
    "\vExperts are drawn evenly. Every thread makes one call before the clock "
    "starts. A failed call ends the run.\n\n"
    "No call can be faster than the compute of its slowest node: LIMIT says what "
    "share of the time that was. Wire, queue and compute are those of each call's "
    "slowest frame; the rest is other work, or frames that ran beside it.\n\n"
    "Examples:\n"
    "  expertctl bench --model demo --layer 0 --tokens 8 --threads 4\n"
    "  expertctl bench --model demo --layer 0 --tokens 1024 \\\n"
    "      --mode prefill --seconds 10 -o json\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static int run(int argc, char **argv)
{
    static bench_options options = {.request = {.tokens = TOKENS_DEFAULT,
                                                .threads = 1,
                                                .duration_us = (uint64_t)(SECONDS_DEFAULT * 1e6),
                                                .seed = 1}};
    ep_client *client = NULL;
    ep_cli_bench_result result = {0};
    ep_layer_desc layer;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    options.request.traceparent = ep_cli_trace_parent(&options.trace);
    options.request.deadline_us = options.connect.timeout_us;
    ep_err err = ep_cli_connect_client(&options.connect, &client, &error);
    err = err != EP_OK ? err : ep_cli_bench_find_layer(client, &options.request, &layer, &error);
    err = err != EP_OK ? err : ep_cli_bench_run(client, &options.request, &layer, &result, &error);
    ep_cli_trace_report(&options.trace);
    int code = err != EP_OK ? ep_cli_fail(argv[0], &error) : EP_CLI_EXIT_OK;
    if (code == EP_CLI_EXIT_OK &&
        !ep_cli_bench_print(&options.request, &result, client, options.format, stdout)) {
        code = EP_CLI_EXIT_FAILED;
    }
    ep_latency_fini(&result.latency);
    ep_client_destroy(client);
    return code;
}

const ep_cli_command ep_cli_bench = {"bench", "drives a layer with random batches and measures",
                                     &argp, run, NULL};
