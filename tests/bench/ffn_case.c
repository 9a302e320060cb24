/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/numeric.h"

#define PASS_BYTES 600e6     /* weights of a pass: tens of times the caches */
#define PASS_OPERATIONS 2e11 /* a pass of large M has fewer experts: its time is arithmetic */

ffn_case ffn_case_make(uint32_t hidden, uint32_t inner, uint32_t rows, ep_dtype dtype)
{
    ffn_case c = {.hidden = hidden, .inner = inner, .rows = rows, .experts = 1, .dtype = dtype};
    double by_bytes = ceil(PASS_BYTES / (double)ffn_case_expert_bytes(&c));
    double by_operations = ceil(PASS_OPERATIONS / ffn_case_operations(&c));
    c.experts = (uint32_t)(by_bytes < by_operations ? by_bytes : by_operations);
    return c;
}

double ffn_case_operations(const ffn_case *c)
{
    return 6.0 * c->rows * c->hidden * c->inner * c->experts;
}

size_t ffn_case_expert_bytes(const ffn_case *c)
{
    return (size_t)3 * c->hidden * c->inner * ep_dtype_bytes(c->dtype);
}

ffn_peak ffn_case_peak(ep_dtype dtype)
{
    return dtype == EP_DTYPE_BF16 ? FFN_PEAK_BF16 : dtype == EP_DTYPE_I8 ? FFN_PEAK_INT8 : FFN_PEAK_F32;
}

/* -1 to 1, a pure function of its arguments. */
static float draw(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t z = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu;
    z ^= z >> 29;
    z *= 0xbf58476d1ce4e5b9u;
    z ^= z >> 32;
    return ((float)(z & 0xffff) - 32768.0f) / 32768.0f;
}

static float as_bf16(float x)
{
    return ep_bf16_to_f32(ep_f32_to_bf16(x));
}

float ffn_case_weight(int matrix, uint32_t row, uint32_t column, uint32_t columns)
{
    return as_bf16(draw((uint64_t)matrix + 1, row, column) * 1.7f / sqrtf((float)columns));
}

float ffn_case_input(uint32_t row, uint32_t column)
{
    return as_bf16(draw(77, row, column));
}

void ffn_case_fill(int matrix, uint32_t rows, uint32_t columns, ep_dtype dtype, void *out)
{
    size_t at = 0;
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t c = 0; c < columns; c++, at++) {
            float value = ffn_case_weight(matrix, r, c, columns);
            if (dtype == EP_DTYPE_BF16) {
                ((uint16_t *)out)[at] = ep_f32_to_bf16(value);
            } else if (dtype == EP_DTYPE_F16) {
                ((uint16_t *)out)[at] = ep_f32_to_f16(value);
            } else {
                ((float *)out)[at] = value;
            }
        }
    }
}

void ffn_case_probe(const ffn_case *c, ffn_probe *out_probe)
{
    double *h = malloc(c->inner * sizeof(*h));
    if (h == NULL) {
        abort();
    }
    for (uint32_t i = 0; i < c->inner; i++) {
        double gate = 0, up = 0;
        for (uint32_t k = 0; k < c->hidden; k++) {
            double x = (double)ffn_case_input(0, k);
            gate += x * (double)ffn_case_weight(FFN_GATE, i, k, c->hidden);
            up += x * (double)ffn_case_weight(FFN_UP, i, k, c->hidden);
        }
        h[i] = gate / (1 + exp(-gate)) * up;
    }
    for (uint32_t p = 0; p < FFN_CASE_PROBES; p++) {
        uint32_t column = p == 0 ? 0 : p == 1 ? 17 : p == 2 ? c->hidden / 2 + 5 : c->hidden - 1;
        double sum = 0;
        for (uint32_t i = 0; i < c->inner; i++) {
            sum += h[i] * (double)ffn_case_weight(FFN_DOWN, column, i, c->inner);
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
