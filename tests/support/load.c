/* SPDX-License-Identifier: Apache-2.0 */
/* Batches with the oracle's answers, and asynchronous calls over them. */
#include "support/load.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/random.h"
#include "ref_checkpoint.h"
#include "support/cluster.h"

#define EXPERTS_MAX 64

static void *need(size_t count, size_t bytes)
{
    void *memory = calloc(count + 1, bytes);
    EP_TEST_CHECK(memory != NULL, "no memory");
    return memory;
}

/* ---- batches ---- */

static float unit(uint64_t *state)
{
    return (float)(ep_splitmix64(state) >> 40) * 0x1p-23f - 1.0f;
}

/* The first top_k of a shuffle. */
static void draw_experts(uint64_t *state, const int32_t *allowed, uint32_t count, uint32_t top_k,
                         int32_t *out)
{
    int32_t pool[EXPERTS_MAX];
    memcpy(pool, allowed, count * sizeof(pool[0]));
    for (uint32_t k = 0; k < top_k; k++) {
        uint32_t pick = k + (uint32_t)((ep_splitmix64(state) >> 33) % (count - k));
        int32_t chosen = pool[pick];
        pool[pick] = pool[k];
        pool[k] = out[k] = chosen;
    }
}

/* Computes the oracle's node sums as if expert e were on node e * step. */
static uint16_t *oracle_sums(const struct ref_layer *reference, const struct ref_batch *plain,
                             size_t step)
{
    char text[REF_TEXT_BYTES];
    size_t owner_of[EXPERTS_MAX];
    struct ref_batch batch = *plain;
    uint16_t *sums = need(plain->tokens * reference->hidden, sizeof(*sums));
    for (size_t e = 0; e < EXPERTS_MAX; e++) {
        owner_of[e] = e * step;
    }
    batch.owner_of = owner_of;
    EP_TEST_CHECK(ref_layer_forward(reference, &batch, sums, text) == REF_OK, "the oracle: %s",
                  text);
    return sums;
}

void ep_test_batch_init(ep_test_batch *batch, const struct ref_layer *reference, const char *model,
                        uint32_t layer, uint32_t tokens, uint32_t top_k, uint64_t seed,
                        const int32_t *allowed, uint32_t allowed_count)
{
    int32_t all[EXPERTS_MAX];
    char text[REF_TEXT_BYTES];
    uint32_t hidden = (uint32_t)reference->hidden;
    for (int32_t e = 0; e < EXPERTS_MAX; e++) {
        all[e] = e;
    }
    if (allowed == NULL) {
        allowed = all;
        allowed_count = (uint32_t)reference->expert_count;
    }
    EP_TEST_CHECK(allowed_count <= EXPERTS_MAX && top_k <= allowed_count, "%u of %u experts", top_k,
                  allowed_count);
    *batch = (ep_test_batch){
        .model = model, .layer = layer, .tokens = tokens, .top_k = top_k, .hidden = hidden};
    batch->x = need((size_t)tokens * hidden, sizeof(*batch->x));
    batch->expected = need((size_t)tokens * hidden, sizeof(*batch->expected));
    batch->ids = need((size_t)tokens * top_k, sizeof(*batch->ids));
    batch->scales = need((size_t)tokens * top_k, sizeof(*batch->scales));
    for (size_t i = 0; i < (size_t)tokens * hidden; i++) {
        batch->x[i] = ref_bf16_from_float(unit(&seed));
    }
    for (uint32_t t = 0; t < tokens; t++) {
        draw_experts(&seed, allowed, allowed_count, top_k, batch->ids + (size_t)t * top_k);
    }
    for (size_t i = 0; i < (size_t)tokens * top_k; i++) {
        batch->scales[i] = unit(&seed);
    }
    struct ref_batch reference_batch = {
        .tokens = tokens,
        .top_k = top_k,
        .x = batch->x,
        .x_dtype = REF_BF16,
        .ids = batch->ids,
        .ids_dtype = REF_I32,
        .scales = batch->scales,
        .scales_dtype = REF_F32,
        .wire_dtype = REF_BF16,
        .out_dtype = REF_BF16,
    };
    EP_TEST_CHECK(ref_layer_forward(reference, &reference_batch, batch->expected, text) == REF_OK,
                  "the oracle: %s", text);
    if (top_k == 2) {
        batch->joint = oracle_sums(reference, &reference_batch, 0);
        batch->apart = oracle_sums(reference, &reference_batch, 1);
    }
}

