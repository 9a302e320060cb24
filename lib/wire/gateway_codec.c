/* SPDX-License-Identifier: Apache-2.0 */
/* Layout and checks of a gateway request. */
#include "wire/gateway_codec.h"

#include <inttypes.h>
#include <string.h>

#include "base/buffer.h"
#include "base/check.h"
#include "moe/convert.h"
#include "moe/flow.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static ep_err check_range(const char *field, uint32_t value, uint32_t min, uint32_t max,
                          const char *why, ep_error *out_error)
{
    if (value >= min && value <= max) {
        return EP_OK;
    }
    return min == max ? BAD("%s %" PRIu32 ": allowed %" PRIu32 "%s", field, value, min, why)
                      : BAD("%s %" PRIu32 ": allowed %" PRIu32 "..%" PRIu32 "%s", field, value, min,
                            max, why);
}

static ep_err check_types(const Expertd__V1__GatewayForwardRequest *header, ep_error *out_error)
{
    bool gated = header->gate != NULL;
    if (header->x_dtype != EP_DTYPE_I8 && !ep_dtype_is_float((ep_dtype)header->x_dtype)) {
        return BAD("x_dtype %" PRIu32 ": allowed 1 (bf16), 2 (f16), 3 (f32), 4 (i8)",
                   header->x_dtype);
    }
    if (!ep_dtype_is_float((ep_dtype)header->out_dtype)) {
        return BAD("out_dtype %" PRIu32 ": allowed 1 (bf16), 2 (f16), 3 (f32)", header->out_dtype);
    }
    if (header->wire_dtype != EP_DTYPE_NONE && !ep_dtype_is_float((ep_dtype)header->wire_dtype)) {
        return BAD("wire_dtype %" PRIu32 ": allowed 0 (bf16), 1 (bf16), 2 (f16), 3 (f32)",
                   header->wire_dtype);
    }
    if (gated || header->top_k == 0) {
        const char *why = gated ? " with gate" : " with top_k 0";
        ep_err err = check_range("ids_dtype", header->ids_dtype, 0, 0, why, out_error);
        return err != EP_OK
                   ? err
                   : check_range("scales_dtype", header->scales_dtype, 0, 0, why, out_error);
    }
    if (header->ids_dtype != EP_DTYPE_I32 && header->ids_dtype != EP_DTYPE_I64) {
        return BAD("ids_dtype %" PRIu32 ": allowed 6 (i32), 7 (i64)", header->ids_dtype);
    }
    if (header->scales_dtype != EP_DTYPE_F32 && header->scales_dtype != EP_DTYPE_BF16) {
        return BAD("scales_dtype %" PRIu32 ": allowed 1 (bf16), 3 (f32)", header->scales_dtype);
    }
    return EP_OK;
}

static ep_err check_gate(const Expertd__V1__GatewayForwardRequest *header, ep_error *out_error)
{
    const Expertd__V1__GateConfig *gate = header->gate;
    ep_err err;
    if (gate == NULL) {
        return check_range("experts", header->experts, 0, 0, " without gate", out_error);
    }
    if ((err = check_range("experts", header->experts, 1, EP_EXPERTS_MAX, " with gate",
                           out_error)) != EP_OK ||
        (err = check_range("top_k", header->top_k, 1, EP_TOP_K_MAX, " with gate", out_error)) !=
            EP_OK ||
        (err = check_range("gate.select", gate->select, EP_GATE_LOGIT, EP_GATE_SPARSEMIXER, "",
                           out_error)) != EP_OK ||
        (err = check_range("gate.weight", gate->weight, EP_GATE_LOGIT, EP_GATE_SPARSEMIXER, "",
                           out_error)) != EP_OK ||
        (err = check_range("gate.group_best", gate->group_best, 0, 2, "", out_error)) != EP_OK ||
        (err = check_range("gate.groups", gate->groups, 0, EP_GATE_GROUPS_MAX, "", out_error)) !=
            EP_OK ||
        (err = check_range("gate.groups_kept", gate->groups_kept, 0, EP_GATE_GROUPS_MAX, "",
                           out_error)) != EP_OK) {
        return err;
    }
    return check_range("gate.group_mask", gate->group_mask, 0, EP_GROUP_MASK_MINUS_INF, "",
                       out_error);
}

