/* SPDX-License-Identifier: Apache-2.0 */
/* Blocked matrix product: 8 x 32 tiles of the result stay in registers, both inputs are packed to
 * run straight through. */
#include "gemm.h"

#include <assert.h>
#include <string.h>

enum { TILE_ROWS = 8, TILE_COLUMNS = 32, LANES = 16, DEPTH = 256, COLUMNS_MAX = 512 };

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

static lanes packed_b[COLUMNS_MAX / TILE_COLUMNS][DEPTH][TILE_COLUMNS / LANES];

/* The loops below read along whichever direction is contiguous; whole tiles have constant bounds,
 * so they vectorise. */
static void pack_b(size_t n, size_t depth, struct view b)
{
    for (size_t panel = 0; panel * TILE_COLUMNS < n; panel++) {
        size_t first = panel * TILE_COLUMNS;
        size_t width = n - first < TILE_COLUMNS ? n - first : TILE_COLUMNS;
        const float *in = b.data + first * b.column;
        float *out = (float *)packed_b[panel];
        if (width == TILE_COLUMNS && b.column == 1) {
            for (size_t i = 0; i < depth; i++) {
                memcpy(out + i * TILE_COLUMNS, in + i * b.row, TILE_COLUMNS * sizeof(*out));
            }
            continue;
        }
        if (width < TILE_COLUMNS) {
            memset(out, 0, depth * TILE_COLUMNS * sizeof(*out));
        }
        for (size_t i = 0; i < depth; i++) {
            for (size_t j = 0; j < width; j++) {
                out[i * TILE_COLUMNS + j] = in[i * b.row + j * b.column];
            }
        }
    }
}

static void pack_a(size_t rows, size_t depth, struct view a, float *out)
{
    if (rows == TILE_ROWS && a.row == 1) {
        for (size_t i = 0; i < depth; i++) {
            memcpy(out + i * TILE_ROWS, a.data + i * a.column, TILE_ROWS * sizeof(*out));
        }
        return;
    }
    if (rows < TILE_ROWS) {
        memset(out, 0, depth * TILE_ROWS * sizeof(*out));
    }
    for (size_t r = 0; r < rows; r++) {
        const float *in = a.data + r * a.row;
        for (size_t i = 0; i < depth; i++) {
            out[i * TILE_ROWS + r] = in[i * a.column];
        }
    }
}

static void tile(size_t depth, const float *a, const lanes (*b)[TILE_COLUMNS / LANES],
                 lanes acc[TILE_ROWS][2])
{
    lanes sum[TILE_ROWS][2] = {0};
    for (size_t i = 0; i < depth; i++, a += TILE_ROWS) {
        lanes b0 = b[i][0];
        lanes b1 = b[i][1];
#pragma GCC unroll 8
        for (size_t r = 0; r < TILE_ROWS; r++) {
            sum[r][0] += a[r] * b0;
            sum[r][1] += a[r] * b1;
        }
    }
    memcpy(acc, sum, sizeof(sum));
}

static void store(size_t rows, size_t width, const float *acc, float *out, size_t out_row,
                  bool accumulate)
{
    if (rows == TILE_ROWS && width == TILE_COLUMNS) {
        for (size_t r = 0; r < TILE_ROWS; r++, acc += TILE_COLUMNS, out += out_row) {
            for (size_t j = 0; j < TILE_COLUMNS; j++) {
                out[j] = acc[j] + (accumulate ? out[j] : 0.0f);
            }
        }
        return;
    }
    for (size_t r = 0; r < rows; r++, acc += TILE_COLUMNS, out += out_row) {
        for (size_t j = 0; j < width; j++) {
            out[j] = acc[j] + (accumulate ? out[j] : 0.0f);
        }
    }
}

void gemm(size_t m, size_t n, size_t k, struct view a, struct view b, float *out, size_t out_row,
          bool accumulate)
{
    static float packed_a[DEPTH * TILE_ROWS];
    lanes acc[TILE_ROWS][2];

    assert(n <= COLUMNS_MAX && k > 0);
    for (size_t done = 0; done < k; done += DEPTH) {
        size_t depth = k - done < DEPTH ? k - done : DEPTH;
        pack_b(n, depth, (struct view){b.data + done * b.row, b.row, b.column});
        for (size_t i = 0; i < m; i += TILE_ROWS) {
            size_t rows = m - i < TILE_ROWS ? m - i : TILE_ROWS;
            pack_a(rows, depth,
                   (struct view){a.data + i * a.row + done * a.column, a.row, a.column}, packed_a);
            for (size_t j = 0; j < n; j += TILE_COLUMNS) {
                size_t width = n - j < TILE_COLUMNS ? n - j : TILE_COLUMNS;
                tile(depth, packed_a, packed_b[j / TILE_COLUMNS], acc);
                store(rows, width, (const float *)acc, out + i * out_row + j, out_row,
                      accumulate || done > 0);
            }
        }
    }
}
