/* SPDX-License-Identifier: Apache-2.0 */
/* Rows in 8 bits: each step as written, each special case, and every form of the loops against
 * plain formulas that share no code with them. */
#include "moe/quantize.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"

Test(quantize, rounds_half_to_even)
{
    /* amax 127 makes d exactly 1 */
    const float row[] = {127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 126.5f};
    const int8_t want[] = {127, 0, 2, 2, 0, -2, -2, 126};
    int8_t q[8];
    cr_assert(ep_row_quantize_i8(row, EP_DTYPE_F32, NULL, 8, q) == 1.0f);
    cr_assert_eq(memcmp(q, want, 8), 0);
}

Test(quantize, scale_is_the_reciprocal_of_d_not_amax_over_127)
{
    unsigned differ = 0;
    uint64_t state = 1;
    for (int i = 0; i < 1000; i++) {
        float row[3];
        int8_t q[3];
        for (int j = 0; j < 3; j++) {
            row[j] = (float)(ep_splitmix64(&state) >> 40) * 0x1p-20f - 8.0f;
        }
        float amax = fmaxf(fabsf(row[0]), fmaxf(fabsf(row[1]), fabsf(row[2])));
        volatile float d = 127.0f / amax;
        volatile float scale = 1.0f / d;
        cr_assert_eq(ep_f32_bits(ep_row_quantize_i8(row, EP_DTYPE_F32, NULL, 3, q)),
                     ep_f32_bits(scale));
        for (int j = 0; j < 3; j++) {
            volatile float scaled = row[j] * d;
            cr_assert_eq(q[j], (int8_t)nearbyintf(scaled));
        }
        differ += scale != amax / 127.0f;
    }
    cr_assert_gt(differ, 50u, "the two forms must be told apart by this test");
}

Test(quantize, a_zero_row_and_a_tiny_one_give_zeros_with_scale_0)
{
    const float zeros[] = {0.0f, -0.0f, 0.0f};
    const float tiny[] = {0x1p-149f, 0x1p-140f, 0x1p-135f}; /* 127 / 2^-135 overflows */
    int8_t q[3] = {1, 1, 1};
    const int8_t none[3] = {0, 0, 0};
    cr_assert(ep_f32_bits(ep_row_quantize_i8(zeros, EP_DTYPE_F32, NULL, 3, q)) == 0);
    cr_assert_eq(memcmp(q, none, 3), 0);
    memset(q, 1, 3);
    cr_assert(ep_f32_bits(ep_row_quantize_i8(tiny, EP_DTYPE_F32, NULL, 3, q)) == 0);
    cr_assert_eq(memcmp(q, none, 3), 0);
}

Test(quantize, a_row_with_a_non_finite_element_gives_zeros_with_scale_nan)
{
    const float bad[] = {NAN, INFINITY, -INFINITY};
    const int8_t none[3] = {0, 0, 0};
    for (int place = 0; place < 3; place++) {
        for (int i = 0; i < 3; i++) {
            float row[3] = {1, 2, 3};
            int8_t q[3] = {1, 1, 1};
            row[place] = bad[i];
            cr_assert(isnan(ep_row_quantize_i8(row, EP_DTYPE_F32, NULL, 3, q)));
            cr_assert_eq(memcmp(q, none, 3), 0);
        }
    }
}

Test(quantize, smooth_scales_multiply_first_and_may_overflow_only_their_row)
{
    const float row[] = {1.0f, 2.0f, 4.0f};
    const float smooth[] = {127.0f, 1.0f, 0.25f};
    const int8_t want[] = {127, 2, 1};
    const float huge[] = {3e38f, 3e38f, 3e38f};
    int8_t q[3];
    cr_assert(ep_row_quantize_i8(row, EP_DTYPE_F32, smooth, 3, q) == 1.0f);
    cr_assert_eq(memcmp(q, want, 3), 0);
    cr_assert(isnan(ep_row_quantize_i8(row, EP_DTYPE_F32, huge, 3, q)));
}

