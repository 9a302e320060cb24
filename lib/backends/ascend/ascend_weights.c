/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/ascend/ascend_weights.h"

#include <stdlib.h>
#include <string.h>

#include "backends/ascend/ascend_slot.h"
#include "base/check.h"
#include "base/error.h"
#include "kernels/ffn_element.h"

/* pinned memory: takes a few milliseconds on a device's link; fits a row of any matrix */
#define STAGE_BYTES ((size_t)4 << 20)
#define PART_ALIGN 512

static bool has_biases(const ep_expert_source *source)
{
    return source->gate_bias != NULL || source->up_bias != NULL || source->down_bias != NULL;
}

static ep_err check_format(const ep_ascend_device *device, const ep_expert_source *source,
                           ep_error *out_error)
{
    const bool has_w8a8 = (device->abilities & EP_ASCEND_W8A8) != 0;
    const bool is_float = source->format == EP_WEIGHTS_BF16 || source->format == EP_WEIGHTS_F16;
    if (!is_float && !(source->format == EP_WEIGHTS_W8A8 && has_w8a8)) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "backend ascend does not compute with %s weights, allowed: bf16, "
                            "f16%s; backend: cpu has all formats",
                            ep_weight_format_name(source->format), has_w8a8 ? ", w8a8" : "");
    }
    if (ep_expert_down_format(source) != source->format || source->places != NULL) {
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "backend ascend wants one format in all matrices and columns in the file's order, "
            "not down as %s%s; backend: cpu has all forms",
            ep_weight_format_name(ep_expert_down_format(source)),
            source->places != NULL ? " and an order of columns" : "");
    }
    return EP_OK;
}

/* Refuses the activation unless its operator exists and has passed its known-answer run. */
static ep_err check_activation(const ep_ascend_device *device, const ep_expert_source *source,
                               ep_error *out_error)
{
    const bool is_clipped =
        source->activation == EP_ACT_SWIGLU_OAI || source->activation == EP_ACT_SWIGLU_LIMIT;
    const bool is_gelu =
        source->activation == EP_ACT_GELU || source->activation == EP_ACT_GELU_TANH;
    const bool can_clip = (device->abilities & EP_ASCEND_CLIPPED) != 0;
    const bool can_gelu = (device->abilities & EP_ASCEND_GELU) != 0;
    if (source->activation == EP_ACT_SILU || (is_clipped && can_clip) || (is_gelu && can_gelu)) {
        return EP_OK;
    }
    return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                        "backend ascend %s activation %s, allowed: silu%s%s; backend: cpu has all",
                        ep_activation_has_gate(source->activation)
                            ? "has on this device no operator for"
                            : "computes experts with a gate only, not",
                        ep_activation_name(source->activation), can_gelu ? ", gelu, gelu_tanh" : "",
                        can_clip ? ", swiglu_oai, swiglu_limit" : "");
}

ep_err ep_ascend_weights_check(const ep_ascend_device *device, const ep_expert_source *source,
                               ep_error *out_error)
{
    const uint64_t wide = 2 * (uint64_t)source->inner;
    const uint32_t biases =
        source->format == EP_WEIGHTS_W8A8 ? EP_ASCEND_W8A8_BIASES : EP_ASCEND_BIASES;
    ep_err err = check_format(device, source, out_error);
    err = err == EP_OK ? check_activation(device, source, out_error) : err;
    if (err == EP_OK && has_biases(source) && (device->abilities & biases) == 0) {
        err = ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                           "backend ascend cannot add experts' biases to %s weights on this "
                           "device; backend: cpu does",
                           ep_weight_format_name(source->format));
    }
    if (err == EP_OK && (wide > EP_ACL_COLUMNS_MAX || source->hidden > EP_ACL_COLUMNS_MAX)) {
        err = ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                           "backend ascend multiplies by matrices of at most %d columns; here H is "
                           "%u and twice I is %llu",
                           EP_ACL_COLUMNS_MAX, source->hidden, (unsigned long long)wide);
    }
    return err;
}

