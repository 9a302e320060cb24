/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weight formats of the oracle. A matrix of any format is kept as plain floats: the exact value of
 * each code, and beside it the scale of each group of columns of each row.
 */
#ifndef TESTS_REFERENCE_REF_FORMAT_H
#define TESTS_REFERENCE_REF_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ref_family.h"

enum ref_format {
    REF_FORMAT_FLOAT, /* f16, f32 */
    REF_FORMAT_BF16,
    /* scales for blocks of 128 x 128 or for rows: both read as one for each 128 columns of a row */
    REF_FORMAT_F8,
    REF_FORMAT_MXFP4, /* groups of 32 columns, as the next two */
    REF_FORMAT_MXFP8,
    REF_FORMAT_INT4,  /* with scales of 16 bits */
    REF_FORMAT_CODES, /* groups of as many columns as each matrix says, perhaps with offsets */
    REF_FORMAT_Q4_K,  /* such codes, in groups of 32 with offsets, that w4a8 has too */
    REF_FORMAT_W8A8   /* one scale for a row; rows of x are rounded to int8 as well */
};

struct ref_matrix {
    const float *values;  /* [rows,columns] */
    const float *scales;  /* [rows, groups of columns]; NULL: plain values */
    const float *bias;    /* [rows] or NULL */
    const float *offsets; /* as scales, taken away from value times scale; NULL none */
    size_t group;         /* columns of one; 0: as the format says */
    /* [columns]: which input each column belongs to; NULL: the same. Alike for gate and up */
    const size_t *order;
};

/* What a node that is told a family computes the format with: w4a8 leaves what it has not to
 * bf16dp, that to `portable`. */
enum ref_family ref_format_family(enum ref_format format, enum ref_family told);
/* Columns that share a scale; 0: no groups. */
size_t ref_format_group(enum ref_format format);

/* Values of codes. */
float ref_e2m1(unsigned code);
float ref_e4m3(uint8_t code);
float ref_e8m0(uint8_t code);

/* The dot product of a row of a matrix that has groups with x, without the bias. Not of w4a8:
 * reference_w4a8.h. */
float ref_dot_groups(enum ref_format format, enum ref_family family, const float *values,
                     const float *scales, const float *x, size_t n);
/* The same of any codes: scales and offsets (NULL none) for each `group` columns. */
float ref_dot_codes(enum ref_family family, const float *values, const float *scales,
                    const float *offsets, size_t group, const float *x, size_t n);
/* x as int8 holds it; *out_scale is what these integers are multiplied by: NaN for a row that is
 * not finite. */
void ref_round_int8(const float *x, size_t n, float *out_q, float *out_scale);
/* Of a row of w8a8 and such integers. */
float ref_dot_int8(const float *values, float scale, const float *q, float q_scale, size_t n);

#endif
