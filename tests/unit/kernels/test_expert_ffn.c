/* SPDX-License-Identifier: Apache-2.0 */
/* The reference kernel itself: cases worked out by hand. Its error bound against double precision
 * is in test_bf16dp.c. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "base/numeric.h"
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
