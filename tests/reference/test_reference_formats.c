/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle's activations against the C library in double, its formats against cases by hand. */
#include <criterion/criterion.h>
#include <math.h>

#include "reference_layer.h"
#include "reference_w4a8.h"

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static double gelu_tanh(double x)
{
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

static double cut(double x, double low, double high)
{
    return x > high ? high : x < low ? low : x;
}

static double of_double(const struct ref_activation *a, double g, double u)
{
    const double alpha = (double)a->alpha;
    const double beta = (double)a->beta;
    const double limit = a->limit > 0.0f ? (double)a->limit : (double)INFINITY;
    const double cut_g = cut(g, -INFINITY, limit);
    const double cut_u = cut(u, -limit, limit);
    switch (a->kind) {
    case REF_ACT_SILU:
        return g * sigmoid(g) * u;
    case REF_ACT_GELU:
        return 0.5 * g * (1.0 + erf(g / sqrt(2.0))) * u;
    case REF_ACT_GELU_TANH:
        return gelu_tanh(g) * u;
    case REF_ACT_RELU:
        return cut(g, 0.0, INFINITY) * u;
    case REF_ACT_RELU2:
        return cut(g, 0.0, INFINITY) * cut(g, 0.0, INFINITY) * u;
    case REF_ACT_SWIGLU_OAI:
        return cut_g * sigmoid(alpha * cut_g) * (cut_u + beta);
    case REF_ACT_SWIGLU_LIMIT:
        return cut_g * sigmoid(cut_g) * cut_u;
    case REF_ACT_SWIGLU_STEP:
        return cut(g * sigmoid(g), -INFINITY, limit) * cut_u;
    case REF_ACT_SITU:
        return alpha * tanh(g / alpha) * sigmoid(g) * beta * tanh(u / beta);
    }
    return NAN;
}

/* exp, tanh and erf have errors below 4 ulp of values up to 1; where 1 + erf cancels, the error is
 * absolute in g. */
static void expect_near(const struct ref_activation *a, bool alone, float g, float u, float got)
{
    double wanted = of_double(a, (double)g, (double)u);
    double scale = fabs(wanted) + fabs((double)g) * (fabs((double)u) + fabs((double)a->beta));
    cr_assert(fabs((double)got - wanted) <= 16 * 0x1p-24 * scale,
              "activation %d%s of %a, %a is %a, in double %a", (int)a->kind, alone ? " alone" : "",
              (double)g, (double)u, (double)got, wanted);
}

Test(reference_formats, activations_are_near_double)
{
    for (int kind = REF_ACT_SILU; kind <= REF_ACT_SITU; kind++) {
        const struct ref_activation limited = {(enum ref_activation_kind)kind, 1.7f, 1.25f, 2.5f};
        const struct ref_activation free_of_limit = {(enum ref_activation_kind)kind, 1.7f, 1.25f,
                                                     0.0f};
        const bool has_gate = kind != REF_ACT_RELU && kind != REF_ACT_RELU2;
        for (float g = -9.0f; g < 9.0f; g += 0.0625f) {
            for (float u = -7.0f; u < 7.0f && has_gate; u += 0.3125f) {
                expect_near(&limited, false, g, u, ref_activate(&limited, g, u));
                expect_near(&free_of_limit, false, g, u, ref_activate(&free_of_limit, g, u));
            }
            if (kind <= REF_ACT_RELU2) {
                expect_near(&limited, true, g, 1.0f, ref_activate_alone(&limited, g));
            }
        }
    }
}

Test(reference_formats, codes_have_their_values)
{
    static const float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (unsigned code = 0; code < 8; code++) {
        cr_expect_eq(ref_e2m1(code), e2m1[code]);
        cr_expect_eq(ref_e2m1(code | 8), -e2m1[code]);
    }
    cr_expect_eq(ref_e4m3(0x00), 0.0f);
    cr_expect_eq(ref_e4m3(0x01), 0x1p-9f);
    cr_expect_eq(ref_e4m3(0x07), 7 * 0x1p-9f);
    cr_expect_eq(ref_e4m3(0x08), 0x1p-6f);
    cr_expect_eq(ref_e4m3(0x38), 1.0f);
    cr_expect_eq(ref_e4m3(0xb9), -1.125f);
    cr_expect_eq(ref_e4m3(0x7e), 448.0f);
    cr_expect(isnan(ref_e4m3(0x7f)) && isnan(ref_e4m3(0xff)));
    cr_expect_eq(ref_e8m0(0), 0x1p-127f);
    cr_expect_eq(ref_e8m0(127), 1.0f);
    cr_expect_eq(ref_e8m0(254), 0x1p127f);
    cr_expect(isnan(ref_e8m0(255)));
}

/* 33 columns are two groups. */
Test(reference_formats, groups_are_scaled_one_by_one)
{
    float values[33] = {1.0f};
    float x[33] = {1.0f};
    const float scales[2] = {3.0f, 0x1p-24f};
    values[32] = 5.0f;
    x[32] = 7.0f;
    cr_expect_eq(ref_dot_groups(REF_FORMAT_INT4, REF_PORTABLE, values, scales, x, 33),
                 3.0f + 35 * 0x1p-24f);
    cr_expect_eq(ref_dot_groups(REF_FORMAT_INT4, REF_BF16DP, values, scales, x, 33),
                 3.0f + 35 * 0x1p-24f);
    cr_expect_eq(ref_dot_groups(REF_FORMAT_INT4, REF_PORTABLE, values, scales, x, 32), 3.0f);
}

/* chain (1 + 2^-7), scale (1 + 2^-23): the product's last bits count if it is fused into -1;
 * rounded first, it loses them. */
Test(reference_formats, a_group_ends_fused_or_rounded)
{
    float values[33] = {-1.0f};
    float x[33] = {1.0f};
    const float scales[2] = {1.0f, 1.0f + 0x1p-23f};
    values[32] = 1.0f + 0x1p-7f;
    x[32] = 1.0f;
    const float product = (1.0f + 0x1p-7f) * (1.0f + 0x1p-23f);
    const float exact = (float)((double)(1.0f + 0x1p-7f) * (double)(1.0f + 0x1p-23f) - 1.0);
    cr_assert_neq(product - 1.0f, exact);
    cr_expect_eq(ref_dot_groups(REF_FORMAT_INT4, REF_PORTABLE, values, scales, x, 33), exact);
    cr_expect_eq(ref_dot_groups(REF_FORMAT_INT4, REF_BF16DP, values, scales, x, 33),
                 product - 1.0f);
}

/* bf16dp widens an MX weight to bf16, so the second group continues the chain of the first. */
Test(reference_formats, mx_weights_are_widened_in_pairs)
{
    float values[33] = {-1.0f};
    float x[33] = {1.0f};
    const float scales[2] = {1.0f, 0x1p-127f};
    values[32] = 2.0f;
    x[32] = 0x1p126f;
    /* 2^-126 is a normal number */
    cr_expect_eq(ref_dot_groups(REF_FORMAT_MXFP8, REF_BF16DP, values, scales, x, 33), 0.0f);
    values[32] = 1.0f;
    x[32] = 0x1p127f;
    /* 2^-127 is not a normal number */
    cr_expect_eq(ref_dot_groups(REF_FORMAT_MXFP8, REF_BF16DP, values, scales, x, 33), -1.0f);
    cr_expect_eq(ref_dot_groups(REF_FORMAT_MXFP8, REF_PORTABLE, values, scales, x, 33), 0.0f);
}

Test(reference_formats, rows_become_int8)
{
    const float x[4] = {-254.0f, 1.0f, 3.0f, 5.1f}; /* scale 2: 0.5 and 1.5 are ties */
    float q[4], scale;
    ref_round_int8(x, 4, q, &scale);
    cr_expect_eq(scale, 2.0f);
    cr_expect(q[0] == -127.0f && q[1] == 0.0f && q[2] == 2.0f && q[3] == 3.0f);
    cr_expect_eq(ref_dot_int8((const float[]){1.0f, 9.0f, -2.0f, 4.0f}, 0.5f, q, scale, 4),
                 -119.0f);
    ref_round_int8((const float[]){0.0f, -0.0f}, 2, q, &scale);
    cr_expect(scale == 0.0f && q[0] == 0.0f && q[1] == 0.0f);
    ref_round_int8((const float[]){1.0f, INFINITY}, 2, q, &scale);
    cr_expect(isnan(scale));
}

Test(reference_formats, told_families_leave_what_they_have_not)
{
    cr_expect_eq(ref_format_family(REF_FORMAT_INT4, REF_W4A8), REF_W4A8);
    cr_expect_eq(ref_format_family(REF_FORMAT_MXFP4, REF_W4A8), REF_W4A8);
    cr_expect_eq(ref_format_family(REF_FORMAT_Q4_K, REF_W4A8), REF_W4A8);
    cr_expect_eq(ref_format_family(REF_FORMAT_Q4_K, REF_BF16DP), REF_BF16DP);
    cr_expect_eq(ref_format_family(REF_FORMAT_CODES, REF_W4A8), REF_BF16DP);
    cr_expect_eq(ref_format_family(REF_FORMAT_MXFP8, REF_W4A8), REF_BF16DP);
    cr_expect_eq(ref_format_family(REF_FORMAT_BF16, REF_W4A8), REF_BF16DP);
    cr_expect_eq(ref_format_family(REF_FORMAT_FLOAT, REF_W4A8), REF_PORTABLE);
    cr_expect_eq(ref_format_family(REF_FORMAT_W8A8, REF_W4A8), REF_PORTABLE);
    cr_expect_eq(ref_format_family(REF_FORMAT_INT4, REF_BF16ODD), REF_PORTABLE);
    cr_expect_eq(ref_format_family(REF_FORMAT_F8, REF_PORTABLE), REF_PORTABLE);
}

Test(reference_formats, an_empty_level_of_the_cpu_cuts_nothing)
{
    unsetenv("EXPERTD_NUMERICS");
    unsetenv("EXPERTD_CPU_FEATURES");
    const enum ref_family uncut = ref_family_default();
    setenv("EXPERTD_CPU_FEATURES", "", 1);
    cr_expect_eq(ref_family_default(), uncut);
}

/* Groups of 32, 32 and 1 columns. */
Test(reference_formats, rows_of_w4a8_become_int8_by_groups)
{
    float x[65] = {-254.0f, 1.0f, 3.0f, 5.1f, -3.0f}; /* scale 2: 0.5 and 1.5 are ties */
    float q[65], scales[3];
    x[33] = -3.5f;
    x[64] = 127.0f * 0x1p-149f;
    ref_w4a8_round_row(x, 65, q, scales);
    cr_expect(scales[0] == 2.0f && scales[1] == 3.5f / 127.0f && scales[2] == 0x1p-149f);
    cr_expect(q[0] == -127.0f && q[1] == 0.0f && q[2] == 2.0f && q[3] == 3.0f && q[4] == -2.0f);
    cr_expect(q[32] == 0.0f && q[33] == -127.0f && q[64] == 127.0f);
    x[64] = 190.0f * 0x1p-149f; /* the scale has one bit; further bits are lost */
    x[34] = INFINITY;
    x[0] = 0.0f;
    ref_w4a8_round_row(x, 65, q, scales);
    cr_expect(scales[0] == 5.1f / 127.0f && isnan(scales[1]) && scales[2] == 0x1p-149f);
    cr_expect(q[3] == 127.0f && q[33] == 0.0f && q[34] == 0.0f && q[64] == 127.0f);
    ref_w4a8_round_row((const float[]){0.0f, -0.0f, 0x1p-149f}, 3, q, scales);
    cr_expect(scales[0] == 0.0f && q[0] == 0.0f && q[1] == 0.0f && q[2] == 0.0f);
}

Test(reference_formats, a_dot_product_of_w4a8_by_hand)
{
    float values[65] = {3.0f};
    float q[65] = {127.0f};
    const float scales[3] = {0.5f, 1.0f, 0.25f};
    const float q_scales[3] = {2.0f, 1.0f, 1.0f};
    values[64] = -8.0f;
    q[64] = 10.0f;
    cr_expect_eq(ref_w4a8_dot(REF_FORMAT_INT4, values, scales, NULL, q, q_scales, 65),
                 381.0f - 20.0f);
    values[64] = -6.0f;
    cr_expect_eq(ref_w4a8_dot(REF_FORMAT_MXFP4, values, scales, NULL, q, q_scales, 65),
                 381.0f - 15.0f);
    cr_expect(isnan(ref_w4a8_dot(REF_FORMAT_MXFP4, values, scales, NULL, q,
                                 (const float[]){2.0f, NAN, 1.0f}, 65)));
    cr_expect(isnan(ref_w4a8_dot(REF_FORMAT_MXFP4, values, (const float[]){0.5f, NAN, 1.0f}, NULL,
                                 q, q_scales, 65)));
    /* 127 of 3/2 - 5/2, twice, and 10 of 8/4 - 3/4 */
    values[64] = 8.0f;
    const float offsets[3] = {2.5f, 7.0f, 0.75f};
    cr_expect_eq(ref_w4a8_dot(REF_FORMAT_Q4_K, values, scales, offsets, q, q_scales, 65),
                 (1.5f - 2.5f) * 127.0f * 2.0f + (2.0f - 0.75f) * 10.0f);
    /* the scale 2^-127 counts as 2^-128, as codes are doubled; no denormal is flushed */
    cr_expect_eq(ref_w4a8_dot(REF_FORMAT_MXFP4, values, (const float[]){0x1p-127f}, NULL, q,
                              (const float[]){0x1p-9f}, 32),
                 381 * 0x1p-136f);
}

/* t (1 + 2^-23), scale (1 + 2^-7): the product's last bits count, since it is fused into -1. In the
 * other order of groups they do not. */
Test(reference_formats, groups_of_w4a8_are_fused_in_ascending_order)
{
    float values[33] = {-1.0f};
    float q[33] = {1.0f};
    values[32] = 1.0f;
    q[32] = 1.0f;
    const float exact = (float)((double)(1.0f + 0x1p-23f) * (double)(1.0f + 0x1p-7f) - 1.0);
    cr_expect_eq(ref_w4a8_dot(REF_FORMAT_INT4, values, (const float[]){1.0f, 1.0f + 0x1p-7f}, NULL,
                              q, (const float[]){1.0f, 1.0f + 0x1p-23f}, 33),
                 exact);
    values[0] = 1.0f;
    values[32] = -1.0f;
    cr_expect_neq(ref_w4a8_dot(REF_FORMAT_INT4, values, (const float[]){1.0f + 0x1p-7f, 1.0f}, NULL,
                               q, (const float[]){1.0f + 0x1p-23f, 1.0f}, 33),
                  exact);
}

/* 3 (1 + 2^-23) is a tie: the offset's product goes up to 3 + 2^-21, the other one is fused. */
Test(reference_formats, of_w4a8_only_the_offsets_product_is_rounded)
{
    const float odd[1] = {1.0f + 0x1p-23f};
    cr_expect_eq(ref_w4a8_dot(REF_FORMAT_Q4_K, (const float[]){1.0f}, odd, odd,
                              (const float[]){3.0f}, (const float[]){1.0f}, 1),
                 -0x1p-23f);
}

/* y = down relu(up x + bias)^2, H = 1, I = 2; then with an own gate, on x before rounding. */
Test(reference_formats, an_expert_of_w4a8_by_hand)
{
    struct ref_expert expert = {.inner = 2,
                                .up = {(const float[]){1.0f, 2.0f}, (const float[]){1.0f, 1.0f},
                                       (const float[]){1.0f, -8.0f}},
                                .down = {(const float[]){3.0f, 4.0f}, (const float[]){0.5f}, NULL},
                                .format = REF_FORMAT_INT4,
                                .family = REF_W4A8,
                                .activation = {.kind = REF_ACT_RELU2}};
    float scratch[8], y;
    cr_assert_leq(ref_expert_scratch(1, 2), 8);
    ref_expert_forward(&expert, 1, (const float[]){127.0f}, scratch, &y);
    /* 128 and 246 squared; 34.38 steps are 34 */
    const float wanted = (3 * 34 + 4 * 127) * (60516.0f / 127.0f) * 0.5f;
    cr_expect_eq(y, wanted);
    expert.output_gate = (const float[]){-0x1p-7f};
    ref_expert_forward(&expert, 1, (const float[]){127.0f}, scratch, &y);
    cr_expect_eq(y, ref_sigmoid(-127.0f * 0x1p-7f) * wanted);
}

/* y = down (up x + bias), no gate: relu squared, H = 1, I = 2. */
Test(reference_formats, two_matrices_with_biases)
{
    const struct ref_expert expert = {
        .inner = 2,
        .up = {.values = (const float[]){1.0f, 2.0f}, .bias = (const float[]){1.0f, -8.0f}},
        .down = {.values = (const float[]){0.5f, 4.0f}, .bias = (const float[]){-1.0f}},
        .activation = {.kind = REF_ACT_RELU2}};
    float scratch[3], y;
    ref_expert_forward(&expert, 1, (const float[]){3.0f}, scratch, &y);
    cr_expect_eq(y, 0.5f * 16.0f - 1.0f); /* 3 + 1 squared; 6 - 8 is cut */
    ref_expert_forward(&expert, 1, (const float[]){5.0f}, scratch, &y);
    cr_expect_eq(y, 0.5f * 36.0f + 4.0f * 4.0f - 1.0f);
}
