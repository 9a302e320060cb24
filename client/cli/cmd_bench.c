/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl bench: measures a layer of the running service. */
#include <inttypes.h>
#include <stdlib.h>

#include "bench.h"
#include "command_table.h"
#include "connect.h"
#include "layer_options.h"
#include "moe/flow.h"
#include "moe/routing_table.h"
#include "trace_option.h"
#include "wire/moe_parameters.h"

#define DURATION_US_DEFAULT 5000000u
#define DURATION_US_MIN 10000u
#define DURATION_US_MAX 3600000000u

static ep_cli_bench_request wanted = {
    .tokens = 1, .threads = 1, .duration_us = DURATION_US_DEFAULT, .seed = 1};
static bool has_layer;

static const ep_cli_option rows[] = {
    {"model", 0, "NAME", "The model (required)", 1, .text = &wanted.model,
     .max = EP_MODEL_NAME_BYTES - 1, .required = true},
    {"version", 0, "V", "Version of the model (default: the service's default for it)", 1,
     .text = &wanted.version, .max = EP_VERSION_BYTES - 1},
    {"layer", 0, "L", "The MoE layer (required)", 1, .u32 = &wanted.layer, .max = UINT32_MAX,
     .given = &has_layer, .required = true},
    {"tokens", 0, "T", "Tokens of a call (default: 1)", 2, .u32 = &wanted.tokens, .min = 1,
     .max = EP_TOKENS_MAX},
    {"top-k", 0, "K", "Experts per token (default: the model's)", 2, .u32 = &wanted.top_k, .min = 1,
     .max = EP_TOP_K_MAX},
    {"threads", 0, "N", "Callers at once (default: 1)", 2, .u32 = &wanted.threads, .min = 1,
     .max = EP_CLI_BENCH_THREADS_MAX},
    {"seconds", 0, "TIME", "How long (default: 5s)", 2, .u64 = &wanted.duration_us,
     .unit = EP_UNIT_US, .plain = EP_UNIT_S, .min = DURATION_US_MIN, .max = DURATION_US_MAX},
    {"mode", 0, EP_MODE_WORDS, EP_MODE_HELP, 2, .word = &wanted.mode},
    {"wire", 0, "bf16|f16|f32", "Type an expert's row is rounded to (default: bf16)", 2,
     .word = &wanted.wire_dtype, .numbers = ep_cli_dtype_numbers},
    {"comm-alg", 0, EP_COMM_ALG_WORDS, EP_COMM_ALG_HELP, 2, .word = &wanted.comm_alg},
    {"combine-at", 0, EP_COMBINE_AT_WORDS, EP_COMBINE_AT_HELP, 2, .word = &wanted.combine_at},
    {"seed", 0, "S", "Of the random batches (default: 1)", 2, .u64 = &wanted.seed,
     .max = UINT64_MAX},
};

/* ---- printing ---- */

/* as ep_moe_mode */
static const char *const mode_words[] = {"auto", "decode", "prefill"};

/* Mean of a call, in microseconds. */
static double of_a_call(uint64_t sum_us, const ep_cli_bench_result *result)
{
    return (double)sum_us / (result->calls > 0 ? (double)result->calls : 1.0);
}

static double share(uint64_t part, uint64_t whole)
{
    return whole > 0 ? (double)part / (double)whole : 0.0;
}

static uint64_t mean(uint64_t sum, uint64_t count)
{
    return count > 0 ? sum / count : 0;
}

static double bytes_per_token(const ep_cli_bench_result *result)
{
    uint64_t tokens = result->calls * wanted.tokens;
    return tokens > 0 ? (double)(result->bytes_sent + result->bytes_received) / (double)tokens
                      : 0.0;
}

static double calls_per_s(const ep_cli_bench_result *result)
{
    return result->elapsed_us > 0 ? (double)result->calls * 1e6 / (double)result->elapsed_us : 0.0;
}

/* as ep_moe_comm_why */
static const struct {
    const char *word;
    const char *text;
} comm_whys[] = {{"asked", "there is no coordinator"},
                 {"alone", "no other host has two nodes with rows"},
                 {"no_bytes", "hierarchy sends as many bytes"},
                 {"refused", "a node refused to pass rows on"},
                 {"learning", "few calls were measured yet"},
                 {"tried", "the slower one, to measure it again"},
                 {"measured", "by the estimates"}};
_Static_assert(EP_ARRAY_COUNT(comm_whys) ==
                   EP_ARRAY_COUNT(((ep_cli_bench_result *)NULL)->comm_whys),
               "a text for each count");

/* ---- JSON ---- */

