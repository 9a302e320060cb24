/* SPDX-License-Identifier: Apache-2.0 */
#include "layer_options.h"

#include "arguments.h"
#include "expertd/gate.h"
#include "moe/routing_table.h"

enum {
    KEY_MODEL = 0x600,
    KEY_VERSION,
    KEY_LAYER,
    KEY_IN,
    KEY_LOGITS,
    KEY_NOISE,
    KEY_DROPOUT,
    KEY_GATE_SEED,
    KEY_MODE,
    KEY_WIRE,
    KEY_COMM_ALG,
    KEY_COMBINE_AT,
    KEY_DISPATCH_QUANT,
    KEY_COMBINE_QUANT,
    KEY_OUT_DTYPE,
    KEY_WEIGHT_ON,
    KEY_SHARED,
    KEY_NAN,
    KEY_ALLOW_DUPLICATES
};

/* as ep_moe_mode */
static const char *const mode_words[] = {"auto", "decode", "prefill", NULL};
/* as ep_moe_comm */
static const char *const comm_words[] = {"auto", "fullmesh", "hierarchy", NULL};
/* as ep_moe_combine_at */
static const char *const combine_words[] = {"rows", "node_sum", NULL};
/* as quant_numbers */
static const char *const quant_words[] = {"plain", "int8", "fp8", NULL};
static const ep_moe_dispatch_quant quant_numbers[] = {EP_MOE_DISPATCH_PLAIN, EP_MOE_DISPATCH_INT8,
                                                      EP_MOE_DISPATCH_FP8};
static const char *const back_words[] = {"plain", "int8", NULL};
/* as ep_moe_weight_on */
static const char *const weight_words[] = {"output", "input", NULL};
static const char *const nan_words[] = {"pass", "reject", "zero", "mean", NULL}; /* as ep_moe_nan */
static const char *const shared_words[] = {"service", "none", NULL};
static const char *const dtype_words[] = {"bf16", "f16", "f32", NULL};

void ep_cli_layer_options_init(ep_cli_layer_options *out_options)
{
    *out_options = (ep_cli_layer_options){.out_dtype = EP_DTYPE_NONE};
    ep_moe_args_init(&out_options->args);
}

static ep_dtype dtype_of(struct argp_state *state, const char *option, const char *text)
{
    return ep_dtype_from_name(dtype_words[ep_cli_arg_word(state, option, text, dtype_words)]);
}

