/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and frees a dense model: checks the configuration, reads tensors, allocates memory. */
#include "dense/dense_weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/model.h"
#include "moe/convert.h"

#define NAME_BYTES 128

typedef struct loader {
    const ep_checkpoint *checkpoint;
    const ep_model_info *info;
    ep_error *error;
    ep_err err; /* the first error; later steps do nothing */
} loader;

/* count elements, zeroed. */
static void *allocate(loader *load, size_t a, size_t b, size_t element_bytes)
{
    size_t count = 0;
    void *memory = NULL;
    if (load->err != EP_OK) {
        return NULL;
    }
    if (ep_mul_size(a, b, &count)) {
        memory = calloc(count > 0 ? count : 1, element_bytes);
    }
    if (memory == NULL) {
        load->err = ep_error_set(load->error, EP_ERR_NO_MEMORY,
                                 "no memory for %zu x %zu values of the dense model", a, b);
    }
    return memory;
}

static void refuse(loader *load, ep_err err, const char *key, uint64_t value, const char *allowed)
{
    if (load->err == EP_OK) {
        load->err =
            ep_error_set(load->error, err, "config.json: %s is %" PRIu64 ", allowed here: %s", key,
                         value, allowed);
    }
}

static void check_config(loader *load)
{
    const ep_model_info *info = load->info;
    if (strcmp(info->model_type, "mixtral") != 0 ||
        info->router.weight != EP_GATE_SOFTMAX_SELECTED) {
        load->err =
            ep_error_set(load->error, EP_ERR_UNIMPLEMENTED,
                         "config.json: model_type is %s, allowed here: mixtral", info->model_type);
        return;
    }
    if (info->vocab != EP_DENSE_VOCAB) {
        refuse(load, EP_ERR_UNIMPLEMENTED, "vocab_size", info->vocab, "256 (a byte-level model)");
    }
    if (info->positions_max < 1 || info->positions_max > EP_DENSE_POSITIONS_MAX) {
        refuse(load, EP_ERR_UNIMPLEMENTED, "max_position_embeddings", info->positions_max,
               "1..8192");
    }
    if (info->heads == 0 || info->head_dim == 0 || info->head_dim % 2 != 0) {
        refuse(load, EP_ERR_BAD_FILE, "head_dim", info->head_dim,
               "an even number above 0, and num_attention_heads above 0");
    }
    if (info->kv_heads == 0 || (info->heads > 0 && info->heads % info->kv_heads != 0)) {
        refuse(load, EP_ERR_BAD_FILE, "num_key_value_heads", info->kv_heads,
               "a divisor of num_attention_heads");
    }
    if (info->moe_layers_count != info->layers_count) {
        refuse(load, EP_ERR_UNIMPLEMENTED, "the number of MoE layers", info->moe_layers_count,
               "all of num_hidden_layers");
    }
}

/* Reads a tensor of exactly this shape (d1 0: rank 1), widened to f32. */
static float *read_tensor(loader *load, const char *name, size_t d0, size_t d1)
{
    ep_tensor_info info;
    size_t count = 0;
    float *values = allocate(load, d0, d1 > 0 ? d1 : 1, sizeof(*values));
    if (load->err == EP_OK) {
        load->err = ep_checkpoint_find(load->checkpoint, name, &info, load->error);
    }
    if (load->err != EP_OK) {
        free(values);
        return NULL;
    }
    bool fits = info.rank == (d1 > 0 ? 2 : 1) && info.shape[0] == (int64_t)d0 &&
                (d1 == 0 || info.shape[1] == (int64_t)d1);
    if (!fits || !ep_dtype_is_float(info.dtype)) {
        char wanted[48];
        if (d1 > 0) {
            snprintf(wanted, sizeof(wanted), "[%zu,%zu]", d0, d1);
        } else {
            snprintf(wanted, sizeof(wanted), "[%zu]", d0);
        }
        load->err = ep_error_set(load->error, EP_ERR_BAD_FILE,
                                 "tensor %s has rank %" PRIu32 ", %" PRId64
                                 " rows, type %s; allowed: %s of bf16, f16 or f32",
                                 name, info.rank, info.rank > 0 ? info.shape[0] : 0,
                                 ep_dtype_name(info.dtype), wanted);
        free(values);
        return NULL;
    }
    count = d0 * (d1 > 0 ? d1 : 1);
    void *bytes = allocate(load, info.bytes, 1, 1);
    if (load->err == EP_OK) {
        load->err = ep_checkpoint_read(load->checkpoint, name, bytes, info.bytes, load->error);
    }
    if (load->err == EP_OK) {
        ep_row_widen(bytes, info.dtype, count, values);
    }
    free(bytes);
    return values;
}

static float *read_part(loader *load, uint32_t layer, const char *part, size_t d0, size_t d1)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof(name), "model.layers.%" PRIu32 ".%s.weight", layer, part);
    return read_tensor(load, name, d0, d1);
}

