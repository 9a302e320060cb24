/* SPDX-License-Identifier: Apache-2.0 */
/* The two loops of w8a8 of every kernel this CPU runs: rows to int8 against the rule of
 * expert_ffn.h, value by value, and sums at the ends of what 32 bits hold. Whole passes are in
 * test_ffn_pass.c. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "kernels/ffn_element.h"
#include "kernels/ffn_kernel.h"
#include "kernels/ffn_pass.h"

enum { ROWS = 13, K_MAX = 200, EXTREME_ROWS_MAX = 33, GUARD = 0xa5, GUARD_BYTES = 64 };

typedef struct {
    float values[ROWS][K_MAX];
    uint16_t halves[ROWS][K_MAX];
    ep_ffn_row rows[ROWS];
    ep_ffn_batch batch;
} int8_case;

static float greatest_of(const float *x, uint32_t k_count)
{
    uint32_t greatest = 0;
    for (uint32_t k = 0; k < k_count; k++) {
        const uint32_t m = ep_f32_bits(x[k]) & 0x7fffffffu;
        greatest = m > greatest ? m : greatest;
    }
    return ep_f32_from_bits(greatest);
}

/* Values of any size beside a greatest one: where a quotient by its scale lies between two
 * integers, and the floats next to that. */
static void fill_row(uint64_t *state, float *x, uint32_t k_count)
{
    const float greatest = ldexpf(1.0f + (float)(ep_splitmix64(state) >> 40) * 0x1p-24f,
                                  (int)(ep_splitmix64(state) % 277) - 149);
    const float scale = ep_ffn_int8_scale(ep_f32_bits(greatest));
    for (uint32_t k = 0; k < k_count; k++) {
        const uint64_t z = ep_splitmix64(state);
        const float tie = ((float)(z % 127) + 0.5f) * scale;
        const uint32_t bits = ep_f32_bits(tie) + (uint32_t)((z >> 8) % 7) - 3u;
        const bool usable = tie > 0.0f && ep_f32_from_bits(bits) <= greatest;
        x[k] = usable ? ep_f32_from_bits(bits) : greatest * 0.3f;
        x[k] = (z >> 20) % 2 == 0 ? x[k] : -x[k];
    }
    x[ep_splitmix64(state) % k_count] = greatest;
}

/* Row 3 is zero, row 5 has a NaN, row 6 an infinity, row 8 is of the least denormals. */
static void fill_case(int8_case *c, uint64_t *state, uint32_t k_count, ep_dtype dtype)
{
    for (uint32_t r = 0; r < ROWS; r++) {
        float *x = c->values[r];
        fill_row(state, x, k_count);
        for (uint32_t k = 0; r == 3 && k < k_count; k++) {
            x[k] = k % 2 == 0 ? 0.0f : -0.0f;
        }
        for (uint32_t k = 0; r == 8 && k < k_count; k++) {
            x[k] = ep_f32_from_bits((uint32_t)(ep_splitmix64(state) % 192) |
                                    (k % 2 == 0 ? 0 : 0x80000000u));
        }
        x[k_count / 2] = r == 5 ? NAN : r == 6 ? -INFINITY : x[k_count / 2];
        for (uint32_t k = 0; k < k_count; k++) {
            c->halves[r][k] = (uint16_t)(ep_f32_bits(x[k]) >> 16);
            x[k] = dtype == EP_DTYPE_BF16 ? ep_bf16_to_f32(c->halves[r][k]) : x[k];
        }
        c->rows[r] = (ep_ffn_row){.x = dtype == EP_DTYPE_BF16 ? (const void *)c->halves[r] : x};
    }
    c->batch = (ep_ffn_batch){.rows = c->rows, .rows_count = ROWS, .x_dtype = dtype};
}

/* Codes of rows first.. of the case; *out_zero: how this kernel stores 0. */
static void expect_codes(const ep_ffn_kernel *kernel, const int8_case *c, uint32_t first,
                         uint32_t rows, uint32_t k_count)
{
    const size_t bytes = 4 * (size_t)ep_ffn_quads(k_count) * rows;
    uint8_t *memory = malloc(bytes + 2 * GUARD_BYTES);
    uint8_t *a = memory + GUARD_BYTES;
    float scales[EP_FFN_CHUNK_ROWS];
    const float zero = 0.0f;
    const ep_ffn_row zero_row = {.x = &zero};
    const ep_ffn_batch zero_batch = {.rows = &zero_row, .rows_count = 1, .x_dtype = EP_DTYPE_F32};
    kernel->int8_rows(&zero_batch, 0, 1, 1, (int8_t *)a, scales);
    const uint8_t plus = a[0]; /* what this kernel adds to codes */
    memset(memory, GUARD, bytes + 2 * GUARD_BYTES);
    kernel->int8_rows(&c->batch, first, rows, k_count, (int8_t *)a, scales);
    for (uint32_t r = 0; r < rows; r++) {
        const float *x = c->values[first + r];
        const float scale = ep_ffn_int8_scale(ep_f32_bits(greatest_of(x, k_count)));
        cr_assert(ep_f32_bits(scale) == ep_f32_bits(scales[r]) ||
                      (scale != scale && scales[r] != scales[r]),
                  "%s scale of row %u", kernel->name, first + r);
        for (uint32_t k = 0; k < 4 * ep_ffn_quads(k_count); k++) {
            const int8_t want = k < k_count ? ep_ffn_int8_round(x[k], scale) : 0;
            const int8_t got = (int8_t)(a[((size_t)(k / 4) * rows + r) * 4 + k % 4] - plus);
            cr_assert_eq(got, want, "%s row %u k %u of %u: %a / %a is %d, not %d", kernel->name,
                         first + r, k, k_count, (double)x[k], (double)scale, want, got);
        }
    }
    for (size_t i = 0; i < GUARD_BYTES; i++) {
        cr_assert(memory[i] == GUARD && a[bytes + i] == GUARD, "%s wrote beside its rows",
                  kernel->name);
    }
    free(memory);
}

