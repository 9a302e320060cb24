/* SPDX-License-Identifier: Apache-2.0 */
/* Family `bf16dp`: its scalars against cases worked out by hand. All families of pairs: their
 * kernels against their scalars where numbers are hard (NaN, infinities, denormals, results around
 * 2^-126). These and `portable`: an error bound against double precision. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/random.h"
#include "kernels/bf16odd.h"
#include "kernels/ffn_kernel.h"

static uint32_t pair(float even, float odd)
{
    return (uint32_t)ep_f32_to_bf16(even) | (uint32_t)ep_f32_to_bf16(odd) << 16;
}

Test(bf16dp, the_odd_member_comes_first_and_each_step_rounds)
{
    /* 2^24 + 1 rounds to 2^24, twice; the other order, or one rounding for both, gives something
     * else. */
    cr_assert_eq(ep_bf16dp_step(0x1p24f, pair(1.0f, 1.0f), pair(1.0f, 1.0f)), 0x1p24f);
    cr_assert_eq(ep_bf16dp_step(0x1p24f, pair(1.0f, -0x1p24f), pair(1.0f, 1.0f)), 1.0f);
    cr_assert_eq(ep_bf16dp_step(0x1p24f, pair(-0x1p24f, 1.0f), pair(1.0f, 1.0f)), 0.0f);
    cr_assert_eq(ep_bf16dp_step(1.0f, pair(2.0f, 3.0f), pair(5.0f, 7.0f)), 32.0f);
}

Test(bf16dp, denormals_are_zeros_of_their_sign)
{
    const float denormal = 0x1p-127f;
    cr_assert_eq(ep_bf16dp_step(0.0f, pair(denormal, 0.0f), pair(0x1p100f, 0.0f)), 0.0f);
    cr_assert_eq(ep_bf16dp_step(0.0f, pair(0x1p100f, 0.0f), pair(denormal, 0.0f)), 0.0f);
    cr_assert_eq(ep_bf16dp_step(denormal, pair(0.0f, 0.0f), pair(0.0f, 0.0f)), 0.0f);
    cr_assert_eq(ep_bf16dp_step(0.0f, pair(0x1p-63f, 0.0f), pair(0x1p-63f, 0.0f)), 0x1p-126f);
    cr_assert_eq(ep_bf16dp_step(0.0f, pair(0x1p-64f, 0.0f), pair(0x1p-63f, 0.0f)), 0.0f);
    cr_assert(signbit(ep_bf16dp_fma(-0x1p-64f, 0x1p-63f, -0.0f)));
    cr_assert_eq(ep_bf16_to_f32(ep_bf16dp_narrow(0x1.fffffcp-127f)), 0.0f);
    cr_assert_eq(ep_bf16_to_f32(ep_bf16dp_narrow(0x1.01p0f)), 1.0f);
    cr_assert_eq(ep_bf16_to_f32(ep_bf16dp_narrow(0x1.03p0f)), 0x1.04p0f);
}

/* Just under 2^-126: what rounds up to it with 24 bits stays, what lies lower goes, though
 * denormals would hold it. */
Test(bf16dp, tiny_is_decided_after_rounding_without_a_smallest_exponent)
{
    /* 2^-126 - 2^-151 is a tie that goes up to 2^-126; 2^-126 - 2^-150 is representable with 24
     * bits. */
    cr_assert_eq(ep_bf16dp_fma(-0x1p-75f, 0x1p-76f, 0x1p-126f), 0x1p-126f);
    cr_assert_eq(ep_bf16dp_fma(-0x1p-75f, 0x1p-75f, 0x1p-126f), 0.0f);
    cr_assert_eq(ep_bf16dp_fma(-0x1.02p-75f, 0x1p-76f, 0x1p-126f), 0.0f);
}

/* bf16 values that make steps hard: of like size, of sizes whose products meet 2^-126, and any bits
 * at all. */
static uint16_t hard_value(uint64_t *state, uint32_t kind)
{
    uint64_t z = ep_splitmix64(state);
    uint32_t exponent = kind == 0   ? 120 + (uint32_t)(z >> 40) % 16
                        : kind == 1 ? 44 + (uint32_t)(z >> 40) % 24
                        : kind == 2 ? (uint32_t)(z >> 40) % 4
                                    : (uint32_t)(z >> 40) % 256;
    return (uint16_t)((z & 0x807fu) | exponent << 7);
}

static uint32_t hard_pair(uint64_t *state, uint32_t kind)
{
    uint32_t low = hard_value(state, kind);
    return low | (uint32_t)hard_value(state, kind) << 16;
}

/* All NaN count as equal: which one an adder passes on is not part of the family. */
static bool is_same(float a, float b)
{
    return ep_f32_bits(a) == ep_f32_bits(b) || (a != a && b != b);
}

static float step(const ep_ffn_kernel *kernel, float acc, uint32_t w, uint32_t x)
{
    return (kernel->family == EP_FFN_FAMILY_BF16DP ? ep_bf16dp_step : ep_bf16odd_step)(acc, w, x);
}

