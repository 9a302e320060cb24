/* SPDX-License-Identifier: Apache-2.0 */
/* Family `w4a8`: its scalars by hand, and the parts of every kernel this CPU runs against the plain
 * one over all codes, scales and inputs of every kind. */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "kernels/ffn_w4a8.h"
#include "kernels/generic/ffn_generic.h"

static const ep_weight_format formats[] = {EP_WEIGHTS_MXFP4, EP_WEIGHTS_INT4, EP_WEIGHTS_INT4_F16,
                                           EP_WEIGHTS_Q4_K};

/* The next kernel of the family from *index on; NULL past the last. */
static const ep_ffn_kernel *next_kernel(size_t *index)
{
    const ep_ffn_kernel *kernel;
    while ((kernel = ep_ffn_kernel_at((*index)++)) != NULL &&
           kernel->family != EP_FFN_FAMILY_W4A8) {
    }
    return kernel;
}

Test(w4a8, codes_are_integers_and_scales_of_mxfp4_half)
{
    for (uint32_t code = 0; code < 16; code++) {
        cr_assert_eq((float)ep_ffn_w4a8_integer(EP_WEIGHTS_MXFP4, code),
                     2.0f * ep_ffn_weight_e2m1(code));
        cr_assert_eq(ep_ffn_w4a8_integer(EP_WEIGHTS_INT4, code), (int)code - 8);
        cr_assert_eq(ep_ffn_w4a8_integer(EP_WEIGHTS_INT4_F16, code), (int)code - 8);
        cr_assert_eq(ep_ffn_w4a8_integer(EP_WEIGHTS_Q4_K, code), (int)code);
    }
    for (int code = 0; code < 255; code++) {
        cr_assert_eq(ep_ffn_w4a8_e8m0((uint8_t)code), ldexpf(1.0f, code - 128), "code %d", code);
    }
    cr_assert(isnan(ep_ffn_w4a8_e8m0(255)));
}

static float scale_of(const uint32_t words[EP_FFN_W4A8_LINES])
{
    return ep_f32_from_bits(words[EP_FFN_W4A8_SCALE_LINE]);
}

Test(w4a8, groups_round_ties_to_even_and_clamp)
{
    const float x[8] = {127.0f, 0.5f, 1.5f, -2.5f, -127.0f, 126.5f, 0.25f, -0.0f};
    const int8_t want[8] = {127, 0, 2, -2, -127, 126, 0, 0};
    uint32_t words[EP_FFN_W4A8_LINES];
    ep_ffn_w4a8_round(x, 8, words);
    cr_assert_eq(scale_of(words), 1.0f);
    cr_assert_arr_eq(words, want, sizeof(want));
    cr_assert_eq((int32_t)words[EP_FFN_W4A8_START_LINE], -8 * 126);
    cr_assert_eq(words[2] | words[3] | words[4] | words[5] | words[6] | words[7], 0,
                 "nothing behind the last column");

    /* s rounds to the smallest number: the quotient is 190 */
    const float tiny[2] = {190.0f * 0x1p-149f, -1.0f * 0x1p-149f};
    ep_ffn_w4a8_round(tiny, 2, words);
    cr_assert_eq(scale_of(words), 0x1p-149f);
    cr_assert_eq(words[0], 0xff7fu);

    const float less[1] = {63.0f * 0x1p-149f};
    ep_ffn_w4a8_round(less, 1, words);
    cr_assert(scale_of(words) == 0.0f && words[0] == 0 && words[EP_FFN_W4A8_START_LINE] == 0);

    const float infinite[3] = {1.0f, -INFINITY, 2.0f};
    ep_ffn_w4a8_round(infinite, 3, words);
    cr_assert(isnan(scale_of(words)) && words[0] == 0 && words[EP_FFN_W4A8_START_LINE] == 0);
}

/* ---- parts of kernels ---- */

/* Any float: ordinary, huge, denormal, zero, infinite or NaN. */
static float any_float(uint64_t *state, bool wild)
{
    static const float rare[] = {0.0f,    -0.0f,        INFINITY,          -INFINITY, NAN,
                                 FLT_MAX, FLT_TRUE_MIN, 63.0f * 0x1p-149f, 0x1p-126f};
    const uint64_t z = ep_splitmix64(state);
    if (!wild || z % 8 != 0) {
        return (float)(int32_t)z * 0x1p-30f;
    }
    return (z >> 8) % 2 == 0 ? rare[(z >> 16) % EP_ARRAY_COUNT(rare)]
                             : ep_f32_from_bits((uint32_t)(z >> 32));
}

