/* SPDX-License-Identifier: Apache-2.0 */
/* One matrix product for the demo trainer. Strides per row and column, so a transpose is only a
 * different view. */
#ifndef DEMO_MODEL_GEMM_H
#define DEMO_MODEL_GEMM_H

#include <stdbool.h>
#include <stddef.h>

/* Element (i, j) is data[i * row + j * column]. */
struct view {
    const float *data;
    size_t row;
    size_t column;
};

static inline struct view plain(const float *data, size_t columns)
{
    return (struct view){data, columns, 1};
}

static inline struct view transposed(const float *data, size_t columns)
{
    return (struct view){data, 1, columns};
}

/* out [m,n] = a [m,k] * b [k,n], or out += with accumulate. out's rows are out_row floats apart.
 * One thread; n <= 512. */
void gemm(size_t m, size_t n, size_t k, struct view a, struct view b, float *out, size_t out_row,
          bool accumulate);

#endif
