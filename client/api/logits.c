/* SPDX-License-Identifier: Apache-2.0 */
/* Gate, dispatch, experts and combine in one call. The gate's choice becomes the ids and scales of
 * an ordinary call. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/float_env.h"
#include "base/struct_size.h"
#include "common/args.h"
#include "base/clock.h"
#include "call/client_core.h"
#include "expertd/gate.h"
#include "moe/gate_check.h"
#include "wire/gateway_codec.h"

typedef struct gate_buffers {
    float *logits;   /* [T,E] contiguous; rows of tokens that are masked out are 0 */
    int32_t *ids;    /* [T,K] */
    float *weights;  /* [T,K] */
    uint8_t *active; /* [T] */
} gate_buffers;

static void free_buffers(gate_buffers *buffers)
{
    free(buffers->logits);
    free(buffers->ids);
    free(buffers->weights);
    free(buffers->active);
}

static ep_err check_gate(const ep_moe_args *args, const ep_gate_config *given,
                         const ep_tensor *logits, ep_gate_config *gate, ep_error *out_error)
{
    static const ep_dtype f32[] = {EP_DTYPE_F32, EP_DTYPE_NONE};
    ep_err err = ep_gate_take_config(given, gate, out_error);
    if (err == EP_OK && logits == NULL) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "logits is NULL");
    }
    if (err != EP_OK) {
        return err;
    }
    if (args->expert_ids.rank != 0 || args->expert_scales.rank != 0) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "expert_ids and expert_scales must be absent (rank 0): the gate makes them");
    }
    err = ep_tensor_check("logits", logits, 2, f32, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (logits->shape[1] != gate->experts) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "logits have %" PRId64 " experts, the gate has %" PRIu32,
                            logits->shape[1], gate->experts);
    }
    if (args->x.rank != 2 || logits->shape[0] != args->x.shape[0] ||
        logits->shape[0] > EP_TOKENS_MAX) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "logits have %" PRId64 " tokens, x has %" PRId64 ": allowed the same, up to %d",
            logits->shape[0], args->x.rank > 0 ? args->x.shape[0] : 0, EP_TOKENS_MAX);
    }
    return ep_args_check_mask(&args->active_mask, (uint64_t)logits->shape[0], gate->top_k,
                              out_error);
}

/* Checks that the gate chooses among the experts of the layer. */
static ep_err check_layer(ep_view *taken_view, const ep_moe_args *args, const ep_gate_config *gate,
                          ep_error *out_error)
{
    ep_view_layer found;
    ep_err err =
        ep_view_find(taken_view, args->model, args->version, args->layer, &found, out_error);
    const uint64_t others = (uint64_t)args->zero_experts + args->copy_experts + args->const_experts;
    if (err == EP_OK && found.layer->shape.experts + others != gate->experts) {
        err = ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "the gate has %" PRIu32 " experts, layer %" PRIu32 " of model %s has %" PRIu32
            " and the call %" PRIu64 " zero, copy and constant ones",
            gate->experts, args->layer, args->model, found.layer->shape.experts, others);
    }
    ep_view_unref(taken_view);
    return err;
}

/*
 * Applies the call's NaN policy to a token's logits; -inf is a mask and stays. False: the policy is
 * pass and there is a NaN or +inf. Then the gate sees zeros, and the token's weights become NaN.
 */
static EP_FLOAT_WORK bool repair_logits(ep_moe_nan policy, float *row, size_t experts)
{
    double sum = 0.0;
    size_t finite = 0;
    size_t spoiled = 0;
    for (size_t e = 0; e < experts; e++) {
        bool is_spoiled = isnan(row[e]) || row[e] == INFINITY;
        sum += isfinite(row[e]) ? (double)row[e] : 0.0;
        finite += isfinite(row[e]) ? 1 : 0;
        spoiled += is_spoiled ? 1 : 0;
    }
    if (spoiled == 0 || policy == EP_MOE_NAN_REJECT) {
        return true; /* with reject the gate names the logit in its error */
    }
    if (policy == EP_MOE_NAN_PASS) {
        memset(row, 0, experts * sizeof(*row));
        return false;
    }
    float value = policy == EP_MOE_NAN_MEAN && finite > 0 ? (float)(sum / (double)finite) : 0.0f;
    for (size_t e = 0; e < experts; e++) {
        row[e] = isnan(row[e]) || row[e] == INFINITY ? value : row[e];
    }
    return true;
}

