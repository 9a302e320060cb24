/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the oracle with cases small enough to compute by hand. H = 2, I = 1; expert e gives y =
 * (m, -2m), m = factor[e] * x[1]. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "reference_layer.h"

enum { H = 2, EXPERTS = 3 };

/* silu(128) is exactly 128, because exp(-128) is 0 here: h = 128 * u. down divides by 128. */
static const float gate_row[H] = {128.0f, 0.0f};
static const float up_rows[EXPERTS][H] = {{0.0f, 1.0f}, {0.0f, 4.0f}, {0.0f, -1.0f}};
static const float down_rows[H] = {0x1p-7f, -0x1p-6f};
static const float closed_half[H] = {0.0f, 0.0f};

static const struct ref_expert experts[EXPERTS] = {
    {.inner = 1,
     .gate = {.values = gate_row},
     .up = {.values = up_rows[0]},
     .down = {.values = down_rows}},
    {.inner = 1,
     .gate = {.values = gate_row},
     .up = {.values = up_rows[1]},
     .down = {.values = down_rows}},
    {.inner = 1,
     .gate = {.values = gate_row},
     .up = {.values = up_rows[2]},
     .down = {.values = down_rows}},
};

static struct ref_layer make_layer(void)
{
    return (struct ref_layer){.hidden = H, .expert_count = EXPERTS, .experts = experts};
}

static struct ref_batch make_batch(size_t tokens, size_t top_k, const float *x, const int32_t *ids,
                                   const float *scales)
{
    return (struct ref_batch){
        .tokens = tokens,
        .top_k = top_k,
        .x = x,
        .x_dtype = REF_F32,
        .ids = ids,
        .ids_dtype = REF_I32,
        .scales = scales,
        .scales_dtype = REF_F32,
        .wire_dtype = REF_F32,
        .out_dtype = REF_F32,
    };
}

static void expect(const struct ref_layer *layer, const struct ref_batch *batch,
                   const float *wanted, size_t count)
{
    float out[16];
    char text[REF_TEXT_BYTES] = "";
    cr_assert_eq(ref_layer_forward(layer, batch, out, text), REF_OK, "%s", text);
    for (size_t i = 0; i < count; i++) {
        cr_expect_eq(out[i], wanted[i], "element %zu is %a, wanted %a", i, (double)out[i],
                     (double)wanted[i]);
    }
}

static void expect_refusal(const struct ref_layer *layer, const struct ref_batch *batch,
                           enum ref_refusal why, const char *wanted)
{
    float out[4] = {7.0f, 7.0f, 7.0f, 7.0f};
    char text[REF_TEXT_BYTES] = "";
    cr_expect_eq(ref_layer_forward(layer, batch, out, text), why);
    cr_expect_str_eq(text, wanted);
    cr_expect_eq(out[0], 7.0f);
}

Test(reference_layer, weights_rows_in_slot_order)
{
    struct ref_layer layer = make_layer();
    const float x[] = {1.0f, 3.0f};
    struct ref_batch batch =
        make_batch(1, 2, x, (const int32_t[]){0, 1}, (const float[]){0.5f, 0.25f});
    expect(&layer, &batch, (const float[]){4.5f, -9.0f}, 2); /* 0.5 * 3 + 0.25 * 12 */
}

Test(reference_layer, sum_order_shows_in_the_bits)
{
    struct ref_layer layer = make_layer();
    const float x[] = {1.0f, 1.0f};
    struct ref_batch batch =
        make_batch(1, 3, x, (const int32_t[]){0, 1, 2}, (const float[]){0x1p25f, 0.25f, 0x1p25f});
    expect(&layer, &batch, (const float[]){0.0f, 0.0f}, 2); /* (2^25 + 1) - 2^25: the 1 is lost */
    batch.ids = (const int32_t[]){0, 2, 1};
    batch.scales = (const float[]){0x1p25f, 0x1p25f, 0.25f};
    expect(&layer, &batch, (const float[]){1.0f, -2.0f}, 2);
}

Test(reference_layer, rounds_rows_once_to_the_wire_type)
{
    struct ref_layer layer = make_layer();
    const float x[] = {1.0f, 1.0f + 0x1p-9f};
    struct ref_batch batch = make_batch(1, 1, x, (const int32_t[]){0}, (const float[]){1.0f});
    expect(&layer, &batch, (const float[]){1.0f + 0x1p-9f, -2.0f - 0x1p-8f}, 2);
    batch.wire_dtype = REF_BF16;
    expect(&layer, &batch, (const float[]){1.0f, -2.0f}, 2);
}

