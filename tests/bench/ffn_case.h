/* SPDX-License-Identifier: Apache-2.0 */
/* One cell of the benchmarks ffn and formats: a shape, rows per expert, a weight format. The same
 * values for us and for the rivals. */
#ifndef EP_BENCH_FFN_CASE_H
#define EP_BENCH_FFN_CASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bench/ffn_limit.h"
#include "bench/ffn_matrix.h"

typedef struct ffn_case {
    uint32_t hidden;
    uint32_t inner;
    uint32_t rows;    /* M, of every expert */
    uint32_t experts; /* of a pass: weights far beyond any cache, a pass of some tenths of a second
                         at the most */
    ep_weight_format format;
    const char *family; /* in the names of rows; NULL: not said */
} ffn_case;

/* As many experts as a pass over bf16 weights has, whatever the format. */
ffn_case ffn_case_make(uint32_t hidden, uint32_t inner, uint32_t rows, ep_weight_format format);

/* Multiplies and adds of one pass over all experts. */
double ffn_case_operations(const ffn_case *c);
/* The instruction that weights of this format are made for. */
ffn_peak ffn_case_peak(ep_weight_format format);

/* Every expert has the same matrices, in memory of its own. */
void ffn_case_matrix(const ffn_case *c, int which, ffn_matrix *out_matrix);
/* Element of a row, as bf16 holds it. */
float ffn_case_input(uint32_t row, uint32_t column);

/* silu(gate) * up of input row 0, in double; matrices: FFN_GATE, FFN_UP, FFN_DOWN of the case. */
double ffn_case_inner(const ffn_case *c, const ffn_matrix matrices[FFN_MATRICES], uint32_t i);

enum { FFN_CASE_PROBES = 64 };
/* Outputs of input row 0 in double, the first and the last among them; the caller compares its own
 * with ffn_case_error. */
typedef struct ffn_probe {
    uint32_t column[FFN_CASE_PROBES];
    double value[FFN_CASE_PROBES];
} ffn_probe;
void ffn_case_probe(const ffn_case *c, const ffn_matrix matrices[FFN_MATRICES],
                    ffn_probe *out_probe);
/* Root of (sum of squared errors / sum of squares). y: output row 0, bf16 or f32. */
double ffn_case_error(const ffn_probe *probe, const void *y, ep_dtype dtype);

/* Zeroed memory in large pages, aligned to them. Ends the program when there is none. */
void *ffn_case_alloc(size_t bytes);

#endif