void ep_test_batches_init(ep_test_batch *batches, uint32_t count, const char *checkpoint_path,
                          const char *model, uint32_t tokens, uint32_t longer, uint32_t top_k,
                          uint64_t seed)
{
    static struct ref_checkpoint checkpoint;
    struct ref_layer layer;
    ref_checkpoint_open(checkpoint_path, &checkpoint);
    ref_layer_load(&checkpoint, 0, &layer);
    for (uint32_t b = 0; b < count; b++) {
        ep_test_batch_init(&batches[b], &layer, model, 0, tokens + b * longer, top_k, seed + b,
                           NULL, 0);
    }
    ref_layer_free(&layer);
    ref_checkpoint_close(&checkpoint);
}

void ep_test_batch_fini(ep_test_batch *batch)
{
    free(batch->x);
    free(batch->ids);
    free(batch->scales);
    free(batch->expected);
    free(batch->joint);
    free(batch->apart);
    memset(batch, 0, sizeof(*batch));
}

void ep_test_batch_args(const ep_test_batch *batch, ep_moe_args *out_args)
{
    ep_moe_args_init(out_args);
    out_args->model = batch->model;
    out_args->layer = batch->layer;
    out_args->x = ep_tensor_2d(batch->x, EP_DTYPE_BF16, batch->tokens, batch->hidden);
    out_args->expert_ids = ep_tensor_2d(batch->ids, EP_DTYPE_I32, batch->tokens, batch->top_k);
    out_args->expert_scales =
        ep_tensor_2d(batch->scales, EP_DTYPE_F32, batch->tokens, batch->top_k);
}

void ep_test_batch_expect(const ep_test_batch *batch, const uint16_t *y)
{
    size_t count = (size_t)batch->tokens * batch->hidden;
    for (size_t i = 0; i < count; i++) {
        EP_TEST_CHECK(y[i] == batch->expected[i],
                      "model %s layer %u token %zu element %zu is %04x, the oracle says %04x",
                      batch->model, batch->layer, i / batch->hidden, i % batch->hidden, y[i],
                      batch->expected[i]);
    }
}

void ep_test_batch_expect_sums(const ep_test_batch *batch, const uint16_t *y)
{
    size_t row_bytes = batch->hidden * sizeof(*y);
    for (size_t t = 0; t < batch->tokens; t++) {
        size_t at = t * batch->hidden;
        EP_TEST_CHECK(
            memcmp(y + at, batch->joint + at, row_bytes) == 0 ||
                memcmp(y + at, batch->apart + at, row_bytes) == 0,
            "model %s layer %u: the row of token %zu is neither the sum of one node nor of two",
            batch->model, batch->layer, t);
    }
}

bool ep_test_batch_call(const ep_test_batch *batch, ep_client *client, uint64_t deadline_us,
                        ep_moe_result *out_result)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    uint16_t *y = need((size_t)batch->tokens * batch->hidden, sizeof(*y));
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, batch->tokens, batch->hidden);
    ep_test_batch_args(batch, &args);
    args.deadline_us = deadline_us;
    ep_err err = ep_moe_forward(client, &args, &out, &result);
    if (err == EP_OK) {
        ep_test_batch_expect(batch, y);
    }
    free(y);
    *out_result = result;
    return err == EP_OK;
}

/* ---- load ---- */

typedef struct load_slot {
    ep_test_load *load;
    const ep_test_batch *batch;
    uint16_t *y;
    uint64_t began_ns;
    bool running;  /* between the call's begin and its end */
    bool is_taken; /* of an open loop; under the lock */
} load_slot;

struct ep_test_load {
    ep_test_load_config config;
    load_slot *slots;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ep_test_load_counts counts;
    uint64_t begun;
    bool stopping;
    pthread_t pacer; /* of an open loop */
};

