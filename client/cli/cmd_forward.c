/* SPDX-License-Identifier: Apache-2.0 */
/*
 * expertctl forward: runs one MoE layer on a batch from a file or on random tokens. Output files
 * are byte-identical for any nodes, placement, mode and split.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "batch_file.h"
#include "bench.h"
#include "command_table.h"
#include "connect.h"
#include "gate_options.h"
#include "gateway_call.h"
#include "layer_options.h"
#include "model/safetensors_writer.h"
#include "moe/flow.h"
#include "placement.h"
#include "trace_option.h"
#include "wire/frame.h"

#define SEED_DEFAULT 1
#define NAMES_BYTES 1024

static const char *const mode_words[] = {"auto", "decode", "prefill"}; /* as ep_moe_mode */

static struct {
    const char *out;        /* NULL: y is not written */
    uint32_t random_tokens; /* 0: a batch from a file */
    uint64_t seed;
    bool has_seed;
    uint32_t *split; /* tokens of each call, or NULL */
    size_t split_count;
    uint32_t split_tokens; /* 0: not given */
    bool gateway;
} wanted = {.seed = SEED_DEFAULT};

/* Where calls go, and how ids are made. */
typedef struct forward_service {
    ep_client *client; /* or */
    ep_cli_gateway *gateway;
    const ep_cli_gate *gate; /* NULL: ids are given */
} forward_service;

typedef struct forward_totals {
    uint64_t calls;
    uint64_t frames;
    uint64_t rerouted_frames;
    uint64_t missing;
    uint64_t total_us;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint32_t nodes;
    char node_names[NAMES_BYTES]; /* " a b"; "": not known with a gateway */
    uint32_t y_crc;               /* CRC32C of y */
    ep_moe_result last;
} forward_totals;

static void take_split(struct argp_state *state, const char *option, char *text)
{
    size_t count = 1;
    for (const char *c = text; *c != '\0'; c++) {
        count += *c == ',';
    }
    if (count > EP_TOKENS_MAX) {
        argp_error(state, "%s has %zu parts, allowed: 1..%d", option, count, EP_TOKENS_MAX);
    }
    free(wanted.split);
    wanted.split = calloc(count, sizeof(*wanted.split));
    if (wanted.split == NULL) {
        argp_error(state, "%s: no memory for %zu parts", option, count);
    }
    wanted.split_count = 0;
    for (char *part; (part = strsep(&text, ",")) != NULL;) {
        wanted.split[wanted.split_count++] =
            (uint32_t)ep_cli_arg_whole(state, "a part of --split", part, 0, EP_TOKENS_MAX);
    }
}

static void check_input(struct argp_state *state)
{
    if (wanted.random_tokens == 0 && ep_cli_layer_wanted.in == NULL) {
        argp_error(state, "--in and --random are both missing; one of them is required");
    }
    if (wanted.random_tokens > 0 && ep_cli_layer_wanted.in != NULL) {
        argp_error(state, "--in and --random are both given, allowed: one of them");
    }
    if (wanted.random_tokens > 0 && ep_cli_layer_wanted.logits != NULL) {
        argp_error(state, "--logits and --random are both given, allowed: one of them; random "
                          "tokens have experts");
    }
    if (wanted.random_tokens == 0 && wanted.has_seed) {
        argp_error(state, "--seed is given without --random; a batch of --in is what it is");
    }
    if (wanted.random_tokens == 0) {
        ep_cli_arg_required(state, "--out", wanted.out);
    }
}

static void check_options(struct argp_state *state)
{
    ep_cli_layer_require(state);
    check_input(state);
    ep_cli_gateway_check(state, wanted.gateway);
    if (wanted.split != NULL && wanted.split_tokens > 0) {
        argp_error(state, "--split and --split-tokens are both given, allowed: one of them");
    }
}

