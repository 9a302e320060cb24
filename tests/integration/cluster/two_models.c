/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two models at once, with the same layer numbers, on the same nodes: calls of many threads,
 * interleaved, each compared with its own model's oracle. A third model has the first one's shapes
 * and other weights, so that a mix-up cannot hide behind a shape check.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "ref_checkpoint.h"
#include "support/cluster.h"
#include "support/load.h"

enum { MODELS = 3, LAYERS = 2, BATCHES = 4, THREADS = 6, CALLS = 60 };

typedef struct test_model {
    const char *name;
    uint64_t seed;
    uint32_t hidden;
    uint32_t inner;
    uint32_t experts;
    uint32_t top_k;
    uint32_t shared_inner;
    char path[EP_TEST_PATH_BYTES];
    ep_test_batch batches[LAYERS * BATCHES];
} test_model;

static test_model models[MODELS] = {
    {.name = "first", .seed = 1, .hidden = 64, .inner = 32, .experts = 8, .top_k = 2},
    {.name = "second",
     .seed = 2,
     .hidden = 96,
     .inner = 48,
     .experts = 12,
     .top_k = 4,
     .shared_inner = 48},
    {.name = "twin-of-first", .seed = 3, .hidden = 64, .inner = 32, .experts = 8, .top_k = 2},
};

static void make_model(test_model *model)
{
    static struct ref_checkpoint checkpoint;
    ep_fixture_config config = ep_fixture_default();
    config.seed = model->seed;
    config.hidden = model->hidden;
    config.inner = model->inner;
    config.experts = model->experts;
    config.top_k = model->top_k;
    config.layers = LAYERS;
    config.shared_inner = model->shared_inner;
    if (model->shared_inner > 0) {
        config.names = EP_NAMES_N1;
        config.router = EP_ROUTER_R4;
        config.router_bias = true;
    }
    ep_test_checkpoint_new(&config, model->path);
    ref_checkpoint_open(model->path, &checkpoint);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct ref_layer reference;
        ref_layer_load(&checkpoint, layer, &reference);
        for (uint32_t b = 0; b < BATCHES;
             /* the same seeds for each model: inputs alike, answers not */
             b++) {
            ep_test_batch_init(&model->batches[layer * BATCHES + b], &reference, model->name, layer,
                               1 + 13 * b, model->top_k, 100 * layer + b, NULL, 0);
        }
        ref_layer_free(&reference);
    }
    ref_checkpoint_close(&checkpoint);
}

/* The test would be blind if the twins agreed. */
static void expect_twins_differ(void)
{
    for (uint32_t b = 0; b < LAYERS * BATCHES; b++) {
        const ep_test_batch *a = &models[0].batches[b];
        const ep_test_batch *c = &models[2].batches[b];
        size_t bytes = (size_t)a->tokens * a->hidden * sizeof(*a->x);
        EP_TEST_CHECK(memcmp(a->x, c->x, bytes) == 0 &&
                          memcmp(a->expected, c->expected, bytes) != 0,
                      "the twins give one answer");
    }
}

typedef struct caller {
    pthread_t thread;
    ep_client *client;
    uint32_t number;
} caller;

static void *run_caller(void *arg)
{
    const caller *c = arg;
    ep_moe_result result;
    for (uint32_t i = 0; i < CALLS; i++) {
        const test_model *model = &models[(c->number + i) % MODELS];
        const ep_test_batch *batch = &model->batches[(c->number * 3 + i) % (LAYERS * BATCHES)];
        EP_TEST_CHECK(ep_test_batch_call(batch, c->client, 0, &result), "%s: %s", model->name,
                      result.error.text);
    }
    return NULL;
}

/* A version belongs to one model. */
static void expect_foreign_version_refused(ep_client *client)
{
    ep_model_desc twin = {.struct_bytes = sizeof(twin)};
    uint32_t index = 0;
    do {
        EP_TEST_CHECK(ep_client_model(client, index++, &twin) == EP_OK,
                      "the twin is not in the table");
    } while (strcmp(twin.name, models[2].name) != 0);
    const ep_test_batch *batch = &models[0].batches[0];
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    uint16_t y[256];
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, batch->tokens, batch->hidden);
    ep_test_batch_args(batch, &args);
    args.version = twin.version;
    EP_TEST_CHECK(ep_moe_forward(client, &args, &out, &result) == EP_ERR_NOT_FOUND,
                  "%s was taken for a version of %s", twin.version, models[0].name);
    EP_TEST_CHECK(strstr(result.error.text, models[0].name) != NULL &&
                      strstr(result.error.text, twin.version) != NULL,
                  "%s", result.error.text);
}

int main(void)
{
    ep_test_model served[MODELS];
    caller callers[THREADS];
    ep_test_cluster cluster;
    for (uint32_t m = 0; m < MODELS; m++) {
        make_model(&models[m]);
        served[m] = (ep_test_model){models[m].name, models[m].path};
    }
    expect_twins_differ();
    const ep_test_cluster_options options = {
        .nodes_count = 2, .copies = 2, .models = served, .models_count = MODELS};
    ep_test_cluster_start(&cluster, &options);
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    for (uint32_t i = 0; i < THREADS; i++) {
        callers[i] = (caller){.client = client, .number = i};
        EP_TEST_CHECK(pthread_create(&callers[i].thread, NULL, run_caller, &callers[i]) == 0,
                      "no thread");
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(callers[i].thread, NULL);
    }
    expect_foreign_version_refused(client);
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
    for (uint32_t m = 0; m < MODELS; m++) {
        for (uint32_t b = 0; b < LAYERS * BATCHES; b++) {
            ep_test_batch_fini(&models[m].batches[b]);
        }
        ep_test_dir_remove(models[m].path);
    }
    printf("%d calls of %d models, %d threads, %d nodes: all equal to their model's oracle\n",
           THREADS * CALLS, MODELS, THREADS, 2);
    return 0;
}