static void on_done(void *arg, const ep_moe_result *result);

/* Takes the next batch; the caller has counted the call as in flight. */
static void begin(load_slot *slot, uint64_t number, uint64_t due_ns)
{
    const ep_test_load_config *config = &slot->load->config;
    ep_moe_args args;
    ep_error error;
    slot->batch = &config->batches[number % config->batches_count];
    ep_tensor out = ep_tensor_2d(slot->y, EP_DTYPE_BF16, slot->batch->tokens, slot->batch->hidden);
    ep_test_batch_args(slot->batch, &args);
    args.version = config->version;
    args.mode = config->mode;
    args.comm_alg = config->comm_alg;
    args.combine_at = config->combine_at;
    args.deadline_us = config->deadline_us;
    slot->running = true;
    slot->began_ns = due_ns;
    ep_err err = ep_moe_forward_async(config->client, &args, &out, on_done, slot, NULL, &error);
    EP_TEST_CHECK(err == EP_OK, "a call was not begun: %s", error.text);
}

static void judge(const load_slot *slot, const ep_moe_result *result, uint64_t now_ns)
{
    const ep_test_load_config *config = &slot->load->config;
    bool good = result->error.code == EP_OK;
    if (config->on_end != NULL) {
        config->on_end(config->arg, slot->batch, result, good ? slot->y : NULL, slot->began_ns,
                       now_ns);
    } else if (good && config->expect != NULL) {
        config->expect(slot->batch, slot->y);
    } else if (good && config->combine_at == EP_MOE_COMBINE_NODE_SUM) {
        ep_test_batch_expect_sums(slot->batch, slot->y);
    } else if (good) {
        ep_test_batch_expect(slot->batch, slot->y);
    } else if (config->on_failure != NULL) {
        config->on_failure(config->arg, slot->batch, result, slot->began_ns, now_ns);
    } else {
        ep_test_fail("a call failed with %s: %s", ep_err_name(result->error.code),
                     result->error.text);
    }
}

static void on_done(void *arg, const ep_moe_result *result)
{
    load_slot *slot = arg;
    ep_test_load *load = slot->load;
    bool good = result->error.code == EP_OK;
    uint64_t now_ns = ep_clock_now_ns();
    EP_TEST_CHECK(slot->running, "a call ended twice");
    slot->running = false;
    judge(slot, result, now_ns);
    memset(slot->y, 0xee, (size_t)slot->batch->tokens * slot->batch->hidden * sizeof(*slot->y));
    pthread_mutex_lock(&load->lock);
    load->counts.succeeded += good;
    load->counts.failed += !good;
    load->counts.rerouted_frames += result->rerouted_frames;
    load->counts.hedged_frames += result->hedged_frames;
    bool again = !load->stopping && load->config.calls_per_s == 0;
    uint64_t number = load->begun;
    load->begun += again;
    load->counts.in_flight -= !again;
    slot->is_taken = again;
    pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
    if (again) {
        begin(slot, number, now_ns);
    }
}

/* Lock held. NULL: all slots are in flight; the call has been counted as failed. */
static load_slot *take_slot(ep_test_load *load)
{
    for (uint32_t i = 0; i < load->config.calls_in_flight; i++) {
        if (!load->slots[i].is_taken) {
            load->slots[i].is_taken = true;
            load->counts.in_flight++;
            return &load->slots[i];
        }
    }
    load->counts.failed++;
    return NULL;
}