static error_t parse_wish(int key, char *arg, struct argp_state *state,
                          ep_cli_layer_options *options)
{
    ep_moe_args *args = &options->args;
    switch (key) {
    case KEY_MODE:
        args->mode = (ep_moe_mode)ep_cli_arg_word(state, "--mode", arg, mode_words);
        return 0;
    case KEY_WIRE:
        args->wire_dtype = dtype_of(state, "--wire", arg);
        return 0;
    case KEY_COMM_ALG:
        args->comm_alg = (ep_moe_comm)ep_cli_arg_word(state, "--comm-alg", arg, comm_words);
        return 0;
    case KEY_COMBINE_AT:
        args->combine_at =
            (ep_moe_combine_at)ep_cli_arg_word(state, "--combine-at", arg, combine_words);
        return 0;
    case KEY_DISPATCH_QUANT:
        args->dispatch_quant =
            quant_numbers[ep_cli_arg_word(state, "--dispatch-quant", arg, quant_words)];
        return 0;
    case KEY_COMBINE_QUANT:
        args->combine_quant = ep_cli_arg_word(state, "--combine-quant", arg, back_words) == 0
                                  ? EP_MOE_COMBINE_PLAIN
                                  : EP_MOE_COMBINE_INT8;
        return 0;
    case KEY_OUT_DTYPE:
        options->out_dtype = dtype_of(state, "--out-dtype", arg);
        return 0;
    case KEY_WEIGHT_ON:
        args->weight_on =
            (ep_moe_weight_on)ep_cli_arg_word(state, "--weight-on", arg, weight_words);
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

static error_t parse(int key, char *arg, struct argp_state *state)
{
    ep_cli_layer_options *options = state->input;
    switch (key) {
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
    case KEY_LOGITS:
        options->logits = arg;
        return 0;
    case KEY_NOISE:
        options->noise_temperature = ep_cli_arg_float(state, "--noise-temperature", arg,
                                                      EP_GATE_NOISE_MIN, EP_GATE_NOISE_MAX);
        return 0;
    case KEY_DROPOUT:
        options->expert_dropout =
            ep_cli_arg_float(state, "--expert-dropout", arg, 0, EP_GATE_DROPOUT_MAX);
        return 0;
    case KEY_GATE_SEED:
        options->gate_seed = ep_cli_arg_whole(state, "--gate-seed", arg, 0, UINT64_MAX);
        return 0;
    default:
        return parse_wish(key, arg, state, options);
    }
}

static const struct argp_option option_list[] = {
    {"model", KEY_MODEL, "NAME", 0, "The model, as expertctl status names it (required)", 1},
    {"version", KEY_VERSION, "V", 0, "Version of the model (default: the service's default for it)",
     1},
    {"layer", KEY_LAYER, "L", 0,
     "The MoE layer; expertctl table --model NAME lists them (required)", 1},
    {"in", KEY_IN, "FILE", 0,
     "Safetensors with x [T,H], expert_ids [T,K], expert_scales [T,K]; for int8 x also x_scales "
     "[T]; "
     "optional active_mask; with --logits logits [T,E] instead of ids and scales, and token_ids "
     "[T] for a layer that routes by them",
     1},
    {"logits", KEY_LOGITS, "DIR", 0,
     "FILE of --in has logits [T,E] f32; the router of the checkpoint in DIR chooses experts by "
     "them",
     1},
    {"noise-temperature", KEY_NOISE, "T", 0,
     "Gumbel noise times T is added to the logits (0.1..10; default: none)", 1},
    {"expert-dropout", KEY_DROPOUT, "P", 0,
     "Chance that an expert is left out for a token (0..0.5; default: 0)", 1},
    {"gate-seed", KEY_GATE_SEED, "N", 0, "Of noise and dropout (default: 0)", 1},
    {"mode", KEY_MODE, "auto|decode|prefill", 0, "How rows travel (default: auto)", 3},
    {"wire", KEY_WIRE, "bf16|f16|f32", 0, "Type an expert's row is rounded to (default: bf16)", 3},
    {"comm-alg", KEY_COMM_ALG, "auto|fullmesh|hierarchy", 0,
     "Rows straight to each owner, or once per host (default: auto, which is fullmesh)", 3},
    {"combine-at", KEY_COMBINE_AT, "rows|node_sum", 0,
     "Where rows are summed (default: rows, the exact sum)", 3},
    {"dispatch-quant", KEY_DISPATCH_QUANT, "plain|int8|fp8", 0,
     "Rows of x in 8 bits on their way to the nodes (default: plain)", 3},
    {"combine-quant", KEY_COMBINE_QUANT, "plain|int8", 0,
     "Experts' rows in 8 bits on their way back (default: plain)", 3},
    {"out-dtype", KEY_OUT_DTYPE, "bf16|f16|f32", 0, "Type of y (default: that of x; bf16 for int8)",
     3},
    {"weight-on", KEY_WEIGHT_ON, "output|input", 0, "Where the scale is applied (default: output)",
     3},
    {"shared", KEY_SHARED, "service|none", 0, "Shared experts (default: service)", 3},
    {"nan", KEY_NAN, "pass|reject|zero|mean", 0, "Values of x that are not finite (default: pass)",
     3},
    {"allow-duplicates", KEY_ALLOW_DUPLICATES, NULL, 0, "A token may name an expert twice", 3},
    {0},
};
const struct argp ep_cli_layer_argp = {option_list, parse, NULL, NULL, NULL, NULL, NULL};

void ep_cli_layer_require(struct argp_state *state, const ep_cli_layer_options *options)
{
    ep_cli_arg_required(state, "--model", options->args.model);
    ep_cli_arg_required(state, "--layer", options->has_layer ? options : NULL);
    const bool is_random = options->noise_temperature > 0 || options->expert_dropout > 0;
    if (options->logits == NULL && (is_random || options->gate_seed != 0)) {
        argp_error(state, "--noise-temperature, --expert-dropout or --gate-seed is given without "
                          "--logits: the router takes them");
    }
    if (!is_random && options->gate_seed != 0) {
        argp_error(state, "--gate-seed is given without --noise-temperature and --expert-dropout, "
                          "which draw by it");
    }
}

ep_dtype ep_cli_layer_out_dtype(const ep_cli_layer_options *options, const ep_cli_batch *batch)
{
    if (options->out_dtype != EP_DTYPE_NONE) {
        return options->out_dtype;
    }
    return batch->x.dtype == EP_DTYPE_I8 ? EP_DTYPE_BF16 : batch->x.dtype;
}

const char *ep_cli_layer_missing(const ep_cli_layer_options *options, const ep_cli_batch *batch)
{
    if (options->logits != NULL) {
        return batch->logits.rank == 0 ? "logits" : NULL;
    }
    return batch->expert_ids.rank == 0 ? "expert_ids" : NULL;
}

void ep_cli_layer_args(const ep_cli_layer_options *options, const ep_cli_batch *batch,
                       int64_t first, int64_t count, ep_moe_args *out_args)
{
    *out_args = options->args;
    out_args->x = ep_cli_tensor_rows(&batch->x, first, count);
    out_args->x_scales = ep_cli_tensor_rows(&batch->x_scales, first, count);
    if (options->logits == NULL) {
        out_args->expert_ids = ep_cli_tensor_rows(&batch->expert_ids, first, count);
        out_args->expert_scales = ep_cli_tensor_rows(&batch->expert_scales, first, count);
    }
    out_args->active_mask = ep_cli_tensor_rows(&batch->active_mask, first, count);
}
