/* SPDX-License-Identifier: Apache-2.0 */
/*
 * expertctl forward: one MoE layer on a batch from a file, or on random tokens. Equal results give
 * byte-identical output files, whatever nodes, placement, mode and split.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "base/check.h"
#include "command_table.h"
#include "connect.h"
#include "exit_code.h"
#include "gate_options.h"
#include "gateway_call.h"
#include "layer_options.h"
#include "model/safetensors_writer.h"
#include "moe/flow.h"
#include "output.h"
#include "random_batch.h"
#include "trace_option.h"
#include "wire/frame.h"

enum {
    KEY_OUT = 0x200,
    KEY_SPLIT,
    KEY_SPLIT_TOKENS,
    KEY_RESULT,
    KEY_GATEWAY,
    KEY_RANDOM,
    KEY_SEED
};

#define SEED_DEFAULT 1
#define NAMES_BYTES 1024

static const char *const mode_words[] = {"auto", "decode", "prefill"}; /* as ep_moe_mode */
static const char *const result_words[] = {"combined", "uncombined", NULL};

typedef struct forward_options {
    ep_cli_connect connect;
    ep_cli_format format;
    ep_cli_trace trace;
    ep_cli_layer_options layer;
    const char *out;        /* NULL: y is not kept */
    uint32_t random_tokens; /* 0: a batch from a file */
    uint64_t seed;
    bool has_seed;
    uint32_t *split; /* tokens of each call, or NULL */
    size_t split_count;
    uint32_t split_tokens; /* 0: not given */
    bool gateway;
} forward_options;

/* Whom the calls go to, and how ids are made. */
typedef struct forward_service {
    ep_client *client; /* or */
    ep_cli_gateway *gateway;
    const ep_cli_gate *gate; /* NULL: ids are given */
} forward_service;

typedef struct forward_totals {
    uint64_t calls;
    uint64_t frames;
    uint64_t rerouted_frames;
    uint64_t total_us;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint32_t nodes;
    char node_names[NAMES_BYTES]; /* " a b"; "": the gateway does not tell */
    uint32_t y_crc;               /* CRC32C of y */
    ep_moe_result last;
} forward_totals;

static void parse_split(struct argp_state *state, forward_options *options, char *text)
{
    size_t count = 1;
    for (const char *c = text; *c != '\0'; c++) {
        count += *c == ',';
    }
    if (count > EP_TOKENS_MAX) {
        argp_error(state, "--split has %zu parts, allowed: 1..%d", count, EP_TOKENS_MAX);
    }
    free(options->split);
    options->split = calloc(count, sizeof(*options->split));
    if (options->split == NULL) {
        argp_error(state, "--split: no memory for %zu parts", count);
    }
    options->split_count = 0;
    for (char *part; (part = strsep(&text, ",")) != NULL;) {
        options->split[options->split_count++] =
            (uint32_t)ep_cli_arg_whole(state, "a part of --split", part, 0, EP_TOKENS_MAX);
    }
}

static void check_input(struct argp_state *state, const forward_options *options)
{
    if (options->random_tokens == 0 && options->layer.in == NULL) {
        argp_error(state, "--in and --random are both missing; one of them is required");
    }
    if (options->random_tokens > 0 && options->layer.in != NULL) {
        argp_error(state, "--in and --random are both given, allowed: one of them");
    }
    if (options->random_tokens > 0 && options->layer.logits != NULL) {
        argp_error(state, "--logits and --random are both given, allowed: one of them; random "
                          "tokens have experts");
    }
    if (options->random_tokens == 0 && options->has_seed) {
        argp_error(state, "--seed is given without --random; a batch of --in is what it is");
    }
    if (options->random_tokens == 0) {
        ep_cli_arg_required(state, "--out", options->out);
    }
}

