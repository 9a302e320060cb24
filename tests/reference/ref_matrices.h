/* SPDX-License-Identifier: Apache-2.0 */
/* Matrices out of the containers of checkpoints: values of codes, and a scale for each group of
 * columns of each row. */
#ifndef TESTS_REFERENCE_REF_MATRICES_H
#define TESTS_REFERENCE_REF_MATRICES_H

#include "ref_checkpoint.h"

/* A matrix of its own tensors: <stem>.weight or .weight_packed, scales and bias as there are.
 * False: there is none. */
bool ref_matrix_load(const struct ref_checkpoint *checkpoint, const char *stem, size_t columns,
                     struct ref_matrix *out_matrix, size_t *out_rows, enum ref_format *out_format);

/* Where the rows of one expert's matrix lie in a tensor of all experts. */
struct ref_slab {
    size_t expert;
    size_t all;   /* rows of an expert in the tensor */
    size_t first; /* row 0 of the matrix among them */
    size_t step;  /* to the next one */
    size_t rows;
    size_t columns;
    bool transposed; /* [E,columns,all] */
};

/* A matrix out of <stem><end>, or of <stem>_blocks with <stem>_scales; <stem>_bias when it is
 * there. False: neither. */
bool ref_matrix_load_stacked(const struct ref_checkpoint *checkpoint, const char *stem,
                             const char *end, const struct ref_slab *slab,
                             struct ref_matrix *out_matrix, enum ref_format *out_format);

void ref_matrix_free(struct ref_matrix *matrix);

#endif