static void spoil_weights(float *weights, uint32_t top_k)
{
    for (uint32_t k = 0; k < top_k; k++) {
        weights[k] = NAN;
    }
}

static ep_err choose(const ep_moe_args *args, const ep_gate_config *gate, const ep_tensor *logits,
                     gate_buffers *buffers, ep_error *out_error)
{
    size_t tokens = (size_t)logits->shape[0];
    size_t row = gate->experts;
    buffers->logits = calloc(tokens * row + 1, sizeof(*buffers->logits));
    buffers->ids = calloc(tokens * gate->top_k + 1, sizeof(*buffers->ids));
    buffers->weights = calloc(tokens * gate->top_k + 1, sizeof(*buffers->weights));
    buffers->active = calloc(tokens + 1, sizeof(*buffers->active));
    if (buffers->logits == NULL || buffers->ids == NULL || buffers->weights == NULL ||
        buffers->active == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a gate of %zu tokens",
                            tokens);
    }
    for (size_t t = 0; t < tokens; t++) {
        /* padding rows may hold anything, NaN too: the gate sees zeros instead */
        if (!ep_moe_token_is_masked(args, (int64_t)t)) {
            buffers->active[t] = 1;
            memcpy(buffers->logits + t * row,
                   (const uint8_t *)logits->data + (int64_t)t * logits->stride_bytes[0],
                   row * sizeof(float));
            /* a token without a choice does not count in the load */
            const ep_float_env env = ep_float_env_begin();
            buffers->active[t] = repair_logits(args->nan_policy, buffers->logits + t * row, row);
            ep_float_env_end(env);
        }
    }
    ep_gate_config plain = *gate;
    plain.load = NULL; /* counted later, because masked tokens do not count */
    ep_err err = ep_gate(&plain, (uint32_t)tokens, buffers->logits, buffers->ids, buffers->weights,
                         out_error);
    for (size_t t = 0; t < tokens && err == EP_OK; t++) {
        if (buffers->active[t] == 0 && !ep_moe_token_is_masked(args, (int64_t)t)) {
            spoil_weights(buffers->weights + t * gate->top_k, gate->top_k);
        }
    }
    return err != EP_OK || gate->load == NULL
               ? err
               : ep_gate_load_compute(&plain, (uint32_t)tokens, buffers->logits, buffers->ids,
                                      buffers->active, gate->load, out_error);
}

/* The call's arguments with the gate's choice, the time-out less the gate's time. */
static ep_moe_args chosen_args(const ep_client *client, const ep_moe_args *args,
                               const gate_buffers *buffers, int64_t tokens, int64_t top_k,
                               uint64_t begin_ns)
{
    ep_moe_args chosen = *args;
    uint64_t deadline_us = args->deadline_us != 0 ? args->deadline_us : client->config.deadline_us;
    uint64_t spent_us = (ep_clock_now_ns() - begin_ns) / EP_NS_PER_US;
    chosen.deadline_us = spent_us < deadline_us ? deadline_us - spent_us : 1;
    chosen.expert_ids = ep_tensor_2d(buffers->ids, EP_DTYPE_I32, tokens, top_k);
    chosen.expert_scales = ep_tensor_2d(buffers->weights, EP_DTYPE_F32, tokens, top_k);
    return chosen;
}

/* ---- blocking ---- */