static void check_options(struct argp_state *state, const forward_options *options)
{
    ep_cli_layer_require(state, &options->layer);
    check_input(state, options);
    if (options->gateway && options->connect.coordinator_url == NULL) {
        argp_error(state, "--gateway and --node are both given: the gateway is the coordinator's");
    }
    if (options->gateway && options->connect.numerics != NULL) {
        argp_error(state, "--gateway and --numerics are both given: the gateway chooses the id");
    }
    if (options->gateway && (options->layer.args.comm_alg != EP_MOE_COMM_AUTO ||
                             options->layer.args.combine_at != EP_MOE_COMBINE_ROWS)) {
        argp_error(state, "--comm-alg or --combine-at, allowed with --gateway: neither");
    }
    if (options->gateway && (options->layer.args.dispatch_quant != EP_MOE_DISPATCH_PLAIN ||
                             options->layer.args.combine_quant != EP_MOE_COMBINE_PLAIN)) {
        argp_error(state, "--dispatch-quant or --combine-quant, allowed with --gateway: plain");
    }
    if (options->gateway && options->layer.args.result != EP_MOE_COMBINED) {
        argp_error(state, "--result uncombined, allowed with --gateway: combined");
    }
    if (options->split != NULL && options->split_tokens > 0) {
        argp_error(state, "--split and --split-tokens are both given, allowed: one of them");
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    forward_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        state->child_inputs[2] = &options->trace;
        state->child_inputs[3] = &options->layer;
        state->child_inputs[4] = &options->connect;
        return 0;
    case KEY_OUT:
        options->out = arg;
        return 0;
    case KEY_SPLIT:
        parse_split(state, options, arg);
        return 0;
    case KEY_SPLIT_TOKENS:
        options->split_tokens =
            (uint32_t)ep_cli_arg_whole(state, "--split-tokens", arg, 1, EP_TOKENS_MAX);
        return 0;
    case KEY_GATEWAY:
        options->gateway = true;
        return 0;
    case KEY_RANDOM:
        options->random_tokens =
            (uint32_t)ep_cli_arg_whole(state, "--random", arg, 1, EP_TOKENS_MAX);
        return 0;
    case KEY_SEED:
        options->seed = ep_cli_arg_whole(state, "--seed", arg, 0, UINT64_MAX);
        options->has_seed = true;
        return 0;
    case KEY_RESULT:
        options->layer.args.result = ep_cli_arg_word(state, "--result", arg, result_words) == 0
                                         ? EP_MOE_COMBINED
                                         : EP_MOE_UNCOMBINED;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    case ARGP_KEY_END:
        check_options(state, options);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    {"random", KEY_RANDOM, "T", 0,
     "T random tokens for random experts, instead of --in: no file is needed", 1},
    {"seed", KEY_SEED, "S", 0, "Of --random: the same seed, the same tokens (default: 1)", 1},
    {"out", KEY_OUT, "FILE", 0,
     "Gets the tensor y, safetensors; replaced as a whole (required with --in)", 1},
    {"split", KEY_SPLIT, "N,N,...", 0,
     "Cut the batch into calls of these token counts; they add up to T", 2},
    {"split-tokens", KEY_SPLIT_TOKENS, "N", 0, "Cut the batch into calls of N tokens", 2},
    {"gateway", KEY_GATEWAY, NULL, 0, "The coordinator routes: one connection, to it alone", 2},
    {"result", KEY_RESULT, "combined|uncombined", 0,
     "y [T,H], or one row per slot [T,K,H] (default: combined)", 3},
    {0},
};
static const struct argp_child children[] = {
    {&ep_cli_connect_argp, 0, NULL, 0},  {&ep_cli_output_argp, 0, NULL, 0},
    {&ep_cli_trace_argp, 0, NULL, 0},    {&ep_cli_layer_argp, 0, NULL, 0},
    {&ep_cli_numerics_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    option_list,
    parse,
    "--model NAME --layer L --in FILE --out FILE\n--model NAME --layer L --random T [--out FILE]",
    "Runs one MoE layer on a batch from a file, or on random tokens, writes the result to a file "
    "and says what it "
    "was: shape, checksum, nodes, time."
    "\vEqual results give byte-identical files and the same checksum, whatever nodes, mode and "
    "split.\n\n"
    "Examples:\n"
    "  expertctl forward --model demo --layer 0 --random 4\n"
    "  expertctl forward --model demo --layer 0 --in x.safetensors \\\n"
    "      --out y.safetensors\n"
    "  expertctl forward --model demo --layer 0 --in x.safetensors \\\n"
    "      --out y.safetensors --mode prefill --split-tokens 64 \\\n"
    "      --node tcp://127.0.0.1:7420\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

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

static ep_err run_part(const forward_service *service, const forward_options *options,
                       const ep_cli_batch *batch, const ep_tensor *out, int64_t first,
                       int64_t count, forward_totals *totals, ep_error *out_error)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor part = ep_cli_tensor_rows(out, first, count);
    ep_tensor logits = ep_cli_tensor_rows(&batch->logits, first, count);
    ep_cli_layer_args(&options->layer, batch, first, count, &args);
    args.want_timing = service->client != NULL; /* so that the nodes are known by name */
    ep_gate_config gate = {0};
    if (service->gate != NULL) {
        gate = ep_cli_gate_config(service->gate, &options->layer, first, &args);
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
    totals->total_us += result.total_us;
    totals->bytes_sent += result.bytes_sent;
    totals->bytes_received += result.bytes_received;
    totals->nodes = result.nodes > totals->nodes ? result.nodes : totals->nodes;
    totals->last = result;
    return EP_OK;
}

static ep_err run_parts(const forward_service *service, const forward_options *options,
                        const ep_cli_batch *batch, const ep_tensor *out, forward_totals *totals,
                        ep_error *out_error)
{
    int64_t step = options->split_tokens > 0 ? (int64_t)options->split_tokens : batch->tokens;
    int64_t first = 0;
    size_t part = 0;
    ep_err err;
    do { /* once for T = 0 too */
        int64_t left = batch->tokens - first;
        int64_t count = options->split != NULL ? (int64_t)options->split[part]
                        : step < left          ? step
                                               : left;
        err = run_part(service, options, batch, out, first, count, totals, out_error);
        first += count;
        part++;
    } while (err == EP_OK &&
             (options->split != NULL ? part < options->split_count : first < batch->tokens));
    return err;
}

static size_t elements(const ep_tensor *tensor)
{
    size_t count = 1;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        count *= (size_t)tensor->shape[i];
    }
    return count;
}

static ep_err allocate_out(const forward_options *options, const ep_cli_batch *batch,
                           ep_tensor *out_tensor, ep_error *out_error)
{
    ep_dtype dtype = ep_cli_layer_out_dtype(&options->layer, batch);
    bool uncombined = options->layer.args.result == EP_MOE_UNCOMBINED;
    size_t bytes = ep_dtype_bytes(dtype);
    if (!ep_mul_size(bytes, (size_t)batch->tokens, &bytes) ||
        !ep_mul_size(bytes, (size_t)batch->hidden, &bytes) ||
        !ep_mul_size(bytes, uncombined ? (size_t)batch->top_k : 1, &bytes)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "the result of %" PRId64 " tokens would not fit in memory",
                            batch->tokens);
    }
    void *data = calloc(bytes > 0 ? bytes : 1, 1);
    if (data == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a result of %zu bytes",
                            bytes);
    }
    *out_tensor = uncombined ? ep_tensor_3d(data, dtype, batch->tokens, batch->top_k, batch->hidden)
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

static json_t *totals_json(const forward_options *options, const ep_cli_batch *batch,
                           const ep_tensor *y, const forward_totals *totals)
{
    char checksum[16];
    json_t *x_json = tensor_json(&batch->x);
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
    if (options->random_tokens > 0) {
        json_object_set_new(x_json, "seed", json_integer((json_int_t)options->seed));
    }
    snprintf(checksum, sizeof(checksum), "%08" PRIx32, totals->y_crc);
    json_object_set_new(y_json, "crc32c", json_string(checksum));
    return json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:{s:I, s:I}, s:s, s:o, s:o, s:o}", "tokens",
        (json_int_t)batch->tokens, "calls", (json_int_t)totals->calls, "nodes",
        (json_int_t)totals->nodes, "frames", (json_int_t)totals->frames, "rerouted_frames",
        (json_int_t)totals->rerouted_frames, "total_us", (json_int_t)totals->total_us, "bytes_sent",
        (json_int_t)totals->bytes_sent, "bytes_received", (json_int_t)totals->bytes_received,
        "numerics", ep_cli_json_text(totals->last.numerics), "epoch", "term",
        (json_int_t)totals->last.epoch_term, "number", (json_int_t)totals->last.epoch_number,
        "mode", mode_words[totals->last.mode], "node_names", names, "x", x_json, "y", y_json);
}

