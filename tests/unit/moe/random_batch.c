/* SPDX-License-Identifier: Apache-2.0 */
#include "unit/moe/random_batch.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "moe/convert.h"

uint32_t random_below(uint64_t *state, uint32_t bound)
{
    return (uint32_t)((ep_splitmix64(state) >> 33) % bound);
}

float random_float(uint64_t *state)
{
    float x = (float)(ep_splitmix64(state) >> 40) * 0x1p-22f - 2.0f;
    switch (random_below(state, 20)) {
    case 0:
        return 0.0f;
    case 1:
        return x * 0x1p-30f;
    case 2:
        return x * 1000.0f;
    default:
        return x;
    }
}

void *random_batch_alloc(random_batch *rb, size_t bytes)
{
    EP_ASSERT(rb->storage_count < EP_ARRAY_COUNT(rb->storage));
    void *p = calloc(1, bytes + 1);
    EP_ASSERT(p != NULL);
    rb->storage[rb->storage_count++] = p;
    return p;
}

static const ep_dtype float_types[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};

/* rows of a float type with a stride that is sometimes wider than the row and not a multiple of the
 * element.
 */
static ep_rows random_rows(random_batch *rb, uint32_t rows, uint32_t n, ep_dtype dtype)
{
    size_t row_bytes = n * ep_dtype_bytes(dtype);
    size_t stride = row_bytes + random_below(&rb->state, 4);
    uint8_t *data = random_batch_alloc(rb, rows * stride + 1);
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t i = 0; i < n; i++) {
            float value = random_float(&rb->state);
            ep_row_narrow(&value, 1, dtype, data + r * stride + i * ep_dtype_bytes(dtype));
        }
    }
    return (ep_rows){data, (int64_t)stride, dtype};
}

static ep_rows random_flags(random_batch *rb, uint32_t rows, uint32_t n)
{
    uint8_t *data = random_batch_alloc(rb, (size_t)rows * n);
    for (size_t i = 0; i < (size_t)rows * n; i++) {
        data[i] = random_below(&rb->state, 3) != 0;
    }
    return (ep_rows){data, n, EP_DTYPE_BOOL};
}

static void fill_ids(random_batch *rb)
{
    ep_batch *b = &rb->batch;
    bool wide = random_below(&rb->state, 2);
    size_t element = wide ? 8 : 4;
    int64_t total = (int64_t)rb->shape.experts + b->special.zero_count + b->special.copy_count +
                    b->special.const_count;
    uint8_t *data = random_batch_alloc(rb, (size_t)b->tokens * b->top_k * element);
    for (uint32_t t = 0; t < b->tokens; t++) {
        for (uint32_t k = 0; k < b->top_k; k++) {
            int64_t id = (int64_t)random_below(&rb->state, (uint32_t)total + 2) - 1;
            int32_t narrow = (int32_t)id;
            memcpy(data + ((size_t)t * b->top_k + k) * element,
                   wide ? (void *)&id : (void *)&narrow, element);
        }
    }
    b->ids = (ep_rows){data, (int64_t)(b->top_k * element), wide ? EP_DTYPE_I64 : EP_DTYPE_I32};
}

static void fill_x(random_batch *rb)
{
    ep_batch *b = &rb->batch;
    if (random_below(&rb->state, 4) != 0) {
        b->x = random_rows(rb, b->tokens, b->hidden, float_types[random_below(&rb->state, 3)]);
        return;
    }
    int8_t *q = random_batch_alloc(rb, (size_t)b->tokens * b->hidden);
    float *scales = random_batch_alloc(rb, b->tokens * sizeof(float));
    for (size_t i = 0; i < (size_t)b->tokens * b->hidden; i++) {
        q[i] = (int8_t)((int)random_below(&rb->state, 255) - 127);
    }
    for (uint32_t t = 0; t < b->tokens; t++) {
        scales[t] = random_float(&rb->state);
    }
    b->x = (ep_rows){q, b->hidden, EP_DTYPE_I8};
    b->x_scales = scales;
}