static const ep_cli_option rows[] = {
    {"random", 0, "T", "T random tokens for random experts, instead of --in: no file is needed", 1,
     .u32 = &wanted.random_tokens, .min = 1, .max = EP_TOKENS_MAX},
    {"seed", 0, "S", "Of --random: the same seed, the same tokens (default: 1)", 1,
     .u64 = &wanted.seed, .max = UINT64_MAX, .given = &wanted.has_seed},
    {"out", 0, "FILE", "Gets the tensor y, safetensors; replaced as a whole (required with --in)",
     1, .text = &wanted.out},
    {"split", 0, "N,N,...", "Cut the batch into calls of these token counts; they add up to T", 2,
     .take = take_split},
    {"split-tokens", 0, "N", "Cut the batch into calls of N tokens", 2, .u32 = &wanted.split_tokens,
     .min = 1, .max = EP_TOKENS_MAX},
    {"gateway", 0, NULL, "The coordinator routes: one connection, to it alone", 2,
     .flag = &wanted.gateway},
};

/* ---- the calls ---- */

static ep_err call_service(const forward_service *service, const ep_moe_args *args,
                           const ep_gate_config *gate, const ep_tensor *logits,
                           const ep_tensor *out, ep_moe_result *out_result)
{
    if (service->gateway != NULL) {
        return ep_cli_gateway_forward(service->gateway, args, gate, logits, out, out_result);
    }
    return gate != NULL
               ? ep_moe_forward_logits(service->client, args, gate, logits, out, out_result)
               : ep_moe_forward(service->client, args, out, out_result);
}

static ep_err run_part(const forward_service *service, const ep_cli_batch *batch,
                       const ep_tensor *out, int64_t first, int64_t count, forward_totals *totals,
                       ep_error *out_error)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor part = ep_cli_tensor_rows(out, first, count);
    ep_tensor logits = ep_cli_tensor_rows(&batch->logits, first, count);
    ep_cli_layer_args(batch, first, count, &args);
    args.want_timing = service->client != NULL; /* for the names of the nodes */
    ep_gate_config gate = {0};
    if (service->gate != NULL) {
        gate = ep_cli_gate_config(service->gate, first, &args);
    }
    ep_err err =
        call_service(service, &args, service->gate != NULL ? &gate : NULL, &logits, &part, &result);
    if (err != EP_OK) {
        *out_error = result.error;
        out_error->code = err;
        return err;
    }
    totals->calls++;
    totals->frames += result.frames;
    totals->rerouted_frames += result.rerouted_frames;
    totals->missing += result.missing_count;
    totals->total_us += result.total_us;
    totals->bytes_sent += result.bytes_sent;
    totals->bytes_received += result.bytes_received;
    totals->nodes = result.nodes > totals->nodes ? result.nodes : totals->nodes;
    totals->last = result;
    return EP_OK;
}

static ep_err run_parts(const forward_service *service, const ep_cli_batch *batch,
                        const ep_tensor *out, forward_totals *totals, ep_error *out_error)
{
    int64_t step = wanted.split_tokens > 0 ? (int64_t)wanted.split_tokens : batch->tokens;
    int64_t first = 0;
    size_t part = 0;
    ep_err err;
    do { /* also once for T = 0 */
        int64_t left = batch->tokens - first;
        int64_t count = wanted.split != NULL ? (int64_t)wanted.split[part]
                        : step < left        ? step
                                             : left;
        err = run_part(service, batch, out, first, count, totals, out_error);
        first += count;
        part++;
    } while (err == EP_OK &&
             (wanted.split != NULL ? part < wanted.split_count : first < batch->tokens));
    return err;
}

static ep_err allocate_out(const ep_cli_batch *batch, int64_t top_k, ep_tensor *out_tensor,
                           ep_error *out_error)
{
    ep_dtype dtype = ep_cli_layer_out_dtype(batch);
    bool uncombined = ep_cli_layer_wanted.args.result == EP_MOE_UNCOMBINED;
    size_t bytes = ep_dtype_bytes(dtype);
    if (!ep_mul_size(bytes, (size_t)batch->tokens, &bytes) ||
        !ep_mul_size(bytes, (size_t)batch->hidden, &bytes) ||
        !ep_mul_size(bytes, uncombined ? (size_t)top_k : 1, &bytes)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "the result of %" PRId64 " tokens would not fit in memory",
                            batch->tokens);
    }
    void *data = calloc(bytes > 0 ? bytes : 1, 1);
    if (data == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a result of %zu bytes",
                            bytes);
    }
    *out_tensor = uncombined ? ep_tensor_3d(data, dtype, batch->tokens, top_k, batch->hidden)
                             : ep_tensor_2d(data, dtype, batch->tokens, batch->hidden);
    return EP_OK;
}

