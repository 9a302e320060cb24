/* SPDX-License-Identifier: Apache-2.0 */
#include "layer_options.h"

#include <float.h>
#include <string.h>

#include "base/check.h"
#include "common/args.h"
#include "expertd/gate.h"
#include "moe/flow.h"
#include "moe/routing_table.h"
#include "wire/gateway_codec.h"
#include "wire/moe_parameters.h"

ep_cli_layer_options ep_cli_layer_wanted = {.out_dtype = EP_DTYPE_NONE};

/* For words whose indexes are not the numbers of the interface. */
const unsigned ep_cli_dtype_numbers[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};
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
     "[T]; optional active_mask [T] or [T,K]; partial_slots, shared, smooth_scales, const_alpha1, "
     "const_alpha2, const_v with the options that use them; with --logits logits [T,E] instead of "
     "ids and scales, and token_ids [T] for a layer that routes by them",
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
    {"out-dtype", 0, "bf16|f16|f32", "Type of y (default: that of x; bf16 for int8)", 3,
     .word = &ep_cli_layer_wanted.out_dtype, .numbers = ep_cli_dtype_numbers},
    {"tenant", 0, "NAME", "Whose call it is, for limits and counts (default: none)", 3,
     .text = &ep_cli_layer_wanted.args.tenant, .max = EP_TENANT_BYTES - 1},
#define EP_CHOICE(field, option, words_, numbers_, help)                                           \
    {option, 0, words_, help, 3, .word = &ep_cli_layer_wanted.args.field, .numbers = (numbers_)},
#define EP_COUNT(field, option, most_, help)                                                       \
    {option, 0, "N", help, 3, .u32 = &ep_cli_layer_wanted.args.field, .max = (most_)},
#define EP_NUMBER(field, option, help)                                                             \
    {option, 0, "N", help, 3, .u64 = &ep_cli_layer_wanted.args.field, .max = UINT64_MAX},
#define EP_REAL(field, option, help)                                                               \
    {option, 0, "X", help, 3, .f32 = &ep_cli_layer_wanted.args.field, .most = FLT_MAX},
#define EP_FLAG(field, option, help)                                                               \
    {option, 0, NULL, help, 3, .flag = &ep_cli_layer_wanted.args.field},
#include "wire/moe_parameters.def"
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
    if (options->logits != NULL &&
        (options->args.zero_experts != 0 || options->args.copy_experts != 0)) {
        argp_error(state, "--zero-experts or --copy-experts is given with --logits: the "
                          "checkpoint's router says how many there are");
    }
    if (options->args.const_experts != 0 && options->in == NULL) {
        argp_error(state, "--const-experts is given without --in: FILE has their tables "
                          "const_alpha1, const_alpha2 and const_v");
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
    return batch->args.x.dtype == EP_DTYPE_I8 ? EP_DTYPE_BF16 : batch->args.x.dtype;
}

static const char *missing_table(const ep_moe_args *args)
{
    return ep_cli_layer_wanted.args.const_experts == 0 ? NULL
           : args->const_alpha1.rank == 0              ? "const_alpha1"
           : args->const_alpha2.rank == 0              ? "const_alpha2"
           : args->const_v.rank == 0                   ? "const_v"
                                                       : NULL;
}

const char *ep_cli_layer_missing(const ep_cli_batch *batch)
{
    if (ep_cli_layer_wanted.logits != NULL) {
        return batch->logits.rank == 0 ? "logits" : missing_table(&batch->args);
    }
    return batch->args.expert_ids.rank == 0 ? "expert_ids" : missing_table(&batch->args);
}

const char *ep_cli_layer_missing_hint(const char *missing)
{
    return strncmp(missing, "const_", 6) == 0
               ? "; --const-experts N takes const_alpha1, const_alpha2 and const_v [N,H] of x's "
                 "type from there: add them, or leave the option out"
           : ep_cli_layer_wanted.logits != NULL ? ""
                                                : "; with --logits it may have logits instead";
}

void ep_cli_layer_args(const ep_cli_batch *batch, int64_t first, int64_t count,
                       ep_moe_args *out_args)
{
    ep_moe_args all = batch->args;
    ep_moe_tensor row;
    *out_args = ep_cli_layer_wanted.args;
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        const ep_tensor *tensor = ep_moe_tensor_of(&row, &all);
        *ep_moe_tensor_of(&row, out_args) =
            row.dims[0] == 'T' ? ep_cli_tensor_rows(tensor, first, count) : *tensor;
    }
    if (ep_cli_layer_wanted.logits != NULL) {
        out_args->expert_ids = out_args->expert_scales = ep_tensor_none();
    }
}