Test(quantize, never_leaves_minus_127_to_127_and_dequantises_within_half_a_step)
{
    uint64_t state = 7;
    for (int i = 0; i < 20000; i++) {
        float row[5];
        float back[5];
        int8_t q[5];
        int exponent = (int)(ep_splitmix64(&state) % 200) - 100;
        for (int j = 0; j < 5; j++) {
            row[j] = ldexpf((float)(ep_splitmix64(&state) >> 40) * 0x1p-23f - 1.0f, exponent);
        }
        float scale = ep_row_quantize_i8(row, EP_DTYPE_F32, NULL, 5, q);
        ep_row_dequantize_i8(q, scale, 5, back);
        for (int j = 0; j < 5; j++) {
            cr_assert(q[j] >= -127);
            cr_assert(fabsf(back[j] - row[j]) <= scale * 0.50001f);
        }
    }
}

Test(quantize, an_empty_row_is_a_zero_row)
{
    cr_assert(ep_row_quantize_i8(NULL, EP_DTYPE_F32, NULL, 0, NULL) == 0.0f);
}

/* ---- the other formats, from their definitions: C's own _Float16, and values as sums of powers of
 * two ---- */

static float f16_of(float x)
{
    return (float)(_Float16)x;
}

/* The multiple of the step that holds at x, ties to the even one. */
static float bf16_of(float x)
{
    int exponent;
    if (!isfinite(x) || x == 0.0f) {
        return x;
    }
    (void)frexp((double)x, &exponent);
    exponent = exponent - 1 < -126 ? -126 : exponent - 1;
    double rounded = ldexp(rint(ldexp((double)x, 7 - exponent)), exponent - 7);
    return fabs(rounded) >= 0x1p128 ? copysignf(INFINITY, x) : (float)rounded;
}

static float rounded_to(float x, ep_dtype dtype)
{
    return dtype == EP_DTYPE_BF16 ? bf16_of(x) : dtype == EP_DTYPE_F16 ? f16_of(x) : x;
}

static void put(void *row, ep_dtype dtype, size_t i, float x)
{
    uint16_t half;
    _Float16 narrow = (_Float16)x;
    if (dtype == EP_DTYPE_F32) {
        memcpy((char *)row + 4 * i, &x, 4);
        return;
    }
    half = (uint16_t)(ep_f32_bits(bf16_of(x)) >> 16);
    if (dtype == EP_DTYPE_F16) {
        memcpy(&half, &narrow, 2);
    }
    memcpy((char *)row + 2 * i, &half, 2);
}

static float get(const void *row, ep_dtype dtype, size_t i)
{
    uint16_t half;
    _Float16 narrow;
    float x;
    if (dtype == EP_DTYPE_F32) {
        memcpy(&x, (const char *)row + 4 * i, 4);
        return x;
    }
    memcpy(&half, (const char *)row + 2 * i, 2);
    memcpy(&narrow, &half, 2);
    return dtype == EP_DTYPE_F16 ? (float)narrow : ep_f32_from_bits((uint32_t)half << 16);
}

static double f8_value(unsigned code)
{
    static double values[256]; /* the search below asks some hundred times for each number */
    if (values[1] == 0.0) {
        for (unsigned c = 0; c < 256; c++) {
            unsigned exponent = (c >> 3) & 15;
            unsigned mantissa = c & 7;
            double magnitude =
                exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, (int)exponent - 10);
            values[c] = (c & 0x80) != 0 ? -magnitude : magnitude;
        }
    }
    return values[code];
}

/* By search: the nearest of all finite codes, of two equally near ones the even one. */
static unsigned f8_code(double x)
{
    unsigned best = 0;
    double magnitude = fabs(x);
    for (unsigned code = 1; code < 0x7f; code++) {
        double nearer = fabs(f8_value(code) - magnitude) - fabs(f8_value(best) - magnitude);
        best = nearer < 0 || (nearer == 0 && code % 2 == 0) ? code : best;
    }
    return magnitude > 448.0 ? 0x7e | (signbit(x) ? 0x80u : 0) : best | (signbit(x) ? 0x80u : 0);
}

