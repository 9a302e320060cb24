/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows stay in the callers' host memory, where the network puts them. When they are gathered into
 * pinned memory they are converted to the type of the weights. So a job crosses the device in one
 * go, without the host between its copies.
 *
 * Two threads. The launcher takes the most urgent job and others that fit into the same group,
 * fills a free slot and queues its steps. The finisher waits for the oldest slot in flight, writes
 * results and calls done(). It waits in a thread rather than with a callback of the vendor's, so
 * that it also notices a device that no longer answers.
 */
#include "backends/ascend/ascend_backend.h"

#include <stdlib.h>
#include <string.h>

#include "backends/ascend/ascend_slot.h"
#include "backends/ascend/ascend_weights.h"
#include "backends/host_common.h"
#include "backends/known_answer.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"

#define SLOTS 4 /* one being copied in, one computed, one copied out, one with the host */
/* interval of reading the device's memory figures: a device that does not answer is lost */
#define LOOK_NS EP_NS_PER_S
/* 1/SPARE_PART of free memory stays for passes and operators when no budget is given */
#define SPARE_PART 10

typedef struct ascend_backend {
    ep_backend base;
    ep_backend_budget budget;
    ep_known_answer answer;
    ep_ascend_device device;
    bool has_device;
    ep_ascend_streams streams;
    ep_ascend_uploader uploader;
    bool has_uploader;
    ep_ascend_slot slots[SLOTS];
    pthread_t launcher;
    pthread_t finisher;
    bool has_launcher;
    bool has_finisher;

    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t changed;
    ep_job *first; /* waiting, in the order of submission */
    ep_job *last;
    uint32_t jobs_count; /* waiting or in flight */
    ep_ascend_slot *free;
    ep_ascend_slot *first_flying; /* oldest first */
    ep_ascend_slot *last_flying;
    bool stopping;
    bool launcher_ended;
} ascend_backend;

/* ---- jobs into slots ---- */

static bool rides_with(const ep_job *job, const ep_job *lead, uint32_t rows)
{
    const bool alike = ep_ascend_weights_alike(job->weights, lead->weights);
    const bool as_patient = ((job->priority ^ lead->priority) & EP_JOB_PATIENT) == 0;
    return job == lead || (alike && as_patient && rows + job->rows_count <= EP_ASCEND_ROWS_MAX);
}

/* Lock held; there are jobs. Takes the most urgent one, and others that fit, in their order. */
static void take_jobs(ascend_backend *backend, ep_ascend_slot *slot)
{
    const ep_job *lead = backend->first;
    for (const ep_job *job = lead; job != NULL; job = job->next) {
        lead = job->priority < lead->priority ? job : lead;
    }
    const uint32_t jobs_max = ep_ascend_slot_jobs_max(lead->weights);
    uint32_t rows = lead->rows_count;
    uint32_t count = 0;
    bool has_lead = false;
    ep_job *kept = NULL; /* the last job that stays in the queue */
    for (ep_job **link = &backend->first; *link != NULL;) {
        ep_job *job = *link;
        const bool has_place = job == lead || count + (has_lead ? 0 : 1) < jobs_max;
        if (has_place && rides_with(job, lead, rows)) {
            rows += job == lead ? 0 : job->rows_count;
            has_lead = has_lead || job == lead;
            slot->jobs[count++] = job;
            *link = job->next;
        } else {
            kept = job;
            link = &job->next;
        }
    }
    backend->last = kept;
    slot->jobs_count = count;
}