Test(reference_layer, special_experts_work_on_x)
{
    struct ref_layer layer = make_layer();
    const float alpha1[] = {0.5f, 0.0f}, alpha2[] = {0.25f, 0.125f}, v[] = {10.0f, 20.0f};
    layer.zero_count = 1;
    layer.copy_count = 1;
    layer.constant_count = 1;
    layer.alpha1 = alpha1;
    layer.alpha2 = alpha2;
    layer.constant = v;
    const float x[] = {2.0f, 4.0f}; /* both alpha dots are 1: the gate is (0.5, 0.5) */
    struct ref_batch batch =
        make_batch(1, 3, x, (const int32_t[]){3, 4, 5}, (const float[]){9.0f, 3.0f, 2.0f});
    expect(&layer, &batch, (const float[]){6.0f + 12.0f, 12.0f + 24.0f}, 2);
    batch.weight_on_input = true;
    expect(&layer, &batch, (const float[]){18.0f, 36.0f}, 2);
    layer.constant_linear = true;
    expect(&layer, &batch, (const float[]){6.0f + 7.0f, 12.0f + 5.0f}, 2);
    batch.form = REF_UNCOMBINED;
    expect(&layer, &batch, (const float[]){0.0f, 0.0f, 2.0f, 4.0f, 3.5f, 2.5f}, 6);
}

Test(reference_layer, masks_and_sentinels)
{
    struct ref_layer layer = make_layer();
    const struct ref_expert shared = {.inner = 1,
                                      .gate = {.values = gate_row},
                                      .up = {.values = up_rows[0]},
                                      .down = {.values = down_rows},
                                      .output_gate = closed_half};
    layer.shared = &shared;
    layer.shared_count = 1; /* adds half of expert 0's row */
    const float x[] = {1.0f, 2.0f, 1.0f, 2.0f, 1.0f, 2.0f};
    const int32_t ids[] = {0, 1, -1, 3, 2, 2};
    const float scales[] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    struct ref_batch batch = make_batch(3, 2, x, ids, scales);
    batch.mask_slots = (const uint8_t[]){0, 1, 1, 1, 0, 0};
    expect(&layer, &batch, (const float[]){9.0f, -18.0f, 1.0f, -2.0f, 0.0f, 0.0f}, 6);
    batch.mask_tokens = (const uint8_t[]){0, 1, 1};
    expect(&layer, &batch, (const float[]){0.0f, 0.0f, 1.0f, -2.0f, 0.0f, 0.0f}, 6);
    batch.no_service_shared = true;
    batch.caller_shared = (const float[]){5.0f, 5.0f, 6.0f, 7.0f, 5.0f, 5.0f};
    batch.caller_shared_dtype = REF_F32;
    expect(&layer, &batch, (const float[]){0.0f, 0.0f, 6.0f, 7.0f, 0.0f, 0.0f}, 6);
    batch.tokens = 0;
    cr_expect_eq(ref_layer_forward(&layer, &batch, NULL, NULL), REF_OK);
}

Test(reference_layer, result_forms_and_weight_on_input)
{
    struct ref_layer layer = make_layer();
    const float x[] = {1.0f, 2.0f};
    const int64_t ids[] = {1, 0};
    struct ref_batch batch = make_batch(1, 2, x, NULL, (const float[]){2.0f, 3.0f});
    batch.ids = ids;
    batch.ids_dtype = REF_I64;
    batch.form = REF_PARTIAL;
    batch.partial_slots = (const uint8_t[]){0, 1};
    expect(&layer, &batch, (const float[]){6.0f, -12.0f}, 2);
    batch.form = REF_UNCOMBINED;
    expect(&layer, &batch, (const float[]){8.0f, -16.0f, 2.0f, -4.0f}, 4);
    batch.form = REF_COMBINED;
    /* gate 256 and 384, up 16 and 6: silu changes neither, and 1/128 does not cancel them */
    batch.weight_on_input = true;
    expect(&layer, &batch, (const float[]){32.0f + 18.0f, -64.0f - 36.0f}, 2);
}

