/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The matrices of the expert that the benchmarks ffn, formats and skew compute, in any weight
 * format, and what their elements then are: equal values for us and for the libraries compared
 * with. Values lie within 1.7 / sqrt(columns); rows repeat after FFN_MATRIX_PERIOD, a prime, so
 * that large matrices are made quickly and rows that changed places still show.
 */
#ifndef EP_BENCH_FFN_MATRIX_H
#define EP_BENCH_FFN_MATRIX_H

#include "base/expert_form.h"

enum { FFN_GATE, FFN_UP, FFN_DOWN, FFN_MATRICES };
enum { FFN_MATRIX_PERIOD = 251 };

typedef struct ffn_matrix {
    ep_weight_format format;
    uint32_t rows;
    uint32_t columns;
    uint8_t *values; /* as base/expert_form.h says */
    void *scales;    /* NULL: the format has none */
    size_t values_bytes;
} ffn_matrix;

/* which: FFN_GATE, FFN_UP or FFN_DOWN. Ends the program when there is no memory. */
void ffn_matrix_make(ffn_matrix *matrix, int which, uint32_t rows, uint32_t columns,
                     ep_weight_format format);
void ffn_matrix_free(ffn_matrix *matrix);
/* The element that the format has kept. */
double ffn_matrix_value(const ffn_matrix *matrix, uint32_t row, uint32_t column);

/* -1 to 1, a pure function of its arguments. */
float ffn_matrix_draw(uint64_t a, uint64_t b, uint64_t c);

#endif