Test(quantize, each_of_the_256_codes_of_e4m3_has_its_value)
{
    for (unsigned code = 0; code < 256; code++) {
        float got = ep_f8e4m3_to_f32((uint8_t)code);
        if ((code & 0x7f) == 0x7f) {
            cr_assert(isnan(got));
            cr_assert_eq(ep_f32_to_f8e4m3(got) & 0x7fu, 0x7fu);
            continue;
        }
        cr_assert((double)got == f8_value(code) && (signbit(got) != 0) == (code > 127));
        cr_assert_eq(ep_f32_to_f8e4m3(got), code, "code %x comes back", code);
    }
    cr_assert(ep_f8e4m3_to_f32(0x7e) == EP_F8E4M3_MAX);
}

Test(quantize, every_bf16_number_and_its_neighbours_find_the_nearest_code_of_e4m3)
{
    for (uint32_t half = 0; half < 65536; half++) {
        for (int beside = -1; beside <= 1; beside++) { /* just off a tie, and on it */
            float x = ep_f32_from_bits((half << 16) + (uint32_t)beside);
            unsigned want = isnan(x) ? 0x7f | (signbit(x) ? 0x80u : 0) : f8_code((double)x);
            cr_assert_eq(ep_f32_to_f8e4m3(x), want, "%a: got %x, nearest is %x", (double)x,
                         ep_f32_to_f8e4m3(x), want);
        }
    }
    cr_assert_eq(ep_f32_to_f8e4m3(-INFINITY), 0xfe);
}

/* ---- rows ---- */

enum { ROW_MAX = 700, BLOCKS_MAX = ROW_MAX / 8 + 1 };

typedef struct {
    int8_t q[ROW_MAX];
    float scales[BLOCKS_MAX]; /* int8 per block: of the wire type */
} coded;

static float draw(uint64_t *state, int kind)
{
    float x = (float)(ep_splitmix64(state) >> 40) * 0x1p-23f - 1.0f;
    uint64_t pick = ep_splitmix64(state) % 64;
    switch (kind) {
    case 0:
        return x;
    case 1: /* outliers */
        return pick == 0 ? 1000.0f * x : x;
    case 2: /* all magnitudes */
        return ldexpf(x, (int)(ep_splitmix64(state) % 270) - 145);
    case 3: /* below the normal numbers */
        return ldexpf(x, -(int)(ep_splitmix64(state) % 10) - 140);
    case 4: /* ties */
        return (float)((int)(ep_splitmix64(state) % 509) - 254) * 0.5f;
    case 5:
        return pick == 0 ? NAN : pick == 1 ? INFINITY : pick == 2 ? -INFINITY : x;
    default:
        return pick < 40 ? (pick & 1 ? -0.0f : 0.0f) : x;
    }
}

static void want_i8(const void *row, ep_dtype dtype, const float *smooth, size_t n, coded *out)
{
    volatile float amax = 0.0f;
    bool bad = false;
    memset(out, 0, sizeof(*out));
    for (size_t i = 0; i < n; i++) {
        volatile float x = get(row, dtype, i);
        x = smooth != NULL ? x * smooth[i] : x;
        bad = bad || !isfinite(x);
        amax = fmaxf(amax, fabsf(x));
    }
    volatile float d = 127.0f / amax;
    volatile float scale = 1.0f / d;
    out->scales[0] = bad ? NAN : amax == 0.0f || !isfinite(d) ? 0.0f : scale;
    for (size_t i = 0; i < n && out->scales[0] > 0.0f; i++) {
        volatile float x = get(row, dtype, i);
        x = smooth != NULL ? x * smooth[i] : x;
        x = x * d;
        out->q[i] = (int8_t)lrintf(x);
    }
}

