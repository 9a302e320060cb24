/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A token row after the NaN policy, in f32 and in the form that travels. A replacement is first
 * rounded to x's type, so that both agree. An i8 row has no non-finite element; a row scale that is
 * not finite marks the whole row (moe/quantize.h). Rows are quantised after the policy.
 */
#include <math.h>
#include <string.h>

#include "base/float_env.h"
#include "moe/batch.h"
#include "moe/convert.h"
#include "moe/quantize.h"

#define CHUNK 256

static size_t chunk_count(size_t n, size_t done)
{
    return n - done < CHUNK ? n - done : CHUNK;
}

static bool replaces_some(const ep_batch *batch)
{
    return batch->nan_policy == EP_NAN_ZERO || batch->nan_policy == EP_NAN_MEAN;
}

float ep_batch_row_scale(const ep_batch *batch, uint32_t token)
{
    float scale = batch->x_scales[token];
    return replaces_some(batch) && !isfinite(scale) ? 0.0f : scale;
}

uint32_t ep_batch_count_nonfinite(const ep_batch *batch, uint32_t token)
{
    if (batch->x.dtype == EP_DTYPE_I8) {
        return isfinite(batch->x_scales[token]) ? 0 : batch->hidden;
    }
    return (uint32_t)ep_row_count_nonfinite(ep_rows_at(&batch->x, token), batch->x.dtype,
                                            batch->hidden);
}

/* Mean of the finite elements; 0 when there are none. In f64, which H floats cannot overflow. */
static float finite_mean(const uint8_t *row, ep_dtype dtype, size_t count)
{
    size_t element = ep_dtype_bytes(dtype);
    double sum = 0.0;
    size_t finite = 0;
    float wide[CHUNK];
    for (size_t done = 0; done < count; done += CHUNK) {
        size_t n = chunk_count(count, done);
        ep_row_widen(row + done * element, dtype, n, wide);
        for (size_t i = 0; i < n; i++) {
            if (isfinite(wide[i])) {
                sum += (double)wide[i];
                finite++;
            }
        }
    }
    return finite == 0 ? 0.0f : (float)(sum / (double)finite);
}

/* The value that replaces a non-finite element of a row: 0 or the mean, which is rounded to the
 * type of values. */
static float replacement_of(const void *row, ep_dtype dtype, size_t n, ep_nan_policy policy,
                            ep_dtype values)
{
    if (policy != EP_NAN_MEAN) {
        return 0.0f;
    }
    float mean = finite_mean(row, dtype, n);
    uint8_t narrow[sizeof(float)];
    ep_row_narrow(&mean, 1, values, narrow);
    ep_row_widen(narrow, values, 1, &mean);
    return mean;
}

static float replacement(const ep_batch *batch, const uint8_t *row)
{
    return replacement_of(row, batch->x.dtype, batch->hidden, batch->nan_policy, batch->x.dtype);
}

static bool must_replace(const ep_batch *batch, uint32_t token)
{
    return replaces_some(batch) && ep_batch_count_nonfinite(batch, token) > 0;
}

uint32_t ep_sent_row_scales(ep_dtype dtype, uint32_t hidden)
{
    return dtype == EP_DTYPE_I8       ? 1
           : dtype == EP_DTYPE_F8E4M3 ? (uint32_t)ep_quant_blocks(hidden, EP_QUANT_BLOCK_F8)
                                      : 0;
}

static void replace_nonfinite(float *row, size_t n, float value)
{
    for (size_t i = 0; i < n; i++) {
        row[i] = isfinite(row[i]) ? row[i] : value;
    }
}

static EP_FLOAT_WORK void repair(float *row, size_t n, ep_nan_policy policy, ep_dtype dtype)
{
    if (ep_row_count_nonfinite(row, EP_DTYPE_F32, n) > 0) {
        replace_nonfinite(row, n, replacement_of(row, EP_DTYPE_F32, n, policy, dtype));
    }
}

void ep_floats_repair(float *row, size_t n, ep_nan_policy policy, ep_dtype dtype)
{
    const ep_float_env env = ep_float_env_begin();
    repair(row, n, policy, dtype);
    ep_float_env_end(env);
}

void ep_batch_widen_row(const ep_batch *batch, uint32_t token, float *out)
{
    const uint8_t *row = ep_rows_at(&batch->x, token);
    if (batch->x.dtype == EP_DTYPE_I8) {
        ep_row_dequantize_i8((const int8_t *)row, ep_batch_row_scale(batch, token), batch->hidden,
                             out);
        return;
    }
    ep_row_widen(row, batch->x.dtype, batch->hidden, out);
    if (must_replace(batch, token)) {
        replace_nonfinite(out, batch->hidden, replacement(batch, row));
    }
}