static void shape_text(const ep_tensor *tensor, char *out_text, size_t bytes)
{
    size_t used = 0;
    for (uint32_t i = 0; i < tensor->rank && used < bytes; i++) {
        used += (size_t)snprintf(out_text + used, bytes - used, "%s%" PRId64, i > 0 ? "," : "[",
                                 tensor->shape[i]);
    }
    snprintf(out_text + used, bytes - used, "] %s", ep_dtype_name(tensor->dtype));
}

static json_t *tensor_json(const ep_tensor *tensor)
{
    json_t *shape = json_array();
    for (uint32_t i = 0; i < tensor->rank; i++) {
        json_array_append_new(shape, json_integer(tensor->shape[i]));
    }
    return json_pack("{s:o, s:s}", "shape", shape, "dtype", ep_dtype_name(tensor->dtype));
}

static json_t *totals_json(const ep_cli_batch *batch, const ep_tensor *y,
                           const forward_totals *totals)
{
    char checksum[16];
    json_t *x_json = tensor_json(&batch->args.x);
    json_t *y_json = tensor_json(y);
    json_t *names = json_array();
    char list[NAMES_BYTES];
    char *rest = list;
    snprintf(list, sizeof(list), "%s", totals->node_names);
    for (char *name; (name = strsep(&rest, " ")) != NULL;) {
        if (name[0] != '\0') {
            json_array_append_new(names, ep_cli_json_text(name));
        }
    }
    if (wanted.random_tokens > 0) {
        json_object_set_new(x_json, "seed", json_integer((json_int_t)wanted.seed));
    }
    snprintf(checksum, sizeof(checksum), "%08" PRIx32, totals->y_crc);
    json_object_set_new(y_json, "crc32c", json_string(checksum));
    return json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:{s:I, s:I}, s:s, s:o, s:o, s:o}",
        "tokens", (json_int_t)batch->tokens, "calls", (json_int_t)totals->calls, "nodes",
        (json_int_t)totals->nodes, "frames", (json_int_t)totals->frames, "rerouted_frames",
        (json_int_t)totals->rerouted_frames, "missing", (json_int_t)totals->missing, "total_us",
        (json_int_t)totals->total_us, "bytes_sent", (json_int_t)totals->bytes_sent,
        "bytes_received", (json_int_t)totals->bytes_received, "numerics",
        ep_cli_json_text(totals->last.numerics), "epoch", "term",
        (json_int_t)totals->last.epoch_term, "number", (json_int_t)totals->last.epoch_number,
        "mode", mode_words[totals->last.mode], "node_names", names, "x", x_json, "y", y_json);
}

static bool print_totals(const ep_cli_batch *batch, const ep_tensor *y,
                         const forward_totals *totals)
{
    char x_text[96];
    char y_text[96];
    char seed[48] = "";
    if (ep_cli_output_format == EP_CLI_JSON) {
        return ep_cli_json_print(totals_json(batch, y, totals), stdout);
    }
    shape_text(&batch->args.x, x_text, sizeof(x_text));
    shape_text(y, y_text, sizeof(y_text));
    if (wanted.random_tokens > 0) {
        snprintf(seed, sizeof(seed), ", random with seed %" PRIu64, wanted.seed);
    }
    ep_cli_line(stdout, "layer   %" PRIu32 " of model %s", ep_cli_layer_wanted.args.layer,
                ep_cli_layer_wanted.args.model);
    ep_cli_line(stdout, "x       %s%s%s", x_text, ep_cli_layer_wanted.in != NULL ? " of " : seed,
                ep_cli_layer_wanted.in != NULL ? ep_cli_layer_wanted.in : "");
    ep_cli_line(stdout, "y       %s, CRC32C %08" PRIx32 "%s%s", y_text, totals->y_crc,
                wanted.out != NULL ? ", in " : "", wanted.out != NULL ? wanted.out : "");
    if (totals->node_names[0] != '\0') {
        ep_cli_line(stdout, "nodes  %s", totals->node_names);
    } else {
        ep_cli_line(stdout, "nodes   %" PRIu32 ", behind the gateway", totals->nodes);
    }
    ep_cli_line(stdout, "time    %.3f ms, %" PRIu64 " call%s, mode %s",
                (double)totals->total_us / 1e3, totals->calls, totals->calls == 1 ? "" : "s",
                mode_words[totals->last.mode]);
    ep_cli_line(
        stdout, "frames  %" PRIu64 ", %" PRIu64 " re-routed; bytes %" PRIu64 " out, %" PRIu64 " in",
        totals->frames, totals->rerouted_frames, totals->bytes_sent, totals->bytes_received);
    if (totals->missing > 0) {
        ep_cli_line(stdout, "missing %" PRIu64 " rows, counted as 0", totals->missing);
    }
    return ferror(stdout) == 0;
}