/* How the calling thread rounds and what it flushes, without the flags of what happened: kernels
 * may change it for themselves alone. */
static unsigned float_control(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr() & 0xffc0u;
#else
    return 0;
#endif
}

enum { LINES = 9, ROWS = 7 };

static void expect_panel(const ep_ffn_kernel *kernel, uint64_t seed, uint32_t lines, uint32_t rows,
                         uint32_t kind)
{
    static _Alignas(64) uint32_t panel[LINES * EP_FFN_PANEL];
    static _Alignas(64) float c[ROWS * EP_FFN_PANEL];
    float a[LINES * ROWS];
    uint64_t state = seed;
    for (uint32_t i = 0; i < lines * EP_FFN_PANEL; i++) {
        panel[i] = hard_pair(&state, kind == 4 ? 2 : kind);
    }
    for (uint32_t i = 0; i < lines * rows; i++) {
        a[i] = ep_f32_from_bits(hard_pair(&state, kind == 4 ? 0 : kind));
    }
    const unsigned control = float_control();
    kernel->panel(EP_DTYPE_BF16, a, rows, (const uint8_t *)panel, lines, NULL, c);
    cr_assert_eq(float_control(), control, "%s", kernel->name);

    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    uint32_t row = 0;
    for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
        const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
        const float *x = a + ep_ffn_chunk_first_row(&chunks, chunk) * lines;
        for (uint32_t r = 0; r < chunk_rows; r++, row++) {
            for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                float want = 0.0f;
                for (uint32_t line = 0; line < lines; line++) {
                    want = step(kernel, want, panel[line * EP_FFN_PANEL + o],
                                ep_f32_bits(x[line * chunk_rows + r]));
                }
                float got = c[row * EP_FFN_PANEL + o];
                cr_assert(
                    is_same(got, want),
                    "%s: kind %u seed %llu lines %u row %u output %u: %a (%08x), want %a (%08x)",
                    kernel->name, kind, (unsigned long long)seed, lines, row, o, (double)got,
                    ep_f32_bits(got), (double)want, ep_f32_bits(want));
            }
        }
    }
}

Test(bf16dp, kernels_equal_the_scalars_where_numbers_are_hard)
{
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        for (uint64_t seed = 0; ep_ffn_family_has_pairs(kernel->family) && seed < 1500; seed++) {
            expect_panel(kernel, seed, 1 + seed % LINES, 1 + seed % ROWS, seed % 5);
        }
    }
}

/* Codes and scales of zero: two groups, and all sizes of a chunk. */
Test(bf16dp, groups_leave_the_floating_point_control_as_it_was)
{
    enum { K = EP_F8_BLOCK + 3 };
    const size_t bytes = 2 * ep_ffn_group_bytes(EP_WEIGHTS_F8_CHANNEL);
    uint8_t *panel = aligned_alloc(64, ep_align_up(bytes, 64));
    static _Alignas(64) float c[ROWS * EP_FFN_PANEL];
    static float a[K * ROWS];
    const ep_ffn_kernel *kernel;
    memset(panel, 0, bytes);
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        for (uint32_t rows = 1;
             ep_ffn_family_has(kernel->family, EP_WEIGHTS_F8_CHANNEL) && rows <= ROWS; rows++) {
            const unsigned control = float_control();
            kernel->group_panel(EP_WEIGHTS_F8_CHANNEL, a, rows, panel, K, NULL, c);
            cr_assert_eq(float_control(), control, "%s, %u rows", kernel->name, rows);
        }
    }
    free(panel);
}

/* Products of -2^-126 + (1 + m / 128) 2^e reach both sides of the smallest normal number, one by
 * one. */
Test(bf16dp, kernels_equal_the_scalars_around_the_smallest_normal)
{
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        for (uint32_t i = 0; ep_ffn_family_has_pairs(kernel->family) && i < 2 * 32 * 128; i++) {
            static _Alignas(64) uint32_t panel[EP_FFN_PANEL];
            static _Alignas(64) float c[EP_FFN_PANEL];
            const float sign = i % 2 == 0 ? 1.0f : -1.0f;
            const float small = ldexpf(1.0f + (float)(i / 64) / 128.0f, -(int)(i / 2 % 32) - 60);
            const uint32_t x = pair(ldexpf(1.0f, -67), ldexpf(1.0f, -63));
            for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                panel[o] = pair(-sign * small, sign * ldexpf(1.0f + (float)(o % 2) / 64.0f, -63));
            }
            const float a = ep_f32_from_bits(x);
            kernel->panel(EP_DTYPE_BF16, &a, 1, (const uint8_t *)panel, 1, NULL, c);
            for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                const float want = step(kernel, 0.0f, panel[o], x);
                cr_assert(is_same(c[o], want), "%s: case %u output %u: %a, want %a", kernel->name,
                          i, o, (double)c[o], (double)want);
            }
        }
    }
}