static void *launcher_main(void *arg)
{
    ascend_backend *backend = arg;
    ep_host_floats_reset();
    (void)ep_ascend_device_enter(&backend->device, NULL);
    pthread_mutex_lock(&backend->lock);
    for (;;) {
        if (backend->first == NULL || backend->free == NULL) {
            if (backend->stopping) {
                break;
            }
            pthread_cond_wait(&backend->changed, &backend->lock);
            continue;
        }
        ep_ascend_slot *slot = backend->free;
        backend->free = slot->next;
        slot->next = NULL;
        take_jobs(backend, slot);
        pthread_mutex_unlock(&backend->lock);

        slot->launched = false;
        slot->result = EP_ERR_DEVICE_LOST;
        if (!atomic_load(&backend->device.lost)) {
            ep_ascend_slot_launch(slot, &backend->device, &backend->streams);
        }

        pthread_mutex_lock(&backend->lock);
        *(backend->first_flying != NULL ? &backend->last_flying->next : &backend->first_flying) =
            slot;
        backend->last_flying = slot;
        pthread_cond_broadcast(&backend->changed);
    }
    backend->launcher_ended = true;
    pthread_cond_broadcast(&backend->changed);
    pthread_mutex_unlock(&backend->lock);
    return NULL;
}

/* Calls done(): the jobs belong to their callers again. */
static void end_jobs(ascend_backend *backend, ep_job *const *jobs, uint32_t count, ep_err result)
{
    for (uint32_t j = 0; j < count; j++) {
        pthread_mutex_lock(&backend->lock);
        backend->jobs_count--;
        pthread_mutex_unlock(&backend->lock);
        jobs[j]->done(jobs[j], result);
    }
}

/* Lock held on entry and exit. */
static void look_now_and_then(ascend_backend *backend, uint64_t *looked_ns)
{
    const uint64_t now_ns = ep_clock_now_ns();
    if (now_ns - *looked_ns < LOOK_NS) {
        return;
    }
    *looked_ns = now_ns;
    pthread_mutex_unlock(&backend->lock);
    (void)ep_ascend_device_look(&backend->device, NULL);
    pthread_mutex_lock(&backend->lock);
}

static void *finisher_main(void *arg)
{
    ascend_backend *backend = arg;
    ep_job *jobs[EP_ACL_GROUPS_MAX];
    uint64_t looked_ns = ep_clock_now_ns();
    ep_host_floats_reset();
    (void)ep_ascend_device_enter(&backend->device, NULL);
    pthread_mutex_lock(&backend->lock);
    for (;;) {
        look_now_and_then(backend, &looked_ns);
        ep_ascend_slot *slot = backend->first_flying;
        if (slot == NULL) {
            if (backend->launcher_ended) {
                break;
            }
            ep_clock_wait(&backend->changed, &backend->lock, looked_ns + LOOK_NS);
            continue;
        }
        backend->first_flying = slot->next;
        pthread_mutex_unlock(&backend->lock);

        const ep_err result = ep_ascend_slot_finish(slot, &backend->device);
        const uint32_t count = slot->jobs_count;
        memcpy(jobs, slot->jobs, count * sizeof(jobs[0]));

        pthread_mutex_lock(&backend->lock); /* free the slot first, since done() may take long */
        slot->next = backend->free;
        backend->free = slot;
        pthread_cond_broadcast(&backend->changed);
        pthread_mutex_unlock(&backend->lock);
        end_jobs(backend, jobs, count, result);
        pthread_mutex_lock(&backend->lock);
    }
    pthread_mutex_unlock(&backend->lock);
    return NULL;
}

static ep_err ascend_submit(ep_backend *base, ep_job *job)
{
    ascend_backend *backend = (ascend_backend *)base;
    ep_err err = ep_job_check(job);
    if (err == EP_OK && atomic_load(&backend->device.lost)) {
        err = EP_ERR_DEVICE_LOST;
    }
    if (err != EP_OK) {
        return err;
    }
    job->next = NULL;
    pthread_mutex_lock(&backend->lock);
    if (backend->jobs_count >= EP_BACKEND_JOBS_MAX) {
        err = EP_ERR_RESOURCE_EXHAUSTED;
    } else {
        *(backend->first != NULL ? &backend->last->next : &backend->first) = job;
        backend->last = job;
        backend->jobs_count++;
        pthread_cond_broadcast(&backend->changed);
    }
    pthread_mutex_unlock(&backend->lock);
    return err;
}