/* Names of the nodes whose answers were used. */
static void read_node_names(ep_client *client, char out_names[NAMES_BYTES])
{
    ep_client_node_waits waits = {.struct_bytes = sizeof(waits)};
    size_t used = 0;
    for (uint32_t i = 0; ep_client_read_waits(client, i, &waits) == EP_OK && used < NAMES_BYTES;
         i++) {
        if (waits.frames > 0) {
            used += (size_t)snprintf(out_names + used, NAMES_BYTES - used, " %s", waits.node);
        }
    }
}

/* out_y: free its data, also after an error. */
static ep_err run_batch(const ep_cli_batch *batch, forward_totals *totals, ep_tensor *out_y,
                        ep_error *out_error)
{
    forward_service service = {.client = NULL};
    ep_cli_gate gate = {.chosen = NULL};
    int64_t top_k = batch->top_k;
    ep_err err = EP_OK;
    if (ep_cli_layer_wanted.logits != NULL) {
        err = ep_cli_gate_read(ep_cli_layer_wanted.logits, ep_cli_layer_wanted.args.layer, &gate,
                               out_error);
        err = err == EP_OK ? ep_cli_gate_choose(&gate, ep_cli_layer_wanted.in, batch, out_error)
                           : err;
        service.gate = &gate;
        top_k = gate.layer.config.top_k;
    }
    err = err == EP_OK ? allocate_out(batch, top_k, out_y, out_error) : err;
    if (err == EP_OK) {
        err = wanted.gateway ? ep_cli_gateway_open(&ep_cli_peer, &service.gateway, out_error)
                             : ep_cli_connect_client(&ep_cli_peer, &service.client, out_error);
    }
    err = err != EP_OK ? err : run_parts(&service, batch, out_y, totals, out_error);
    if (err == EP_OK && service.client != NULL) {
        read_node_names(service.client, totals->node_names);
    }
    ep_cli_gateway_close(service.gateway);
    ep_client_destroy(service.client);
    ep_cli_gate_fini(&gate);
    if (err == EP_OK) {
        totals->y_crc = ep_crc32c(0, out_y->data, ep_cli_tensor_bytes(out_y));
    }
    if (err == EP_OK && wanted.out != NULL) {
        const ep_named_tensor named = {.name = "y", .tensor = *out_y};
        err = ep_safetensors_write(wanted.out, &named, 1, NULL, 0, out_error);
    }
    return err;
}

/* Prints what is wrong and returns the exit code; 0: nothing. */
static int check_batch(const char *program, const ep_cli_batch *batch)
{
    int64_t sum = 0;
    const char *missing = ep_cli_layer_missing(batch);
    if (missing != NULL) {
        fprintf(stderr, "%s: there is no tensor %s in %s%s\n", program, missing,
                ep_cli_layer_wanted.in, ep_cli_layer_missing_hint(missing));
        return EP_CLI_EXIT_USAGE;
    }
    for (size_t i = 0; i < wanted.split_count; i++) {
        sum += wanted.split[i];
    }
    if (wanted.split != NULL && sum != batch->tokens) {
        fprintf(stderr,
                "%s: --split adds up to %" PRId64 " tokens, allowed: %" PRId64
                ", the tokens of %s%s\n",
                program, sum, batch->tokens, ep_cli_layer_wanted.in != NULL ? "x in " : "",
                ep_cli_layer_wanted.in != NULL ? ep_cli_layer_wanted.in : "--random");
        return EP_CLI_EXIT_USAGE;
    }
    return EP_CLI_EXIT_OK;
}

/* ---- random tokens ---- */

