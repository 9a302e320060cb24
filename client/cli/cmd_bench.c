/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl bench: what a layer of the running service does per second. */
#include <stdlib.h>

#include "bench.h"
#include "bench_print.h"
#include "command_table.h"
#include "connect.h"
#include "moe/flow.h"
#include "moe/routing_table.h"
#include "output.h"
#include "layer_options.h"
#include "trace_option.h"

#define DURATION_US_DEFAULT 5000000u
#define DURATION_US_MIN 10000u
#define DURATION_US_MAX 3600000000u

static ep_cli_bench_request request = {
    .tokens = 1, .threads = 1, .duration_us = DURATION_US_DEFAULT, .seed = 1};
static bool has_layer;

static const ep_cli_option rows[] = {
    {"model", 0, "NAME", "The model (required)", 1, .text = &request.model,
     .max = EP_MODEL_NAME_BYTES - 1, .required = true},
    {"version", 0, "V", "Version of the model (default: the service's default for it)", 1,
     .text = &request.version, .max = EP_VERSION_BYTES - 1},
    {"layer", 0, "L", "The MoE layer (required)", 1, .u32 = &request.layer, .max = UINT32_MAX,
     .given = &has_layer, .required = true},
    {"tokens", 0, "T", "Tokens of a call (default: 1)", 2, .u32 = &request.tokens, .min = 1,
     .max = EP_TOKENS_MAX},
    {"top-k", 0, "K", "Experts per token (default: the model's)", 2, .u32 = &request.top_k,
     .min = 1, .max = EP_TOP_K_MAX},
    {"threads", 0, "N", "Callers at once (default: 1)", 2, .u32 = &request.threads, .min = 1,
     .max = EP_CLI_BENCH_THREADS_MAX},
    {"seconds", 0, "TIME", "How long (default: 5s)", 2, .u64 = &request.duration_us,
     .unit = EP_UNIT_US, .plain = EP_UNIT_S, .min = DURATION_US_MIN, .max = DURATION_US_MAX},
    {"mode", 0, "auto|decode|prefill", "How rows travel (default: auto)", 2, .word = &request.mode},
    {"wire", 0, "bf16|f16|f32", "Type an expert's row is rounded to (default: bf16)", 2,
     .word = &request.wire_dtype, .numbers = ep_cli_dtype_numbers},
    {"comm-alg", 0, "auto|fullmesh|hierarchy",
     "Rows straight to each owner, or once per host (default: auto, which is fullmesh)", 2,
     .word = &request.comm_alg},
    {"combine-at", 0, "rows|node_sum", "Where rows are summed (default: rows, the exact sum)", 2,
     .word = &request.combine_at},
    {"seed", 0, "S", "Of the random batches (default: 1)", 2, .u64 = &request.seed,
     .max = UINT64_MAX},
};

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_client *client = NULL;
    ep_cli_bench_result result = {0};
    ep_layer_desc layer;
    request.traceparent = ep_cli_trace_parent();
    request.deadline_us = ep_cli_peer.timeout_us;
    ep_err err = ep_cli_connect_client(&ep_cli_peer, &client, out_error);
    err = err != EP_OK ? err : ep_cli_bench_find_layer(client, &request, &layer, out_error);
    err = err != EP_OK ? err : ep_cli_bench_run(client, &request, &layer, &result, out_error);
    ep_cli_trace_report();
    call->failed = err == EP_OK &&
                   !ep_cli_bench_print(&request, &result, client, ep_cli_output_format, stdout);
    ep_latency_fini(&result.latency);
    ep_client_destroy(client);
    return err;
}

const ep_cli_command ep_cli_bench = {
    .name = "bench",
    .help = "drives a layer with random batches and measures",
    .args = "--model NAME --layer L",
    .doc = "Sends random batches to one MoE layer and prints calls and tokens per second, latency, "
           "bytes per token, where the time of a call goes, and what was waited for at each node."
           "\vExperts are drawn evenly. Every thread makes one call before the clock starts. A "
           "failed call ends the run.\n\n"
           "No call can be faster than the compute of its slowest node: LIMIT says what share of "
           "the time that was. Wire, queue and compute are those of each call's slowest frame; the "
           "rest is other work, or frames that ran beside it.\n\n"
           "Examples:\n"
           "  expertctl bench --model demo --layer 0 --tokens 8 --threads 4\n"
           "  expertctl bench --model demo --layer 0 --tokens 1024 \\\n"
           "      --mode prefill --seconds 10 -o json\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options, &ep_cli_trace_options,
             &ep_cli_numerics_options},
    .run = run,
};