/* ---- open and close ---- */

static void stop_threads(ascend_backend *backend)
{
    pthread_mutex_lock(&backend->lock);
    EP_ASSERT(backend->jobs_count == 0);
    backend->stopping = true;
    backend->launcher_ended = !backend->has_launcher;
    pthread_cond_broadcast(&backend->changed);
    pthread_mutex_unlock(&backend->lock);
    if (backend->has_launcher) {
        pthread_join(backend->launcher, NULL);
    }
    if (backend->has_finisher) {
        pthread_join(backend->finisher, NULL);
    }
}

/* Destroys streams first: nothing may be destroyed that a stream has not yet passed. */
static void close_device(ascend_backend *backend)
{
    ep_ascend_device *device = &backend->device;
    const ep_acl_stream streams[] = {backend->streams.in, backend->streams.compute,
                                     backend->streams.out};
    (void)device->acl.aclrtSetDevice(device->number);
    for (size_t i = 0; i < EP_ARRAY_COUNT(streams); i++) {
        ep_ascend_stream_destroy(device, streams[i]);
    }
    if (backend->has_uploader) {
        ep_ascend_uploader_fini(&backend->uploader, device);
    }
    for (size_t i = 0; i < SLOTS; i++) {
        ep_ascend_slot_fini(&backend->slots[i], device);
    }
    ep_ascend_device_close(device);
}

static void ascend_close(ep_backend *base)
{
    ascend_backend *backend = (ascend_backend *)base;
    if (backend == NULL) {
        return;
    }
    stop_threads(backend);
    EP_ASSERT(atomic_load(&backend->budget.used_bytes) == 0);
    if (backend->has_device) {
        close_device(backend);
    }
    pthread_mutex_destroy(&backend->lock);
    pthread_cond_destroy(&backend->changed);
    free(backend);
}

static ep_err check_config(const ep_backend_config *config, ep_error *out_error)
{
    if (config->threads > EP_BACKEND_THREADS_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "compute threads is %u, allowed 0 to %u", config->threads,
                            EP_BACKEND_THREADS_MAX);
    }
    if (config->numerics != EP_NUMERICS_AUTO) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "backend ascend rounds by the device's own rules: numerics must be auto");
    }
    return EP_OK;
}

static ep_err make_device(ascend_backend *backend, ep_error *out_error)
{
    ep_ascend_device *device = &backend->device;
    ep_acl_stream *const streams[] = {&backend->streams.in, &backend->streams.compute,
                                      &backend->streams.out};
    ep_err err = ep_ascend_device_open(device, out_error);
    backend->has_device = err == EP_OK;
    for (size_t i = 0; i < EP_ARRAY_COUNT(streams) && err == EP_OK; i++) {
        err = EP_ASCEND_CALL(device, out_error, aclrtCreateStream, streams[i]);
    }
    for (size_t i = 0; i < SLOTS && err == EP_OK; i++) {
        err = ep_ascend_slot_init(&backend->slots[i], device, out_error);
        backend->slots[i].next = backend->free;
        backend->free = &backend->slots[i];
    }
    if (err == EP_OK) {
        backend->has_uploader = true;
        err = ep_ascend_uploader_init(&backend->uploader, device, out_error);
    }
    return err;
}

static ep_err start_threads(ascend_backend *backend, ep_error *out_error)
{
    backend->has_launcher =
        ep_thread_start("ep-ascend-in", launcher_main, backend, &backend->launcher) == EP_OK;
    backend->has_finisher =
        backend->has_launcher &&
        ep_thread_start("ep-ascend-out", finisher_main, backend, &backend->finisher) == EP_OK;
    return backend->has_finisher ? EP_OK
                                 : ep_error_set(out_error, EP_ERR_NO_MEMORY,
                                                "backend ascend cannot start its threads");
}

/* I of known-answer runs; the fused operator accepts the second */
enum { ODD = EP_KNOWN_ANSWER_INNER, EVEN = 64 };

