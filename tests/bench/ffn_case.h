/* SPDX-License-Identifier: Apache-2.0 */
/* One cell of the benchmark ffn: a shape, rows per expert, a weight type. The same values for us and for the rivals. */
#ifndef EP_BENCH_FFN_CASE_H
#define EP_BENCH_FFN_CASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bench/ffn_limit.h"
#include "expertd/tensor.h"

typedef struct ffn_case {
    uint32_t hidden;
    uint32_t inner;
    uint32_t rows;    /* M, of every expert */
    uint32_t experts; /* of a pass: weights far beyond any cache, a pass of some tenths of a second */
    ep_dtype dtype;
} ffn_case;

ffn_case ffn_case_make(uint32_t hidden, uint32_t inner, uint32_t rows, ep_dtype dtype);

/* Multiplies and adds of one pass over all experts. */
double ffn_case_operations(const ffn_case *c);
/* Bytes of one expert's three matrices. */
size_t ffn_case_expert_bytes(const ffn_case *c);
ffn_peak ffn_case_peak(ep_dtype dtype);

enum { FFN_GATE, FFN_UP, FFN_DOWN };

/* Element of a matrix and of a row, as bf16 holds it. Every expert has the same matrices, in memory of its own. */
float ffn_case_weight(int matrix, uint32_t row, uint32_t column, uint32_t columns);
float ffn_case_input(uint32_t row, uint32_t column);
/* A matrix [rows,columns] as dtype (bf16, f16 or f32). */
void ffn_case_fill(int matrix, uint32_t rows, uint32_t columns, ep_dtype dtype, void *out);

enum { FFN_CASE_PROBES = 4 };
/* Outputs of input row 0 in double; the caller compares its own with ffn_case_error. */
typedef struct ffn_probe {
    uint32_t column[FFN_CASE_PROBES];
    double value[FFN_CASE_PROBES];
} ffn_probe;
void ffn_case_probe(const ffn_case *c, ffn_probe *out_probe);
/* Root of (sum of squared errors / sum of squares). y: output row 0, bf16 or f32. */
double ffn_case_error(const ffn_probe *probe, const void *y, ep_dtype dtype);

/* Zeroed memory in large pages, aligned to them. Ends the program when there is none. */
void *ffn_case_alloc(size_t bytes);

#endif
