/* SPDX-License-Identifier: Apache-2.0 */
/* The reference kernel itself: cases worked out by hand, and an error bound against double
 * precision. */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "base/numeric.h"
#include "base/random.h"
#include "kernels/expert_ffn.h"

static void run(const ep_ffn_source *source, const ep_ffn_batch *batch)
{
    float *scratch =
        malloc(ep_ffn_reference_scratch_floats(source->hidden, source->inner) * sizeof(*scratch));
    ep_ffn_reference(source, batch, scratch);
    free(scratch);
}

/* H = I = 1 with gate = 0, up = 2, down = 3: silu(0) = 0; with gate large: silu(g) = g. */
Test(expert_ffn, one_by_one)
{
    const float gate = 64.0f;
    const float up = 2.0f;
    const float down = 3.0f;
    const float x = 1.5f;
    float out = -1.0f;
    ep_ffn_source source = {
        .hidden = 1, .inner = 1, .format = EP_WEIGHTS_F32, .gate = &gate, .up = &up, .down = &down};
    ep_ffn_row row = {.x = &x, .out = &out};
    ep_ffn_batch batch = {
        .rows = &row, .rows_count = 1, .x_dtype = EP_DTYPE_F32, .out_dtype = EP_DTYPE_F32};
    run(&source, &batch);
    cr_assert_eq(out, 96.0f * 3.0f * 3.0f);

    const float zero = 0.0f;
    source.gate = &zero;
    run(&source, &batch);
    cr_assert_eq(out, 0.0f);
}

Test(expert_ffn, scales_int8_then_the_input_weight_then_the_shared_gate)
{
    const float gate = 1.0f;
    const float up = 1.0f;
    const float down = 1.0f;
    const uint16_t shared = 0x3f80; /* 1.0 in bf16 */
    const int8_t x = 100;
    float out;
    ep_ffn_source source = {.hidden = 1,
                            .inner = 1,
                            .format = EP_WEIGHTS_F32,
                            .gate = &gate,
                            .up = &up,
                            .down = &down,
                            .shared_gate_dtype = EP_DTYPE_BF16,
                            .shared_gate = &shared};
    ep_ffn_row row = {.x = &x, .x_scale = 0.013f, .input_weight = 0.7f, .out = &out};
    ep_ffn_batch batch = {.rows = &row,
                          .rows_count = 1,
                          .x_dtype = EP_DTYPE_I8,
                          .out_dtype = EP_DTYPE_F32,
                          .weight_on_input = true};
    run(&source, &batch);
    float wide = 100.0f * 0.013f;
    float weighted = 0.7f * wide;
    float h = ep_siluf(weighted) * weighted;
    cr_assert_eq(out, ep_sigmoidf(weighted) * h);

    batch.weight_on_input = false;
    run(&source, &batch);
    cr_assert_eq(out, ep_sigmoidf(wide) * (ep_siluf(wide) * wide));
}

Test(expert_ffn, any_nan_is_written_as_the_one_quiet_nan)
{
    const float one = 1.0f;
    const float x = ep_f32_from_bits(0xff812345u); /* signalling, negative, with payload */
    uint32_t out_f32 = 0;
    uint16_t out_bf16 = 0;
    uint16_t out_f16 = 0;
    ep_ffn_source source = {
        .hidden = 1, .inner = 1, .format = EP_WEIGHTS_F32, .gate = &one, .up = &one, .down = &one};
    ep_ffn_row row = {.x = &x, .out = &out_f32};
    ep_ffn_batch batch = {
        .rows = &row, .rows_count = 1, .x_dtype = EP_DTYPE_F32, .out_dtype = EP_DTYPE_F32};
    run(&source, &batch);
    row.out = &out_bf16;
    batch.out_dtype = EP_DTYPE_BF16;
    run(&source, &batch);
    row.out = &out_f16;
    batch.out_dtype = EP_DTYPE_F16;
    run(&source, &batch);
    cr_assert_eq(out_f32, 0x7fc00000u);
    cr_assert_eq(out_bf16, 0x7fc0);
    cr_assert_eq(out_f16, 0x7e00);
}

enum { H = 70, I = 45 };

/*
 * A chain of n fused multiply-adds errs by at most n * eps/2 * sum |a_i b_i| (one rounding per
 * step). The bound below follows g and u into h and h into y with |silu'| <= 1.1, and allows 4 ulp
 * for exp, division and products.
 */
Test(expert_ffn, is_near_double_precision)
{
    static float gate[I * H];
    static float up[I * H];
    static float down[H * I];
    float x[H];
    float out[H];
    uint64_t state = 3;
    float *all[] = {gate, up, down};
    for (size_t m = 0; m < 3; m++) {
        for (size_t i = 0; i < (size_t)H * I; i++) {
            all[m][i] = (float)(int32_t)ep_splitmix64(&state) * 0x1p-32f;
        }
    }
    for (size_t i = 0; i < H; i++) {
        x[i] = (float)(int32_t)ep_splitmix64(&state) * 0x1p-30f;
    }
    ep_ffn_source source = {
        .hidden = H, .inner = I, .format = EP_WEIGHTS_F32, .gate = gate, .up = up, .down = down};
    ep_ffn_row row = {.x = x, .out = out};
    ep_ffn_batch batch = {
        .rows = &row, .rows_count = 1, .x_dtype = EP_DTYPE_F32, .out_dtype = EP_DTYPE_F32};
    run(&source, &batch);

    const double half_eps = FLT_EPSILON / 2.0;
    double h[I];
    double h_error[I];
    for (size_t i = 0; i < I; i++) {
        double g = 0, u = 0, g_abs = 0, u_abs = 0;
        for (size_t k = 0; k < H; k++) {
            g += (double)gate[i * H + k] * (double)x[k];
            u += (double)up[i * H + k] * (double)x[k];
            g_abs += fabs((double)gate[i * H + k] * (double)x[k]);
            u_abs += fabs((double)up[i * H + k] * (double)x[k]);
        }
        double silu = g / (1.0 + exp(-g));
        h[i] = silu * u;
        h_error[i] =
            H * half_eps * (1.1 * g_abs * fabs(u) + u_abs * fabs(silu)) + 8 * half_eps * fabs(h[i]);
    }
    for (size_t i = 0; i < H; i++) {
        double y = 0, y_abs = 0, error = 0;
        for (size_t k = 0; k < I; k++) {
            y += (double)down[i * I + k] * h[k];
            y_abs += fabs((double)down[i * I + k] * h[k]);
            error += fabs((double)down[i * I + k]) * h_error[k];
        }
        error += (I + 1) * half_eps * y_abs;
        cr_assert(fabs((double)out[i] - y) <= error * 1.01,
                  "output %zu is %a, in double %a, bound %g", i, (double)out[i], y, error);
    }
}