/* Abilities that a device may lack, with what its known-answer run computes. Abilities that others
 * need come first. */
static const struct {
    ep_ascend_ability ability;
    uint32_t needs;
    ep_activation activation;
    bool has_biases;
    bool is_quant; /* w8a8; false: bf16 and f16 */
    uint32_t inner;
    const char *effect;
} trials[] = {
    {EP_ASCEND_BIASES, 0, EP_ACT_SILU, true, false, ODD,
     "bf16 and f16 experts with biases are refused"},
    {EP_ASCEND_CLIPPED, 0, EP_ACT_SWIGLU_OAI, false, false, ODD,
     "swiglu_oai and swiglu_limit experts are refused"},
    {EP_ASCEND_CLIPPED, 0, EP_ACT_SWIGLU_LIMIT, false, false, ODD,
     "swiglu_oai and swiglu_limit experts are refused"},
    {EP_ASCEND_GELU, 0, EP_ACT_GELU, false, false, ODD, "gelu and gelu_tanh experts are refused"},
    {EP_ASCEND_GELU, 0, EP_ACT_GELU_TANH, false, false, ODD,
     "gelu and gelu_tanh experts are refused"},
    {EP_ASCEND_W8A8, 0, EP_ACT_SILU, false, true, ODD, "w8a8 experts are refused"},
    {EP_ASCEND_W8A8_BIASES, EP_ASCEND_W8A8, EP_ACT_SILU, true, true, ODD,
     "w8a8 experts with biases are refused"},
    {EP_ASCEND_FUSED, EP_ASCEND_W8A8, EP_ACT_SILU, false, true, EVEN,
     "w8a8 experts take more steps"},
};

/* The abilities for which the symbols exist. */
static uint32_t abilities_of(const ep_acl_symbols *acl)
{
    return EP_ASCEND_BIASES | (acl->aclnnClippedSwiglu != NULL ? EP_ASCEND_CLIPPED : 0) |
           (acl->aclnnGeGluV3 != NULL ? EP_ASCEND_GELU : 0) |
           (acl->aclnnDynamicQuant != NULL ? EP_ASCEND_W8A8 | EP_ASCEND_W8A8_BIASES : 0) |
           (acl->aclnnGroupedMatmulSwigluQuant != NULL ? EP_ASCEND_FUSED : 0);
}

static ep_err run_trial(ascend_backend *backend, ep_activation activation, bool has_biases,
                        bool is_quant, uint32_t inner, ep_error *out_error)
{
    static const ep_weight_format floats[] = {EP_WEIGHTS_BF16, EP_WEIGHTS_F16};
    static const ep_weight_format quant[] = {EP_WEIGHTS_W8A8};
    const ep_weight_format *formats = is_quant ? quant : floats;
    const size_t count = is_quant ? EP_ARRAY_COUNT(quant) : EP_ARRAY_COUNT(floats);
    ep_err err = EP_OK;
    for (size_t f = 0; f < count && err == EP_OK; f++) {
        err = ep_known_answer_run_expert(&backend->base, formats[f], activation, has_biases, inner,
                                         &backend->answer.digests[formats[f]], out_error);
    }
    return err;
}

/*
 * Makes the known-answer runs. bf16 and f16 with silu must succeed. The operators' other abilities
 * differ between releases and devices: each is used if its run succeeds, and refused otherwise. A
 * run without memory says nothing of the device, so it ends the opening.
 */
