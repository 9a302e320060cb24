/* SPDX-License-Identifier: Apache-2.0 */
/* The dense formulas against the textbook ones in double. */
#include <criterion/criterion.h>
#include <math.h>

#include "base/random.h"
#include "dense/dense_math.h"

#define N 37

static void fill(float *values, size_t count, uint64_t seed)
{
    for (size_t i = 0; i < count; i++) {
        values[i] = (float)(ep_splitmix64(&seed) >> 40) * 0x1p-23f - 1.0f;
    }
}

static void near(float got, double expected, const char *what, size_t index)
{
    cr_assert_lt(fabs((double)got - expected), 1e-5 * (1.0 + fabs(expected)),
                 "%s[%zu] is %g, expected %g", what, index, (double)got, expected);
}

Test(dense_math, matrix)
{
    float w[5 * N], x[N], y[5];
    fill(w, 5 * N, 1);
    fill(x, N, 2);
    ep_dense_matrix(w, x, 5, N, y);
    for (size_t r = 0; r < 5; r++) {
        double sum = 0.0;
        float chain = 0.0f;
        for (size_t i = 0; i < N; i++) {
            sum += (double)w[r * N + i] * (double)x[i];
            chain = fmaf(w[r * N + i], x[i], chain);
        }
        near(y[r], sum, "matrix", r);
        cr_assert_eq(y[r], chain, "row %zu is not one ascending chain", r);
    }
}

Test(dense_math, rms_norm)
{
    float x[N], w[N], y[N];
    double squares = 0.0;
    fill(x, N, 3);
    fill(w, N, 4);
    for (size_t i = 0; i < N; i++) {
        squares += (double)x[i] * (double)x[i];
    }
    ep_dense_rms_norm(x, w, N, 1e-5f, y);
    for (size_t i = 0; i < N; i++) {
        near(y[i], (double)x[i] / sqrt(squares / N + 1e-5) * (double)w[i], "norm", i);
    }
    ep_dense_rms_norm(x, w, N, 1e-5f, x);
    cr_assert_arr_eq(x, y, sizeof(y), "in place gives other bits");
}

Test(dense_math, softmax_of_large_values)
{
    float values[3] = {1000.0f, 1001.0f, 900.0f};
    ep_dense_softmax(values, 3);
    near(values[0], 1.0 / (1.0 + exp(1.0)), "softmax", 0);
    near(values[1], exp(1.0) / (1.0 + exp(1.0)), "softmax", 1);
    near(values[2], 0.0, "softmax", 2);
    float one[1] = {-5.0f};
    ep_dense_softmax(one, 1);
    cr_assert_eq(one[0], 1.0f);
}

/* A rotation keeps lengths, does nothing at position 0, and depends on the difference of positions
 * only. */
Test(dense_math, rotation)
{
    float inv_freq[4], a[16], b[16], kept[16];
    ep_dense_rope_table(10000.0f, 8, inv_freq);
    for (size_t j = 0; j < 4; j++) {
        near(inv_freq[j], pow(10000.0, -(double)j / 4.0), "inv_freq", j);
    }
    fill(a, 16, 5);
    memcpy(kept, a, sizeof(a));
    ep_dense_rotate(a, 2, 8, inv_freq, 0);
    cr_assert_arr_eq(a, kept, sizeof(a));
    ep_dense_rotate(a, 2, 8, inv_freq, 9);
    for (size_t h = 0; h < 2; h++) {
        for (size_t j = 0; j < 4; j++) {
            double angle = 9.0 * pow(10000.0, -(double)j / 4.0);
            double low = kept[h * 8 + j];
            double high = kept[h * 8 + j + 4];
            near(a[h * 8 + j], low * cos(angle) - high * sin(angle), "low half", j);
            near(a[h * 8 + j + 4], high * cos(angle) + low * sin(angle), "high half", j);
        }
    }
    fill(a, 16, 6);
    fill(b, 16, 7);
    memcpy(kept, a, sizeof(a));
    float other[16];
    memcpy(other, b, sizeof(b));
    ep_dense_rotate(a, 2, 8, inv_freq, 20);
    ep_dense_rotate(b, 2, 8, inv_freq, 17);
    ep_dense_rotate(kept, 2, 8, inv_freq, 5);
    ep_dense_rotate(other, 2, 8, inv_freq, 2);
    double x = 0.0, y = 0.0;
    for (size_t i = 0; i < 8; i++) {
        x += (double)a[i] * (double)b[i];
        y += (double)kept[i] * (double)other[i];
    }
    near((float)x, y, "product of a query and a key 3 apart", 0);
}

Test(dense_math, attention_with_shared_key_heads)
{
    enum { HEADS = 4, KV = 2, D = 6, POSITIONS = 5 };
    const ep_dense_heads heads = {HEADS, KV, D};
    float q[HEADS * D], keys[POSITIONS * KV * D], values[POSITIONS * KV * D], scores[POSITIONS],
        o[HEADS * D];
    fill(q, HEADS * D, 8);
    fill(keys, POSITIONS * KV * D, 9);
    fill(values, POSITIONS * KV * D, 10);
    for (size_t position = 0; position < POSITIONS; position++) {
        ep_dense_attend(&heads, q, keys, values, position, scores, o);
        for (size_t h = 0; h < HEADS; h++) {
            size_t kv = h / 2 * D; /* heads 0 and 1 use key head 0 */
            double weight[POSITIONS], total = 0.0;
            for (size_t p = 0; p <= position; p++) {
                double dot = 0.0;
                for (size_t i = 0; i < D; i++) {
                    dot += (double)q[h * D + i] * (double)keys[p * KV * D + kv + i];
                }
                weight[p] = exp(dot / sqrt(D));
                total += weight[p];
            }
            for (size_t i = 0; i < D; i++) {
                double sum = 0.0;
                for (size_t p = 0; p <= position; p++) {
                    sum += weight[p] / total * (double)values[p * KV * D + kv + i];
                }
                near(o[h * D + i], sum, "o", h * D + i);
            }
        }
    }
}
