/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs each kernel shape once, of routed and of shared experts, before the node is ready. This
 * starts threads, allocates their memory and fills caches, so that no caller waits for it. A shape
 * without an expert in memory is left out.
 */
#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "expertd/weight_store_private.h"

#define WARM_ROWS_MAX 256

typedef struct warm_run {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool is_done;
} warm_run;

static void on_done(ep_job *job, ep_err result)
{
    warm_run *run = job->arg;
    (void)result; /* not reported: a real call that fails the same way is */
    pthread_mutex_lock(&run->lock);
    run->is_done = true;
    pthread_cond_signal(&run->ended);
    pthread_mutex_unlock(&run->lock);
}

static void run_job(ep_backend *backend, ep_backend_weights *weights, const ep_job_row *rows,
                    uint32_t count)
{
    warm_run run = {.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
    ep_job job = {.weights = weights,
                  .rows = rows,
                  .rows_count = count,
                  .x_dtype = EP_DTYPE_BF16,
                  .out_dtype = EP_DTYPE_BF16,
                  .done = on_done,
                  .arg = &run};
    if (ep_backend_run(backend, &job) != EP_OK) {
        return;
    }
    pthread_mutex_lock(&run.lock);
    while (!run.is_done) {
        pthread_cond_wait(&run.ended, &run.lock);
    }
    pthread_mutex_unlock(&run.lock);
}

static void warm_expert(const ep_resident *resident, uint32_t hidden)
{
    static const uint32_t counts[] = {1, 1, 2, 4, 8, 16, 32, 64, WARM_ROWS_MAX, 1};
    uint16_t *x = calloc(hidden, sizeof(*x));
    uint16_t *out = calloc((size_t)WARM_ROWS_MAX * hidden, sizeof(*out));
    ep_job_row *rows = calloc(WARM_ROWS_MAX, sizeof(*rows));
    for (uint32_t r = 0; rows != NULL && r < WARM_ROWS_MAX; r++) {
        rows[r] = (ep_job_row){
            .x = x, .x_scale = 1.0f, .input_weight = 1.0f, .out = out + (size_t)r * hidden};
    }
    for (size_t i = 0; x != NULL && out != NULL && rows != NULL && i < EP_ARRAY_COUNT(counts);
         i++) {
        run_job(resident->backend, resident->weights, rows, counts[i]);
    }
    free(x);
    free(out);
    free(rows);
}

/* What decides which kernel code runs. */
typedef struct warm_shape {
    uint32_t hidden;
    uint32_t inner;
    ep_weight_format format;
    ep_weight_format down_format;
    ep_activation activation;
} warm_shape;

static bool is_same_shape(const warm_shape *a, const warm_shape *b)
{
    return a->hidden == b->hidden && a->inner == b->inner && a->format == b->format &&
           a->down_format == b->down_format && a->activation == b->activation;
}

/* A reference to the first of the layer's experts [begin, end) that is on the device; NULL: none
 * is. */
static ep_resident *take_first(ep_weight_store *store, uint32_t device, uint32_t layer,
                               uint32_t begin, uint32_t end)
{
    ep_resident *resident = NULL;
    pthread_mutex_lock(&store->lock);
    for (uint32_t e = begin; e < end && resident == NULL; e++) {
        ep_resident *one = store->layers[layer].experts[e].resident;
        resident = one != NULL && one->device == device ? one : NULL;
    }
    if (resident != NULL) {
        ep_resident_ref(resident, 1);
    }
    pthread_mutex_unlock(&store->lock);
    return resident;
}

static void warm_device(ep_weight_store *store, uint32_t device)
{
    warm_shape *done = calloc(2 * (size_t)store->layers_count, sizeof(*done));
    size_t done_count = 0;
    for (uint32_t i = 0; done != NULL && i < 2 * store->layers_count; i++) {
        const ep_layer_shape *shape = &store->layers[i / 2].layer.shape;
        /* shared experts have another width, often another format */
        const bool is_shared = i % 2 != 0;
        const uint32_t begin = is_shared ? shape->experts : 0;
        ep_resident *resident =
            take_first(store, device, i / 2, begin,
                       is_shared ? shape->experts + shape->shared_experts : shape->experts);
        if (resident == NULL) {
            continue;
        }
        const ep_backend_weights *weights = resident->weights;
        const warm_shape wanted = {weights->hidden, weights->inner, weights->format,
                                   weights->down_format, shape->activation};
        size_t same = 0;
        while (same < done_count && !is_same_shape(&done[same], &wanted)) {
            same++;
        }
        if (same == done_count) {
            done[done_count++] = wanted;
            warm_expert(resident, wanted.hidden);
        }
        ep_resident_release(resident);
    }
    free(done);
}

void ep_weight_warm(ep_weight_store *store)
{
    for (uint32_t d = 0; d < store->devices_count; d++) {
        warm_device(store, d);
    }
}