static void want_blocks(const void *row, ep_dtype dtype, size_t n, coded *out)
{
    memset(out, 0, sizeof(*out));
    for (size_t b = 0; b * 8 < n; b++) {
        volatile float amax = 0.0f;
        bool bad = false;
        size_t end = b * 8 + 8 < n ? b * 8 + 8 : n;
        for (size_t i = b * 8; i < end; i++) {
            bad = bad || !isfinite(get(row, dtype, i));
            amax = fmaxf(amax, fabsf(get(row, dtype, i)));
        }
        volatile float reciprocal = 1.0f / 127.0f;
        volatile float s = amax * reciprocal;
        put(out->scales, dtype, b, bad ? NAN : s);
        for (size_t i = b * 8; i < end && !bad && s > 0.0f; i++) {
            volatile float quotient = get(row, dtype, i) / s;
            float whole = nearbyintf(f16_of(quotient));
            out->q[i] = (int8_t)fminf(fmaxf(whole, -127.0f), 127.0f);
        }
    }
}

static void want_f8(const void *row, ep_dtype dtype, size_t n, coded *out)
{
    memset(out, 0, sizeof(*out));
    for (size_t b = 0; b * 128 < n; b++) {
        float amax = 0.0f;
        bool bad = false;
        size_t end = b * 128 + 128 < n ? b * 128 + 128 : n;
        for (size_t i = b * 128; i < end; i++) {
            bad = bad || !isfinite(get(row, dtype, i));
            amax = fmaxf(amax, fabsf(get(row, dtype, i)));
        }
        volatile float scale = amax / 448.0f;
        out->scales[b] = bad ? NAN : scale;
        for (size_t i = b * 128; i < end && !bad && scale > 0.0f; i++) {
            volatile float quotient = get(row, dtype, i) / scale;
            out->q[i] = (int8_t)(uint8_t)f8_code((double)quotient);
        }
    }
}

static bool same_value(float a, float b)
{
    return (isnan(a) && isnan(b)) || ep_f32_bits(a) == ep_f32_bits(b);
}

static void check_blocks(const ep_quant_kernel *kernel, const void *row, ep_dtype dtype, size_t n)
{
    coded want;
    coded got;
    float back[ROW_MAX];
    memset(&got, 0, sizeof(got));
    want_blocks(row, dtype, n, &want);
    kernel->to_i8_blocks(row, dtype, n, got.q, got.scales);
    cr_assert_eq(memcmp(got.q, want.q, sizeof(want.q)), 0, "%s codes, %zu elements", kernel->name,
                 n);
    for (size_t b = 0; b * 8 < n; b++) {
        cr_assert(same_value(get(got.scales, dtype, b), get(want.scales, dtype, b)), "%s scale %zu",
                  kernel->name, b);
    }
    kernel->from_i8_blocks(got.q, got.scales, dtype, n, back);
    for (size_t i = 0; i < n; i++) {
        volatile float product = (float)want.q[i] * get(want.scales, dtype, i / 8);
        cr_assert(same_value(back[i], rounded_to(product, dtype)), "%s element %zu: %a, not %a",
                  kernel->name, i, (double)back[i], (double)rounded_to(product, dtype));
        cr_assert(!isnan(back[i]) || ep_f32_bits(back[i]) == 0x7fc00000u);
    }
}

static void check_rows(const ep_quant_kernel *kernel, const void *row, ep_dtype dtype,
                       const float *smooth, size_t n)
{
    coded want;
    int8_t q[ROW_MAX];
    float back[ROW_MAX];
    want_i8(row, dtype, smooth, n, &want);
    float amax = ep_f32_from_bits(kernel->amax_bits(row, dtype, smooth, n));
    cr_assert_eq(isfinite(amax), !isnan(want.scales[0]));
    if (want.scales[0] > 0.0f) {
        kernel->to_i8(row, dtype, smooth, n, 127.0f / amax, q);
        cr_assert_eq(memcmp(q, want.q, n), 0, "%s", kernel->name);
    }
    kernel->from_i8(want.q, want.scales[0], n, back);
    for (size_t i = 0; i < n; i++) {
        volatile float product = (float)want.q[i] * want.scales[0];
        cr_assert(same_value(back[i], product));
    }
}