/* Where the scale is the smallest number and quotients go up to 190. */
static float tiny_float(uint64_t *state)
{
    return (float)((int)(ep_splitmix64(state) % 381) - 190) * 0x1p-149f;
}

static void expect_equal_words(const float *got, const float *want, size_t count, const char *what,
                               const ep_ffn_kernel *kernel, uint32_t rows, uint32_t k_count)
{
    for (size_t i = 0; i < count; i++) {
        const bool both_nan = isnan(got[i]) && isnan(want[i]);
        cr_assert(both_nan || ep_f32_bits(got[i]) == ep_f32_bits(want[i]),
                  "%s of %s: rows %u, columns %u, word %zu is %08x, want %08x", what, kernel->name,
                  rows, k_count, i, ep_f32_bits(got[i]), ep_f32_bits(want[i]));
    }
}

/* Lines of rows with any codes; input scales of every kind. */
static void fill_lines(uint64_t *state, uint32_t rows, uint32_t groups, float *a)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
        const uint32_t n = ep_ffn_chunk_rows(&chunks, chunk);
        for (uint32_t g = 0; g < groups; g++, a += EP_FFN_W4A8_LINES * n) {
            for (uint32_t r = 0; r < n; r++) {
                float x[EP_MX_GROUP];
                uint32_t words[EP_FFN_W4A8_LINES];
                for (uint32_t i = 0; i < EP_MX_GROUP; i++) {
                    x[i] = ep_splitmix64(state) % 4 == 0 ? ((i & 1u) != 0 ? -1.0f : 1.0f)
                                                         : any_float(state, false);
                }
                ep_ffn_w4a8_round(x, EP_MX_GROUP, words);
                if (ep_splitmix64(state) % 4 == 0) {
                    words[EP_FFN_W4A8_SCALE_LINE] = ep_f32_bits(fabsf(any_float(state, true)));
                }
                for (uint32_t i = 0; i < EP_FFN_W4A8_LINES; i++) {
                    memcpy(a + i * n + r, &words[i], sizeof(words[i]));
                }
            }
        }
    }
}

/* Lines of a group of one chunk's rows. */
static void fill_equal_lines(float value, uint32_t rows, float *a)
{
    float x[EP_MX_GROUP];
    for (uint32_t i = 0; i < EP_MX_GROUP; i++) {
        x[i] = value;
    }
    for (uint32_t r = 0; r < rows; r++) {
        ep_ffn_w4a8_lay_group(x, EP_MX_GROUP, rows, r, a);
    }
}

/* Any codes and parts. One group in four has scales of every kind, the others ordinary ones; one
 * factor in 32 is of any kind. */
static void fill_panel(uint64_t *state, ep_weight_format format, uint32_t groups, uint8_t *panel)
{
    for (uint32_t g = 0; g < groups; g++, panel += ep_ffn_group_bytes(format)) {
        const bool wild = ep_splitmix64(state) % 4 == 0;
        uint8_t *scales = panel + EP_FFN_W4A8_CODE_BYTES;
        for (uint32_t i = 0; i < EP_FFN_W4A8_CODE_BYTES; i++) {
            panel[i] = (uint8_t)(ep_splitmix64(state) >> 56);
        }
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            const uint64_t z = ep_splitmix64(state);
            const uint8_t edges[] = {0, 1, 2, 253, 254, 255};
            if (format == EP_WEIGHTS_Q4_K) {
                scales[o] = (uint8_t)(z >> 8);
                scales[EP_FFN_PANEL + o] = (uint8_t)(z >> 16);
            } else if (format == EP_WEIGHTS_MXFP4) {
                scales[o] =
                    wild && z % 8 == 0 ? edges[(z >> 8) % 6] : (uint8_t)(2 + (z >> 8) % 253);
            } else if (format == EP_WEIGHTS_INT4_F16 && wild) {
                memcpy(scales + 2 * o, &z, 2); /* one in 16 is a denormal, one infinite or NaN */
            } else {
                const float scale = any_float(state, wild);
                const bool is_f16 = format == EP_WEIGHTS_INT4_F16;
                const uint16_t half = is_f16 ? ep_f32_to_f16(scale) : ep_f32_to_bf16(scale);
                memcpy(scales + 2 * o, &half, 2);
            }
        }
    }
    const size_t blocks =
        (groups + EP_SCALE_BLOCK / EP_MX_GROUP - 1) / (EP_SCALE_BLOCK / EP_MX_GROUP);
    for (size_t i = 0; i < blocks * ep_ffn_block_factors(format); i++) {
        ((float *)(void *)panel)[i] = any_float(state, ep_splitmix64(state) % 32 == 0);
    }
}

