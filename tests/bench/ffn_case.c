/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/numeric.h"

#define PASS_BYTES 600e6       /* bf16 weights of a pass: tens of times the caches */
#define PASS_OPERATIONS 2.5e10 /* a pass of large M has fewer experts: its time is arithmetic */

ffn_case ffn_case_make(uint32_t hidden, uint32_t inner, uint32_t rows, ep_weight_format format)
{
    ffn_case c = {.hidden = hidden, .inner = inner, .rows = rows, .experts = 1, .format = format};
    double by_bytes = ceil(PASS_BYTES / (6.0 * hidden * inner));
    double by_operations = ceil(PASS_OPERATIONS / ffn_case_operations(&c));
    c.experts = (uint32_t)(by_bytes < by_operations ? by_bytes : by_operations);
    return c;
}

double ffn_case_operations(const ffn_case *c)
{
    return 6.0 * c->rows * c->hidden * c->inner * c->experts;
}

ffn_peak ffn_case_peak(ep_weight_format format)
{
    return format == EP_WEIGHTS_BF16   ? FFN_PEAK_BF16
           : format == EP_WEIGHTS_W8A8 ? FFN_PEAK_INT8
                                       : FFN_PEAK_F32;
}

void ffn_case_matrix(const ffn_case *c, int which, ffn_matrix *out_matrix)
{
    const bool is_down = which == FFN_DOWN;
    ffn_matrix_make(out_matrix, which, is_down ? c->hidden : c->inner,
                    is_down ? c->inner : c->hidden, c->format);
}

float ffn_case_input(uint32_t row, uint32_t column)
{
    return ep_bf16_to_f32(ep_f32_to_bf16(ffn_matrix_draw(77, row, column)));
}

double ffn_case_inner(const ffn_case *c, const ffn_matrix matrices[FFN_MATRICES], uint32_t i)
{
    double gate = 0, up = 0;
    for (uint32_t k = 0; k < c->hidden; k++) {
        const double x = (double)ffn_case_input(0, k);
        gate += x * ffn_matrix_value(&matrices[FFN_GATE], i, k);
        up += x * ffn_matrix_value(&matrices[FFN_UP], i, k);
    }
    return gate / (1 + exp(-gate)) * up;
}

void ffn_case_probe(const ffn_case *c, const ffn_matrix matrices[FFN_MATRICES],
                    ffn_probe *out_probe)
{
    double *h = malloc(c->inner * sizeof(*h));
    if (h == NULL) {
        abort();
    }
    for (uint32_t i = 0; i < c->inner; i++) {
        h[i] = i < FFN_MATRIX_PERIOD ? ffn_case_inner(c, matrices, i) : h[i - FFN_MATRIX_PERIOD];
    }
    for (uint32_t p = 0; p < FFN_CASE_PROBES; p++) {
        const uint32_t column = (uint32_t)((uint64_t)p * (c->hidden - 1) / (FFN_CASE_PROBES - 1));
        double sum = 0;
        for (uint32_t i = 0; i < c->inner; i++) {
            sum += h[i] * ffn_matrix_value(&matrices[FFN_DOWN], column, i);
        }
        out_probe->column[p] = column;
        out_probe->value[p] = sum;
    }
    free(h);
}

double ffn_case_error(const ffn_probe *probe, const void *y, ep_dtype dtype)
{
    double error = 0, power = 0;
    for (uint32_t p = 0; p < FFN_CASE_PROBES; p++) {
        uint32_t at = probe->column[p];
        double got = dtype == EP_DTYPE_BF16 ? (double)ep_bf16_to_f32(((const uint16_t *)y)[at])
                                            : (double)((const float *)y)[at];
        error += (got - probe->value[p]) * (got - probe->value[p]);
        power += probe->value[p] * probe->value[p];
    }
    return sqrt(error / power);
}

void *ffn_case_alloc(size_t bytes)
{
    const size_t page = (size_t)2 << 20;
    void *memory;
    bytes = (bytes + page - 1) / page * page;
    if (posix_memalign(&memory, page, bytes) != 0) {
        abort();
    }
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, 0, bytes);
    return memory;
}