static void check_f8(const ep_quant_kernel *kernel, const coded *want, const void *row,
                     ep_dtype dtype, size_t n)
{
    uint8_t q[ROW_MAX];
    for (size_t b = 0; b * 128 < n; b++) {
        size_t count = n - b * 128 < 128 ? n - b * 128 : 128;
        if (want->scales[b] > 0.0f) {
            const char *block = (const char *)row + b * 128 * ep_dtype_bytes(dtype);
            kernel->to_f8(block, dtype, count, want->scales[b], q);
            cr_assert_eq(memcmp(q, want->q + b * 128, count), 0, "%s", kernel->name);
        }
    }
}

/* The calls themselves, with the kernel they choose. */
static void check_calls(const void *row, ep_dtype dtype, const float *smooth, size_t n)
{
    coded want;
    coded got;
    memset(&got, 0, sizeof(got));
    want_i8(row, dtype, smooth, n, &want);
    cr_assert(same_value(ep_row_quantize_i8(row, dtype, smooth, n, got.q), want.scales[0]));
    cr_assert_eq(memcmp(got.q, want.q, n), 0);
    want_f8(row, dtype, n, &want);
    memset(&got, 0, sizeof(got));
    ep_row_quantize_f8(row, dtype, n, (uint8_t *)got.q, got.scales);
    cr_assert_eq(memcmp(got.q, want.q, n), 0);
    for (size_t b = 0; b * 128 < n; b++) {
        cr_assert(same_value(got.scales[b], want.scales[b]));
    }
}

Test(quantize, every_form_of_the_loops_gives_the_bits_of_the_formulas)
{
    const ep_dtype dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};
    static uint8_t memory[ROW_MAX * 4 + 8];
    static float smooth[ROW_MAX];
    uint64_t state = 3;
    unsigned rounds = 0;
    for (int round = 0; round < 1500; round++) {
        ep_dtype dtype = dtypes[round % 3];
        int kind = round / 3 % 7;
        size_t n =
            round < 900 ? 1 + ep_splitmix64(&state) % 70 : 1 + ep_splitmix64(&state) % ROW_MAX;
        void *row = memory + ep_splitmix64(&state) % 8; /* any alignment */
        for (size_t i = 0; i < n; i++) {
            put(row, dtype, i, draw(&state, kind));
            smooth[i] = draw(&state, round % 5 == 0 ? 2 : 0);
        }
        coded f8;
        want_f8(row, dtype, n, &f8);
        for (size_t k = 0; ep_quant_kernel_at(k) != NULL; k++, rounds++) {
            check_rows(ep_quant_kernel_at(k), row, dtype, NULL, n);
            check_rows(ep_quant_kernel_at(k), row, dtype, smooth, n);
            check_blocks(ep_quant_kernel_at(k), row, dtype, n);
            check_f8(ep_quant_kernel_at(k), &f8, row, dtype, n);
        }
        check_calls(row, dtype, round % 2 ? smooth : NULL, n);
    }
    cr_assert_geq(rounds, 1500u);
}

Test(quantize, a_block_with_a_non_finite_element_spoils_only_itself)
{
    float row[256];
    int8_t q[256];
    float scales[32];
    float back[256];
    for (int i = 0; i < 256; i++) {
        row[i] = (float)(i % 7) - 3.0f;
    }
    row[17] = -INFINITY;
    ep_row_quantize_i8_blocks(row, EP_DTYPE_F32, 256, q, scales);
    ep_row_dequantize_i8_blocks(q, scales, EP_DTYPE_F32, 256, back);
    for (int i = 0; i < 256; i++) {
        cr_assert_eq(isnan(back[i]), i / 8 == 2);
    }
    ep_row_quantize_f8(row, EP_DTYPE_F32, 256, (uint8_t *)q, scales);
    cr_assert(isnan(scales[0]) && isfinite(scales[1]));
}