Test(reference_layer, refuses_by_name)
{
    struct ref_layer layer = make_layer();
    const float x[] = {1.0f, NAN, 1.0f, 2.0f};
    const float scales[] = {1.0f, 1.0f, 1.0f, 1.0f};
    struct ref_batch batch = make_batch(2, 2, x, (const int32_t[]){0, 1, 0, 4}, scales);
    expect_refusal(&layer, &batch, REF_BAD_ID, "token 1 slot 1 has expert id 4, allowed -1 to 3");
    batch.ids = (const int32_t[]){0, 1, 2, 2};
    expect_refusal(&layer, &batch, REF_DUPLICATE_ID, "token 1 has expert id 2 in slots 0 and 1");
    batch.allow_duplicates = true;
    batch.nan_policy = REF_NAN_REJECT;
    expect_refusal(&layer, &batch, REF_NOT_FINITE, "token 0 element 1 is nan");
    batch.nan_policy = REF_NAN_PASS;
    batch.x_abs_max = 1.5f;
    expect_refusal(&layer, &batch, REF_TOO_LARGE, "token 1 element 1 is 2, allowed +-1.5");
    batch.mask_tokens = (const uint8_t[]){1, 0};
    cr_expect_eq(ref_layer_forward(&layer, &batch, (float[4]){0}, NULL), REF_OK);
    batch.ids = (const int32_t[]){0, 1, -2, 0};
    expect_refusal(&layer, &batch, REF_BAD_ID, "token 1 slot 0 has expert id -2, allowed -1 to 3");
}

Test(reference_layer, nan_policies_and_int8_rows)
{
    struct ref_layer layer = make_layer();
    const float x[] = {3.0f, INFINITY};
    struct ref_batch batch = make_batch(1, 1, x, (const int32_t[]){4}, (const float[]){1.0f});
    layer.copy_count = 1;
    batch.ids = (const int32_t[]){3};
    expect(&layer, &batch, (const float[]){3.0f, INFINITY}, 2);
    batch.nan_policy = REF_NAN_ZERO;
    expect(&layer, &batch, (const float[]){3.0f, 0.0f}, 2);
    batch.nan_policy = REF_NAN_MEAN;
    expect(&layer, &batch, (const float[]){3.0f, 3.0f}, 2);
    batch.x = (const int8_t[]){-4, 127};
    batch.x_dtype = REF_I8;
    batch.x_scales = (const float[]){0.5f};
    expect(&layer, &batch, (const float[]){-2.0f, 63.5f}, 2);
    batch.x_scales = (const float[]){NAN};
    expect(&layer, &batch, (const float[]){0.0f, 0.0f}, 2);
    batch.nan_policy = REF_NAN_REJECT;
    expect_refusal(&layer, &batch, REF_NOT_FINITE, "token 0 has row scale nan");
}

Test(ref_math, half_formats_round_to_nearest_even)
{
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        float narrow = ref_float_from_f16((uint16_t)bits);
        float wide = ref_float_from_bf16((uint16_t)bits);
        cr_assert(isnan(narrow) || ref_f16_from_float(narrow) == bits, "f16 %04x", bits);
        cr_assert(isnan(wide) || ref_bf16_from_float(wide) == bits, "bf16 %04x", bits);
        cr_assert(!isnan(narrow) || isnan(ref_float_from_f16(ref_f16_from_float(narrow))),
                  "f16 %04x", bits);
        cr_assert(!isnan(wide) || isnan(ref_float_from_bf16(ref_bf16_from_float(wide))),
                  "bf16 %04x", bits);
        if (isfinite(narrow) && isfinite(ref_float_from_f16((uint16_t)(bits + 1)))) {
            float tie = (narrow + ref_float_from_f16((uint16_t)(bits + 1))) / 2.0f;
            cr_assert_eq(ref_f16_from_float(tie), (bits + 1) & ~1u, "tie above %04x", bits);
        }
    }
    cr_expect_eq(ref_f16_from_float(65519.996f), 0x7bff);
    cr_expect_eq(ref_f16_from_float(65520.0f), 0x7c00);
    cr_expect_eq(ref_f16_from_float(-0x1p-25f), 0x8000);
    cr_expect_eq(ref_f16_from_float(0x1.000002p-25f), 0x0001);
    cr_expect_eq(ref_bf16_from_float(1.0f + 0x1p-8f), 0x3f80);
    cr_expect_eq(ref_bf16_from_float(1.0f + 0x1.8p-7f), 0x3f82);
    cr_expect_eq(ref_bf16_from_float(0x1.ffp127f), 0x7f80);
}

Test(ref_math, exp_is_close_and_ends_where_it_says)
{
    for (float x = -87.0f; x < 88.7f; x += 0.01f) {
        double wanted = exp((double)x);
        cr_assert_lt(fabs((double)ref_exp(x) - wanted), 2e-7 * wanted, "exp(%g)", (double)x);
    }
    cr_expect_eq(ref_exp(0.0f), 1.0f);
    cr_expect_eq(ref_exp(88.8f), INFINITY);
    cr_expect_eq(ref_exp(-104.0f), 0.0f);
    cr_expect_gt(ref_exp(-103.0f), 0.0f);
    cr_expect(isnan(ref_exp(NAN)));
    cr_expect_eq(ref_sigmoid(0.0f), 0.5f);
}
