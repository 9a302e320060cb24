/* SPDX-License-Identifier: Apache-2.0 */
/* The hand-driven backend. */
#include "hand_backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ep_err hand_submit(ep_backend *backend, ep_job *job)
{
    hand_backend *hand = (hand_backend *)(void *)backend;
    pthread_mutex_lock(&hand->lock);
    ep_err err = hand->next_error;
    hand->next_error = EP_OK;
    if (err == EP_OK) {
        if (hand->count == HAND_JOBS_MAX) {
            fprintf(stderr, "more than %d jobs\n", HAND_JOBS_MAX);
            abort();
        }
        hand->jobs[hand->count++] = job;
        if (hand->on_submit != NULL) {
            hand->on_submit(job);
        }
        pthread_cond_broadcast(&hand->submitted);
    }
    pthread_mutex_unlock(&hand->lock);
    return err;
}

static ep_err hand_numerics(ep_backend *backend, ep_weight_format format, bool wide_inputs,
                            uint32_t others, char out_id[EP_NUMERICS_ID_BYTES])
{
    (void)backend;
    (void)wide_inputs;
    (void)others;
    snprintf(out_id, EP_NUMERICS_ID_BYTES, "hand/%s", ep_weight_format_name(format));
    return EP_OK;
}

static size_t hand_bytes(ep_backend *backend, const ep_expert_source *source)
{
    (void)backend;
    return 3 * (size_t)source->hidden * source->inner * 2;
}

static ep_err hand_load(ep_backend *backend, const ep_expert_source *source,
                        ep_backend_weights **out_weights, ep_error *out_error)
{
    (void)backend;
    ep_backend_weights *weights = malloc(sizeof(*weights));
    if (weights == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory");
    }
    *weights = (ep_backend_weights){
        .hidden = source->hidden, .inner = source->inner, .format = source->format};
    *out_weights = weights;
    return EP_OK;
}

static void hand_unload(ep_backend *backend, ep_backend_weights *weights)
{
    (void)backend;
    free(weights);
}

static const ep_backend_ops hand_ops = {
    .api_version = EP_BACKEND_API_VERSION,
    .name = "hand",
    .memory = EP_MEMORY_HOST,
    .numerics_id = hand_numerics,
    .weights_bytes = hand_bytes,
    .weights_load = hand_load,
    .weights_unload = hand_unload,
    .submit = hand_submit,
};

void hand_backend_init(hand_backend *hand)
{
    memset(hand, 0, sizeof(*hand));
    hand->base.ops = &hand_ops;
    pthread_mutex_init(&hand->lock, NULL);
    pthread_cond_init(&hand->submitted, NULL);
}

void hand_backend_wait(hand_backend *hand, uint32_t count)
{
    pthread_mutex_lock(&hand->lock);
    while (hand->count < count) {
        pthread_cond_wait(&hand->submitted, &hand->lock);
    }
    pthread_mutex_unlock(&hand->lock);
}

bool hand_backend_complete(hand_backend *hand, ep_err result)
{
    pthread_mutex_lock(&hand->lock);
    ep_job *job = hand->completed < hand->count ? hand->jobs[hand->completed++] : NULL;
    pthread_mutex_unlock(&hand->lock);
    if (job != NULL) {
        job->done(job, result);
    }
    return job != NULL;
}

void hand_backend_complete_all(hand_backend *hand)
{
    while (hand_backend_complete(hand, EP_OK)) {
    }
}