/* Makes random tokens for the layer in the options, after asking for its shape. */
static ep_err make_random(ep_cli_batch *out_batch, ep_error *out_error)
{
    const ep_moe_args *args = &ep_cli_layer_wanted.args;
    const uint32_t tokens = wanted.random_tokens;
    ep_routing_table *table = NULL;
    ep_cli_bench_batch random = {0};
    uint32_t model = 0;
    ep_err err = ep_cli_placement_read(NULL, &ep_cli_peer, &table, out_error);
    if (err != EP_OK) {
        return err;
    }
    const bool has_model =
        ep_routing_table_find_model(table, args->model, args->version, &model) != NULL;
    const ep_routing_layer *layer =
        has_model ? ep_routing_table_find_layer(table, model, args->layer) : NULL;
    if (layer == NULL) {
        err = ep_cli_placement_missing(table, args->model, args->version,
                                       has_model ? (int64_t)args->layer : -1, out_error);
        ep_routing_table_unref(table);
        return err;
    }
    const ep_layer_shape *shape = &layer->shape;
    const ep_layer_desc desc = {.hidden = shape->hidden, .experts = shape->experts};
    if (!ep_cli_bench_batch_fill(&random, &desc, tokens, shape->top_k, wanted.seed)) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY,
                           "no memory for %" PRIu32 " tokens of %" PRIu32 " values", tokens,
                           shape->hidden);
    } else {
        *out_batch = (ep_cli_batch){.tokens = tokens,
                                    .top_k = shape->top_k,
                                    .hidden = shape->hidden,
                                    .logits = ep_tensor_none(),
                                    .token_ids = ep_tensor_none()};
        ep_moe_args *inputs = &out_batch->args;
        ep_moe_args_init(inputs);
        inputs->x = ep_tensor_2d(random.x, EP_DTYPE_BF16, tokens, shape->hidden);
        inputs->expert_ids = ep_tensor_2d(random.ids, EP_DTYPE_I32, tokens, shape->top_k);
        inputs->expert_scales = ep_tensor_2d(random.scales, EP_DTYPE_F32, tokens, shape->top_k);
    }
    ep_routing_table_unref(table);
    return err;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    forward_totals totals = {0};
    ep_cli_batch batch;
    ep_tensor y = ep_tensor_none();
    ep_cli_layer_wanted.args.traceparent = ep_cli_trace_parent();
    ep_err err = wanted.random_tokens > 0
                     ? make_random(&batch, out_error)
                     : ep_cli_batch_read(ep_cli_layer_wanted.in, &batch, out_error);
    if (err != EP_OK) {
        free(wanted.split);
        return err;
    }
    if (batch.ignored[0] != '\0') {
        fprintf(stderr, "%s: %s: not used: %s\n", call->program, ep_cli_layer_wanted.in,
                batch.ignored);
    }
    call->exit_code = check_batch(call->program, &batch);
    if (call->exit_code == EP_CLI_EXIT_OK) {
        err = run_batch(&batch, &totals, &y, out_error);
        ep_cli_trace_report();
        call->failed = err == EP_OK && !print_totals(&batch, &y, &totals);
    }
    free(y.data);
    ep_cli_batch_free(&batch);
    free(wanted.split);
    return err;
}

const ep_cli_command ep_cli_forward = {
    .name = "forward",
    .help = "runs one MoE layer on a batch from a file, or on random tokens",
    .args = "--model NAME --layer L --in FILE --out FILE\n--model NAME --layer L --random T [--out "
            "FILE]",
    .doc = "Runs one MoE layer on a batch from a file, or on random tokens, writes the result to a "
           "file and says what it was: shape, checksum, nodes, time."
           "\vEqual results give byte-identical files and the same checksum, whatever nodes, mode "
           "and split.\n\n"
           "Examples:\n"
           "  expertctl forward --model demo --layer 0 --random 4\n"
           "  expertctl forward --model demo --layer 0 --in x.safetensors \\\n"
           "      --out y.safetensors\n"
           "  expertctl forward --model demo --layer 0 --in x.safetensors \\\n"
           "      --out y.safetensors --mode prefill --split-tokens 64 \\\n"
           "      --node tcp://127.0.0.1:7420\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .check = check_options},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options, &ep_cli_trace_options,
             &ep_cli_layer_set, &ep_cli_numerics_options},
    .run = run,
};