static json_t *nodes_json(ep_client *client)
{
    json_t *nodes = json_array();
    ep_client_node_waits w = {.struct_bytes = sizeof(w)};
    for (uint32_t i = 0; ep_client_read_waits(client, i, &w) == EP_OK; i++) {
        json_array_append_new(
            nodes,
            json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:I}", "node", ep_cli_json_text(w.node),
                      "frames", (json_int_t)w.frames, "wait_us", (json_int_t)w.wait_us, "wire_us",
                      (json_int_t)w.wire_us, "queue_us", (json_int_t)w.queue_us, "compute_us",
                      (json_int_t)w.compute_us, "wait_max_us", (json_int_t)w.wait_max_us));
    }
    return nodes;
}

/* The choices of comm_alg auto and their reasons. */
static json_t *choice_json(const ep_cli_bench_result *result)
{
    json_t *whys = json_object();
    for (size_t why = 0; why < EP_ARRAY_COUNT(comm_whys); why++) {
        json_object_set_new(whys, comm_whys[why].word,
                            json_integer((json_int_t)result->comm_whys[why]));
    }
    return json_pack(
        "{s:I, s:I, s:I, s:I, s:o}", "hierarchy_calls", (json_int_t)result->hierarchy_calls,
        "estimated_calls", (json_int_t)result->estimated_calls, "fullmesh_us",
        (json_int_t)mean(result->fullmesh_estimate_us, result->estimated_calls), "hierarchy_us",
        (json_int_t)mean(result->hierarchy_estimate_us, result->estimated_calls), "calls_by_reason",
        whys);
}

static bool print_json(ep_cli_bench_result *result, ep_client *client)
{
    json_t *root = json_pack(
        "{s:o, s:I, s:I, s:I, s:I, s:s, s:f, s:I, s:f, s:f, s:I, s:I, s:f, s:I, s:f, s:I, s:I}",
        "model", ep_cli_json_text(wanted.model), "layer", (json_int_t)wanted.layer, "tokens",
        (json_int_t)wanted.tokens, "top_k", (json_int_t)wanted.top_k, "threads",
        (json_int_t)wanted.threads, "mode", mode_words[wanted.mode], "seconds",
        (double)result->elapsed_us / 1e6, "calls", (json_int_t)result->calls, "calls_per_s",
        calls_per_s(result), "tokens_per_s", calls_per_s(result) * wanted.tokens, "p50_us",
        (json_int_t)ep_latency_percentile(&result->latency, 50), "p99_us",
        (json_int_t)ep_latency_percentile(&result->latency, 99), "mean_us",
        ep_latency_mean(&result->latency), "max_us", (json_int_t)result->latency.max_us,
        "bytes_per_token", bytes_per_token(result), "frames", (json_int_t)result->frames,
        "rerouted_frames", (json_int_t)result->rerouted_frames);
    json_t *stages = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "total_us", of_a_call(result->total_us, result),
        "pack_us", of_a_call(result->pack_us, result), "wire_us",
        of_a_call(result->wire_us, result), "queue_us", of_a_call(result->queue_us, result),
        "compute_us", of_a_call(result->compute_us, result), "combine_us",
        of_a_call(result->combine_us, result), "limit_share",
        share(result->compute_us, result->total_us));
    if (root != NULL) {
        json_object_set_new(root, "mean_of_a_call", stages);
        json_object_set_new(root, "nodes", nodes_json(client));
        if (wanted.comm_alg == EP_MOE_COMM_AUTO) {
            json_object_set_new(root, "comm_alg_auto", choice_json(result));
        }
    }
    return ep_cli_json_print(root, stdout);
}

/* ---- tables ---- */

static bool print_whole(ep_cli_bench_result *result)
{
    ep_cli_table *table = ep_cli_table_create(
        ">CALLS|>CALLS/S|>TOKENS/S|>P50 US|>P99 US|>MAX US|1>BYTES/TOKEN|2>RE-ROUTED");
    ep_cli_line(stdout,
                "model %s layer %" PRIu32 ": %" PRIu32 " tokens a call, top-%" PRIu32
                ", threads %" PRIu32 ", mode %s, %.1f s",
                wanted.model, wanted.layer, wanted.tokens, wanted.top_k, wanted.threads,
                mode_words[wanted.mode], (double)result->elapsed_us / 1e6);
    putchar('\n');
    ep_cli_table_cell(table, "%" PRIu64, result->calls);
    ep_cli_table_cell(table, "%.1f", calls_per_s(result));
    ep_cli_table_cell(table, "%.1f", calls_per_s(result) * wanted.tokens);
    ep_cli_table_cell(table, "%" PRIu64, ep_latency_percentile(&result->latency, 50));
    ep_cli_table_cell(table, "%" PRIu64, ep_latency_percentile(&result->latency, 99));
    ep_cli_table_cell(table, "%" PRIu64, result->latency.max_us);
    ep_cli_table_cell(table, "%.0f", bytes_per_token(result));
    ep_cli_table_cell(table, "%" PRIu64, result->rerouted_frames);
    return ep_cli_table_print(table, stdout);
}

