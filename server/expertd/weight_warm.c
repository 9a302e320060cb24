/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Before a node is ready it runs each kernel shape once: threads are started, their memory is there, code and tables are in cache, so
 * that no caller pays for it.
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
    (void)result; /* a call that fails the same way says so */
    pthread_mutex_lock(&run->lock);
    run->is_done = true;
    pthread_cond_signal(&run->ended);
    pthread_mutex_unlock(&run->lock);
}

static void run_job(ep_backend *backend, ep_backend_weights *weights, const ep_job_row *rows, uint32_t count)
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

static void warm_expert(ep_backend *backend, const ep_resident *resident, uint32_t hidden)
{
    static const uint32_t counts[] = {1, 1, 2, 4, 8, 16, 32, 64, WARM_ROWS_MAX, 1};
    uint16_t *x = calloc(hidden, sizeof(*x));
    uint16_t *out = calloc((size_t)WARM_ROWS_MAX * hidden, sizeof(*out));
    ep_job_row *rows = calloc(WARM_ROWS_MAX, sizeof(*rows));
    for (uint32_t r = 0; rows != NULL && r < WARM_ROWS_MAX; r++) {
        rows[r] = (ep_job_row){.x = x, .x_scale = 1.0f, .input_weight = 1.0f, .out = out + (size_t)r * hidden};
    }
    for (size_t i = 0; x != NULL && out != NULL && rows != NULL && i < EP_ARRAY_COUNT(counts); i++) {
        run_job(backend, resident->weights, rows, counts[i]);
    }
    free(x);
    free(out);
    free(rows);
}

static bool is_same_kernel(const ep_weight_layer *a, const ep_weight_layer *b)
{
    return a->shape.hidden == b->shape.hidden && a->shape.inner == b->shape.inner && a->format == b->format &&
           a->shape.activation == b->shape.activation;
}

/* With a reference; NULL: this layer's kernels ran for another one, or no expert is here. */
static ep_resident *take_sample(ep_weight_store *store, uint32_t index)
{
    ep_resident *resident = NULL;
    pthread_mutex_lock(&store->lock);
    const layer_entry *layer = &store->layers[index];
    bool is_due = layer->resident_count > 0;
    for (uint32_t l = 0; l < index && is_due; l++) {
        is_due = store->layers[l].resident_count == 0 || !is_same_kernel(&store->layers[l].layer, &layer->layer);
    }
    for (uint32_t e = 0; is_due && resident == NULL && e < layer->experts_count; e++) {
        resident = layer->experts[e].resident;
    }
    if (resident != NULL) {
        ep_resident_ref(resident, 1);
    }
    pthread_mutex_unlock(&store->lock);
    return resident;
}

void ep_weight_warm(ep_weight_store *store)
{
    for (uint32_t l = 0; l < store->layers_count; l++) {
        ep_resident *resident = take_sample(store, l);
        if (resident != NULL) {
            warm_expert(store->config.backend, resident, store->layers[l].layer.shape.hidden);
            ep_resident_release(resident);
        }
    }
}