static ep_err check_header(const Expertd__V1__GatewayForwardRequest *header, ep_error *out_error)
{
    ep_err err;
    if ((err = check_range("tokens", header->tokens, 0, EP_TOKENS_MAX, "", out_error)) != EP_OK ||
        (err = check_range("hidden", header->hidden, 1, EP_HIDDEN_MAX, "", out_error)) != EP_OK ||
        (err = check_range("top_k", header->top_k, 0, EP_TOP_K_MAX, "", out_error)) != EP_OK ||
        (err = check_gate(header, out_error)) != EP_OK ||
        (err = check_types(header, out_error)) != EP_OK ||
        (err = check_range("zero_experts", header->zero_experts, 0, EP_EXPERTS_MAX, "",
                           out_error)) != EP_OK ||
        (err = check_range("copy_experts", header->copy_experts, 0, EP_EXPERTS_MAX, "",
                           out_error)) != EP_OK ||
        (err = check_range("weight_on", header->weight_on, 0, EP_WEIGHT_ON_INPUT, "", out_error)) !=
            EP_OK ||
        (err = check_range("nan_policy", header->nan_policy, 0, EP_NAN_MEAN, "", out_error)) !=
            EP_OK ||
        (err = check_range("mode", header->mode, 0, EP_MODE_PREFILL, "", out_error)) != EP_OK) {
        return err;
    }
    if (header->shared != EP_SHARED_SERVICE && header->shared != EP_SHARED_NONE) {
        return BAD("shared %" PRIu32 ": allowed 0 (service), 2 (none)", header->shared);
    }
    return EP_OK;
}

/* Begins a part of rows x columns elements at the next multiple of 64 after *end; false on
 * overflow. */
static bool add_part(uint32_t rows, uint32_t columns, size_t element_bytes, size_t *end,
                     size_t *out_offset)
{
    size_t count;
    size_t bytes;
    if (*end > SIZE_MAX - EP_BUFFER_ALIGN || !ep_mul_size(rows, columns, &count) ||
        !ep_mul_size(count, element_bytes, &bytes)) {
        return false;
    }
    *out_offset = ep_align_up(*end, EP_BUFFER_ALIGN);
    return bytes == 0 || ep_add_size(*out_offset, bytes, end);
}

ep_err ep_gateway_layout_make(const Expertd__V1__GatewayForwardRequest *header,
                              ep_gateway_layout *out_layout, ep_error *out_error)
{
    ep_gateway_layout layout = {0};
    size_t end = 0;
    size_t unused;
    uint32_t tokens = header->tokens;
    bool gated = header->gate != NULL;
    ep_err err = check_header(header, out_error);
    if (err != EP_OK) {
        return err;
    }
    uint32_t slots = gated ? 0 : header->top_k;
    if (!add_part(tokens, header->hidden, ep_dtype_bytes((ep_dtype)header->x_dtype), &end,
                  &layout.x_offset) ||
        !add_part(header->x_dtype == EP_DTYPE_I8 ? tokens : 0, 1, sizeof(float), &end,
                  &layout.x_scales_offset) ||
        !add_part(tokens, slots, ep_dtype_bytes((ep_dtype)header->ids_dtype), &end,
                  &layout.ids_offset) ||
        !add_part(tokens, slots, ep_dtype_bytes((ep_dtype)header->scales_dtype), &end,
                  &layout.scales_offset) ||
        !add_part(tokens, gated ? header->experts : 0, sizeof(float), &end,
                  &layout.logits_offset) ||
        !add_part(gated && header->gate->has_bias ? header->experts : 0, 1, sizeof(float), &end,
                  &layout.bias_offset) ||
        !add_part(gated && header->gate->has_expert_factors ? header->experts : 0, 1, sizeof(float),
                  &end, &layout.factors_offset) ||
        !add_part(gated && header->gate->has_chosen ? tokens : 0, header->top_k, sizeof(int32_t),
                  &end, &layout.chosen_offset) ||
        !add_part(header->has_active_mask ? tokens : 0, 1, 1, &end, &layout.mask_offset) ||
        !add_part(tokens, header->hidden, ep_dtype_bytes((ep_dtype)header->out_dtype),
                  &layout.reply_bytes, &unused)) {
        return BAD("tokens %" PRIu32 ", hidden %" PRIu32 ", top_k %" PRIu32 ", experts %" PRIu32
                   ": the tensors do not fit in memory",
                   tokens, header->hidden, header->top_k, header->experts);
    }
    layout.total_bytes = end;
    *out_layout = layout;
    return EP_OK;
}

