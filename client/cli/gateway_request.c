/* SPDX-License-Identifier: Apache-2.0 */
/* A batch laid out as the gateway reads it: each tensor at its place behind the header. */
#include "gateway_request.h"

#include <inttypes.h>
#include <string.h>

static void fill_gate(const ep_gate_config *gate, Expertd__V1__GateConfig *out_message)
{
    expertd__v1__gate_config__init(out_message);
    out_message->select = (uint32_t)gate->select;
    out_message->weight = (uint32_t)gate->weight;
    out_message->renormalise = gate->renormalise;
    out_message->epsilon = gate->epsilon;
    out_message->sum_min = gate->sum_min;
    out_message->scaling_factor = gate->scaling_factor;
    out_message->softcap = gate->softcap;
    out_message->jitter = gate->jitter;
    out_message->noise_temperature = gate->noise_temperature;
    out_message->expert_dropout = gate->expert_dropout;
    out_message->seed = gate->seed;
    out_message->groups = gate->groups;
    out_message->groups_kept = gate->groups_kept;
    out_message->group_best = gate->group_best;
    out_message->group_mask = (uint32_t)gate->group_mask;
    out_message->has_bias = gate->bias != NULL;
    out_message->has_expert_factors = gate->expert_factors != NULL;
    out_message->has_chosen = gate->chosen != NULL;
}

static void fill_header(const ep_moe_args *args, const ep_gate_config *gate,
                        Expertd__V1__GateConfig *gate_message, ep_dtype out_dtype,
                        Expertd__V1__GatewayForwardRequest *header)
{
    header->model = (char *)(uintptr_t)args->model;
    header->version = (char *)(uintptr_t)(args->version != NULL ? args->version : "");
    header->layer = args->layer;
    header->tokens = (uint32_t)args->x.shape[0];
    header->hidden = (uint32_t)args->x.shape[1];
    header->x_dtype = (uint32_t)args->x.dtype;
    header->out_dtype = (uint32_t)out_dtype;
    if (gate != NULL) {
        fill_gate(gate, gate_message);
        header->gate = gate_message;
        header->experts = gate->experts;
        header->top_k = gate->top_k;
    } else if (args->expert_ids.rank == 2) {
        header->top_k = (uint32_t)args->expert_ids.shape[1];
        header->ids_dtype = (uint32_t)args->expert_ids.dtype;
        header->scales_dtype = (uint32_t)args->expert_scales.dtype;
    }
    header->has_active_mask = args->active_mask.rank == 1;
    header->zero_experts = args->zero_experts;
    header->copy_experts = args->copy_experts;
    header->weight_on = (uint32_t)args->weight_on;
    header->shared = (uint32_t)args->shared_source;
    header->nan_policy = (uint32_t)args->nan_policy;
    header->mode = (uint32_t)args->mode;
    header->wire_dtype = (uint32_t)args->wire_dtype;
    header->allow_duplicates = args->allow_duplicates;
    header->allow_missing = args->allow_missing;
}

/* What a caller can wish of the nodes, but not of the gateway; NULL: nothing. */
static const char *not_carried(const ep_moe_args *args)
{
    return args->dispatch_quant != EP_MOE_DISPATCH_PLAIN ? "dispatch_quant"
           : args->combine_quant != EP_MOE_COMBINE_PLAIN ? "combine_quant"
           : args->comm_alg != EP_MOE_COMM_DEFAULT       ? "comm_alg"
           : args->combine_at != EP_MOE_COMBINE_ROWS     ? "combine_at"
                                                         : NULL;
}

static ep_err check_args(const ep_moe_args *args, const ep_gate_config *gate,
                         const ep_tensor *logits, ep_error *out_error)
{
    const char *beyond = not_carried(args);
    if (beyond != NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%s is set: the gateway takes its default only", beyond);
    }
    if (args->result != EP_MOE_COMBINED || args->active_mask.rank > 1) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "%s",
                            args->result != EP_MOE_COMBINED
                                ? "the gateway gives combined results only"
                                : "active_mask has rank 2: the gateway takes [T] only");
    }
    if (gate != NULL &&
        (logits->rank != 2 || logits->dtype != EP_DTYPE_F32 || logits->shape[1] != gate->experts)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "logits are %s of rank %" PRIu32 ": allowed f32 [T,%" PRIu32 "]",
                            ep_dtype_name(logits->dtype), logits->rank, gate->experts);
    }
    return EP_OK;
}

static void put(ep_buffer *tensors, size_t offset, const void *data, size_t bytes)
{
    if (bytes > 0) {
        memcpy(tensors->data + offset, data, bytes);
    }
}

static size_t bytes_of(const ep_tensor *tensor)
{
    size_t bytes = tensor->rank > 0 ? ep_dtype_bytes(tensor->dtype) : 0;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}

static void pack(const ep_moe_args *args, const ep_gate_config *gate, const ep_tensor *logits,
                 const ep_gateway_layout *layout, ep_buffer *tensors)
{
    memset(tensors->data, 0, layout->total_bytes);
    put(tensors, layout->x_offset, args->x.data, bytes_of(&args->x));
    put(tensors, layout->x_scales_offset, args->x_scales.data, bytes_of(&args->x_scales));
    if (gate != NULL) {
        put(tensors, layout->logits_offset, logits->data, bytes_of(logits));
        put(tensors, layout->bias_offset, gate->bias,
            gate->bias != NULL ? gate->experts * sizeof(float) : 0);
        put(tensors, layout->factors_offset, gate->expert_factors,
            gate->expert_factors != NULL ? gate->experts * sizeof(float) : 0);
        put(tensors, layout->chosen_offset, gate->chosen,
            gate->chosen != NULL ? (size_t)args->x.shape[0] * gate->top_k * sizeof(int32_t) : 0);
    } else {
        put(tensors, layout->ids_offset, args->expert_ids.data, bytes_of(&args->expert_ids));
        put(tensors, layout->scales_offset, args->expert_scales.data,
            bytes_of(&args->expert_scales));
    }
    put(tensors, layout->mask_offset, args->active_mask.data, bytes_of(&args->active_mask));
}

ep_err ep_cli_gateway_request_make(const ep_moe_args *args, const ep_gate_config *gate,
                                   const ep_tensor *logits, ep_dtype out_dtype,
                                   ep_buffer_pool *pool, ep_cli_gateway_request *out_request,
                                   ep_error *out_error)
{
    ep_err err = check_args(args, gate, logits, out_error);
    if (err != EP_OK) {
        return err;
    }
    out_request->tensors = NULL;
    expertd__v1__gateway_forward_request__init(&out_request->header);
    fill_header(args, gate, &out_request->gate, out_dtype, &out_request->header);
    err = ep_gateway_layout_make(&out_request->header, &out_request->layout, out_error);
    if (err != EP_OK || out_request->layout.total_bytes == 0) {
        return err;
    }
    err = ep_buffer_acquire(pool, out_request->layout.total_bytes, &out_request->tensors);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for a request of %zu bytes",
                            out_request->layout.total_bytes);
    }
    pack(args, gate, logits, &out_request->layout, out_request->tensors);
    return EP_OK;
}

void ep_cli_gateway_request_fini(ep_cli_gateway_request *request)
{
    ep_buffer_unref(request->tensors);
}