static void stage_row(ep_cli_table *table, const char *name, uint64_t us,
                      const ep_cli_bench_result *result)
{
    ep_cli_table_cell(table, "%s", name);
    ep_cli_table_cell(table, "%.1f", of_a_call(us, result));
    ep_cli_table_cell(table, "%.1f", 100.0 * share(us, result->total_us));
}

static bool print_stages(const ep_cli_bench_result *r)
{
    const uint64_t named = r->pack_us + r->wire_us + r->queue_us + r->compute_us + r->combine_us;
    ep_cli_table *table = ep_cli_table_create("MEAN OF A CALL|>US|>SHARE %");
    stage_row(table, "pack", r->pack_us, r);
    stage_row(table, "wire", r->wire_us, r);
    stage_row(table, "queue", r->queue_us, r);
    stage_row(table, "compute", r->compute_us, r);
    stage_row(table, "combine", r->combine_us, r);
    stage_row(table, "other", r->total_us > named ? r->total_us - named : 0, r);
    stage_row(table, "total", r->total_us, r);
    stage_row(table, "LIMIT (compute alone)", r->compute_us, r);
    return ep_cli_table_print(table, stdout);
}

static void print_choice(const ep_cli_bench_result *result)
{
    ep_cli_line(stdout, "comm-alg auto: hierarchy in %" PRIu64 " of %" PRIu64 " calls",
                result->hierarchy_calls, result->calls);
    if (result->estimated_calls > 0) {
        ep_cli_line(stdout,
                    "  estimates of a call: fullmesh %" PRIu64 " us, hierarchy %" PRIu64
                    " us (mean of %" PRIu64 " calls)",
                    mean(result->fullmesh_estimate_us, result->estimated_calls),
                    mean(result->hierarchy_estimate_us, result->estimated_calls),
                    result->estimated_calls);
    }
    for (size_t why = 0; why < EP_ARRAY_COUNT(comm_whys); why++) {
        if (result->comm_whys[why] > 0) {
            ep_cli_line(stdout, "  %" PRIu64 " calls: %s", result->comm_whys[why],
                        comm_whys[why].text);
        }
    }
    putchar('\n');
}

static bool print_waits(ep_client *client)
{
    ep_client_node_waits w = {.struct_bytes = sizeof(w)};
    ep_cli_table *table =
        ep_cli_table_create("WAITED FOR|1>FRAMES|>MEAN US|2>WIRE|2>QUEUE|2>COMPUTE|>MAX US");
    for (uint32_t i = 0; ep_client_read_waits(client, i, &w) == EP_OK; i++) {
        ep_cli_table_cell(table, "%s", w.node);
        ep_cli_table_cell(table, "%" PRIu64, w.frames);
        ep_cli_table_cell(table, "%" PRIu64, mean(w.wait_us, w.frames));
        ep_cli_table_cell(table, "%" PRIu64, mean(w.wire_us, w.frames));
        ep_cli_table_cell(table, "%" PRIu64, mean(w.queue_us, w.frames));
        ep_cli_table_cell(table, "%" PRIu64, mean(w.compute_us, w.frames));
        ep_cli_table_cell(table, "%" PRIu64, w.wait_max_us);
    }
    return ep_cli_table_print(table, stdout);
}

/* The waits are the client's and include calls before the measurement. Sorts the latencies. */
static bool print_result(ep_cli_bench_result *result, ep_client *client)
{
    if (ep_cli_output_format == EP_CLI_JSON) {
        return print_json(result, client);
    }
    bool good = print_whole(result) && putchar('\n') != EOF;
    if (good && wanted.comm_alg == EP_MOE_COMM_AUTO) {
        print_choice(result);
    }
    return good && print_stages(result) && putchar('\n') != EOF && print_waits(client);
}

/* ---- */

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_client *client = NULL;
    ep_cli_bench_result result = {0};
    ep_layer_desc layer;
    wanted.traceparent = ep_cli_trace_parent();
    wanted.deadline_us = ep_cli_peer.timeout_us;
    ep_err err = ep_cli_connect_client(&ep_cli_peer, &client, out_error);
    err = err != EP_OK ? err : ep_cli_bench_find_layer(client, &wanted, &layer, out_error);
    err = err != EP_OK ? err : ep_cli_bench_run(client, &wanted, &layer, &result, out_error);
    ep_cli_trace_report();
    call->failed = err == EP_OK && !print_result(&result, client);
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
           "With --comm-alg auto it also prints how many calls went by hierarchy and why, and what "
           "either algorithm was expected to take.\n\n"
           "Examples:\n"
           "  expertctl bench --model demo --layer 0 --tokens 8 --threads 4\n"
           "  expertctl bench --model demo --layer 0 --tokens 1024 \\\n"
           "      --mode prefill --seconds 10 -o json\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options, &ep_cli_trace_options,
             &ep_cli_numerics_options},
    .run = run,
};
