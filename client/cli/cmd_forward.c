/* SPDX-License-Identifier: Apache-2.0 */
/*
 * expertctl forward: one MoE layer on a batch from a file. Equal results give byte-identical output files,
 * whatever nodes, placement, mode and split.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "base/check.h"
#include "batch_file.h"
#include "command_table.h"
#include "connect.h"
#include "exit_code.h"
#include "gate_options.h"
#include "gateway_call.h"
#include "model/safetensors_writer.h"
#include "moe/flow.h"
#include "moe/routing_table.h"
#include "output.h"
#include "trace_option.h"

enum {
    KEY_MODEL = 0x200,
    KEY_VERSION,
    KEY_LAYER,
    KEY_IN,
    KEY_OUT,
    KEY_MODE,
    KEY_SPLIT,
    KEY_SPLIT_TOKENS,
    KEY_RESULT,
    KEY_WIRE,
    KEY_OUT_DTYPE,
    KEY_WEIGHT_ON,
    KEY_SHARED,
    KEY_NAN,
    KEY_ALLOW_DUPLICATES,
    KEY_GATEWAY,
    KEY_LOGITS
};

static const char *const mode_words[] = {"auto", "decode", "prefill", NULL};     /* as ep_moe_mode */
static const char *const weight_words[] = {"output", "input", NULL};             /* as ep_moe_weight_on */
static const char *const nan_words[] = {"pass", "reject", "zero", "mean", NULL}; /* as ep_moe_nan */
static const char *const result_words[] = {"combined", "uncombined", NULL};
static const char *const shared_words[] = {"service", "none", NULL};
static const char *const dtype_words[] = {"bf16", "f16", "f32", NULL};

typedef struct forward_options {
    ep_cli_connect connect;
    ep_cli_format format;
    ep_cli_trace trace;
    const char *in;
    const char *out;
    ep_moe_args args; /* the wishes; tensors come from the file */
    bool has_layer;
    ep_dtype out_dtype; /* NONE: that of x, bf16 for int8 */
    uint32_t *split;    /* tokens of each call, or NULL */
    size_t split_count;
    uint32_t split_tokens; /* 0: not given */
    bool gateway;
    const char *logits; /* checkpoint whose router turns logits into ids and scales; NULL: ids are given */
} forward_options;

/* Whom the calls go to, and how ids are made. */
typedef struct forward_service {
    ep_client *client;       /* or */
    ep_cli_gateway *gateway;
    const ep_gate_config *gate; /* NULL: ids are given */
} forward_service;

