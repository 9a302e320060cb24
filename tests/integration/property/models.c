/* SPDX-License-Identifier: Apache-2.0 */
#include "models.h"

#include <stdio.h>
#include <sys/stat.h>

#include "random.h"
#include "ref_checkpoint.h"

typedef enum shared_kind { SHARED_NOT, SHARED_PLAIN, SHARED_WIDE, SHARED_GATED } shared_kind;

/* What must occur in every run; the sizes are drawn. */
typedef struct model_kind {
    ep_name_family names;
    ep_fixture_router router;
    shared_kind shared;
    ep_dtype dtype;
    uint32_t dense_layers;
    uint32_t shards;
    ep_weight_format format; /* of routed experts; NONE: plain */
    ep_weight_format shared_format;
} model_kind;

static const model_kind kinds[MODELS_COUNT] = {
    {EP_NAMES_N2, EP_ROUTER_R1, SHARED_NOT, EP_DTYPE_BF16, 0, 1, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R2, SHARED_GATED, EP_DTYPE_BF16, 0, 2, EP_WEIGHTS_NONE,
     EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R4, SHARED_PLAIN, EP_DTYPE_BF16, 1, 1, EP_WEIGHTS_NONE,
     EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R3, SHARED_WIDE, EP_DTYPE_F16, 2, 3, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R2, SHARED_GATED, EP_DTYPE_F16, 0, 1, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N2, EP_ROUTER_R4, SHARED_WIDE, EP_DTYPE_F16, 0, 5, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R2, SHARED_NOT, EP_DTYPE_F32, 0, 1, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R2, SHARED_GATED, EP_DTYPE_F32, 0, 4, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R4, SHARED_WIDE, EP_DTYPE_F32, 1, 1, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N2, EP_ROUTER_R2, SHARED_GATED, EP_DTYPE_F32, 0, 2, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R4, SHARED_PLAIN, EP_DTYPE_F16, 1, 1, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R3, SHARED_PLAIN, EP_DTYPE_BF16, 0, 7, EP_WEIGHTS_NONE,
     EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R2, SHARED_GATED, EP_DTYPE_BF16, 0, 2, EP_WEIGHTS_MXFP4,
     EP_WEIGHTS_MXFP4},
    {EP_NAMES_N2, EP_ROUTER_R4, SHARED_PLAIN, EP_DTYPE_BF16, 0, 1, EP_WEIGHTS_MXFP4,
     EP_WEIGHTS_NONE},
    {EP_NAMES_N1, EP_ROUTER_R2, SHARED_GATED, EP_DTYPE_BF16, 0, 1, EP_WEIGHTS_INT4,
     EP_WEIGHTS_INT4},
    {EP_NAMES_N1, EP_ROUTER_R2, SHARED_GATED, EP_DTYPE_F16, 1, 3, EP_WEIGHTS_INT4_F16,
     EP_WEIGHTS_NONE},
};

static ep_fixture_config draw_config(uint64_t seed, uint32_t index)
{
    const model_kind *kind = &kinds[index];
    random_source random = random_begin(seed, 0x6d6f64656cull + index);
    ep_fixture_config config = {
        .seed = ep_splitmix64(&random.state),
        .names = kind->names,
        .router = kind->router,
        .dense_layers = kind->dense_layers,
        .dtype = kind->dtype,
        .shards = kind->shards,
        .shared_gate = kind->shared == SHARED_GATED,
        .expert_format = kind->format,
        .shared_format = kind->shared_format,
    };
    config.layers = kind->dense_layers + random_between(&random, 1, 3);
    /* Odd and even widths, a few at the edges of vector registers. */
    config.hidden = random_chance(&random, 30) ? 16 * random_between(&random, 1, 6)
                                               : random_between(&random, 8, 96);
    config.inner = random_chance(&random, 30) ? 16 * random_between(&random, 1, 4)
                                              : random_between(&random, 4, 64);
    /* several groups of columns, short last ones among them */
    if (kind->format != EP_WEIGHTS_NONE) {
        config.hidden = random_between(&random, 40, 110);
        config.inner = random_between(&random, 20, 72);
    }
    config.experts = index == 6 ? 1 : random_between(&random, 2, 24);
    config.top_k = random_between(&random, 1, config.experts < 8 ? config.experts : 8);
    if (kind->shared == SHARED_PLAIN) {
        config.shared_inner = config.inner;
    } else if (kind->shared == SHARED_WIDE) {
        config.shared_inner = 2 * config.inner;
    } else if (kind->shared == SHARED_GATED) {
        config.shared_inner = random_between(&random, 4, 80);
    }
    return config;
}

static void load_layers(test_model *model, const enum ref_family families[PLACES_COUNT])
{
    struct ref_checkpoint checkpoint;
    ref_checkpoint_open(model->path, &checkpoint);
    for (uint32_t layer = model->config.dense_layers; layer < model->config.layers; layer++) {
        model->layer_numbers[model->layers_count] = layer;
        for (int p = 0; p < PLACES_COUNT; p++) {
            struct ref_layer *loaded = &model->layers[p][model->layers_count];
            ref_layer_load(&checkpoint, layer, loaded);
            ref_layer_set_family(loaded, families[p]);
        }
        model->layers_count++;
    }
    ref_checkpoint_close(&checkpoint);
}

bool test_models_create(uint64_t seed, const char *dir,
                        const enum ref_family families[PLACES_COUNT],
                        test_model models[MODELS_COUNT])
{
    for (uint32_t i = 0; i < MODELS_COUNT; i++) {
        test_model *model = &models[i];
        ep_error error;
        *model = (test_model){.config = draw_config(seed, i)};
        snprintf(model->name, sizeof(model->name), "model-%u", i);
        snprintf(model->path, sizeof(model->path), "%s/%s", dir, model->name);
        if (mkdir(model->path, 0755) != 0) {
            perror(model->path);
            return false;
        }
        if (ep_fixture_write(&model->config, model->path, &error) != EP_OK) {
            fprintf(stderr, "%s: %s\n", model->name, error.text);
            return false;
        }
        load_layers(model, families);
    }
    return true;
}

void test_models_destroy(test_model models[MODELS_COUNT])
{
    for (uint32_t i = 0; i < MODELS_COUNT; i++) {
        for (uint32_t l = 0; l < models[i].layers_count; l++) {
            for (int p = 0; p < PLACES_COUNT; p++) {
                ref_layer_free(&models[i].layers[p][l]);
            }
        }
    }
}
