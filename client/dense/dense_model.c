/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass of the dense part. */
#include "dense/dense_model.h"

#include <inttypes.h>
#include <string.h>

#include "base/numeric.h"
#include "dense/dense_weights.h"
#include "expertd/gate.h"

const ep_dense_shape *ep_dense_model_shape(const ep_dense_model *model)
{
    return &model->shape;
}

const ep_layer_shape *ep_dense_model_layer(const ep_dense_model *model, uint32_t layer)
{
    return &model->layers[layer].moe;
}

/* Adds the attention block to x [H] at one position. */
static void attention(ep_dense_model *model, ep_dense_layer *layer, float *x, size_t position)
{
    const ep_dense_shape *shape = &model->shape;
    const ep_dense_heads *heads = &shape->heads;
    size_t q_width = (size_t)heads->heads * heads->head_dim;
    size_t kv_width = (size_t)heads->kv_heads * heads->head_dim;
    float *key = layer->keys + position * kv_width;
    float *value = layer->values + position * kv_width;
    ep_dense_rms_norm(x, layer->input_norm, shape->hidden, shape->rms_norm_eps, model->normed);
    ep_dense_matrix(layer->q, model->normed, q_width, shape->hidden, model->query);
    ep_dense_matrix(layer->k, model->normed, kv_width, shape->hidden, key);
    ep_dense_matrix(layer->v, model->normed, kv_width, shape->hidden, value);
    ep_dense_rotate(model->query, heads->heads, heads->head_dim, model->inv_freq, position);
    ep_dense_rotate(key, heads->kv_heads, heads->head_dim, model->inv_freq, position);
    ep_dense_attend(heads, model->query, layer->keys, layer->values, position, model->scores,
                    model->attended);
    ep_dense_matrix(layer->o, model->attended, shape->hidden, q_width, model->normed);
    for (size_t i = 0; i < shape->hidden; i++) {
        x[i] = x[i] + model->normed[i];
    }
}

/* Makes the row that the experts get, and the router's logits for it. */
static void prepare_row(ep_dense_model *model, const ep_dense_layer *layer, uint32_t token)
{
    size_t hidden = model->shape.hidden;
    uint16_t *row = model->rows + token * hidden;
    ep_dense_rms_norm(model->x + token * hidden, layer->post_norm, hidden,
                      model->shape.rms_norm_eps, model->normed);
    for (size_t i = 0; i < hidden; i++) {
        row[i] = ep_f32_to_bf16(model->normed[i]);
        model->normed[i] = ep_bf16_to_f32(row[i]);
    }
    ep_dense_matrix(layer->router, model->normed, layer->moe.experts, hidden,
                    model->router_logits + (size_t)token * layer->moe.experts);
}

/* Adds the expert block to x [T,H]. */
static ep_err expert_block(ep_dense_model *model, const ep_dense_layer *layer, uint32_t tokens,
                           ep_dense_experts_func experts, void *arg, ep_error *out_error)
{
    ep_gate_config gate = {
        .struct_bytes = sizeof(gate),
        .select = EP_GATE_LOGIT,
        .weight = EP_GATE_SOFTMAX_SELECTED,
        .experts = layer->moe.experts,
        .top_k = layer->moe.top_k,
        .scaling_factor = 1.0f,
        .groups = 1,
        .groups_kept = 1,
    };
    for (uint32_t t = 0; t < tokens; t++) {
        prepare_row(model, layer, t);
    }
    ep_err err = ep_gate(&gate, tokens, model->router_logits, model->ids, model->scales, out_error);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "layer %" PRIu32, layer->moe.layer);
    }
    err = experts(arg, &layer->moe, tokens, model->rows, model->ids, model->scales, model->result,
                  out_error);
    if (err != EP_OK) {
        return err;
    }
    for (size_t i = 0; i < (size_t)tokens * model->shape.hidden; i++) {
        model->x[i] = model->x[i] + ep_bf16_to_f32(model->result[i]);
    }
    return EP_OK;
}

ep_err ep_dense_model_forward(ep_dense_model *model, const uint8_t *bytes, uint32_t tokens,
                              uint32_t first, ep_dense_experts_func experts, void *arg,
                              float *out_logits, ep_error *out_error)
{
    const ep_dense_shape *shape = &model->shape;
    size_t hidden = shape->hidden;
    if (tokens == 0 || tokens > shape->positions_max || first > shape->positions_max - tokens) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%" PRIu32 " tokens at position %" PRIu32
                            ", allowed: at least 1, and positions 0..%" PRIu32,
                            tokens, first, shape->positions_max - 1);
    }
    for (uint32_t t = 0; t < tokens; t++) {
        memcpy(model->x + t * hidden, model->embedding + bytes[t] * hidden, hidden * sizeof(float));
    }
    for (uint32_t l = 0; l < shape->layers; l++) {
        for (uint32_t t = 0; t < tokens; t++) {
            attention(model, &model->layers[l], model->x + t * hidden, (size_t)first + t);
        }
        ep_err err = expert_block(model, &model->layers[l], tokens, experts, arg, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    ep_dense_rms_norm(model->x + (tokens - 1) * hidden, model->norm, hidden, shape->rms_norm_eps,
                      model->normed);
    ep_dense_matrix(model->head, model->normed, EP_DENSE_VOCAB, hidden, out_logits);
    return EP_OK;
}