static bool print_totals(const forward_options *options, const ep_cli_batch *batch,
                         const ep_tensor *y, const forward_totals *totals)
{
    char x_text[96];
    char y_text[96];
    char seed[48] = "";
    if (options->format == EP_CLI_JSON) {
        return ep_cli_json_print(totals_json(options, batch, y, totals), stdout);
    }
    shape_text(&batch->x, x_text, sizeof(x_text));
    shape_text(y, y_text, sizeof(y_text));
    if (options->random_tokens > 0) {
        snprintf(seed, sizeof(seed), ", random with seed %" PRIu64, options->seed);
    }
    ep_cli_line(stdout, "layer   %" PRIu32 " of model %s", options->layer.args.layer,
                options->layer.args.model);
    ep_cli_line(stdout, "x       %s%s%s", x_text, options->layer.in != NULL ? " of " : seed,
                options->layer.in != NULL ? options->layer.in : "");
    ep_cli_line(stdout, "y       %s, CRC32C %08" PRIx32 "%s%s", y_text, totals->y_crc,
                options->out != NULL ? ", in " : "", options->out != NULL ? options->out : "");
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
    return ferror(stdout) == 0;
}

/* Those whose answers were used. */
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

/* out_y: allocated, also on an error where its data is not NULL. */
static ep_err run_batch(const forward_options *options, const ep_cli_batch *batch,
                        forward_totals *totals, ep_tensor *out_y, ep_error *out_error)
{
    forward_service service = {.client = NULL};
    ep_cli_gate gate = {.chosen = NULL};
    ep_err err = allocate_out(options, batch, out_y, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (options->layer.logits != NULL) {
        err = ep_cli_gate_read(options->layer.logits, options->layer.args.layer, &gate, out_error);
        err = err == EP_OK ? ep_cli_gate_choose(&gate, options->layer.in, batch, out_error) : err;
        service.gate = &gate;
    }
    if (err == EP_OK) {
        err = options->gateway
                  ? ep_cli_gateway_open(&options->connect, &service.gateway, out_error)
                  : ep_cli_connect_client(&options->connect, &service.client, out_error);
    }
    err = err != EP_OK ? err : run_parts(&service, options, batch, out_y, totals, out_error);
    if (err == EP_OK && service.client != NULL) {
        read_node_names(service.client, totals->node_names);
    }
    ep_cli_gateway_close(service.gateway);
    ep_client_destroy(service.client);
    ep_cli_gate_fini(&gate);
    if (err == EP_OK) {
        totals->y_crc = ep_crc32c(0, out_y->data, ep_dtype_bytes(out_y->dtype) * elements(out_y));
    }
    if (err == EP_OK && options->out != NULL) {
        const ep_named_tensor named = {.name = "y", .tensor = *out_y};
        err = ep_safetensors_write(options->out, &named, 1, NULL, 0, out_error);
    }
    return err;
}

/* 0, or the exit code after saying what is wrong. */
static int check_batch(const char *program, const forward_options *options,
                       const ep_cli_batch *batch)
{
    int64_t sum = 0;
    const char *missing = ep_cli_layer_missing(&options->layer, batch);
    if (missing != NULL) {
        fprintf(stderr, "%s: there is no tensor %s in %s%s\n", program, missing, options->layer.in,
                options->layer.logits != NULL ? "" : "; with --logits it may have logits instead");
        return EP_CLI_EXIT_USAGE;
    }
    for (size_t i = 0; i < options->split_count; i++) {
        sum += options->split[i];
    }
    if (options->split != NULL && sum != batch->tokens) {
        fprintf(stderr,
                "%s: --split adds up to %" PRId64 " tokens, allowed: %" PRId64
                ", the tokens of %s%s\n",
                program, sum, batch->tokens, options->layer.in != NULL ? "x in " : "",
                options->layer.in != NULL ? options->layer.in : "--random");
        return EP_CLI_EXIT_USAGE;
    }
    return EP_CLI_EXIT_OK;
}

static int run(int argc, char **argv)
{
    static forward_options options = {.seed = SEED_DEFAULT};
    forward_totals totals = {0};
    ep_cli_batch batch;
    ep_tensor y = ep_tensor_none();
    ep_error error;
    ep_cli_connect_init(&options.connect);
    ep_cli_layer_options_init(&options.layer);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    options.layer.args.traceparent = ep_cli_trace_parent(&options.trace);
    ep_err err = options.random_tokens > 0
                     ? ep_cli_batch_random(&options.connect, &options.layer.args,
                                           options.random_tokens, options.seed, &batch, &error)
                     : ep_cli_batch_read(options.layer.in, &batch, &error);
    if (err != EP_OK) {
        free(options.split);
        return ep_cli_fail(argv[0], &error);
    }
    if (batch.ignored[0] != '\0') {
        fprintf(stderr, "%s: %s: not used: %s\n", argv[0], options.layer.in, batch.ignored);
    }
    int code = check_batch(argv[0], &options, &batch);
    if (code == EP_CLI_EXIT_OK) {
        err = run_batch(&options, &batch, &totals, &y, &error);
        ep_cli_trace_report(&options.trace);
        code = err != EP_OK ? ep_cli_fail(argv[0], &error) : EP_CLI_EXIT_OK;
    }
    if (code == EP_CLI_EXIT_OK && !print_totals(&options, &batch, &y, &totals)) {
        code = EP_CLI_EXIT_FAILED;
    }
    free(y.data);
    ep_cli_batch_free(&batch);
    free(options.split);
    return code;
}

const ep_cli_command ep_cli_forward = {
    "forward", "runs one MoE layer on a batch from a file, or on random tokens", &argp, run, NULL};
