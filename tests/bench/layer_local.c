/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/layer_local.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "moe/combine.h"

struct layer_local {
    ep_backend *backend;
    ep_layer_shape shape;
    uint32_t weights_count;
    uint32_t share_first;
    uint32_t share_count;
    ep_backend_weights **weights; /* [weights_count]; NULL outside of the share */
    pthread_mutex_t lock;
    pthread_cond_t all_done;
    uint32_t pending;
    ep_err result;
    /* grow once and stay, as the service's buffers do: a fresh page costs more than its row */
    size_t slots_max;
    size_t output_bytes_max;
    char *outputs;
    const void **row_of_slot;
    ep_job_row *rows;
    ep_job *jobs;
    float *scratch;
};

static ep_err load_expert(layer_local *local, const ep_checkpoint *checkpoint, uint32_t expert,
                          ep_error *out_error)
{
    ep_expert_data data;
    ep_err err =
        ep_checkpoint_read_expert(checkpoint, local->shape.layer, expert, &data, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = local->backend->ops->weights_load(local->backend, &data.source, &local->weights[expert],
                                            out_error);
    ep_expert_data_free(&data);
    return err;
}

ep_err layer_local_open(const char *path, uint32_t layer, uint32_t threads, layer_local **out_local,
                        ep_error *out_error)
{
    return layer_local_open_share(path, layer, 0, UINT32_MAX, threads, out_local, out_error);
}

ep_err layer_local_open_share(const char *path, uint32_t layer, uint32_t first, uint32_t count,
                              uint32_t threads, layer_local **out_local, ep_error *out_error)
{
    ep_checkpoint *checkpoint;
    const char *numerics = getenv("EXPERTD_NUMERICS"); /* the daemons beside us read it too */
    const bool is_auto = numerics != NULL && strcmp(numerics, "auto") == 0;
    ep_backend_config config = {.numerics = is_auto ? EP_NUMERICS_AUTO : EP_NUMERICS_PORTABLE,
                                .threads = threads};
    const ep_backend_ops *ops = ep_backend_by_name("cpu");
    layer_local *local = calloc(1, sizeof(*local));
    if (local == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_init(&local->lock, NULL);
    pthread_cond_init(&local->all_done, NULL);
    ep_err err = ep_checkpoint_open(path, &checkpoint, out_error);
    if (err != EP_OK) {
        free(local);
        return err;
    }
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        if (info->moe_layers[i].layer == layer) {
            local->shape = info->moe_layers[i];
        }
    }
    local->weights_count = local->shape.experts + local->shape.shared_experts;
    local->weights = calloc(local->weights_count + 1, sizeof(*local->weights));
    local->share_first = first;
    local->share_count =
        count < local->weights_count - first ? count : local->weights_count - first;
    err = ops->open(&config, &local->backend, out_error);
    for (uint32_t e = 0; err == EP_OK && e < local->share_count; e++) {
        err = load_expert(local, checkpoint, first + e, out_error);
    }
    ep_checkpoint_close(checkpoint);
    if (err != EP_OK) {
        layer_local_close(local);
        return err;
    }
    *out_local = local;
    return EP_OK;
}

void layer_local_close(layer_local *local)
{
    if (local->backend != NULL) {
        for (uint32_t e = 0; e < local->weights_count; e++) {
            local->backend->ops->weights_unload(local->backend, local->weights[e]);
        }
        local->backend->ops->close(local->backend);
    }
    free(local->weights);
    free(local->outputs);
    free(local->row_of_slot);
    free(local->rows);
    free(local->jobs);
    free(local->scratch);
    free(local);
}

const ep_layer_shape *layer_local_shape(const layer_local *local)
{
    return &local->shape;
}

static void on_done(ep_job *job, ep_err result)
{
    layer_local *local = job->arg;
    pthread_mutex_lock(&local->lock);
    local->result = result != EP_OK ? result : local->result;
    if (--local->pending == 0) {
        pthread_cond_signal(&local->all_done);
    }
    pthread_mutex_unlock(&local->lock);
}

static bool reserve(layer_local *local, const ep_batch *batch, size_t slots)
{
    size_t output_bytes = slots * batch->hidden * ep_dtype_bytes(batch->wire_dtype);
    if (local->jobs == NULL) {
        local->jobs = calloc(local->weights_count + 1, sizeof(*local->jobs));
        local->scratch =
            aligned_alloc(64, ep_combine_scratch_floats(batch->hidden) / 16 * 64 + 128);
    }
    if (slots > local->slots_max) {
        free(local->row_of_slot);
        free(local->rows);
        local->row_of_slot = calloc(slots, sizeof(*local->row_of_slot));
        local->rows = calloc(slots, sizeof(*local->rows));
        local->slots_max = slots;
    }
    if (output_bytes > local->output_bytes_max) {
        free(local->outputs);
        local->outputs = malloc(output_bytes);
        local->output_bytes_max = output_bytes;
    }
    return local->jobs != NULL && local->scratch != NULL && local->row_of_slot != NULL &&
           local->rows != NULL && local->outputs != NULL;
}

/* Counting sort of slots by expert; jobs[e] gets rows rows[begin[e] .. begin[e+1]). */
static void make_jobs(layer_local *local, const ep_batch *batch, uint32_t slots_per_token)
{
    ep_job *jobs = local->jobs;
    ep_job_row *rows = local->rows;
    size_t row_bytes = batch->hidden * ep_dtype_bytes(batch->wire_dtype);
    uint32_t *next = calloc(local->weights_count + 1, sizeof(*next));
    uint32_t expert;
    for (uint32_t slot = 0; slot < batch->tokens * slots_per_token; slot++) {
        ep_slot_kind kind = ep_batch_slot(batch, &local->shape, slot / slots_per_token,
                                          slot % slots_per_token, &expert);
        next[expert + 1] += kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED;
    }
    for (uint32_t e = 0; e < local->weights_count; e++) {
        next[e + 1] += next[e];
        jobs[e] = (ep_job){.weights = local->weights[e],
                           .rows = rows + next[e],
                           .rows_count = next[e + 1] - next[e],
                           .x_dtype = batch->x.dtype,
                           .out_dtype = batch->wire_dtype,
                           .done = on_done,
                           .arg = local};
    }
    for (uint32_t slot = 0; slot < batch->tokens * slots_per_token; slot++) {
        uint32_t token = slot / slots_per_token;
        ep_slot_kind kind =
            ep_batch_slot(batch, &local->shape, token, slot % slots_per_token, &expert);
        if (kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED) {
            uint32_t at = next[expert]++;
            rows[at] = (ep_job_row){.x = ep_rows_at(&batch->x, token),
                                    .out = local->outputs + at * row_bytes};
            local->row_of_slot[slot] = rows[at].out;
        }
    }
    free(next);
}

/* Those of local->jobs that have rows; until all are done. */
static ep_err run_jobs(layer_local *local)
{
    local->result = EP_OK;
    local->pending = 1;
    for (uint32_t e = 0; e < local->weights_count; e++) {
        local->pending += local->jobs[e].rows_count > 0;
    }
    for (uint32_t e = 0; e < local->weights_count; e++) {
        if (local->jobs[e].rows_count > 0 &&
            ep_backend_run(local->backend, &local->jobs[e]) != EP_OK) {
            abort(); /* a benchmark's queue is never full */
        }
    }
    pthread_mutex_lock(&local->lock);
    local->pending--;
    while (local->pending > 0) {
        pthread_cond_wait(&local->all_done, &local->lock);
    }
    ep_err err = local->result;
    pthread_mutex_unlock(&local->lock);
    return err;
}

ep_err layer_local_rows(layer_local *local, const uint32_t *counts, const void *x, void *out)
{
    size_t row_bytes = (size_t)local->shape.hidden * ep_dtype_bytes(EP_DTYPE_BF16);
    size_t slots = 0;
    for (uint32_t i = 0; i < local->share_count; i++) {
        slots += counts[i];
    }
    const ep_batch batch = {.hidden = local->shape.hidden, .wire_dtype = EP_DTYPE_BF16};
    if (!reserve(local, &batch, slots)) {
        return EP_ERR_NO_MEMORY;
    }
    memset(local->jobs, 0, local->weights_count * sizeof(*local->jobs));
    for (size_t s = 0; s < slots; s++) {
        local->rows[s] =
            (ep_job_row){.x = (const char *)x + s * row_bytes, .out = (char *)out + s * row_bytes};
    }
    ep_job_row *rows = local->rows;
    for (uint32_t i = 0; i < local->share_count; rows += counts[i], i++) {
        local->jobs[local->share_first + i] =
            (ep_job){.weights = local->weights[local->share_first + i],
                     .rows = rows,
                     .rows_count = counts[i],
                     .x_dtype = EP_DTYPE_BF16,
                     .out_dtype = EP_DTYPE_BF16,
                     .done = on_done,
                     .arg = local};
    }
    return run_jobs(local);
}

ep_err layer_local_run(layer_local *local, const ep_batch *batch, void *out)
{
    uint32_t slots_per_token = ep_batch_slots_per_token(batch, &local->shape);
    if (!reserve(local, batch, (size_t)batch->tokens * slots_per_token)) {
        return EP_ERR_NO_MEMORY;
    }
    make_jobs(local, batch, slots_per_token);
    ep_err err = run_jobs(local);
    ep_combine_out combined = {.data = out,
                               .token_stride_bytes =
                                   (int64_t)(batch->hidden * ep_dtype_bytes(batch->out_dtype))};
    ep_combine(batch, &local->shape, local->row_of_slot, NULL, 0, batch->tokens, local->scratch,
               &combined);
    return err;
}
