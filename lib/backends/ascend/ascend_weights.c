/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/ascend/ascend_weights.h"

#include <stdlib.h>
#include <string.h>

#include "backends/ascend/ascend_slot.h"
#include "base/check.h"
#include "base/error.h"
#include "kernels/ffn_element.h"

#define STAGE_BYTES                                                                                                   \
    ((size_t)4 << 20) /* of pinned memory: a few milliseconds of a device's link; at least one row of any matrix */
#define PART_ALIGN 512

ep_err ep_ascend_weights_check(const ep_ascend_device *device, const ep_expert_source *source, ep_error *out_error)
{
    const bool is_float = source->format == EP_WEIGHTS_BF16 || source->format == EP_WEIGHTS_F16;
    if (!is_float && !(source->format == EP_WEIGHTS_W8A8 && device->has_w8a8)) {
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "backend ascend does not compute with %s weights, allowed: bf16, f16%s; backend: cpu has all formats",
            ep_weight_format_name(source->format), device->has_w8a8 ? ", w8a8" : "");
    }
    if (ep_expert_down_format(source) != source->format || source->places != NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "backend ascend wants one format in all matrices and columns in the file's order, "
                            "not down as %s%s; backend: cpu has all forms",
                            ep_weight_format_name(ep_expert_down_format(source)),
                            source->places != NULL ? " and an order of columns" : "");
    }
    if (source->activation != EP_ACT_SILU) {
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "backend ascend has no operator for activation %s, allowed: silu; backend: cpu has all activations",
            ep_activation_name(source->activation));
    }
    if (source->gate_bias != NULL || source->up_bias != NULL || source->down_bias != NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "backend ascend does not add experts' biases; backend: cpu does");
    }
    const uint32_t columns = source->hidden > 2 * source->inner ? source->hidden : 2 * source->inner;
    if (columns > EP_ACL_COLUMNS_MAX) {
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "backend ascend multiplies by matrices of at most %d columns; here H is %u and twice I is %llu",
            EP_ACL_COLUMNS_MAX, source->hidden, 2ull * source->inner);
    }
    return EP_OK;
}

static size_t element_bytes(ep_weight_format format)
{
    return format == EP_WEIGHTS_W8A8 ? sizeof(int8_t) : sizeof(uint16_t);
}

/* Where the parts lie; the bytes of all. */
static size_t lay_out(const ep_expert_source *source, ep_ascend_weights *out_weights)
{
    const size_t element = element_bytes(source->format);
    const size_t values = (size_t)source->hidden * source->inner * element;
    ep_ascend_weights w = {.down_offset = ep_align_up(2 * values, PART_ALIGN)};
    size_t bytes = w.down_offset + values;
    if (source->format == EP_WEIGHTS_W8A8) {
        w.gate_up_scales_offset = ep_align_up(bytes, PART_ALIGN);
        w.down_scales_offset = w.gate_up_scales_offset + ep_align_up(2 * source->inner * sizeof(float), PART_ALIGN);
        bytes = w.down_scales_offset + source->hidden * sizeof(float);
    }
    *out_weights = w;
    return bytes;
}

size_t ep_ascend_weights_bytes(const ep_expert_source *source)
{
    ep_ascend_weights unused;
    return lay_out(source, &unused);
}

ep_err ep_ascend_uploader_init(ep_ascend_uploader *uploader, ep_ascend_device *device, ep_error *out_error)
{
    void *stage = NULL;
    pthread_mutex_init(&uploader->lock, NULL);
    ep_err err = EP_ASCEND_CALL(device, out_error, aclrtCreateStream, &uploader->stream);
    err = err == EP_OK ? EP_ASCEND_CALL(device, out_error, aclrtMallocHost, &stage, STAGE_BYTES) : err;
    uploader->stage = stage;
    return err;
}

static void free_weights(ep_ascend_device *device, ep_ascend_weights *weights)
{
    if (weights->memory != NULL) {
        (void)device->acl.aclrtFree(weights->memory);
    }
    free(weights->shared_gate);
    free(weights);
}

void ep_ascend_uploader_fini(ep_ascend_uploader *uploader, ep_ascend_device *device)
{
    ep_ascend_stream_destroy(device, uploader->stream);
    while (uploader->abandoned != NULL) {
        ep_ascend_weights *weights = uploader->abandoned;
        uploader->abandoned = weights->next;
        free_weights(device, weights);
    }
    if (uploader->stage != NULL) {
        (void)device->acl.aclrtFreeHost(uploader->stage);
    }
    pthread_mutex_destroy(&uploader->lock);
}

/* A matrix of the file, or two of one shape that come side by side. */
typedef struct upload_job {
    const void *left;
    const void *right; /* NULL: one */
    uint32_t rows;
    uint32_t columns;
    size_t element;
    uint8_t *to;
} upload_job;

/* Columns [first, first + count) of a matrix become rows of the stage, width wide, from its column at. */
static void transpose(const void *matrix, const upload_job *job, uint32_t first, uint32_t count, uint8_t *stage,
                      size_t width, size_t at)
{
    const uint8_t *from = matrix;
    for (uint32_t r = 0; r < job->rows; r++) {
        for (uint32_t c = 0; c < count; c++) {
            memcpy(stage + (c * width + at + r) * job->element,
                   from + ((size_t)r * job->columns + first + c) * job->element, job->element);
        }
    }
}

