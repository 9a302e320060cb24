/* SPDX-License-Identifier: Apache-2.0 */
/* A caller's float environment changes no bit of what its thread computes for it, and is there
 * afterwards. */
#include <criterion/criterion.h>
#include <fenv.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "expertd/gate.h"
#include "expertd/permute.h"
#include "moe/combine.h"
#include "moe/quantize.h"
#include "support/expect.h"

enum { TOKENS = 3, TOP_K = 4, SLOTS = TOKENS * TOP_K, H = 200, EXPERTS = 16 };

typedef struct given {
    float x[TOKENS][H];
    float rows[SLOTS][H];
    int8_t codes[SLOTS][H];
    float code_scales[SLOTS][H / 8];
    float scales[TOKENS][TOP_K];
    float logits[TOKENS][EXPERTS];
    int32_t ids[TOKENS][TOP_K];
    int32_t slot_rows[SLOTS];
} given;

typedef struct results {
    float sums[TOKENS][H];
    float code_sums[TOKENS][H];
    float unpermuted[TOKENS][H];
    /* int8, fp8, as it is with non-finite elements replaced by the mean */
    uint8_t sent[3][TOKENS][4 * H];
    float sent_scales[3][TOKENS][H / 8];
    int32_t chosen[TOKENS][TOP_K];
    float weights[TOKENS][TOP_K];
    double fractions[EXPERTS];
    double mean_probabilities[EXPERTS];
    double losses[3];
} results;

/* Of all sizes; one of eight is subnormal, so that sums and products of it are, too. */
static float draw(uint64_t *state)
{
    const uint64_t z = ep_splitmix64(state);
    const uint32_t exponent = z % 8 == 0 ? 0 : z % 8 == 1 ? 1 : 120 + (z >> 8) % 12;
    return ep_f32_from_bits((uint32_t)(z >> 32 & 0x807fffffu) | exponent << 23);
}

static void draw_all(given *g)
{
    uint64_t state = 5;
    for (int i = 0; i < TOKENS * H; i++) {
        (&g->x[0][0])[i] = draw(&state);
    }
    g->x[1][17] = ep_f32_from_bits(0x7f800000u);
    for (int i = 0; i < SLOTS * H; i++) {
        (&g->rows[0][0])[i] = draw(&state);
        (&g->codes[0][0])[i] = (int8_t)((int)(ep_splitmix64(&state) % 255) - 127);
        (&g->code_scales[0][0])[i / 8] = draw(&state);
    }
    for (int i = 0; i < TOKENS * EXPERTS; i++) {
        (&g->logits[0][0])[i] = draw(&state);
    }
    for (int i = 0; i < SLOTS; i++) {
        (&g->scales[0][0])[i] = draw(&state);
        (&g->ids[0][0])[i] = i % EXPERTS;
        g->slot_rows[i] = (5 * i) % SLOTS;
    }
}

static void send_rows(const ep_batch *plain, results *out)
{
    static const ep_dispatch_quant quants[] = {EP_DISPATCH_INT8, EP_DISPATCH_FP8,
                                               EP_DISPATCH_PLAIN};
    for (size_t q = 0; q < EP_ARRAY_COUNT(quants); q++) {
        ep_batch batch = *plain;
        batch.dispatch_quant = quants[q];
        for (uint32_t t = 0; t < TOKENS; t++) {
            ep_batch_send_row(&batch, t, 0, 0, out->sent[q][t], out->sent_scales[q][t]);
        }
    }
}