static void fill_masks(random_batch *rb)
{
    ep_batch *b = &rb->batch;
    if (random_below(&rb->state, 3) == 0) {
        uint8_t *mask = random_batch_alloc(rb, b->tokens);
        for (uint32_t t = 0; t < b->tokens; t++) {
            mask[t] = random_below(&rb->state, 4) != 0;
        }
        b->mask_tokens = mask;
    }
    if (random_below(&rb->state, 3) == 0) {
        b->mask_slots = random_flags(rb, b->tokens, b->top_k);
    }
    if (b->form == EP_RESULT_PARTIAL) {
        b->partial_slots = random_flags(rb, b->tokens, b->top_k);
    }
}

static void fill_special(random_batch *rb)
{
    ep_special_experts *s = &rb->batch.special;
    if (random_below(&rb->state, 2) == 0) {
        return;
    }
    s->zero_count = random_below(&rb->state, 3);
    s->copy_count = random_below(&rb->state, 3);
    s->const_count = random_below(&rb->state, 3);
    s->const_rule = random_below(&rb->state, 2) ? EP_CONST_LINEAR : EP_CONST_KERNEL;
    ep_dtype dtype = float_types[random_below(&rb->state, 3)];
    s->const_alpha1 = random_rows(rb, s->const_count, rb->batch.hidden, dtype);
    s->const_alpha2 = random_rows(rb, s->const_count, rb->batch.hidden, dtype);
    s->const_v = random_rows(rb, s->const_count, rb->batch.hidden, dtype);
}

void random_batch_init(random_batch *rb, uint64_t seed)
{
    memset(rb, 0, sizeof(*rb));
    rb->state = seed;
    ep_batch *b = &rb->batch;
    rb->shape = (ep_layer_shape){.layer = random_below(&rb->state, 60),
                                 .hidden = 1 + random_below(&rb->state, 40),
                                 .inner = 8,
                                 .experts = 1 + random_below(&rb->state, 12),
                                 .shared_experts = random_below(&rb->state, 3),
                                 .top_k = 2};
    b->hidden = rb->shape.hidden;
    b->tokens = random_below(&rb->state, 12);
    b->top_k = 1 + random_below(&rb->state, 8);
    b->form = (ep_result_form)random_below(&rb->state, 3);
    b->weight_on = random_below(&rb->state, 2) ? EP_WEIGHT_ON_INPUT : EP_WEIGHT_ON_OUTPUT;
    b->shared_source = (ep_shared_source)random_below(&rb->state, 3);
    b->allow_duplicates = true;
    b->wire_dtype = float_types[random_below(&rb->state, 3)];
    b->out_dtype = float_types[random_below(&rb->state, 3)];
    fill_x(rb);
    fill_special(rb);
    fill_ids(rb);
    b->scales = random_rows(rb, b->tokens, b->top_k,
                            random_below(&rb->state, 2) ? EP_DTYPE_F32 : EP_DTYPE_BF16);
    fill_masks(rb);
    if (b->shared_source == EP_SHARED_CALLER) {
        b->shared = random_rows(rb, b->tokens, b->hidden, float_types[random_below(&rb->state, 3)]);
    }
}

void random_batch_fini(random_batch *rb)
{
    for (unsigned i = 0; i < rb->storage_count; i++) {
        free(rb->storage[i]);
    }
}

float random_batch_element(const void *data, ep_dtype dtype, size_t i)
{
    uint16_t half;
    float whole;
    if (dtype == EP_DTYPE_F32) {
        memcpy(&whole, (const char *)data + 4 * i, 4);
        return whole;
    }
    memcpy(&half, (const char *)data + 2 * i, 2);
    return dtype == EP_DTYPE_BF16 ? ep_bf16_to_f32(half) : ep_f16_to_f32(half);
}

float random_batch_rounded(float x, ep_dtype dtype)
{
    return dtype == EP_DTYPE_F32    ? x
           : dtype == EP_DTYPE_BF16 ? ep_bf16_to_f32(ep_f32_to_bf16(x))
                                    : ep_f16_to_f32(ep_f32_to_f16(x));
}