/* Lock held. What lies in the stage. */
static ep_err send(ep_ascend_device *device, ep_ascend_uploader *uploader, uint8_t *to, size_t bytes,
                   ep_error *out_error)
{
    const ep_err err = EP_ASCEND_CALL(device, out_error, aclrtMemcpyAsync, to, bytes, uploader->stage, bytes,
                                      EP_ACL_HOST_TO_DEVICE, uploader->stream);
    return err == EP_OK ? EP_ASCEND_CALL(device, out_error, aclrtSynchronizeStreamWithTimeout, uploader->stream,
                                         EP_ASCEND_TIMEOUT_MS)
                        : err;
}

/* Lock held. [rows,columns], or two of these, become [columns, rows or 2 rows]. */
static ep_err upload(ep_ascend_device *device, ep_ascend_uploader *uploader, const upload_job *job,
                     ep_error *out_error)
{
    const size_t width = job->right != NULL ? (size_t)2 * job->rows : job->rows;
    const uint32_t step = (uint32_t)(STAGE_BYTES / (width * job->element));
    for (uint32_t first = 0; first < job->columns; first += step) {
        const uint32_t count = job->columns - first < step ? job->columns - first : step;
        transpose(job->left, job, first, count, uploader->stage, width, 0);
        if (job->right != NULL) {
            transpose(job->right, job, first, count, uploader->stage, width, job->rows);
        }
        const ep_err err =
            send(device, uploader, job->to + first * width * job->element, count * width * job->element, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

/* Lock held. The scales of w8a8, gate and up side by side. */
static ep_err upload_scales(ep_ascend_device *device, ep_ascend_uploader *uploader, const ep_expert_source *source,
                            const ep_ascend_weights *weights, ep_error *out_error)
{
    const size_t half = source->inner * sizeof(float);
    const size_t down = source->hidden * sizeof(float);
    memcpy(uploader->stage, source->gate_scales, half);
    memcpy(uploader->stage + half, source->up_scales, half);
    ep_err err = send(device, uploader, weights->memory + weights->gate_up_scales_offset, 2 * half, out_error);
    if (err == EP_OK) {
        memcpy(uploader->stage, source->down_scales, down);
        err = send(device, uploader, weights->memory + weights->down_scales_offset, down, out_error);
    }
    return err;
}

static ep_err fill(ep_ascend_device *device, ep_ascend_uploader *uploader, const ep_expert_source *source,
                   const ep_ascend_weights *weights, ep_error *out_error)
{
    const size_t element = element_bytes(source->format);
    const upload_job gate_up = {source->gate, source->up, source->inner, source->hidden, element, weights->memory};
    const upload_job down = {source->down,  NULL,    source->hidden,
                             source->inner, element, weights->memory + weights->down_offset};
    pthread_mutex_lock(&uploader->lock);
    ep_err err = upload(device, uploader, &gate_up, out_error);
    err = err == EP_OK ? upload(device, uploader, &down, out_error) : err;
    if (err == EP_OK && source->format == EP_WEIGHTS_W8A8) {
        err = upload_scales(device, uploader, source, weights, out_error);
    }
    pthread_mutex_unlock(&uploader->lock);
    return err;
}

ep_err ep_ascend_weights_create(ep_ascend_device *device, ep_ascend_uploader *uploader, const ep_expert_source *source,
                                ep_ascend_weights **out_weights, ep_error *out_error)
{
    void *memory = NULL;
    ep_ascend_weights *weights = calloc(1, sizeof(*weights));
    float *shared_gate = source->shared_gate != NULL ? malloc(source->hidden * sizeof(*shared_gate)) : NULL;
    if (weights == NULL || (source->shared_gate != NULL && shared_gate == NULL)) {
        free(weights);
        free(shared_gate);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert");
    }
    for (uint32_t h = 0; source->shared_gate != NULL && h < source->hidden; h++) {
        shared_gate[h] = ep_ffn_read_float(source->shared_gate, source->shared_gate_dtype, h);
    }
    const size_t bytes = lay_out(source, weights);
    weights->base = (ep_backend_weights){.hidden = source->hidden, .inner = source->inner, .format = source->format};
    weights->bytes = bytes;
    weights->shared_gate = shared_gate;
    ep_err err = EP_ASCEND_CALL(device, out_error, aclrtMalloc, &memory, weights->bytes, EP_ACL_MALLOC_HUGE_FIRST);
    weights->memory = memory;
    err = err == EP_OK ? fill(device, uploader, source, weights, out_error) : err;
    if (err != EP_OK) {
        ep_ascend_weights_destroy(device, uploader, weights);
        return err;
    }
    *out_weights = weights;
    return EP_OK;
}

void ep_ascend_weights_destroy(ep_ascend_device *device, ep_ascend_uploader *uploader, ep_ascend_weights *weights)
{
    if (weights != NULL && atomic_load(&device->lost)) {
        pthread_mutex_lock(&uploader->lock);
        weights->next = uploader->abandoned;
        uploader->abandoned = weights;
        pthread_mutex_unlock(&uploader->lock);
    } else if (weights != NULL) {
        free_weights(device, weights);
    }
}