/* code: 0..15, of all weights, and all inputs have one magnitude and sign; else any. */
static void expect_panels(uint64_t seed, ep_weight_format format, uint32_t rows, uint32_t k_count,
                          int code)
{
    const uint32_t groups = ep_ffn_w4a8_groups(k_count);
    const size_t lines = ep_ffn_lines(EP_FFN_FAMILY_W4A8, k_count);
    const size_t panel_bytes = ep_ffn_panel_bytes(EP_FFN_FAMILY_W4A8, format, k_count);
    float *a = aligned_alloc(64, ep_align_up(lines * rows * sizeof(*a), 64));
    uint8_t *panel = aligned_alloc(64, panel_bytes);
    float *want = aligned_alloc(64, (size_t)rows * EP_FFN_PANEL * sizeof(*want));
    float *got = aligned_alloc(64, (size_t)rows * EP_FFN_PANEL * sizeof(*got));
    const ep_ffn_kernel *kernel;
    fill_lines(&seed, rows, groups, a);
    fill_panel(&seed, format, groups, panel);
    for (uint32_t g = 0; code >= 0 && g < groups; g++) {
        memset(panel + g * ep_ffn_group_bytes(format), 17 * code, EP_FFN_W4A8_CODE_BYTES);
        fill_equal_lines(g % 2 == 0 ? 1.0f : -1.0f, rows, a + (size_t)g * EP_FFN_W4A8_LINES * rows);
    }
    ep_ffn_kernel_w4a8_generic.group_panel(format, a, rows, panel, k_count, NULL, want);
    for (size_t n = 0; (kernel = next_kernel(&n)) != NULL;) {
        for (int has_next = 0; has_next < 2; has_next++) {
            memset(got, 0xff, (size_t)rows * EP_FFN_PANEL * sizeof(*got));
            kernel->group_panel(format, a, rows, panel, k_count, has_next ? panel : NULL, got);
            expect_equal_words(got, want, (size_t)rows * EP_FFN_PANEL,
                               ep_weight_format_name(format), kernel, rows, k_count);
        }
    }
    free(a);
    free(panel);
    free(want);
    free(got);
}

Test(w4a8, panels_equal_the_plain_loops_for_all_codes_and_scales)
{
    const uint32_t columns[] = {1, 31, 32, 33, 64, 200, 449};
    const uint32_t more_rows[] = {29, 64, 100, 255, 256};
    uint64_t seed = 1;
    for (size_t f = 0; f < EP_ARRAY_COUNT(formats); f++) {
        for (size_t k = 0; k < EP_ARRAY_COUNT(columns); k++) {
            for (uint32_t rows = 1; rows <= 19; rows++) {
                expect_panels(seed++, formats[f], rows, columns[k], -1);
            }
        }
        for (size_t r = 0; r < EP_ARRAY_COUNT(more_rows); r++) {
            expect_panels(seed++, formats[f], more_rows[r], 97, -1);
        }
        expect_panels(seed++, formats[f], 7, 4231, -1); /* beyond two blocks */
        expect_panels(seed++, formats[f], 13, 2080, -1);
    }
}

/* The greatest sums, of either sign: kernels that sum in 16 bits have room for them. */
Test(w4a8, sums_of_equal_codes_and_inputs_are_exact)
{
    uint64_t seed = 1000;
    for (size_t f = 0; f < EP_ARRAY_COUNT(formats); f++) {
        for (int code = 0; code < 16; code++) {
            for (uint32_t rows = 1; rows <= EP_FFN_CHUNK_ROWS; rows++) {
                expect_panels(seed++, formats[f], rows, 128, code);
            }
        }
    }
}

enum { ROWS_MAX = EP_FFN_CHUNK_ROWS, HIDDEN_MAX = 161 };