static ep_err learn_answers(ascend_backend *backend, ep_error *out_error)
{
    uint32_t *abilities = &backend->device.abilities;
    uint32_t lacking = ~abilities_of(&backend->device.acl);
    ep_err err = run_trial(backend, EP_ACT_SILU, false, false, ODD, out_error);
    for (size_t t = 0; t < EP_ARRAY_COUNT(trials) && err == EP_OK; t++) {
        ep_error error;
        if ((lacking & (trials[t].ability | trials[t].needs)) != 0) {
            continue;
        }
        *abilities |= trials[t].ability;
        const ep_err trial = run_trial(backend, trials[t].activation, trials[t].has_biases,
                                       trials[t].is_quant, trials[t].inner, &error);
        if (trial == EP_OK) {
            continue;
        }
        *abilities &= ~(uint32_t)trials[t].ability;
        lacking |= trials[t].ability;
        const bool is_lost = atomic_load(&backend->device.lost);
        if (is_lost || trial == EP_ERR_NO_MEMORY) {
            return ep_error_set(out_error, is_lost ? EP_ERR_DEVICE_LOST : trial, "%s", error.text);
        }
        ep_log(EP_LOG_WARN, "device-lacks", EP_KV(backend, "ascend"), EP_KV(reason, error.text),
               EP_KV(effect, trials[t].effect));
    }
    return err;
}

/* A device's memory is limited, so there is always a budget. */
static ep_err set_budget(ascend_backend *backend, uint64_t wanted, ep_error *out_error)
{
    const ep_err err = ep_ascend_device_look(&backend->device, out_error);
    if (err != EP_OK) {
        return err;
    }
    const uint64_t left = atomic_load(&backend->device.free_bytes);
    const uint64_t spared = left - left / SPARE_PART;
    if (wanted > left || spared == 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "weight_bytes_max is %llu, and %llu of %llu bytes of device %d are "
                            "free; allowed: up to "
                            "what is free, less what passes need, or 0 for %llu",
                            (unsigned long long)wanted, (unsigned long long)left,
                            (unsigned long long)atomic_load(&backend->device.memory_bytes),
                            backend->device.number, (unsigned long long)spared);
    }
    backend->budget.limit_bytes = wanted != 0 ? wanted : spared;
    return EP_OK;
}

static ep_err ascend_open(const ep_backend_config *config, ep_backend **out_backend,
                          ep_error *out_error)
{
    ep_err err = check_config(config, out_error);
    if (err != EP_OK) {
        return err;
    }
    ascend_backend *backend = calloc(1, sizeof(*backend));
    if (backend == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for backend ascend");
    }
    backend->base.ops = &ep_backend_ascend_ops;
    backend->device.number = (int32_t)config->device;
    backend->device.on_lost = config->on_lost;
    backend->device.arg = config->arg;
    pthread_mutex_init(&backend->lock, NULL);
    pthread_cond_init(&backend->changed, NULL);
    err = make_device(backend, out_error);
    err = err == EP_OK ? start_threads(backend, out_error) : err;
    err = err == EP_OK ? learn_answers(backend, out_error) : err;
    err = err == EP_OK ? set_budget(backend, config->memory_bytes, out_error) : err;
    if (err != EP_OK) {
        ascend_close(&backend->base);
        return err == EP_ERR_INVALID_ARGUMENT
                   ? err
                   : ep_error_prefix(out_error, err,
                                     "not available (backend: cpu computes without a device)");
    }
    backend->device.has_served = true;
    *out_backend = &backend->base;
    return EP_OK;
}

static ep_err ascend_numerics_id(ep_backend *base, ep_weight_format format, bool wide_inputs,
                                 uint32_t others, char out_id[EP_NUMERICS_ID_BYTES])
{
    ascend_backend *backend = (ascend_backend *)base;
    (void)wide_inputs; /* both use the same arithmetic */
    if (format != EP_WEIGHTS_BF16 && format != EP_WEIGHTS_F16 &&
        !(format == EP_WEIGHTS_W8A8 && (backend->device.abilities & EP_ASCEND_W8A8) != 0)) {
        return EP_ERR_UNIMPLEMENTED;
    }
    return ep_known_answer_id(&backend->answer, "ascend", format, others, out_id);
}

/* ---- weights ---- */

