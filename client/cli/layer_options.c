/* SPDX-License-Identifier: Apache-2.0 */
#include "layer_options.h"

#include "base/check.h"
#include "expertd/gate.h"
#include "moe/routing_table.h"

ep_cli_layer_options ep_cli_layer_wanted = {.out_dtype = EP_DTYPE_NONE};

/* Where the places of the words are not the numbers of the interface. */
const unsigned ep_cli_dtype_numbers[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};
static const unsigned dispatch_numbers[] = {EP_MOE_DISPATCH_PLAIN, EP_MOE_DISPATCH_INT8,
                                            EP_MOE_DISPATCH_FP8};
static const unsigned combine_numbers[] = {EP_MOE_COMBINE_PLAIN, EP_MOE_COMBINE_INT8};
static const unsigned shared_numbers[] = {EP_MOE_SHARED_SERVICE, EP_MOE_SHARED_NONE};

static void init(void)
{
    ep_moe_args_init(&ep_cli_layer_wanted.args);
}

static const ep_cli_option rows[] = {
    {"model", 0, "NAME", "The model, as expertctl status names it (required)", 1,
     .text = &ep_cli_layer_wanted.args.model, .max = EP_MODEL_NAME_BYTES - 1},
    {"version", 0, "V", "Version of the model (default: the service's default for it)", 1,
     .text = &ep_cli_layer_wanted.args.version, .max = EP_VERSION_BYTES - 1},
    {"layer", 0, "L", "The MoE layer; expertctl table --model NAME lists them (required)", 1,
     .u32 = &ep_cli_layer_wanted.args.layer, .max = UINT32_MAX,
     .given = &ep_cli_layer_wanted.has_layer},
    {"in", 0, "FILE",
     "Safetensors with x [T,H], expert_ids [T,K], expert_scales [T,K]; for int8 x also x_scales "
     "[T]; optional active_mask; with --logits logits [T,E] instead of ids and scales, and "
     "token_ids [T] for a layer that routes by them",
     1, .text = &ep_cli_layer_wanted.in},
    {"logits", 0, "DIR",
     "FILE of --in has logits [T,E] f32; the router of the checkpoint in DIR chooses experts by "
     "them",
     1, .text = &ep_cli_layer_wanted.logits},
    {"noise-temperature", 0, "T",
     "Gumbel noise times T is added to the logits (0.1..10; default: none)", 1,
     .f32 = &ep_cli_layer_wanted.noise_temperature, .least = EP_GATE_NOISE_MIN,
     .most = EP_GATE_NOISE_MAX},
    {"expert-dropout", 0, "P", "Chance that an expert is left out for a token (0..0.5; default: 0)",
     1, .f32 = &ep_cli_layer_wanted.expert_dropout, .most = EP_GATE_DROPOUT_MAX},
    {"gate-seed", 0, "N", "Of noise and dropout (default: 0)", 1,
     .u64 = &ep_cli_layer_wanted.gate_seed, .max = UINT64_MAX},
    {"mode", 0, "auto|decode|prefill", "How rows travel (default: auto)", 3,
     .word = &ep_cli_layer_wanted.args.mode},
    {"wire", 0, "bf16|f16|f32", "Type an expert's row is rounded to (default: bf16)", 3,
     .word = &ep_cli_layer_wanted.args.wire_dtype, .numbers = ep_cli_dtype_numbers},
    {"comm-alg", 0, "default|fullmesh|hierarchy|auto",
     "Rows straight to each owner, or once per host; auto: by measured times (default: fullmesh)",
     3, .word = &ep_cli_layer_wanted.args.comm_alg},
    {"combine-at", 0, "rows|node_sum", "Where rows are summed (default: rows, the exact sum)", 3,
     .word = &ep_cli_layer_wanted.args.combine_at},
    {"dispatch-quant", 0, "plain|int8|fp8",
     "Rows of x in 8 bits on their way to the nodes (default: plain)", 3,
     .word = &ep_cli_layer_wanted.args.dispatch_quant, .numbers = dispatch_numbers},
    {"combine-quant", 0, "plain|int8", "Experts' rows in 8 bits on their way back (default: plain)",
     3, .word = &ep_cli_layer_wanted.args.combine_quant, .numbers = combine_numbers},
    {"out-dtype", 0, "bf16|f16|f32", "Type of y (default: that of x; bf16 for int8)", 3,
     .word = &ep_cli_layer_wanted.out_dtype, .numbers = ep_cli_dtype_numbers},
    {"weight-on", 0, "output|input", "Where the scale is applied (default: output)", 3,
     .word = &ep_cli_layer_wanted.args.weight_on},
    {"shared", 0, "service|none", "Shared experts (default: service)", 3,
     .word = &ep_cli_layer_wanted.args.shared_source, .numbers = shared_numbers},
    {"nan", 0, "pass|reject|zero|mean", "Values of x that are not finite (default: pass)", 3,
     .word = &ep_cli_layer_wanted.args.nan_policy},
    {"allow-duplicates", 0, NULL, "A token may name an expert twice", 3,
     .flag = &ep_cli_layer_wanted.args.allow_duplicates},
};

const ep_cli_options ep_cli_layer_set = {.rows = rows, .count = EP_ARRAY_COUNT(rows), .init = init};
const ep_cli_options ep_cli_layer_of_frame_set = {
    .rows = rows,
    .count = EP_ARRAY_COUNT(rows),
    .init = init,
    .heading = "A batch for expertd.v1.Gateway/Forward, instead of --json and --tensors:",
    .group = 3};

void ep_cli_layer_require(struct argp_state *state)
{
    const ep_cli_layer_options *options = &ep_cli_layer_wanted;
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

ep_dtype ep_cli_layer_out_dtype(const ep_cli_batch *batch)
{
    if (ep_cli_layer_wanted.out_dtype != EP_DTYPE_NONE) {
        return ep_cli_layer_wanted.out_dtype;
    }
    return batch->x.dtype == EP_DTYPE_I8 ? EP_DTYPE_BF16 : batch->x.dtype;
}

const char *ep_cli_layer_missing(const ep_cli_batch *batch)
{
    if (ep_cli_layer_wanted.logits != NULL) {
        return batch->logits.rank == 0 ? "logits" : NULL;
    }
    return batch->expert_ids.rank == 0 ? "expert_ids" : NULL;
}

void ep_cli_layer_args(const ep_cli_batch *batch, int64_t first, int64_t count,
                       ep_moe_args *out_args)
{
    *out_args = ep_cli_layer_wanted.args;
    out_args->x = ep_cli_tensor_rows(&batch->x, first, count);
    out_args->x_scales = ep_cli_tensor_rows(&batch->x_scales, first, count);
    if (ep_cli_layer_wanted.logits == NULL) {
        out_args->expert_ids = ep_cli_tensor_rows(&batch->expert_ids, first, count);
        out_args->expert_scales = ep_cli_tensor_rows(&batch->expert_scales, first, count);
    }
    out_args->active_mask = ep_cli_tensor_rows(&batch->active_mask, first, count);
}