static void fill_gate(const Expertd__V1__GatewayForwardRequest *header, const uint8_t *tensors,
                      const ep_gateway_layout *layout, ep_gate_config *out_gate)
{
    const Expertd__V1__GateConfig *gate = header->gate;
    *out_gate = (ep_gate_config){
        .struct_bytes = sizeof(*out_gate),
        .select = (ep_gate_score)gate->select,
        .weight = (ep_gate_score)gate->weight,
        .experts = header->experts,
        .top_k = header->top_k,
        .renormalise = gate->renormalise,
        .epsilon = gate->epsilon,
        .sum_min = gate->sum_min,
        .scaling_factor = gate->scaling_factor,
        .softcap = gate->softcap,
        .jitter = gate->jitter,
        .noise_temperature = gate->noise_temperature,
        .expert_dropout = gate->expert_dropout,
        .seed = gate->seed,
        .groups = gate->groups,
        .groups_kept = gate->groups_kept,
        .group_best = gate->group_best,
        .group_mask = (ep_group_mask)gate->group_mask,
        .bias = gate->has_bias ? (const float *)(tensors + layout->bias_offset) : NULL,
        .expert_factors =
            gate->has_expert_factors ? (const float *)(tensors + layout->factors_offset) : NULL,
        .chosen = gate->has_chosen && header->tokens > 0
                      ? (const int32_t *)(tensors + layout->chosen_offset)
                      : NULL,
    };
}

ep_err ep_gateway_view_make(const Expertd__V1__GatewayForwardRequest *header,
                            const uint8_t *tensors, size_t tensor_bytes, ep_gateway_view *out_view,
                            ep_error *out_error)
{
    ep_gateway_layout layout;
    ep_err err = ep_gateway_layout_make(header, &layout, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (tensor_bytes != layout.total_bytes) {
        return BAD("the tensor section has %zu bytes: tokens %" PRIu32 ", hidden %" PRIu32
                   ", top_k %" PRIu32 ", experts %" PRIu32 " and their types need %zu",
                   tensor_bytes, header->tokens, header->hidden, header->top_k, header->experts,
                   layout.total_bytes);
    }
    bool gated = header->gate != NULL;
    bool has_tokens = header->tokens > 0;
    bool has_slots = has_tokens && !gated && header->top_k > 0;
    ep_gateway_view view = {
        .x = has_tokens ? tensors + layout.x_offset : NULL,
        .x_scales = has_tokens && header->x_dtype == EP_DTYPE_I8
                        ? (const float *)(tensors + layout.x_scales_offset)
                        : NULL,
        .ids = has_slots ? tensors + layout.ids_offset : NULL,
        .scales = has_slots ? tensors + layout.scales_offset : NULL,
        .logits = has_tokens && gated ? (const float *)(tensors + layout.logits_offset) : NULL,
        .active_mask = has_tokens && header->has_active_mask ? tensors + layout.mask_offset : NULL,
        .reply_bytes = layout.reply_bytes,
    };
    for (uint32_t t = 0; view.active_mask != NULL && t < header->tokens; t++) {
        if (view.active_mask[t] > 1) {
            return BAD("active_mask of token %" PRIu32 " is %u: allowed 0, 1", t,
                       view.active_mask[t]);
        }
    }
    if (gated) {
        fill_gate(header, tensors, &layout, &view.gate);
    }
    *out_view = view;
    return EP_OK;
}
