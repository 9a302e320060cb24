/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/ascend/ascend_weights.h"

#include <stdlib.h>
#include <string.h>

#include "backends/ascend/ascend_slot.h"
#include "base/check.h"
#include "base/error.h"
#include "kernels/ffn_element.h"

#define STAGE_BYTES ((size_t)4 << 20) /* of pinned memory: a few milliseconds of a device's link; at least one row of any matrix */
#define PART_ALIGN 512

ep_err ep_ascend_weights_check(const ep_expert_source *source, ep_error *out_error)
{
    if (source->format != EP_WEIGHTS_BF16 && source->format != EP_WEIGHTS_F16) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "backend ascend does not compute with %s weights, allowed: bf16, f16; backend: cpu has all formats",
                            ep_weight_format_name(source->format));
    }
    if (source->activation != EP_ACT_SILU) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "backend ascend has no operator for activation %s, allowed: silu; backend: cpu has all activations",
                            ep_activation_name(source->activation));
    }
    if (source->gate_bias != NULL || source->up_bias != NULL || source->down_bias != NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "backend ascend does not add experts' biases; backend: cpu does");
    }
    const uint32_t columns = source->hidden > 2 * source->inner ? source->hidden : 2 * source->inner;
    if (columns > EP_ACL_COLUMNS_MAX) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "backend ascend multiplies by matrices of at most %d columns; here H is %u and twice I is %llu", EP_ACL_COLUMNS_MAX,
                            source->hidden, 2ull * source->inner);
    }
    return EP_OK;
}

static size_t down_offset(const ep_expert_source *source)
{
    return ep_align_up((size_t)source->hidden * 2 * source->inner * sizeof(uint16_t), PART_ALIGN);
}

size_t ep_ascend_weights_bytes(const ep_expert_source *source)
{
    return down_offset(source) + (size_t)source->inner * source->hidden * sizeof(uint16_t);
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

/* Columns [first, first + count) of [rows,columns] in file order become rows of the stage, from its column at; a row of the stage has width. */
static void transpose(const void *matrix, uint32_t rows, uint32_t columns, uint32_t first, uint32_t count, uint16_t *stage, size_t width, size_t at)
{
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t c = 0; c < count; c++) {
            stage[c * width + at + r] = ep_ffn_read_u16(matrix, (size_t)r * columns + first + c);
        }
    }
}

/* Lock held. One matrix, or two side by side, of [rows,columns] each, becomes [columns, rows or 2 rows] at address to. */
static ep_err upload(ep_ascend_device *device, ep_ascend_uploader *uploader, const void *left, const void *right, uint32_t rows, uint32_t columns,
                     uint8_t *to, ep_error *out_error)
{
    const size_t width = right != NULL ? (size_t)2 * rows : rows;
    const uint32_t step = (uint32_t)(STAGE_BYTES / (width * sizeof(uint16_t)));
    for (uint32_t first = 0; first < columns; first += step) {
        const uint32_t count = columns - first < step ? columns - first : step;
        const size_t bytes = count * width * sizeof(uint16_t);
        transpose(left, rows, columns, first, count, (uint16_t *)uploader->stage, width, 0);
        if (right != NULL) {
            transpose(right, rows, columns, first, count, (uint16_t *)uploader->stage, width, rows);
        }
        ep_err err = EP_ASCEND_CALL(device, out_error, aclrtMemcpyAsync, to + first * width * sizeof(uint16_t), bytes, uploader->stage, bytes,
                                    EP_ACL_HOST_TO_DEVICE, uploader->stream);
        err = err == EP_OK ? EP_ASCEND_CALL(device, out_error, aclrtSynchronizeStreamWithTimeout, uploader->stream, EP_ASCEND_TIMEOUT_MS) : err;
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

static ep_err fill(ep_ascend_device *device, ep_ascend_uploader *uploader, const ep_expert_source *source, const ep_ascend_weights *weights,
                   ep_error *out_error)
{
    pthread_mutex_lock(&uploader->lock);
    ep_err err = upload(device, uploader, source->gate, source->up, source->inner, source->hidden, weights->memory, out_error);
    err = err == EP_OK ? upload(device, uploader, source->down, NULL, source->hidden, source->inner, weights->memory + weights->down_offset, out_error)
                       : err;
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
    *weights = (ep_ascend_weights){.base = {.hidden = source->hidden, .inner = source->inner, .format = source->format},
                                   .bytes = ep_ascend_weights_bytes(source),
                                   .down_offset = down_offset(source),
                                   .shared_gate = shared_gate};
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
