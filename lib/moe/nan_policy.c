/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A token row after the NaN policy, in f32 and as it travels. A replacement is first rounded to x's type, so
 * both agree. An i8 row has no non-finite element; a row scale that is not finite marks the whole row
 * (moe/quantize.h).
 */
#include <math.h>
#include <string.h>

#include "base/numeric.h"
#include "moe/batch.h"
#include "moe/convert.h"
#include "moe/quantize.h"

#define CHUNK 256

static size_t chunk_count(size_t n, size_t done)
{
    return n - done < CHUNK ? n - done : CHUNK;
}

static uint32_t count_nonfinite(const float *row, size_t n)
{
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += !isfinite(row[i]);
    }
    return count;
}

float ep_batch_row_scale(const ep_batch *batch, uint32_t token)
{
    float scale = batch->x_scales[token];
    bool replace = batch->nan_policy == EP_NAN_ZERO || batch->nan_policy == EP_NAN_MEAN;
    return replace && !isfinite(scale) ? 0.0f : scale;
}

uint32_t ep_batch_count_nonfinite(const ep_batch *batch, uint32_t token)
{
    if (batch->x.dtype == EP_DTYPE_I8) {
        return isfinite(batch->x_scales[token]) ? 0 : batch->hidden;
    }
    const uint8_t *row = ep_rows_at(&batch->x, token);
    size_t element = ep_dtype_bytes(batch->x.dtype);
    uint32_t count = 0;
    float wide[CHUNK];
    for (size_t done = 0; done < batch->hidden; done += CHUNK) {
        size_t n = chunk_count(batch->hidden, done);
        ep_row_widen(row + done * element, batch->x.dtype, n, wide);
        count += count_nonfinite(wide, n);
    }
    return count;
}

/* Mean of the finite elements, 0 when there is none. f64: the sum of H floats cannot overflow it. */
static float finite_mean(const ep_batch *batch, const uint8_t *row)
{
    size_t element = ep_dtype_bytes(batch->x.dtype);
    double sum = 0.0;
    uint32_t count = 0;
    float wide[CHUNK];
    for (size_t done = 0; done < batch->hidden; done += CHUNK) {
        size_t n = chunk_count(batch->hidden, done);
        ep_row_widen(row + done * element, batch->x.dtype, n, wide);
        for (size_t i = 0; i < n; i++) {
            if (isfinite(wide[i])) {
                sum += (double)wide[i];
                count++;
            }
        }
    }
    return count == 0 ? 0.0f : (float)(sum / (double)count);
}

/* What stands in for a non-finite element, as a value of x's type. */
static float replacement(const ep_batch *batch, const uint8_t *row)
{
    if (batch->nan_policy != EP_NAN_MEAN) {
        return 0.0f;
    }
    float mean = finite_mean(batch, row);
    uint8_t narrow[sizeof(float)];
    ep_row_narrow(&mean, 1, batch->x.dtype, narrow);
    ep_row_widen(narrow, batch->x.dtype, 1, &mean);
    return mean;
}

static bool must_replace(const ep_batch *batch, uint32_t token)
{
    return (batch->nan_policy == EP_NAN_ZERO || batch->nan_policy == EP_NAN_MEAN) &&
           ep_batch_count_nonfinite(batch, token) > 0;
}

static void replace_nonfinite(float *row, size_t n, float value)
{
    for (size_t i = 0; i < n; i++) {
        row[i] = isfinite(row[i]) ? row[i] : value;
    }
}

void ep_batch_widen_row(const ep_batch *batch, uint32_t token, float *out)
{
    const uint8_t *row = ep_rows_at(&batch->x, token);
    if (batch->x.dtype == EP_DTYPE_I8) {
        ep_row_dequantize_i8((const int8_t *)row, ep_batch_row_scale(batch, token), batch->hidden, out);
        return;
    }
    ep_row_widen(row, batch->x.dtype, batch->hidden, out);
    if (must_replace(batch, token)) {
        replace_nonfinite(out, batch->hidden, replacement(batch, row));
    }
}

void ep_batch_copy_row(const ep_batch *batch, uint32_t token, void *out)
{
    const uint8_t *row = ep_rows_at(&batch->x, token);
    size_t element = ep_dtype_bytes(batch->x.dtype);
    if (batch->x.dtype == EP_DTYPE_I8 || !must_replace(batch, token)) {
        memcpy(out, row, batch->hidden * element);
        return;
    }
    float value = replacement(batch, row);
    float wide[CHUNK];
    for (size_t done = 0; done < batch->hidden; done += CHUNK) {
        size_t n = chunk_count(batch->hidden, done);
        ep_row_widen(row + done * element, batch->x.dtype, n, wide);
        replace_nonfinite(wide, n, value);
        ep_row_narrow(wide, n, batch->x.dtype, (uint8_t *)out + done * element);
    }
}