Test(ffn_int8, rows_are_rounded_as_the_rule_says)
{
    static int8_case c;
    const uint32_t k_counts[] = {1, 3, 15, 16, 17, 32, 63, 64, 65, 127, 130, K_MAX};
    const ep_ffn_kernel *kernel;
    uint64_t state = 5;
    for (uint32_t round = 0; round < 40; round++) {
        const uint32_t k_count = k_counts[round % (sizeof(k_counts) / sizeof(k_counts[0]))];
        fill_case(&c, &state, k_count, round % 3 == 0 ? EP_DTYPE_BF16 : EP_DTYPE_F32);
        for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
            for (uint32_t rows = 1; kernel->int8_rows != NULL && rows <= EP_FFN_CHUNK_ROWS;
                 rows++) {
                expect_codes(kernel, &c, (round + rows) % (ROWS + 1 - rows), rows, k_count);
            }
        }
    }
}

static void fill_with(float *to, size_t count, float value)
{
    for (size_t i = 0; i < count; i++) {
        to[i] = value;
    }
}

/* Rows of nothing but 127 or -127 times the panel's columns of nothing but -128. */
static void expect_extreme_sums(const ep_ffn_kernel *kernel, const ep_ffn_batch *batch,
                                uint32_t k_count, const uint8_t *panel, float want)
{
    const uint32_t rows = batch->rows_count;
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    int8_t *a = malloc(4 * (size_t)ep_ffn_quads(k_count) * rows);
    float *c = aligned_alloc(64, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    float ones[EXTREME_ROWS_MAX];
    float scales[EXTREME_ROWS_MAX];
    fill_with(ones, rows, 1.0f);
    for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
        const uint32_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
        kernel->int8_rows(batch, first_row, ep_ffn_chunk_rows(&chunks, chunk), k_count,
                          a + 4 * (size_t)ep_ffn_quads(k_count) * first_row, scales + first_row);
    }
    kernel->int8_panel(a, rows, panel, k_count, ones, NULL, c);
    for (uint32_t i = 0; i < rows * EP_FFN_PANEL; i++) {
        if (c[i] != want) {
            cr_assert_fail("%s row %u of %u output %u: %a", kernel->name, i / EP_FFN_PANEL, rows,
                           i % EP_FFN_PANEL, (double)c[i]);
        }
    }
    free(a);
    free(c);
}

/* 127 * 128 * columns is just below 2^31: with one chunk, with blocks for few rows and for many. */
Test(ffn_int8, sums_reach_the_ends_of_32_bits)
{
    const uint32_t k_count = EP_W8A8_COLUMNS_MAX;
    const uint32_t rows_counts[] = {2, 7, EXTREME_ROWS_MAX};
    /* where a processor is emulated */
    const uint32_t sizes = getenv("EP_TEST_SHORT") != NULL ? 2 : 3;
    float *x = malloc(k_count * sizeof(*x));
    float *scales = malloc(k_count * sizeof(*scales));
    uint8_t *codes = malloc((size_t)k_count * EP_FFN_HALF_PANEL);
    fill_with(scales, k_count, 1.0f);
    memset(codes, 0x80, (size_t)k_count * EP_FFN_HALF_PANEL);
    const ep_ffn_source source = {.hidden = k_count,
                                  .inner = EP_FFN_HALF_PANEL,
                                  .activation = EP_ACT_SILU,
                                  .format = EP_WEIGHTS_W8A8,
                                  .gate = codes,
                                  .up = codes,
                                  .down = codes,
                                  .gate_scales = scales,
                                  .up_scales = scales,
                                  .down_scales = scales};
    void *memory = aligned_alloc(
        EP_FFN_ALIGN,
        ep_align_up(ep_ffn_packed_bytes(&source, EP_FFN_FAMILY_PORTABLE), EP_FFN_ALIGN));
    ep_ffn_packed packed;
    ep_ffn_pack(&source, EP_FFN_FAMILY_PORTABLE, memory, &packed);
    ep_ffn_row rows[EXTREME_ROWS_MAX];
    for (uint32_t r = 0; r < EXTREME_ROWS_MAX; r++) {
        rows[r] = (ep_ffn_row){.x = x};
    }
    for (int sign = -1; sign <= 1; sign += 2) {
        const ep_ffn_kernel *kernel;
        fill_with(x, k_count, (float)sign);
        for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
            for (uint32_t i = 0; kernel->int8_rows != NULL && i < sizes; i++) {
                const ep_ffn_batch batch = {
                    .rows = rows, .rows_count = rows_counts[i], .x_dtype = EP_DTYPE_F32};
                expect_extreme_sums(kernel, &batch, k_count, ep_ffn_gate_up_panel(&packed, 0),
                                    (float)(-sign * 127 * 128) * (float)k_count);
            }
        }
    }
    free(memory);
    free(x);
    free(scales);
    free(codes);
}
