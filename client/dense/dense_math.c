/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorm, rotary positions, attention. */
#include "dense/dense_math.h"

#include <math.h>

#include "base/numeric.h"

void ep_dense_matrix(const float *w, const float *x, size_t rows, size_t columns, float *out_y)
{
    for (size_t r = 0; r < rows; r++) {
        out_y[r] = ep_dotf(w + r * columns, x, columns);
    }
}

void ep_dense_rms_norm(const float *x, const float *w, size_t n, float eps, float *out_y)
{
    float inverse = 1.0f / sqrtf(ep_dotf(x, x, n) / (float)n + eps);
    for (size_t i = 0; i < n; i++) {
        out_y[i] = (x[i] * inverse) * w[i];
    }
}

void ep_dense_softmax(float *values, size_t n)
{
    float max = values[0];
    float sum = 0.0f;
    for (size_t i = 1; i < n; i++) {
        max = values[i] > max ? values[i] : max;
    }
    for (size_t i = 0; i < n; i++) {
        values[i] = ep_expf(values[i] - max);
        sum = sum + values[i];
    }
    for (size_t i = 0; i < n; i++) {
        values[i] = values[i] / sum;
    }
}

void ep_dense_rope_table(float theta, uint32_t head_dim, float *out_inv_freq)
{
    for (uint32_t j = 0; j < head_dim / 2; j++) {
        out_inv_freq[j] = (float)pow((double)theta, -2.0 * (double)j / (double)head_dim);
    }
}

void ep_dense_rotate(float *x, uint32_t count, uint32_t head_dim, const float *inv_freq,
                     size_t position)
{
    uint32_t half = head_dim / 2;
    for (uint32_t j = 0; j < half; j++) {
        double angle = (double)position * (double)inv_freq[j];
        float c = (float)cos(angle);
        float s = (float)sin(angle);
        for (uint32_t h = 0; h < count; h++) {
            float *low = x + (size_t)h * head_dim + j;
            float a = low[0];
            float b = low[half];
            low[0] = a * c - b * s;
            low[half] = b * c + a * s;
        }
    }
}

void ep_dense_attend(const ep_dense_heads *heads, const float *q, const float *keys,
                     const float *values, size_t position, float *scores, float *out_o)
{
    size_t d = heads->head_dim;
    size_t stride = (size_t)heads->kv_heads * d;
    uint32_t group = heads->heads / heads->kv_heads;
    float scale = 1.0f / sqrtf((float)d);
    for (uint32_t h = 0; h < heads->heads; h++) {
        const float *query = q + h * d;
        size_t column = (h / group) * d;
        for (size_t p = 0; p <= position; p++) {
            scores[p] = ep_dotf(query, keys + p * stride + column, d) * scale;
        }
        ep_dense_softmax(scores, position + 1);
        for (size_t i = 0; i < d; i++) {
            float acc = 0.0f;
            for (size_t p = 0; p <= position; p++) {
                acc = fmaf(scores[p], values[p * stride + column + i], acc);
            }
            out_o[h * d + i] = acc;
        }
    }
}
