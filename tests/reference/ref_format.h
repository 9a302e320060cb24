/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weight formats of the oracle. A matrix of any format is kept as floats: the exact value of each
 * code, and the scale of each group of columns of each row.
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
    /* scales of blocks of 128 x 128 or of rows, both read as one per 128 columns of a row */
    REF_FORMAT_F8,
    REF_FORMAT_MXFP4, /* groups of 32 columns, as the next two */
    REF_FORMAT_MXFP8,
    REF_FORMAT_INT4,  /* with scales of 16 bits */
    REF_FORMAT_CODES, /* groups of ref_matrix.group columns, perhaps with offsets */
    REF_FORMAT_Q4_K,  /* REF_FORMAT_CODES in groups of 32 with offsets, which w4a8 computes too */
    REF_FORMAT_W8A8   /* one scale per row; rows of x are rounded to int8 too */
};

struct ref_matrix {
    const float *values;  /* [rows,columns] */
    const float *scales;  /* [rows, groups of columns]; NULL: plain values */
    const float *bias;    /* [rows] or NULL */
    const float *offsets; /* laid out as scales, subtracted from value times scale; NULL: none */
    size_t group;         /* columns per group; 0: the format's */
    /* [columns]: the input of each column; NULL: the same. Equal for gate and up */
    const size_t *order;
};

/* Returns the family with which a node configured for `told` computes the format: w4a8 leaves other
 * formats to bf16dp, and bf16dp to portable. */
enum ref_family ref_format_family(enum ref_format format, enum ref_family told);
/* Returns the columns that share a scale; 0: no groups. */
size_t ref_format_group(enum ref_format format);

/* Values of codes. */
float ref_e2m1(unsigned code);
float ref_e4m3(uint8_t code);
float ref_e8m0(uint8_t code);

/* Returns the dot product of x and a row of a matrix with groups, without the bias. For w4a8 see
 * reference_w4a8.h. */
float ref_dot_groups(enum ref_format format, enum ref_family family, const float *values,
                     const float *scales, const float *x, size_t n);
/* Does the same for any codes: scales and offsets (NULL: none) per `group` columns. */
float ref_dot_codes(enum ref_family family, const float *values, const float *scales,
                    const float *offsets, size_t group, const float *x, size_t n);
/* Rounds x to int8; *out_scale is the factor of these integers: NaN if an element is not finite. */
void ref_round_int8(const float *x, size_t n, float *out_q, float *out_scale);
/* Returns the dot product of a w8a8 row and such integers. */
float ref_dot_int8(const float *values, float scale, const float *q, float q_scale, size_t n);

#endif
