/* SPDX-License-Identifier: Apache-2.0 */
/* Reads matrices from the containers of checkpoints: values of codes, and a scale for each group of
 * columns of each row. */
#ifndef TESTS_REFERENCE_REF_MATRICES_H
#define TESTS_REFERENCE_REF_MATRICES_H

#include "ref_checkpoint.h"

/* Loads a matrix from its own tensors: <stem>.weight or .weight_packed, scales and bias if there
 * are any. False: there is no such matrix. */
bool ref_matrix_load(const struct ref_checkpoint *checkpoint, const char *stem, size_t columns,
                     struct ref_matrix *out_matrix, size_t *out_rows, enum ref_format *out_format);

/* The rows of one expert's matrix in a tensor of all experts. */
struct ref_slab {
    size_t expert;
    size_t all;   /* rows of an expert in the tensor */
    size_t first; /* the matrix's row 0 among them */
    size_t step;  /* from one row of the matrix to the next */
    size_t rows;
    size_t columns;
    bool transposed; /* [E,columns,all] */
};

/* Loads a matrix from <stem><end>, or from <stem>_blocks with <stem>_scales, and <stem>_bias if
 * there is one. False: there is neither. */
bool ref_matrix_load_stacked(const struct ref_checkpoint *checkpoint, const char *stem,
                             const char *end, const struct ref_slab *slab,
                             struct ref_matrix *out_matrix, enum ref_format *out_format);

void ref_matrix_free(struct ref_matrix *matrix);

#endif