static void send_replaced(const ep_batch *batch, const uint8_t *row, uint8_t *out)
{
    size_t element = ep_dtype_bytes(batch->x.dtype);
    float value = replacement(batch, row);
    float wide[CHUNK];
    for (size_t done = 0; done < batch->hidden; done += CHUNK) {
        size_t n = chunk_count(batch->hidden, done);
        ep_row_widen(row + done * element, batch->x.dtype, n, wide);
        replace_nonfinite(wide, n, value);
        ep_row_narrow(wide, n, batch->x.dtype, out + done * element);
    }
}

static const float *smooth_row(const ep_batch *batch, uint32_t slot, uint32_t expert)
{
    if (batch->smooth.data == NULL) {
        return NULL;
    }
    return ep_rows_at(&batch->smooth,
                      slot < batch->top_k ? batch->smooth_first + expert : slot - batch->top_k);
}

/*
 * A row with replaced elements, which is rare. The scale needs the whole row, so it is widened
 * twice, piece by piece: for the greatest magnitude, then for the codes.
 */
static float send_replaced_i8(const ep_batch *batch, const uint8_t *row, const float *smooth,
                              int8_t *out)
{
    const ep_quant_kernel *kernel = ep_quant_kernel_best();
    size_t element = ep_dtype_bytes(batch->x.dtype);
    float value = replacement(batch, row);
    float wide[CHUNK];
    uint32_t amax = 0;
    float d = 0.0f;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t done = 0; done < batch->hidden; done += CHUNK) {
            size_t n = chunk_count(batch->hidden, done);
            const float *part = smooth != NULL ? smooth + done : NULL;
            ep_row_widen(row + done * element, batch->x.dtype, n, wide);
            replace_nonfinite(wide, n, value);
            if (pass == 0) {
                uint32_t bits = kernel->amax_bits(wide, EP_DTYPE_F32, part, n);
                amax = bits > amax ? bits : amax;
            } else {
                kernel->to_i8(wide, EP_DTYPE_F32, part, n, d, out + done);
            }
        }
        if (pass == 0) {
            float scale = ep_row_scale_i8(amax, &d);
            if (!(scale > 0.0f)) {
                memset(out, 0, batch->hidden);
                return scale;
            }
        }
    }
    return 1.0f / d;
}

static void send_replaced_f8(const ep_batch *batch, const uint8_t *row, uint8_t *out, float *scales)
{
    size_t element = ep_dtype_bytes(batch->x.dtype);
    float value = replacement(batch, row);
    float wide[CHUNK];
    _Static_assert(CHUNK % EP_QUANT_BLOCK_F8 == 0, "pieces are whole blocks");
    for (size_t done = 0; done < batch->hidden; done += CHUNK) {
        size_t n = chunk_count(batch->hidden, done);
        ep_row_widen(row + done * element, batch->x.dtype, n, wide);
        replace_nonfinite(wide, n, value);
        ep_row_quantize_f8(wide, EP_DTYPE_F32, n, out + done, scales + done / EP_QUANT_BLOCK_F8);
    }
}

/* A row that is quantised, or that may need repair. */
static EP_FLOAT_WORK void send_row(const ep_batch *batch, uint32_t token, const float *smooth,
                                   uint8_t *out, float *scales)
{
    const uint8_t *row = ep_rows_at(&batch->x, token);
    const ep_dtype dtype = batch->x.dtype;
    const bool replaces = must_replace(batch, token);
    if (batch->dispatch_quant == EP_DISPATCH_INT8) {
        scales[0] = replaces ? send_replaced_i8(batch, row, smooth, (int8_t *)out)
                             : ep_row_quantize_i8(row, dtype, smooth, batch->hidden, (int8_t *)out);
    } else if (batch->dispatch_quant == EP_DISPATCH_FP8) {
        if (replaces) {
            send_replaced_f8(batch, row, out, scales);
        } else {
            ep_row_quantize_f8(row, dtype, batch->hidden, out, scales);
        }
    } else if (replaces) {
        send_replaced(batch, row, out);
    } else {
        memcpy(out, row, batch->hidden * ep_dtype_bytes(dtype));
    }
}

void ep_batch_send_row(const ep_batch *batch, uint32_t token, uint32_t slot, uint32_t expert,
                       void *out, float *scales)
{
    if (batch->x.dtype == EP_DTYPE_I8) {
        scales[0] = ep_batch_row_scale(batch, token);
    }
    if (batch->dispatch_quant == EP_DISPATCH_PLAIN &&
        (batch->x.dtype == EP_DTYPE_I8 || !replaces_some(batch))) {
        memcpy(out, ep_rows_at(&batch->x, token), batch->hidden * ep_dtype_bytes(batch->x.dtype));
        return;
    }
    const ep_float_env env = ep_float_env_begin();
    send_row(batch, token, smooth_row(batch, slot, expert), out, scales);
    ep_float_env_end(env);
}