static size_t ascend_weights_bytes(ep_backend *base, const ep_expert_source *source)
{
    return ep_expert_source_supported(source) &&
                   ep_ascend_weights_check(&((ascend_backend *)base)->device, source, NULL) == EP_OK
               ? ep_ascend_weights_bytes(source)
               : 0;
}

/* Only the runtime can tell how much device memory is free. The error says it, and what to
 * change. */
static ep_err tell_memory(ascend_backend *backend, size_t bytes, ep_error *out_error)
{
    return ep_error_set(
        out_error, EP_ERR_NO_MEMORY,
        "an expert of %zu bytes does not fit: %llu of %llu bytes of device %d are free, %llu of "
        "weight_bytes_max %llu are held by experts; lower weight_bytes_max, or see npu-smi info "
        "for "
        "who holds the rest",
        bytes, (unsigned long long)atomic_load(&backend->device.free_bytes),
        (unsigned long long)atomic_load(&backend->device.memory_bytes), backend->device.number,
        (unsigned long long)atomic_load(&backend->budget.used_bytes) - bytes,
        (unsigned long long)backend->budget.limit_bytes);
}

static ep_err ascend_weights_load(ep_backend *base, const ep_expert_source *source,
                                  ep_backend_weights **out_weights, ep_error *out_error)
{
    ascend_backend *backend = (ascend_backend *)base;
    ep_ascend_weights *weights = NULL;
    ep_err err = ep_expert_source_check(source, out_error);
    err = err == EP_OK ? ep_ascend_weights_check(&backend->device, source, out_error) : err;
    err = err == EP_OK ? ep_ascend_device_enter(&backend->device, out_error) : err;
    if (err != EP_OK) {
        return err;
    }
    const size_t bytes = ep_ascend_weights_bytes(source);
    err = ep_backend_budget_take(&backend->budget, bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    err =
        ep_ascend_weights_create(&backend->device, &backend->uploader, source, &weights, out_error);
    if (err == EP_OK || err == EP_ERR_NO_MEMORY) {
        (void)ep_ascend_device_look(&backend->device, NULL);
    }
    if (err != EP_OK) {
        err = err == EP_ERR_NO_MEMORY ? tell_memory(backend, bytes, out_error) : err;
        ep_backend_budget_give(&backend->budget, bytes);
        return err;
    }
    *out_weights = &weights->base;
    return EP_OK;
}

static void ascend_weights_unload(ep_backend *base, ep_backend_weights *base_weights)
{
    ascend_backend *backend = (ascend_backend *)base;
    ep_ascend_weights *weights = (ep_ascend_weights *)base_weights;
    if (weights != NULL) {
        (void)ep_ascend_device_enter(&backend->device, NULL);
        ep_backend_budget_give(&backend->budget, weights->bytes);
        ep_ascend_weights_destroy(&backend->device, &backend->uploader, weights);
        (void)ep_ascend_device_look(&backend->device, NULL);
    }
}

static void ascend_device_read(ep_backend *base, ep_backend_device *out_device)
{
    ascend_backend *backend = (ascend_backend *)base;
    const bool is_lost = atomic_load(&backend->device.lost);
    *out_device = (ep_backend_device){
        .memory_bytes = is_lost ? 0 : atomic_load(&backend->device.memory_bytes),
        .free_bytes = is_lost ? 0 : atomic_load(&backend->device.free_bytes),
        .weight_bytes_max = backend->budget.limit_bytes};
}

const ep_backend_ops ep_backend_ascend_ops = {
    .api_version = EP_BACKEND_API_VERSION,
    .name = "ascend",
    .memory = EP_MEMORY_HOST,
    .jobs_ahead = EP_ACL_GROUPS_MAX,
    .probe = ep_ascend_device_probe,
    .open = ascend_open,
    .close = ascend_close,
    .device_read = ascend_device_read,
    .numerics_id = ascend_numerics_id,
    .weights_bytes = ascend_weights_bytes,
    .weights_load = ascend_weights_load,
    .weights_unload = ascend_weights_unload,
    .submit = ascend_submit,
};
