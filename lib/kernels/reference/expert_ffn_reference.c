/* SPDX-License-Identifier: Apache-2.0 */
/* Family `portable` in plain loops. Slow on purpose: what it does can be checked by reading it. */
#include "kernels/expert_ffn.h"

#include "kernels/ffn_element.h"

static void widen_row(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t hidden, float *x)
{
    for (uint32_t i = 0; i < hidden; i++) {
        x[i] = batch->x_dtype == EP_DTYPE_I8       ? ep_ffn_read_i8(row->x, row->x_scale, i)
               : batch->x_dtype == EP_DTYPE_F8E4M3 ? ep_ffn_read_f8(row->x, row->x_scales, i)
                                                   : ep_ffn_read_float(row->x, batch->x_dtype, i);
        if (batch->weight_on_input) {
            x[i] = row->input_weight * x[i];
        }
    }
}

/* dot(row `index` of a [.,n] matrix, x) */
static float dot_row(const void *matrix, ep_dtype dtype, size_t index, const float *x, uint32_t n)
{
    float acc = 0.0f;
    for (uint32_t i = 0; i < n; i++) {
        acc = fmaf(ep_ffn_read_float(matrix, dtype, index * n + i), x[i], acc);
    }
    return acc;
}

void ep_ffn_reference(const ep_ffn_source *source, const ep_ffn_batch *batch, float *scratch)
{
    const uint32_t hidden = source->hidden;
    const uint32_t inner = source->inner;
    float *x = scratch;
    float *h = scratch + hidden;

    for (uint32_t r = 0; r < batch->rows_count; r++) {
        const ep_ffn_row *row = &batch->rows[r];
        widen_row(batch, row, hidden, x);
        for (uint32_t i = 0; i < inner; i++) {
            float g = dot_row(source->gate, source->dtype, i, x, hidden);
            float u = dot_row(source->up, source->dtype, i, x, hidden);
            h[i] = ep_siluf(g) * u;
        }
        float share = 1.0f;
        if (source->shared_gate != NULL) {
            share = ep_sigmoidf(dot_row(source->shared_gate, source->shared_gate_dtype, 0, x, hidden));
        }
        for (uint32_t i = 0; i < hidden; i++) {
            float y = dot_row(source->down, source->dtype, i, h, inner);
            if (source->shared_gate != NULL) {
                y = share * y;
            }
            ep_ffn_write(row->out, batch->out_dtype, i, y);
        }
    }
}
