/* SPDX-License-Identifier: Apache-2.0 */
/* OpenBLAS: it has f32 products only, so weights are f32 whatever the case says. One row: sgemv,
 * else sgemm.
 */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/ffn_rival.h"

static ffn_case the_case;
static float *weights; /* [experts][3][H * I] */
static float *x, *gate, *up, *y;

static int blas_open(const ffn_case *c)
{
    const size_t n = (size_t)c->hidden * c->inner;
    the_case = *c;
    weights = ffn_case_alloc(3 * n * sizeof(float) * c->experts);
    ffn_case as_f32 = *c;
    as_f32.format = EP_WEIGHTS_F32;
    for (int m = 0; m < FFN_MATRICES; m++) {
        ffn_matrix matrix;
        ffn_case_matrix(&as_f32, m, &matrix);
        memcpy(weights + (size_t)m * n, matrix.values, matrix.values_bytes);
        ffn_matrix_free(&matrix);
    }
    for (uint32_t e = 1; e < c->experts; e++) {
        memcpy(weights + 3 * n * e, weights, 3 * n * sizeof(float));
    }
    x = ffn_case_alloc((size_t)c->rows * c->hidden * sizeof(float));
    y = ffn_case_alloc((size_t)c->rows * c->hidden * sizeof(float));
    gate = ffn_case_alloc((size_t)c->rows * c->inner * sizeof(float));
    up = ffn_case_alloc((size_t)c->rows * c->inner * sizeof(float));
    for (uint32_t r = 0; r < c->rows; r++) {
        for (uint32_t k = 0; k < c->hidden; k++) {
            x[(size_t)r * c->hidden + k] = ffn_case_input(r, k);
        }
    }
    return 0;
}

static void multiply(uint32_t outputs, uint32_t columns, const float *a, const float *w, float *c)
{
    const int n = (int)outputs, k = (int)columns, m = (int)the_case.rows;
    if (m == 1) {
        cblas_sgemv(CblasRowMajor, CblasNoTrans, n, k, 1.0f, w, k, a, 1, 0.0f, c, 1);
    } else {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1.0f, a, k, w, k, 0.0f, c, n);
    }
}

static void blas_pass(void)
{
    const size_t n = (size_t)the_case.hidden * the_case.inner;
    const size_t inner = (size_t)the_case.rows * the_case.inner;
    for (uint32_t e = 0; e < the_case.experts; e++) {
        const float *w = weights + 3 * n * e;
        multiply(the_case.inner, the_case.hidden, x, w, gate);
        multiply(the_case.inner, the_case.hidden, x, w + n, up);
#pragma omp parallel for simd
        for (size_t i = 0; i < inner; i++) {
            gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
        }
        multiply(the_case.hidden, the_case.inner, gate, w + 2 * n, y);
    }
}

static const void *blas_output(ep_dtype *out_dtype)
{
    *out_dtype = EP_DTYPE_F32;
    return y;
}

int main(int argc, char **argv)
{
    static const ffn_rival rival = {.open = blas_open, .pass = blas_pass, .output = blas_output};
    return ffn_rival_main(&rival, argc, argv);
}
