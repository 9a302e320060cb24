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
    ep_backend_weights **weights;
    pthread_mutex_t lock;
    pthread_cond_t all_done;
    uint32_t pending;
    ep_err result;
};

static ep_err load_expert(layer_local *local, const ep_checkpoint *checkpoint, uint32_t expert, ep_error *out_error)
{
    ep_expert_data data;
    ep_err err = ep_checkpoint_read_expert(checkpoint, local->shape.layer, expert, &data, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_expert_source source = {.hidden = data.hidden,
                               .inner = data.inner,
                               .activation = local->shape.activation,
                               .dtype = data.dtype,
                               .gate = data.gate,
                               .up = data.up,
                               .down = data.down,
                               .shared_gate_dtype = data.shared_gate_dtype,
                               .shared_gate = data.shared_gate};
    err = local->backend->ops->weights_load(local->backend, &source, &local->weights[expert], out_error);
    ep_expert_data_free(&data);
    return err;
}

ep_err layer_local_open(const char *path, uint32_t layer, uint32_t threads, layer_local **out_local, ep_error *out_error)
{
    ep_checkpoint *checkpoint;
    ep_backend_config config = {.threads = threads};
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
    err = ops->open(&config, &local->backend, out_error);
    for (uint32_t e = 0; err == EP_OK && e < local->weights_count; e++) {
        err = load_expert(local, checkpoint, e, out_error);
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

/* Counting sort of slots by expert; jobs[e] gets rows rows[begin[e] .. begin[e+1]). */
static void make_jobs(layer_local *local, const ep_batch *batch, uint32_t slots_per_token, char *outputs, const void **row_of_slot,
                      ep_job_row *rows, ep_job *jobs)
{
    size_t row_bytes = batch->hidden * ep_dtype_bytes(batch->wire_dtype);
    uint32_t *next = calloc(local->weights_count + 1, sizeof(*next));
    uint32_t expert;
    for (uint32_t slot = 0; slot < batch->tokens * slots_per_token; slot++) {
        ep_slot_kind kind = ep_batch_slot(batch, &local->shape, slot / slots_per_token, slot % slots_per_token, &expert);
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
        ep_slot_kind kind = ep_batch_slot(batch, &local->shape, token, slot % slots_per_token, &expert);
        if (kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED) {
            uint32_t at = next[expert]++;
            rows[at] = (ep_job_row){.x = ep_rows_at(&batch->x, token), .out = outputs + at * row_bytes};
            row_of_slot[slot] = rows[at].out;
        }
    }
    free(next);
}

ep_err layer_local_run(layer_local *local, const ep_batch *batch, void *out)
{
    uint32_t slots_per_token = ep_batch_slots_per_token(batch, &local->shape);
    size_t slots = (size_t)batch->tokens * slots_per_token;
    char *outputs = malloc(slots * batch->hidden * ep_dtype_bytes(batch->wire_dtype) + 1);
    const void **row_of_slot = calloc(slots + 1, sizeof(*row_of_slot));
    ep_job_row *rows = calloc(slots + 1, sizeof(*rows));
    ep_job *jobs = calloc(local->weights_count + 1, sizeof(*jobs));
    float *scratch = aligned_alloc(64, (ep_combine_scratch_floats(batch->hidden) * sizeof(float) + 63) / 64 * 64 + 64);
    ep_err err = EP_ERR_NO_MEMORY;
    if (outputs != NULL && row_of_slot != NULL && rows != NULL && jobs != NULL && scratch != NULL) {
        make_jobs(local, batch, slots_per_token, outputs, row_of_slot, rows, jobs);
        local->result = EP_OK;
        local->pending = 1;
        for (uint32_t e = 0; e < local->weights_count; e++) {
            local->pending += jobs[e].rows_count > 0;
        }
        for (uint32_t e = 0; e < local->weights_count; e++) {
            if (jobs[e].rows_count > 0 && ep_backend_run(local->backend, &jobs[e]) != EP_OK) {
                abort(); /* a benchmark's queue is never full */
            }
        }
        pthread_mutex_lock(&local->lock);
        local->pending--;
        while (local->pending > 0) {
            pthread_cond_wait(&local->all_done, &local->lock);
        }
        err = local->result;
        pthread_mutex_unlock(&local->lock);
        ep_combine_out combined = {.data = out, .token_stride_bytes = (int64_t)(batch->hidden * ep_dtype_bytes(batch->out_dtype))};
        ep_combine(batch, &local->shape, row_of_slot, 0, batch->tokens, scratch, &combined);
    }
    free(outputs);
    free(row_of_slot);
    free(rows);
    free(jobs);
    free(scratch);
    return err;
}