/* One chunk of inputs of a type; behind each row lies what is none of it. */
static void expect_rows(uint64_t seed, ep_dtype dtype, bool weighted, uint32_t rows,
                        uint32_t hidden)
{
    static _Alignas(64) uint8_t x[ROWS_MAX][HIDDEN_MAX * 4 + 64];
    static float got[ROWS_MAX * (HIDDEN_MAX / 32 + 1) * EP_FFN_W4A8_LINES + 16];
    static float want[ROWS_MAX * (HIDDEN_MAX / 32 + 1) * EP_FFN_W4A8_LINES + 16];
    static const float block_scales[HIDDEN_MAX / EP_FFN_F8_BLOCK + 1] = {0.5f, 3.0f};
    const size_t words = (size_t)rows * ep_ffn_lines(EP_FFN_FAMILY_W4A8, hidden);
    const ep_ffn_kernel *kernel;
    ep_ffn_row list[ROWS_MAX];
    const ep_ffn_batch batch = {
        .rows = list, .rows_count = rows, .x_dtype = dtype, .weight_on_input = weighted};
    for (uint32_t r = 0; r < rows; r++) {
        list[r] = (ep_ffn_row){.x = x[r],
                               .x_scale = 0.01f * (float)(r + 1),
                               .x_scales = block_scales,
                               .input_weight = 0.3f};
        for (uint32_t i = 0; i < HIDDEN_MAX; i++) {
            const float v = any_float(&seed, i / 32 % 2 == 0);
            const uint16_t half = dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(v) : ep_f32_to_f16(v);
            const uint8_t code = (uint8_t)ep_splitmix64(&seed);
            const void *from = dtype == EP_DTYPE_F32        ? (const void *)&v
                               : ep_dtype_bytes(dtype) == 2 ? (const void *)&half
                                                            : &code;
            memcpy(x[r] + i * ep_dtype_bytes(dtype), from, ep_dtype_bytes(dtype));
        }
    }
    ep_ffn_kernel_w4a8_generic.pack_rows(&batch, 0, rows, hidden, want);
    for (size_t n = 0; (kernel = next_kernel(&n)) != NULL;) {
        memset(got, 0x55, sizeof(got));
        kernel->pack_rows(&batch, 0, rows, hidden, got);
        expect_equal_words(got, want, words, ep_dtype_name(dtype), kernel, rows, hidden);
        cr_assert_eq(ep_f32_bits(got[words]), 0x55555555u, "%s wrote behind the last line",
                     kernel->name);
    }
}

Test(w4a8, rows_of_every_type_are_rounded_as_by_the_plain_loops)
{
    const ep_dtype dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_I8,
                               EP_DTYPE_F8E4M3};
    const uint32_t hiddens[] = {1, 15, 16, 17, 31, 32, 33, 48, 96, HIDDEN_MAX};
    uint64_t seed = 77;
    for (size_t d = 0; d < EP_ARRAY_COUNT(dtypes); d++) {
        for (size_t h = 0; h < EP_ARRAY_COUNT(hiddens); h++) {
            for (uint32_t rows = 1; rows <= ROWS_MAX; rows++) {
                expect_rows(seed++, dtypes[d], rows % 2 == 0, rows, hiddens[h]);
            }
        }
    }
}

Test(w4a8, inner_rows_are_rounded_as_by_the_plain_loops)
{
    static _Alignas(64) float h[ROWS_MAX][EP_FFN_PANEL];
    float got[ROWS_MAX * 2 * EP_FFN_W4A8_LINES + 16];
    float want[ROWS_MAX * 2 * EP_FFN_W4A8_LINES + 16];
    uint64_t seed = 5;
    const ep_ffn_kernel *kernel;
    for (uint32_t rows = 1; rows <= ROWS_MAX; rows++) {
        for (uint32_t count = 1; count <= EP_FFN_PANEL; count++) {
            const size_t words = (size_t)rows * ep_ffn_lines(EP_FFN_FAMILY_W4A8, count);
            for (size_t i = 0; i < (size_t)rows * EP_FFN_PANEL; i++) {
                const float x =
                    rows == 3 ? tiny_float(&seed) : any_float(&seed, i % 3 == 0 && rows % 2 == 0);
                h[i / EP_FFN_PANEL][i % EP_FFN_PANEL] = i % EP_FFN_PANEL < count ? x : NAN;
            }
            ep_ffn_kernel_w4a8_generic.lay(h[0], rows, count, want);
            for (size_t n = 0; (kernel = next_kernel(&n)) != NULL;) {
                memset(got, 0x55, sizeof(got));
                kernel->lay(h[0], rows, count, got);
                expect_equal_words(got, want, words, "inner rows", kernel, rows, count);
                cr_assert_eq(ep_f32_bits(got[words]), 0x55555555u, "%s wrote behind the last line",
                             kernel->name);
            }
        }
    }
}