bool ep_ascend_weights_alike(const ep_backend_weights *a, const ep_backend_weights *b)
{
    const ep_ascend_weights *one = (const ep_ascend_weights *)a;
    const ep_ascend_weights *other = (const ep_ascend_weights *)b;
    return a->hidden == b->hidden && a->inner == b->inner && a->format == b->format &&
           one->activation == other->activation && one->has_biases == other->has_biases &&
           /* NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): floats, by their bits */
           memcmp(&one->numbers, &other->numbers, sizeof(one->numbers)) == 0;
}

/*
 * Whether the operator accepts these shapes and does all that is needed: whole fractals, and result
 * rows in whole blocks of its local memory (no document says so, but its kernel relies on it).
 */
static bool can_fuse(const ep_ascend_device *device, const ep_expert_source *source)
{
    return (device->abilities & EP_ASCEND_FUSED) != 0 && source->format == EP_WEIGHTS_W8A8 &&
           source->activation == EP_ACT_SILU && !has_biases(source) &&
           source->hidden % EP_ACL_NZ_ROWS == 0 && source->inner % EP_ACL_ALIGN == 0 &&
           2 * source->inner <= EP_ACL_FUSED_COLUMNS_MAX;
}

static size_t element_bytes(ep_weight_format format)
{
    return format == EP_WEIGHTS_W8A8 ? sizeof(int8_t) : sizeof(uint16_t);
}

/* The type of biases that the operators add for each format. */
static ep_dtype bias_dtype(ep_weight_format format)
{
    return format == EP_WEIGHTS_BF16  ? EP_DTYPE_F32
           : format == EP_WEIGHTS_F16 ? EP_DTYPE_F16
                                      : EP_DTYPE_BF16;
}

/* Appends a part. */
static size_t take_part(size_t *bytes, size_t part_bytes)
{
    const size_t begin = ep_align_up(*bytes, PART_ALIGN);
    *bytes = begin + part_bytes;
    return begin;
}

/* Sets the offsets of the parts; returns the bytes of all. */
static size_t lay_out(const ep_expert_source *source, ep_ascend_weights *weights)
{
    const size_t values = (size_t)source->hidden * source->inner * element_bytes(source->format);
    const size_t scale = source->format == EP_WEIGHTS_W8A8 ? sizeof(float) : 0;
    const size_t bias = has_biases(source) ? ep_dtype_bytes(bias_dtype(source->format)) : 0;
    const size_t wide = 2 * (size_t)source->inner;
    size_t bytes = 0;
    weights->gate_up.values = take_part(&bytes, 2 * values);
    weights->down.values = take_part(&bytes, values);
    if (scale != 0) {
        weights->gate_up.scales = take_part(&bytes, wide * scale);
        weights->down.scales = take_part(&bytes, source->hidden * scale);
    }
    if (bias != 0) {
        weights->gate_up.biases = take_part(&bytes, wide * bias);
        weights->down.biases = take_part(&bytes, source->hidden * bias);
    }
    return bytes;
}

size_t ep_ascend_weights_bytes(const ep_expert_source *source)
{
    ep_ascend_weights unused;
    return lay_out(source, &unused);
}

ep_err ep_ascend_uploader_init(ep_ascend_uploader *uploader, ep_ascend_device *device,
                               ep_error *out_error)
{
    void *stage = NULL;
    pthread_mutex_init(&uploader->lock, NULL);
    ep_err err = EP_ASCEND_CALL(device, out_error, aclrtCreateStream, &uploader->stream);
    err = err == EP_OK ? EP_ASCEND_CALL(device, out_error, aclrtMallocHost, &stage, STAGE_BYTES)
                       : err;
    uploader->stage = stage;
    return err;
}