static void read_layer(loader *load, ep_dense_layer *layer, uint32_t index)
{
    const ep_model_info *info = load->info;
    size_t hidden = info->hidden;
    size_t q_width = (size_t)info->heads * info->head_dim;
    size_t kv_width = (size_t)info->kv_heads * info->head_dim;
    float *bias = NULL;
    layer->moe = info->moe_layers[index];
    layer->input_norm = read_part(load, index, "input_layernorm", hidden, 0);
    layer->q = read_part(load, index, "self_attn.q_proj", q_width, hidden);
    layer->k = read_part(load, index, "self_attn.k_proj", kv_width, hidden);
    layer->v = read_part(load, index, "self_attn.v_proj", kv_width, hidden);
    layer->o = read_part(load, index, "self_attn.o_proj", hidden, q_width);
    layer->post_norm = read_part(load, index, "post_attention_layernorm", hidden, 0);
    layer->keys = allocate(load, info->positions_max, kv_width, sizeof(float));
    layer->values = allocate(load, info->positions_max, kv_width, sizeof(float));
    if (load->err == EP_OK) {
        load->err =
            ep_checkpoint_read_router(load->checkpoint, index, &layer->router, &bias, load->error);
    }
    if (load->err == EP_OK && bias != NULL) {
        load->err =
            ep_error_set(load->error, EP_ERR_UNIMPLEMENTED,
                         "the router of layer %" PRIu32 " has a bias, allowed here: none", index);
    }
    free(bias);
}

static void allocate_scratch(loader *load, ep_dense_model *model)
{
    const ep_model_info *info = load->info;
    size_t positions = info->positions_max;
    size_t q_width = (size_t)info->heads * info->head_dim;
    uint32_t experts = 0;
    uint32_t top_k = 0;
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        experts = info->moe_layers[i].experts > experts ? info->moe_layers[i].experts : experts;
        top_k = info->moe_layers[i].top_k > top_k ? info->moe_layers[i].top_k : top_k;
    }
    model->inv_freq = allocate(load, info->head_dim / 2, 1, sizeof(float));
    model->x = allocate(load, positions, info->hidden, sizeof(float));
    model->rows = allocate(load, positions, info->hidden, sizeof(uint16_t));
    model->result = allocate(load, positions, info->hidden, sizeof(uint16_t));
    model->router_logits = allocate(load, positions, experts, sizeof(float));
    model->ids = allocate(load, positions, top_k, sizeof(int32_t));
    model->scales = allocate(load, positions, top_k, sizeof(float));
    model->normed = allocate(load, info->hidden, 1, sizeof(float));
    model->query = allocate(load, q_width, 1, sizeof(float));
    model->attended = allocate(load, q_width, 1, sizeof(float));
    model->scores = allocate(load, positions, 1, sizeof(float));
}

static void load_model(loader *load, ep_dense_model *model)
{
    const ep_model_info *info = load->info;
    check_config(load);
    if (load->err != EP_OK) {
        return;
    }
    model->shape = (ep_dense_shape){
        .layers = info->layers_count,
        .hidden = info->hidden,
        .heads = {.heads = info->heads, .kv_heads = info->kv_heads, .head_dim = info->head_dim},
        .positions_max = info->positions_max,
        .rms_norm_eps = info->rms_norm_eps,
    };
    memcpy(model->shape.version, info->files_version, sizeof(model->shape.version));
    model->layers = allocate(load, info->layers_count, 1, sizeof(*model->layers));
    allocate_scratch(load, model);
    model->embedding = read_tensor(load, "model.embed_tokens.weight", EP_DENSE_VOCAB, info->hidden);
    model->norm = read_tensor(load, "model.norm.weight", info->hidden, 0);
    model->head = info->tie_embeddings
                      ? model->embedding
                      : read_tensor(load, "lm_head.weight", EP_DENSE_VOCAB, info->hidden);
    for (uint32_t l = 0; l < info->layers_count && load->err == EP_OK; l++) {
        read_layer(load, &model->layers[l], l);
    }
    if (load->err == EP_OK) {
        ep_dense_rope_table(info->rope_theta, info->head_dim, model->inv_freq);
    }
}

ep_err ep_dense_model_open(const char *dir, ep_dense_model **out_model, ep_error *out_error)
{
    ep_checkpoint *checkpoint = NULL;
    loader load = {.error = out_error, .err = EP_OK};
    load.err = ep_checkpoint_open(dir, &checkpoint, out_error);
    if (load.err != EP_OK) {
        return load.err;
    }
    load.checkpoint = checkpoint;
    load.info = ep_checkpoint_info(checkpoint);
    ep_dense_model *model = allocate(&load, 1, 1, sizeof(*model));
    if (model != NULL) {
        load_model(&load, model);
    }
    ep_checkpoint_close(checkpoint);
    if (load.err != EP_OK) {
        ep_dense_model_close(model);
        return ep_error_prefix(out_error, load.err, "%s", dir);
    }
    *out_model = model;
    return EP_OK;
}

static void free_layer(ep_dense_layer *layer)
{
    float *parts[] = {layer->input_norm, layer->q,      layer->k,    layer->v,     layer->o,
                      layer->post_norm,  layer->router, layer->keys, layer->values};
    for (size_t i = 0; i < EP_ARRAY_COUNT(parts); i++) {
        free(parts[i]);
    }
}

void ep_dense_model_close(ep_dense_model *model)
{
    if (model == NULL) {
        return;
    }
    for (uint32_t l = 0; model->layers != NULL && l < model->shape.layers; l++) {
        free_layer(&model->layers[l]);
    }
    if (model->head != model->embedding) {
        free(model->head);
    }
    void *parts[] = {model->layers,   model->embedding, model->norm,   model->inv_freq,
                     model->x,        model->rows,      model->result, model->router_logits,
                     model->ids,      model->scales,    model->normed, model->query,
                     model->attended, model->scores};
    for (size_t i = 0; i < EP_ARRAY_COUNT(parts); i++) {
        free(parts[i]);
    }
    free(model);
}