/* Rows of every bit pattern's neighbourhood, packed by each kernel. */
Test(bf16dp, kernels_narrow_as_the_scalars_do)
{
    enum { COUNT = 70 };
    const ep_ffn_kernel *kernel;
    for (size_t n = 0; (kernel = ep_ffn_kernel_at(n)) != NULL; n++) {
        for (uint32_t top = 0; ep_ffn_family_has_pairs(kernel->family) && top < 0x10000;
             top += COUNT / 2) {
            float x[COUNT];
            uint32_t a[COUNT / 2];
            const uint32_t low[] = {0x0000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, 0x0001u};
            for (uint32_t i = 0; i < COUNT; i++) {
                uint32_t bits = ((top + i / 2) & 0xffffu) << 16 | low[(top + i) % 6];
                memcpy(&x[i], &bits, sizeof(bits));
            }
            ep_ffn_row row = {.x = x};
            ep_ffn_batch batch = {
                .rows = &row, .rows_count = 1, .x_dtype = EP_DTYPE_F32, .out_dtype = EP_DTYPE_F32};
            kernel->pack_rows(&batch, 0, 1, COUNT, (float *)a);
            for (uint32_t i = 0; i < COUNT; i++) {
                const uint16_t got = (uint16_t)(a[i / 2] >> (16 * (i % 2)));
                cr_assert(is_same(ep_bf16_to_f32(got), ep_bf16_to_f32(ep_bf16dp_narrow(x[i]))),
                          "%s: %a (%08x) became %04x", kernel->name, (double)x[i],
                          ep_f32_bits(x[i]), got);
            }
        }
    }
}

enum { H = 70, I = 45 };

static void fill(uint64_t *state, uint16_t *to, size_t count, float scale)
{
    for (size_t i = 0; i < count; i++) {
        to[i] = ep_f32_to_bf16((float)(int32_t)ep_splitmix64(state) * 0x1p-31f * scale);
    }
}

/*
 * A chain of n sums errs by at most n * sum_error * sum |a_i b_i|: half a unit in the last place
 * for each step rounded to nearest, a whole one rounded to odd. The bound follows g and u into h
 * and h into y with |silu'| <= 1.1, and allows 4 ulp for exp, division and products. narrowing:
 * what h loses of its value where it becomes bf16. x is bf16 and loses nothing.
 */
static void expect_near_double(ep_ffn_family family, double sum_error, double narrowing)
{
    static uint16_t gate[I * H];
    static uint16_t up[I * H];
    static uint16_t down[H * I];
    uint16_t x[H];
    float out[H];
    float scratch[H + I];
    uint64_t state = 3;
    fill(&state, gate, I * H, 0.5f);
    fill(&state, up, I * H, 0.5f);
    fill(&state, down, H * I, 0.5f);
    fill(&state, x, H, 2.0f);
    ep_ffn_source source = {
        .hidden = H, .inner = I, .format = EP_WEIGHTS_BF16, .gate = gate, .up = up, .down = down};
    ep_ffn_row row = {.x = x, .out = out};
    ep_ffn_batch batch = {
        .rows = &row, .rows_count = 1, .x_dtype = EP_DTYPE_BF16, .out_dtype = EP_DTYPE_F32};
    ep_ffn_reference_of(family, &source, &batch, scratch);

    const double half_eps = FLT_EPSILON / 2.0;
    double h[I];
    double h_error[I];
    for (size_t i = 0; i < I; i++) {
        double g = 0, u = 0, g_abs = 0, u_abs = 0;
        for (size_t k = 0; k < H; k++) {
            double wide = (double)ep_bf16_to_f32(x[k]);
            g += (double)ep_bf16_to_f32(gate[i * H + k]) * wide;
            u += (double)ep_bf16_to_f32(up[i * H + k]) * wide;
            g_abs += fabs((double)ep_bf16_to_f32(gate[i * H + k]) * wide);
            u_abs += fabs((double)ep_bf16_to_f32(up[i * H + k]) * wide);
        }
        double silu = g / (1.0 + exp(-g));
        h[i] = silu * u;
        h_error[i] = H * sum_error * (1.1 * g_abs * fabs(u) + u_abs * fabs(silu)) +
                     (8 * half_eps + narrowing) * fabs(h[i]);
    }
    for (size_t i = 0; i < H; i++) {
        double y = 0, y_abs = 0, error = 0;
        for (size_t k = 0; k < I; k++) {
            double weight = (double)ep_bf16_to_f32(down[i * I + k]);
            y += weight * h[k];
            y_abs += fabs(weight * h[k]);
            error += fabs(weight) * h_error[k];
        }
        error += (I + 1) * sum_error * y_abs;
        cr_assert(fabs((double)out[i] - y) <= error * 1.01,
                  "output %zu is %a, in double %a, bound %g", i, (double)out[i], y, error);
    }
}

Test(bf16dp, families_are_near_double_precision)
{
    expect_near_double(EP_FFN_FAMILY_PORTABLE, FLT_EPSILON / 2.0, 0);
    expect_near_double(EP_FFN_FAMILY_BF16DP, FLT_EPSILON / 2.0, 0x1p-8);
    expect_near_double(EP_FFN_FAMILY_BF16ODD, FLT_EPSILON, 0x1p-8);
}