typedef struct forward_totals {
    uint64_t calls;
    uint64_t frames;
    uint64_t rerouted_frames;
    uint64_t total_us;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint32_t nodes;
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

static ep_dtype dtype_of(struct argp_state *state, const char *option, const char *text)
{
    return ep_dtype_from_name(dtype_words[ep_cli_arg_word(state, option, text, dtype_words)]);
}

static error_t parse_wish(int key, char *arg, struct argp_state *state, forward_options *options)
{
    ep_moe_args *args = &options->args;
    switch (key) {
    case KEY_MODE:
        args->mode = (ep_moe_mode)ep_cli_arg_word(state, "--mode", arg, mode_words);
        return 0;
    case KEY_RESULT:
        args->result =
            ep_cli_arg_word(state, "--result", arg, result_words) == 0 ? EP_MOE_COMBINED : EP_MOE_UNCOMBINED;
        return 0;
    case KEY_WIRE:
        args->wire_dtype = dtype_of(state, "--wire", arg);
        return 0;
    case KEY_OUT_DTYPE:
        options->out_dtype = dtype_of(state, "--out-dtype", arg);
        return 0;
    case KEY_WEIGHT_ON:
        args->weight_on = (ep_moe_weight_on)ep_cli_arg_word(state, "--weight-on", arg, weight_words);
        return 0;
    case KEY_SHARED:
        args->shared_source = ep_cli_arg_word(state, "--shared", arg, shared_words) == 0
                                  ? EP_MOE_SHARED_SERVICE
                                  : EP_MOE_SHARED_NONE;
        return 0;
    case KEY_NAN:
        args->nan_policy = (ep_moe_nan)ep_cli_arg_word(state, "--nan", arg, nan_words);
        return 0;
    case KEY_ALLOW_DUPLICATES:
        args->allow_duplicates = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void check_options(struct argp_state *state, const forward_options *options)
{
    ep_cli_arg_required(state, "--model", options->args.model);
    ep_cli_arg_required(state, "--layer", options->has_layer ? options : NULL);
    ep_cli_arg_required(state, "--in", options->in);
    ep_cli_arg_required(state, "--out", options->out);
    if (options->gateway && options->connect.coordinator_url == NULL) {
        argp_error(state, "--gateway and --node are both given: the gateway is the coordinator's");
    }
    if (options->gateway && options->args.result != EP_MOE_COMBINED) {
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
        return 0;
    case KEY_MODEL:
        options->args.model = ep_cli_arg_text(state, "--model", arg, EP_MODEL_NAME_BYTES - 1);
        return 0;
    case KEY_VERSION:
        options->args.version = ep_cli_arg_text(state, "--version", arg, EP_VERSION_BYTES - 1);
        return 0;
    case KEY_LAYER:
        options->args.layer = (uint32_t)ep_cli_arg_whole(state, "--layer", arg, 0, UINT32_MAX);
        options->has_layer = true;
        return 0;
    case KEY_IN:
        options->in = arg;
        return 0;
    case KEY_OUT:
        options->out = arg;
        return 0;
    case KEY_SPLIT:
        parse_split(state, options, arg);
        return 0;
    case KEY_SPLIT_TOKENS:
        options->split_tokens = (uint32_t)ep_cli_arg_whole(state, "--split-tokens", arg, 1, EP_TOKENS_MAX);
        return 0;
    case KEY_GATEWAY:
        options->gateway = true;
        return 0;
    case KEY_LOGITS:
        options->logits = arg;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    case ARGP_KEY_END:
        check_options(state, options);
        return 0;
    default:
        return parse_wish(key, arg, state, options);
    }
}

static const struct argp_option option_list[] = {
    {"model", KEY_MODEL, "NAME", 0, "The model (required)", 1},
    {"version", KEY_VERSION, "V", 0, "Version of the model (default: the only one there is)", 1},
    {"layer", KEY_LAYER, "L", 0, "The MoE layer (required)", 1},
    {"in", KEY_IN, "FILE", 0,
     "Safetensors with x [T,H], expert_ids [T,K], expert_scales [T,K]; for int8 x also x_scales [T]; "
     "optional active_mask; with --logits logits [T,E] instead of ids and scales (required)",
     1},
    {"out", KEY_OUT, "FILE", 0, "Gets the tensor y, safetensors; replaced as a whole (required)", 1},
    {"mode", KEY_MODE, "auto|decode|prefill", 0, "How rows travel (default: auto)", 2},
    {"split", KEY_SPLIT, "N,N,...", 0, "Cut the batch into calls of these token counts; they add up to T", 2},
    {"split-tokens", KEY_SPLIT_TOKENS, "N", 0, "Cut the batch into calls of N tokens", 2},
    {"gateway", KEY_GATEWAY, NULL, 0, "The coordinator routes: one connection, to it alone", 2},
    {"logits", KEY_LOGITS, "DIR", 0,
     "FILE of --in has logits [T,E] f32; the router of the checkpoint in DIR chooses experts by them", 2},
    {"result", KEY_RESULT, "combined|uncombined", 0,
     "y [T,H], or one row per slot [T,K,H] (default: combined)", 3},
    {"wire", KEY_WIRE, "bf16|f16|f32", 0, "Type an expert's row is rounded to (default: bf16)", 3},
    {"out-dtype", KEY_OUT_DTYPE, "bf16|f16|f32", 0, "Type of y (default: that of x; bf16 for int8)", 3},
    {"weight-on", KEY_WEIGHT_ON, "output|input", 0, "Where the scale is applied (default: output)", 3},
    {"shared", KEY_SHARED, "service|none", 0, "Shared experts (default: service)", 3},
    {"nan", KEY_NAN, "pass|reject|zero|mean", 0, "Values of x that are not finite (default: pass)", 3},
    {"allow-duplicates", KEY_ALLOW_DUPLICATES, NULL, 0, "A token may name an expert twice", 3},
    {0},
};
static const struct argp_child children[] = {
    {&ep_cli_connect_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {&ep_cli_trace_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    option_list,
    parse,
    "--model NAME --layer L --in FILE --out FILE",
    "Runs one MoE layer on a batch from a file and writes the result to a file."
    "\vEqual results give byte-identical files, whatever nodes, mode and split.\n\n"
    "Examples:\n"
    "  expertctl forward --model demo --layer 0 --in x.safetensors \\\n"
    "      --out y.safetensors\n"
    "  expertctl forward --model demo --layer 0 --in x.safetensors \\\n"
    "      --out y.safetensors --mode prefill --split-tokens 64 \\\n"
    "      --node tcp://127.0.0.1:7420\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

/* ---- the calls ---- */

static ep_err call_service(const forward_service *service, const ep_moe_args *args, const ep_tensor *logits, const ep_tensor *out,
                           ep_moe_result *out_result)
{
    if (service->gateway != NULL) {
        return ep_cli_gateway_forward(service->gateway, args, service->gate, logits, out, out_result);
    }
    return service->gate != NULL ? ep_moe_forward_logits(service->client, args, service->gate, logits, out, out_result)
                                 : ep_moe_forward(service->client, args, out, out_result);
}

static ep_err run_part(const forward_service *service, const forward_options *options, const ep_cli_batch *batch,
                       const ep_tensor *out, int64_t first, int64_t count, forward_totals *totals,
                       ep_error *out_error)
{
    ep_moe_args args = options->args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor part = ep_cli_tensor_rows(out, first, count);
    args.x = ep_cli_tensor_rows(&batch->x, first, count);
    args.x_scales = ep_cli_tensor_rows(&batch->x_scales, first, count);
    ep_tensor logits = ep_cli_tensor_rows(&batch->logits, first, count);
    if (service->gate == NULL) {
        args.expert_ids = ep_cli_tensor_rows(&batch->expert_ids, first, count);
        args.expert_scales = ep_cli_tensor_rows(&batch->expert_scales, first, count);
    }
    args.active_mask = ep_cli_tensor_rows(&batch->active_mask, first, count);
    ep_err err = call_service(service, &args, &logits, &part, &result);
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

static ep_err run_parts(const forward_service *service, const forward_options *options, const ep_cli_batch *batch,
                        const ep_tensor *out, forward_totals *totals, ep_error *out_error)
{
    int64_t step = options->split_tokens > 0 ? (int64_t)options->split_tokens : batch->tokens;
    int64_t first = 0;
    size_t part = 0;
    ep_err err;
    do { /* once for T = 0 too */
        int64_t left = batch->tokens - first;
        int64_t count = options->split != NULL ? (int64_t)options->split[part] : step < left ? step : left;
        err = run_part(service, options, batch, out, first, count, totals, out_error);
        first += count;
        part++;
    } while (err == EP_OK && (options->split != NULL ? part < options->split_count : first < batch->tokens));
    return err;
}

static ep_err allocate_out(const forward_options *options, const ep_cli_batch *batch, ep_tensor *out_tensor,
                           ep_error *out_error)
{
    ep_dtype dtype = options->out_dtype != EP_DTYPE_NONE ? options->out_dtype
                     : batch->x.dtype == EP_DTYPE_I8     ? EP_DTYPE_BF16
                                                         : batch->x.dtype;
    bool uncombined = options->args.result == EP_MOE_UNCOMBINED;
    size_t bytes = ep_dtype_bytes(dtype);
    if (!ep_mul_size(bytes, (size_t)batch->tokens, &bytes) ||
        !ep_mul_size(bytes, (size_t)batch->hidden, &bytes) ||
        !ep_mul_size(bytes, uncombined ? (size_t)batch->top_k : 1, &bytes)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: the result would not fit in memory",
                            options->in);
    }
    void *data = calloc(bytes > 0 ? bytes : 1, 1);
    if (data == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a result of %zu bytes", bytes);
    }
    *out_tensor = uncombined ? ep_tensor_3d(data, dtype, batch->tokens, batch->top_k, batch->hidden)
                             : ep_tensor_2d(data, dtype, batch->tokens, batch->hidden);
    return EP_OK;
}

static bool print_totals(const forward_options *options, const ep_cli_batch *batch,
                         const forward_totals *totals)
{
    if (options->format == EP_CLI_JSON) {
        return ep_cli_json_print(
            json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:{s:I, s:I}, s:s}", "tokens",
                      (json_int_t)batch->tokens, "calls", (json_int_t)totals->calls, "nodes",
                      (json_int_t)totals->nodes, "frames", (json_int_t)totals->frames, "rerouted_frames",
                      (json_int_t)totals->rerouted_frames, "total_us", (json_int_t)totals->total_us,
                      "bytes_sent", (json_int_t)totals->bytes_sent, "bytes_received",
                      (json_int_t)totals->bytes_received, "numerics", ep_cli_json_text(totals->last.numerics),
                      "epoch", "term", (json_int_t)totals->last.epoch_term, "number",
                      (json_int_t)totals->last.epoch_number, "mode", mode_words[totals->last.mode]),
            stdout);
    }
    ep_cli_table *table = ep_cli_table_create(
        ">TOKENS|>CALLS|>NODES|>FRAMES|>RE-ROUTED|>MICROSECONDS|>BYTES OUT|>BYTES IN|MODE");
    if (table == NULL) {
        return false;
    }
    ep_cli_table_cell(table, "%" PRId64, batch->tokens);
    ep_cli_table_cell(table, "%" PRIu64, totals->calls);
    ep_cli_table_cell(table, "%" PRIu32, totals->nodes);
    ep_cli_table_cell(table, "%" PRIu64, totals->frames);
    ep_cli_table_cell(table, "%" PRIu64, totals->rerouted_frames);
    ep_cli_table_cell(table, "%" PRIu64, totals->total_us);
    ep_cli_table_cell(table, "%" PRIu64, totals->bytes_sent);
    ep_cli_table_cell(table, "%" PRIu64, totals->bytes_received);
    ep_cli_table_cell(table, "%s", mode_words[totals->last.mode]);
    bool good = ep_cli_table_print(table, stdout);
    ep_cli_table_destroy(table);
    return good;
}

static ep_err run_file(const forward_options *options, const ep_cli_batch *batch, forward_totals *totals,
                       ep_error *out_error)
{
    forward_service service = {.client = NULL};
    ep_gate_config gate;
    float *bias = NULL;
    ep_named_tensor named = {.name = "y"};
    ep_err err = allocate_out(options, batch, &named.tensor, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (options->logits != NULL) {
        err = ep_cli_gate_read(options->logits, options->args.layer, &gate, &bias, out_error);
        service.gate = &gate;
    }
    if (err == EP_OK) {
        err = options->gateway ? ep_cli_gateway_open(&options->connect, &service.gateway, out_error)
                               : ep_cli_connect_client(&options->connect, &service.client, out_error);
    }
    err = err != EP_OK ? err : run_parts(&service, options, batch, &named.tensor, totals, out_error);
    ep_cli_gateway_close(service.gateway);
    ep_client_destroy(service.client);
    free(bias);
    err = err != EP_OK ? err : ep_safetensors_write(options->out, &named, 1, NULL, 0, out_error);
    free(named.tensor.data);
    return err;
}

/* 0, or the exit code after saying what is wrong. */
static int check_batch(const char *program, const forward_options *options, const ep_cli_batch *batch)
{
    int64_t sum = 0;
    const char *missing = options->logits != NULL ? (batch->logits.rank == 0 ? "logits" : NULL)
                          : batch->expert_ids.rank == 0 ? "expert_ids" : NULL;
    if (missing != NULL) {
        fprintf(stderr, "%s: there is no tensor %s in %s%s\n", program, missing, options->in,
                options->logits != NULL ? "" : "; with --logits it may have logits instead");
        return EP_CLI_EXIT_USAGE;
    }
    for (size_t i = 0; i < options->split_count; i++) {
        sum += options->split[i];
    }
    if (options->split != NULL && sum != batch->tokens) {
        fprintf(stderr,
                "%s: --split adds up to %" PRId64 " tokens, allowed: %" PRId64 ", the tokens of x in %s\n",
                program, sum, batch->tokens, options->in);
        return EP_CLI_EXIT_USAGE;
    }
    return EP_CLI_EXIT_OK;
}

static int run(int argc, char **argv)
{
    static forward_options options;
    forward_totals totals = {0};
    ep_cli_batch batch;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    ep_moe_args_init(&options.args);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    options.args.traceparent = ep_cli_trace_parent(&options.trace);
    ep_err err = ep_cli_batch_read(options.in, &batch, &error);
    if (err != EP_OK) {
        free(options.split);
        return ep_cli_fail(argv[0], &error);
    }
    int code = check_batch(argv[0], &options, &batch);
    if (code == EP_CLI_EXIT_OK) {
        err = run_file(&options, &batch, &totals, &error);
        ep_cli_trace_report(&options.trace);
        code = err != EP_OK ? ep_cli_fail(argv[0], &error) : EP_CLI_EXIT_OK;
    }
    if (code == EP_CLI_EXIT_OK && !print_totals(&options, &batch, &totals)) {
        code = EP_CLI_EXIT_FAILED;
    }
    ep_cli_batch_free(&batch);
    free(options.split);
    return code;
}

const ep_cli_command ep_cli_forward = {"forward", "runs one MoE layer on a batch from a safetensors file",
                                       &argp, run};