static void compute(const given *g, results *out)
{
    static float scratch[4 * (H + 64)] __attribute__((aligned(64)));
    static float workspace[3 * (H + 64)] __attribute__((aligned(64)));
    const ep_layer_shape shape = {.hidden = H, .inner = 1, .experts = EXPERTS, .top_k = TOP_K};
    const ep_batch batch = {.tokens = TOKENS,
                            .top_k = TOP_K,
                            .hidden = H,
                            .x = {g->x, sizeof(g->x[0]), EP_DTYPE_F32},
                            .ids = {g->ids, sizeof(g->ids[0]), EP_DTYPE_I32},
                            .scales = {g->scales, sizeof(g->scales[0]), EP_DTYPE_F32},
                            .wire_dtype = EP_DTYPE_F32,
                            .out_dtype = EP_DTYPE_F32,
                            .shared_source = EP_SHARED_NONE,
                            .nan_policy = EP_NAN_MEAN};
    const void *rows[SLOTS], *codes[SLOTS], *code_scales[SLOTS];
    ep_combine_out sums = {out->sums, sizeof(out->sums[0]), 0},
                   code_sums = {out->code_sums, sizeof(out->code_sums[0]), 0};
    memset(out, 0, sizeof(*out));
    cr_assert_leq(ep_combine_scratch_floats(H), EP_ARRAY_COUNT(scratch));
    for (int i = 0; i < SLOTS; i++) {
        rows[i] = g->rows[i];
        codes[i] = g->codes[i];
        code_scales[i] = g->code_scales[i];
    }
    ep_combine(&batch, &shape, rows, NULL, 0, TOKENS, scratch, &sums);
    ep_combine(&batch, &shape, codes, code_scales, 0, TOKENS, scratch, &code_sums);
    send_rows(&batch, out);

    ep_gate_load load = {.struct_bytes = sizeof(load),
                         .fractions = out->fractions,
                         .mean_probabilities = out->mean_probabilities};
    const ep_gate_config gate = {.struct_bytes = sizeof(gate),
                                 .select = EP_GATE_SOFTMAX,
                                 .weight = EP_GATE_SOFTMAX,
                                 .experts = EXPERTS,
                                 .top_k = TOP_K,
                                 .renormalise = true,
                                 .scaling_factor = 1,
                                 .groups = 1,
                                 .groups_kept = 1,
                                 .load = &load};
    ep_error error;
    ASSERT_OK(ep_gate(&gate, TOKENS, g->logits[0], out->chosen[0], out->weights[0], &error), error);
    out->losses[0] = load.max_over_mean;
    out->losses[1] = load.auxiliary_loss;
    out->losses[2] = load.z_loss;

    ep_unpermute_args args;
    ep_unpermute_args_init(&args);
    args.tokens = TOKENS;
    args.top_k = TOP_K;
    args.hidden = H;
    args.rows_count = SLOTS;
    args.dtype = args.out_dtype = EP_DTYPE_F32;
    args.rows = g->rows;
    args.slot_rows = g->slot_rows;
    args.weights = g->scales[0];
    args.x1 = g->x;
    args.out = out->unpermuted;
    ASSERT_OK(ep_moe_unpermute(&args, workspace, sizeof(workspace), &error), error);
}

/* What control registers say; the exceptions that happened are none of it. */
static unsigned long environment(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr() & 0xffc0u;
#elif defined(__aarch64__)
    unsigned long control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
#else
    return (unsigned long)fegetround();
#endif
}

static void flush_to_zero(void)
{
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040u);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" ::"r"(environment() | 1ul << 24));
#endif
}

static void round_down(void)
{
    (void)fesetround(FE_DOWNWARD);
}

static void round_up(void)
{
    (void)fesetround(FE_UPWARD);
}

static void trap_all(void)
{
    (void)feenableexcept(FE_INEXACT | FE_UNDERFLOW | FE_OVERFLOW | FE_INVALID);
}

Test(float_env, that_of_the_caller_changes_no_bit_and_is_left_as_it_was)
{
    static void (*const environments[])(void) = {flush_to_zero, round_down, round_up, trap_all};
    static given g;
    static results want, got;
    draw_all(&g);
    compute(&g, &want);
    for (size_t i = 0; i < EP_ARRAY_COUNT(environments); i++) {
        environments[i]();
        const unsigned long before = environment();
        compute(&g, &got);
        const unsigned long after = environment();
        (void)fesetenv(FE_DFL_ENV);
        cr_expect_eq(after, before, "environment %zu: %lx became %lx", i, before, after);
        cr_expect(memcmp(got.sums, want.sums, sizeof(want.sums)) == 0, "environment %zu: combine",
                  i);
        cr_expect(memcmp(got.code_sums, want.code_sums, sizeof(want.code_sums)) == 0,
                  "environment %zu: combine of int8 rows", i);
        cr_expect(memcmp(got.sent, want.sent, sizeof(want.sent)) == 0,
                  "environment %zu: rows that are sent", i);
        cr_expect(memcmp(got.sent_scales, want.sent_scales, sizeof(want.sent_scales)) == 0,
                  "environment %zu: their scales", i);
        cr_expect(memcmp(got.chosen, want.chosen, sizeof(want.chosen)) == 0,
                  "environment %zu: gate", i);
        cr_expect(memcmp(got.weights, want.weights, sizeof(want.weights)) == 0,
                  "environment %zu: weights of the gate", i);
        cr_expect(memcmp(got.fractions, want.fractions, sizeof(want.fractions)) == 0,
                  "environment %zu: load of the experts", i);
        cr_expect(memcmp(got.mean_probabilities, want.mean_probabilities,
                         sizeof(want.mean_probabilities)) == 0,
                  "environment %zu: their probabilities", i);
        cr_expect(memcmp(got.losses, want.losses, sizeof(want.losses)) == 0,
                  "environment %zu: losses of the load", i);
        cr_expect(memcmp(got.unpermuted, want.unpermuted, sizeof(want.unpermuted)) == 0,
                  "environment %zu: unpermute", i);
    }
}