static ep_err forward_logits(ep_client *client, const ep_moe_args *args,
                             const ep_gate_config *given_gate, const ep_tensor *logits,
                             const ep_tensor *out, ep_moe_result *result)
{
    gate_buffers buffers = {0};
    ep_gate_config gate = {0};
    uint64_t begin_ns = ep_clock_now_ns();
    uint64_t deadline_us = args->deadline_us != 0 ? args->deadline_us : client->config.deadline_us;
    ep_view *view = NULL;
    ep_err err = check_gate(args, given_gate, logits, &gate, &result->error);
    if (err == EP_OK) {
        err = ep_cluster_wait_view(client->cluster, begin_ns + deadline_us * EP_NS_PER_US, &view,
                                   &result->error);
    }
    if (err == EP_OK) {
        err = check_layer(view, args, &gate, &result->error);
    }
    if (err == EP_OK) {
        err = choose(args, &gate, logits, &buffers, &result->error);
    }
    if (err == EP_OK) {
        ep_moe_args chosen =
            chosen_args(client, args, &buffers, logits->shape[0], gate.top_k, begin_ns);
        err = ep_moe_forward(client, &chosen, out, result);
    }
    free_buffers(&buffers);
    return err;
}

ep_err ep_moe_forward_logits(ep_client *client, const ep_moe_args *args, const ep_gate_config *gate,
                             const ep_tensor *logits, const ep_tensor *out,
                             ep_moe_result *out_result)
{
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_moe_args own;
    ep_error_clear(&result.error);
    ep_err err = ep_client_enter(client, &result.error);
    if (err == EP_OK) {
        err = ep_args_take(args, out, &own, &result.error);
        if (err == EP_OK) {
            err = forward_logits(client, &own, gate, logits, out, &result);
        }
        ep_client_leave(client);
    }
    if (out_result != NULL) {
        ep_struct_out(out_result, &result, sizeof(result));
    }
    return err;
}

/* ---- callback ---- */

/* Keeps the gate's choice until the call is done. */
typedef struct gated_call {
    ep_moe_done_func done;
    void *arg;
    gate_buffers buffers;
} gated_call;

static void free_gated(gated_call *gated)
{
    free_buffers(&gated->buffers);
    free(gated);
}

static void on_gated_done(void *arg, const ep_moe_result *result)
{
    gated_call *gated = arg;
    gated->done(gated->arg, result);
    free_gated(gated);
}

static ep_err begin_gated(ep_client *client, const ep_moe_args *args, const ep_gate_config *gate,
                          const ep_tensor *logits, const ep_tensor *out, gated_call *gated,
                          ep_call **out_call, ep_error *out_error)
{
    uint64_t begin_ns = ep_clock_now_ns();
    ep_view *view = NULL;
    ep_err err = ep_cluster_current_view(client->cluster, &view, out_error);
    err = err != EP_OK ? err : check_layer(view, args, gate, out_error);
    err = err != EP_OK ? err : choose(args, gate, logits, &gated->buffers, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_moe_args chosen =
        chosen_args(client, args, &gated->buffers, logits->shape[0], gate->top_k, begin_ns);
    return ep_moe_forward_async(client, &chosen, out, on_gated_done, gated, out_call, out_error);
}

static ep_err forward_logits_async(ep_client *client, const ep_moe_args *given_args,
                                   const ep_gate_config *given_gate, const ep_tensor *logits,
                                   const ep_tensor *out, ep_moe_done_func done, void *arg,
                                   ep_call **out_call, ep_error *out_error)
{
    ep_moe_args args;
    ep_gate_config gate = {0};
    ep_err err = ep_args_take(given_args, out, &args, out_error);
    if (err == EP_OK && done == NULL) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "done is NULL");
    }
    err = err != EP_OK ? err : check_gate(&args, given_gate, logits, &gate, out_error);
    if (err != EP_OK) {
        return err;
    }
    gated_call *gated = calloc(1, sizeof(*gated));
    if (gated == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a call");
    }
    gated->done = done;
    gated->arg = arg;
    err = begin_gated(client, &args, &gate, logits, out, gated, out_call, out_error);
    if (err != EP_OK) {
        free_gated(gated);
    }
    return err;
}

ep_err ep_moe_forward_logits_async(ep_client *client, const ep_moe_args *args,
                                   const ep_gate_config *gate, const ep_tensor *logits,
                                   const ep_tensor *out, ep_moe_done_func done, void *arg,
                                   ep_call **out_call, ep_error *out_error)
{
    ep_err err = ep_client_enter(client, out_error);
    if (err == EP_OK) {
        err = forward_logits_async(client, args, gate, logits, out, done, arg, out_call, out_error);
        ep_client_leave(client);
    }
    return err;
}
