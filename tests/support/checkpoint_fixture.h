/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes small random checkpoints for tests: config.json, safetensors shards, index. Every tensor
 * is a pure function of (seed, name): its bytes do not depend on the number of shards, and a test
 * can compute it again.
 */
#ifndef EP_TEST_CHECKPOINT_FIXTURE_H
#define EP_TEST_CHECKPOINT_FIXTURE_H

#include "base/expert_form.h"
#include "model/model.h"

#define EP_FIXTURE_PATH_BYTES 512

/* The router of the model_type: R1 Mixtral's, R2 Qwen's, R3 DeepSeek-V2's, R4 DeepSeek-V3's. */
typedef enum ep_fixture_router {
    EP_ROUTER_R1 = 1,
    EP_ROUTER_R2 = 2,
    EP_ROUTER_R3 = 3,
    EP_ROUTER_R4 = 4
} ep_fixture_router;

typedef struct ep_fixture_config {
    uint64_t seed;
    ep_name_family names;
    ep_fixture_router router;
    const char *prefix; /* before "layers."; NULL: "model." */
    uint32_t layers;
    uint32_t dense_layers; /* so many first layers have a dense MLP */
    uint32_t hidden;
    uint32_t inner;
    uint32_t experts;
    /* expert e has the values of expert e modulo this, which is quicker to write; 0: all differ */
    uint32_t distinct_experts;
    uint32_t top_k;
    uint32_t shared_inner; /* 0: no shared expert */
    bool shared_gate;      /* the shared expert has a sigmoid gate [1,H] */
    bool router_bias;      /* correction bias [E], f32 */
    bool renormalise;
    float scaling_factor; /* 0: not in the config */
    uint32_t groups;      /* 0: not in the config */
    uint32_t groups_kept;
    ep_dtype dtype;                 /* bf16, f16, f32 */
    ep_weight_format expert_format; /* of routed experts: mxfp4, int4 or int4_f16; NONE: plain, of
                                       dtype */
    ep_weight_format shared_format; /* of the shared expert, likewise */
    uint32_t shards;                /* 1: model.safetensors; more: an index */
    /* > 0: also embeddings, attention, norms and head, so that text can be generated */
    uint32_t vocab;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
} ep_fixture_config;

/* A Mixtral of 2 layers, 8 experts, top 2, H 32, I 16, bf16, one file, no dense part. */
ep_fixture_config ep_fixture_default(void);
/* ep_fixture_default with one layer of this shape. */
ep_fixture_config ep_fixture_layer(uint32_t hidden, uint32_t inner, uint32_t experts,
                                   uint32_t top_k);
/* Writes into dir, which must exist. Errors: INVALID_ARGUMENT, IO, NO_MEMORY. */
ep_err ep_fixture_write(const ep_fixture_config *config, const char *dir, ep_error *out_error);

/* Computes count values of the tensor of this name, as ep_fixture_write wrote them. */
void ep_fixture_fill(uint64_t seed, const char *name, ep_dtype dtype, size_t count, void *out);

/* Makes a new empty directory below $TMPDIR or /tmp. Aborts the test program on failure. */
void ep_fixture_temp_dir(char out_path[EP_FIXTURE_PATH_BYTES]);
/* Makes such a directory with the checkpoint in it. */
void ep_fixture_new(const ep_fixture_config *config, char out_path[EP_FIXTURE_PATH_BYTES]);
/* Removes the directory and its contents; does not follow links. */
void ep_fixture_remove(const char *path);

#endif