/* Begins calls when they are due. */
static void *pace(void *arg)
{
    ep_test_load *load = arg;
    const uint64_t step_ns = (uint64_t)(1e9 / load->config.calls_per_s);
    for (uint64_t due_ns = ep_clock_now_ns();; due_ns += step_ns) {
        const struct timespec due = {.tv_sec = (time_t)(due_ns / EP_NS_PER_S),
                                     .tv_nsec = (long)(due_ns % EP_NS_PER_S)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) != 0) {
        }
        pthread_mutex_lock(&load->lock);
        if (load->stopping) {
            pthread_mutex_unlock(&load->lock);
            return NULL;
        }
        uint64_t number = load->begun++;
        load_slot *slot = take_slot(load);
        pthread_mutex_unlock(&load->lock);
        if (slot != NULL) {
            begin(slot, number, due_ns);
        } else if (load->config.on_end != NULL) {
            ep_moe_result result = {.struct_bytes = sizeof(result)};
            ep_error_set(&result.error, EP_ERR_RESOURCE_EXHAUSTED, "%u calls are in flight",
                         load->config.calls_in_flight);
            load->config.on_end(load->config.arg,
                                &load->config.batches[number % load->config.batches_count], &result,
                                NULL, due_ns, ep_clock_now_ns());
        }
    }
}

ep_test_load *ep_test_load_start(const ep_test_load_config *config)
{
    ep_test_load *load = need(1, sizeof(*load));
    pthread_condattr_t monotonic;
    size_t elements = 0;
    load->config = *config;
    pthread_mutex_init(&load->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&load->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    for (uint32_t i = 0; i < config->batches_count; i++) {
        size_t wants = (size_t)config->batches[i].tokens * config->batches[i].hidden;
        elements = wants > elements ? wants : elements;
    }
    load->slots = need(config->calls_in_flight, sizeof(*load->slots));
    for (uint32_t i = 0; i < config->calls_in_flight; i++) {
        load->slots[i] = (load_slot){.load = load, .y = need(elements, sizeof(uint16_t))};
    }
    if (config->calls_per_s > 0) {
        EP_TEST_CHECK(pthread_create(&load->pacer, NULL, pace, load) == 0, "no thread");
        return load;
    }
    load->begun = config->calls_in_flight;
    load->counts.in_flight = config->calls_in_flight;
    for (uint32_t i = 0; i < config->calls_in_flight; i++) {
        begin(&load->slots[i], i, ep_clock_now_ns());
    }
    return load;
}

void ep_test_load_read(ep_test_load *load, ep_test_load_counts *out_counts)
{
    pthread_mutex_lock(&load->lock);
    *out_counts = load->counts;
    pthread_mutex_unlock(&load->lock);
}

/* Lock held. EP_TEST_PATIENCE_MS bounds each event, not the whole wait. */
static void wait_event(ep_test_load *load)
{
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += 2 * EP_TEST_PATIENCE_MS / 1000;
    if (pthread_cond_timedwait(&load->changed, &load->lock, &end) != 0) {
        ep_test_fail("no call ended: %llu have succeeded, %llu failed, %u are in flight",
                     (unsigned long long)load->counts.succeeded,
                     (unsigned long long)load->counts.failed, load->counts.in_flight);
    }
}

static void wait_count(ep_test_load *load, const uint64_t *counter, uint64_t more)
{
    pthread_mutex_lock(&load->lock);
    uint64_t goal = *counter + more;
    while (*counter < goal) {
        wait_event(load);
    }
    pthread_mutex_unlock(&load->lock);
}

void ep_test_load_wait_succeeded(ep_test_load *load, uint64_t more)
{
    wait_count(load, &load->counts.succeeded, more);
}

void ep_test_load_wait_failed(ep_test_load *load, uint64_t more)
{
    wait_count(load, &load->counts.failed, more);
}

void ep_test_load_stop(ep_test_load *load, ep_test_load_counts *out_counts)
{
    pthread_mutex_lock(&load->lock);
    load->stopping = true;
    pthread_mutex_unlock(&load->lock);
    if (load->config.calls_per_s > 0) {
        pthread_join(load->pacer, NULL);
    }
    pthread_mutex_lock(&load->lock);
    while (load->counts.in_flight > 0) {
        wait_event(load);
    }
    *out_counts = load->counts;
    pthread_mutex_unlock(&load->lock);
    for (uint32_t i = 0; i < load->config.calls_in_flight; i++) {
        free(load->slots[i].y);
    }
    pthread_cond_destroy(&load->changed);
    pthread_mutex_destroy(&load->lock);
    free(load->slots);
    free(load);
}