static void free_weights(ep_ascend_device *device, ep_ascend_weights *weights)
{
    if (weights->memory != NULL) {
        (void)device->acl.aclrtFree(weights->memory);
    }
    free(weights->shared_gate);
    free(weights->down_bias);
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

/* A matrix of the file, or two of one shape to be put side by side. */
typedef struct upload_job {
    const void *left;
    const void *right; /* NULL: only one */
    uint32_t rows;
    uint32_t columns;
    size_t element;
    uint8_t *to;
} upload_job;

/* Copies columns [first, first + count) of a matrix to rows of the stage, which are width wide,
 * from column `at` on. */
static void transpose(const void *matrix, const upload_job *job, uint32_t first, uint32_t count,
                      uint8_t *stage, size_t width, size_t at)
{
    const uint8_t *from = matrix;
    for (uint32_t r = 0; r < job->rows; r++) {
        for (uint32_t c = 0; c < count; c++) {
            memcpy(stage + (c * width + at + r) * job->element,
                   from + ((size_t)r * job->columns + first + c) * job->element, job->element);
        }
    }
}

/* Lock held. Sends the content of the stage. */
static ep_err send(ep_ascend_device *device, ep_ascend_uploader *uploader, uint8_t *to,
                   size_t bytes, ep_error *out_error)
{
    const ep_err err =
        EP_ASCEND_CALL(device, out_error, aclrtMemcpyAsync, to, bytes, uploader->stage, bytes,
                       EP_ACL_HOST_TO_DEVICE, uploader->stream);
    return err == EP_OK ? EP_ASCEND_CALL(device, out_error, aclrtSynchronizeStreamWithTimeout,
                                         uploader->stream, EP_ASCEND_TIMEOUT_MS)
                        : err;
}

/* Lock held. Turns [rows,columns], or two of these, into [columns, rows or 2 rows]. */
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
        const ep_err err = send(device, uploader, job->to + first * width * job->element,
                                count * width * job->element, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

/* Writes 32 columns of gate and up side by side, from column first on: fractals below one another
 * are H rows of 32 values. */
static void stage_fractals(const ep_expert_source *source, uint32_t first, uint8_t *to)
{
    for (uint32_t c = 0; c < EP_ACL_NZ_COLUMNS; c++) {
        const uint32_t n = first + c;
        const bool is_gate = n < source->inner;
        const uint8_t *matrix = is_gate ? source->gate : source->up;
        const uint8_t *from = matrix + (size_t)(is_gate ? n : n - source->inner) * source->hidden;
        for (uint32_t h = 0; h < source->hidden; h++) {
            to[(size_t)h * EP_ACL_NZ_COLUMNS + c] = from[h];
        }
    }
}

/* Lock held. Gate and up of w8a8 as FRACTAL_NZ. */
static ep_err upload_fractals(ep_ascend_device *device, ep_ascend_uploader *uploader,
                              const ep_expert_source *source, const ep_ascend_weights *weights,
                              ep_error *out_error)
{
    const size_t bytes = (size_t)source->hidden * EP_ACL_NZ_COLUMNS; /* of 32 columns */
    const uint32_t total = 2 * source->inner / EP_ACL_NZ_COLUMNS;
    const uint32_t step = (uint32_t)(STAGE_BYTES / bytes);
    for (uint32_t first = 0; first < total; first += step) {
        const uint32_t count = total - first < step ? total - first : step;
        for (uint32_t i = 0; i < count; i++) {
            stage_fractals(source, (first + i) * EP_ACL_NZ_COLUMNS, uploader->stage + i * bytes);
        }
        const ep_err err =
            send(device, uploader, weights->memory + weights->gate_up.values + first * bytes,
                 count * bytes, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

/* Lock held. The scales of w8a8, gate and up side by side. */
static ep_err upload_scales(ep_ascend_device *device, ep_ascend_uploader *uploader,
                            const ep_expert_source *source, const ep_ascend_weights *weights,
                            ep_error *out_error)
{
    const size_t half = source->inner * sizeof(float);
    const size_t down = source->hidden * sizeof(float);
    memcpy(uploader->stage, source->gate_scales, half);
    memcpy(uploader->stage + half, source->up_scales, half);
    ep_err err =
        send(device, uploader, weights->memory + weights->gate_up.scales, 2 * half, out_error);
    if (err == EP_OK) {
        memcpy(uploader->stage, source->down_scales, down);
        err = send(device, uploader, weights->memory + weights->down.scales, down, out_error);
    }
    return err;
}

/* Writes count values to the stage, after the first `first`, as dtype; zeros without biases. */
static void stage_biases(ep_ascend_uploader *uploader, const ep_expert_source *source,
                         const void *biases, size_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const float bias = biases != NULL ? ep_ffn_read_float(biases, source->bias_dtype, i) : 0.0f;
        ep_ffn_write(uploader->stage, bias_dtype(source->format), first + i, bias);
    }
}

/* Lock held. */
static ep_err upload_biases(ep_ascend_device *device, ep_ascend_uploader *uploader,
                            const ep_expert_source *source, const ep_ascend_weights *weights,
                            ep_error *out_error)
{
    const size_t element = ep_dtype_bytes(bias_dtype(source->format));
    stage_biases(uploader, source, source->gate_bias, 0, source->inner);
    stage_biases(uploader, source, source->up_bias, source->inner, source->inner);
    ep_err err = send(device, uploader, weights->memory + weights->gate_up.biases,
                      2 * element * source->inner, out_error);
    if (err == EP_OK) {
        stage_biases(uploader, source, source->down_bias, 0, source->hidden);
        err = send(device, uploader, weights->memory + weights->down.biases,
                   element * source->hidden, out_error);
    }
    return err;
}

static ep_err fill(ep_ascend_device *device, ep_ascend_uploader *uploader,
                   const ep_expert_source *source, const ep_ascend_weights *weights,
                   ep_error *out_error)
{
    const size_t element = element_bytes(source->format);
    const upload_job gate_up = {source->gate,  source->up,
                                source->inner, source->hidden,
                                element,       weights->memory + weights->gate_up.values};
    const upload_job down = {source->down,  NULL,    source->hidden,
                             source->inner, element, weights->memory + weights->down.values};
    pthread_mutex_lock(&uploader->lock);
    ep_err err = ep_ascend_device_enter(device, out_error); /* it may have been lost meanwhile */
    if (err == EP_OK) {
        err = weights->is_fused ? upload_fractals(device, uploader, source, weights, out_error)
                                : upload(device, uploader, &gate_up, out_error);
    }
    err = err == EP_OK ? upload(device, uploader, &down, out_error) : err;
    if (err == EP_OK && source->format == EP_WEIGHTS_W8A8) {
        err = upload_scales(device, uploader, source, weights, out_error);
    }
    if (err == EP_OK && weights->has_biases) {
        err = upload_biases(device, uploader, source, weights, out_error);
    }
    pthread_mutex_unlock(&uploader->lock);
    return err;
}

/* Copies values of a file to the heap as f32; NULL stays NULL. False: no memory. */
static bool copy_floats(const void *from, ep_dtype dtype, uint32_t count, float **out_floats)
{
    float *floats = from != NULL ? malloc(count * sizeof(*floats)) : NULL;
    for (uint32_t i = 0; floats != NULL && i < count; i++) {
        floats[i] = ep_ffn_read_float(from, dtype, i);
    }
    *out_floats = floats;
    return from == NULL || floats != NULL;
}

ep_err ep_ascend_weights_create(ep_ascend_device *device, ep_ascend_uploader *uploader,
                                const ep_expert_source *source, ep_ascend_weights **out_weights,
                                ep_error *out_error)
{
    void *memory = NULL;
    const bool wants_bias = source->format == EP_WEIGHTS_W8A8 && has_biases(source);
    ep_ascend_weights *weights = calloc(1, sizeof(*weights));
    if (weights == NULL ||
        !copy_floats(source->shared_gate, source->shared_gate_dtype, source->hidden,
                     &weights->shared_gate) ||
        !copy_floats(wants_bias ? source->down_bias : NULL, source->bias_dtype, source->hidden,
                     &weights->down_bias)) {
        if (weights != NULL) {
            free_weights(device, weights);
        }
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert");
    }
    weights->base = (ep_backend_weights){
        .hidden = source->hidden, .inner = source->inner, .format = source->format};
    weights->activation = source->activation;
    weights->numbers = source->numbers;
    weights->has_biases = has_biases(source);
    weights->is_fused = can_fuse(device, source);
    weights->bytes = lay_out(source, weights);
    ep_err err = EP_ASCEND_CALL(device, out_error, aclrtMalloc, &memory, weights->bytes,
                                EP_ACL_MALLOC_HUGE_FIRST);
    weights->memory = memory;
    err = err == EP_OK ? fill(device, uploader, source, weights, out_error) : err;
    if (err != EP_OK) {
        ep_ascend_weights_destroy(device, uploader, weights);
        return err;
    }
    *out_weights = weights;
    return EP_OK;
}

void ep_ascend_weights_destroy(ep_ascend_device *device, ep_ascend_uploader *uploader,
                               ep_ascend_weights *weights)
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
