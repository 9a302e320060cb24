/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routers against plain f64 code written from the formulas alone, on random logits whose choice has
 * a margin of 1e-4, so that rounding cannot change it; then ties, group masks, noise and refusals
 * by hand.
 */
#include "expertd/gate.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "support/expect.h"

#define E_MAX 256
#define K_MAX 64
#define MARGIN 1e-4

static double uniform(uint64_t *state)
{
    return (double)(ep_splitmix64(state) >> 11) * 0x1p-53;
}

typedef enum rule { R1 = 1, R2, R3, R4 } rule; /* Mixtral, Qwen, DeepSeek-V2, DeepSeek-V3 */

static ep_gate_config make_config(rule r, uint32_t experts, uint32_t top_k)
{
    static const ep_gate_score select[] = {[R1] = EP_GATE_LOGIT,
                                           [R2] = EP_GATE_SOFTMAX,
                                           [R3] = EP_GATE_SOFTMAX,
                                           [R4] = EP_GATE_SIGMOID};
    return (ep_gate_config){.struct_bytes = sizeof(ep_gate_config),
                            .select = select[r],
                            .weight = r == R1 ? EP_GATE_SOFTMAX_SELECTED : select[r],
                            .group_best = r == R3 ? 1 : 2,
                            .experts = experts,
                            .top_k = top_k,
                            .scaling_factor = 1.0f,
                            .groups = 1,
                            .groups_kept = 1};
}

/* ---- the formulas in f64 ---- */

/* Picks the count largest of values, marks them; returns the gap between the last taken and the
 * best left. */
static double take_largest(const double *values, uint32_t n, uint32_t count, uint32_t *out,
                           bool *taken)
{
    memset(taken, 0, n * sizeof(*taken));
    double last = INFINITY;
    double gap = INFINITY;
    for (uint32_t c = 0; c <= count; c++) {
        uint32_t best = n;
        for (uint32_t i = 0; i < n; i++) {
            if (!taken[i] && (best == n || values[i] > values[best])) {
                best = i;
            }
        }
        if (best == n) {
            break;
        }
        double step = last - values[best];
        /* every neighbour in the order counts: slots are ordered too */
        gap = step < gap ? step : gap;
        last = values[best];
        if (c < count) {
            taken[best] = true;
            out[c] = best;
        }
    }
    return gap;
}

static double limit_groups64(const ep_gate_config *c, double *scores)
{
    double group_scores[EP_GATE_GROUPS_MAX];
    uint32_t kept[EP_GATE_GROUPS_MAX];
    bool taken[EP_GATE_GROUPS_MAX];
    uint32_t size = c->experts / c->groups;
    for (uint32_t g = 0; g < c->groups; g++) {
        uint32_t best[2];
        bool marks[E_MAX];
        uint32_t want = size > 1 ? c->group_best : 1;
        take_largest(scores + g * size, size, want, best, marks);
        group_scores[g] =
            scores[g * size + best[0]] + (want == 2 ? scores[g * size + best[1]] : 0.0);
    }
    double gap = take_largest(group_scores, c->groups, c->groups_kept, kept, taken);
    for (uint32_t e = 0; e < c->experts; e++) {
        if (!taken[e / size]) {
            scores[e] = c->group_mask == EP_GROUP_MASK_ZERO ? 0.0 : -INFINITY;
        }
    }
    return c->groups_kept == c->groups ? INFINITY : gap;
}

static void score64(const ep_gate_config *c, ep_gate_score kind, const double *logits, double *out)
{
    double sum = 0;
    for (uint32_t e = 0; e < c->experts; e++) {
        sum += exp(logits[e]);
    }
    for (uint32_t e = 0; e < c->experts; e++) {
        out[e] = kind == EP_GATE_LOGIT           ? logits[e]
                 : kind == EP_GATE_SIGMOID       ? 1.0 / (1.0 + exp(-logits[e]))
                 : kind == EP_GATE_SQRT_SOFTPLUS ? sqrt(log1p(exp(logits[e])))
                                                 : exp(logits[e]) / sum;
    }
}

/* Returns the smallest margin of any decision. */
static double route64(const ep_gate_config *c, const float *logits, uint32_t *ids, double *weights)
{
    double capped[E_MAX];
    double scores[E_MAX];
    double plain[E_MAX];
    bool taken[E_MAX];
    double gap = INFINITY;
    for (uint32_t e = 0; e < c->experts; e++) {
        double cap = (double)c->softcap;
        capped[e] = cap > 0 ? cap * tanh((double)logits[e] / cap) : (double)logits[e];
    }
    score64(c, c->select, capped, scores);
    score64(c, c->weight, capped, plain); /* over all: renormalised, it is that over the selected */
    for (uint32_t e = 0; e < c->experts; e++) {
        scores[e] += c->bias == NULL ? 0.0 : (double)c->bias[e];
    }
    if (c->groups > 1) {
        gap = limit_groups64(c, scores);
    }
    gap = fmin(gap, take_largest(scores, c->experts, c->top_k, ids, taken));
    double sum = 0;
    for (uint32_t k = 0; k < c->top_k; k++) {
        sum += plain[ids[k]];
    }
    bool divide = c->weight == EP_GATE_SOFTMAX_SELECTED || c->renormalise;
    double divisor = divide ? fmax(sum + (double)c->epsilon, (double)c->sum_min) : 1.0;
    for (uint32_t k = 0; k < c->top_k; k++) {
        double scale = c->expert_factors == NULL ? 1.0 : (double)c->expert_factors[ids[k]];
        weights[k] = plain[ids[k]] / divisor * (double)c->scaling_factor * scale;
    }
    return gap;
}

static void check_against_f64(const ep_gate_config *c, uint64_t seed, unsigned wanted)
{
    uint64_t state = seed;
    unsigned checked = 0;
    for (unsigned tries = 0; checked < wanted; tries++) {
        float logits[E_MAX];
        uint32_t want_ids[K_MAX];
        double want[K_MAX];
        int32_t ids[K_MAX];
        float weights[K_MAX];
        cr_assert_lt(tries, wanted * 1000, "too few cases with a margin");
        for (uint32_t e = 0; e < c->experts; e++) {
            logits[e] = (float)(8.0 * uniform(&state) - 4.0);
        }
        if (!(route64(c, logits, want_ids, want) >= MARGIN)) {
            continue;
        }
        checked++;
        cr_assert_eq(ep_gate(c, 1, logits, ids, weights, NULL), EP_OK);
        for (uint32_t k = 0; k < c->top_k; k++) {
            cr_assert_eq((uint32_t)ids[k], want_ids[k],
                         "scores %d %d, slot %u: expert %d, expected %u", (int)c->select,
                         (int)c->weight, k, ids[k], want_ids[k]);
            cr_assert(fabs((double)weights[k] - want[k]) <= 2e-6 * fabs(want[k]),
                      "scores %d %d, slot %u: %.9g, expected %.9g", (int)c->select, (int)c->weight,
                      k, (double)weights[k], want[k]);
        }
    }
}

Test(gate, r1_agrees_with_the_formula)
{
    const uint32_t sizes[][2] = {{8, 2}, {16, 4}, {32, 8}, {1, 1}, {5, 5}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        ep_gate_config c = make_config(R1, sizes[i][0], sizes[i][1]);
        check_against_f64(&c, i, 200);
    }
}

Test(gate, r2_agrees_with_the_formula_with_and_without_renormalising)
{
    for (int renormalise = 0; renormalise < 2; renormalise++) {
        ep_gate_config c = make_config(R2, 60, 4);
        c.renormalise = renormalise;
        check_against_f64(&c, 10, 200);
    }
}

Test(gate, r3_agrees_with_the_formula_in_every_mode)
{
    for (int mode = 0; mode < 8; mode++) {
        ep_gate_config c = make_config(R3, 40, 3);
        c.groups = mode & 1 ? 8 : 1;
        c.groups_kept = mode & 1 ? 3 : 1;
        c.renormalise = mode & 2;
        c.group_mask = mode & 4 ? EP_GROUP_MASK_MINUS_INF : EP_GROUP_MASK_ZERO;
        c.scaling_factor = 16.0f;
        c.epsilon = 1e-20f;
        check_against_f64(&c, 20, 100);
    }
}

Test(gate, r4_agrees_with_the_formula_in_every_mode)
{
    uint64_t state = 99;
    float bias[64];
    for (int e = 0; e < 64; e++) {
        bias[e] = (float)(0.5 * uniform(&state));
    }
    for (int mode = 0; mode < 16; mode++) {
        ep_gate_config c = make_config(R4, 64, 6);
        c.groups = mode & 1 ? 8 : 1;
        c.groups_kept = mode & 1 ? 4 : 1;
        c.renormalise = mode & 2;
        c.group_mask = mode & 4 ? EP_GROUP_MASK_MINUS_INF : EP_GROUP_MASK_ZERO;
        c.bias = mode & 8 ? bias : NULL;
        c.scaling_factor = 2.5f;
        c.epsilon = 1e-20f;
        check_against_f64(&c, 30, 50);
    }
}

Test(gate, scores_of_every_kind_agree_with_the_formula)
{
    /* DeepSeek-V4 */
    static const ep_gate_score kinds[][2] = {{EP_GATE_SQRT_SOFTPLUS, EP_GATE_SQRT_SOFTPLUS},
                                             /* Llama 4, kolibri1 */
                                             {EP_GATE_LOGIT, EP_GATE_SIGMOID},
                                             /* ERNIE 4.5, LongCat */
                                             {EP_GATE_SOFTMAX, EP_GATE_SOFTMAX},
                                             {EP_GATE_SIGMOID, EP_GATE_SOFTMAX_SELECTED}};
    uint64_t state = 7;
    float bias[16];
    float scales[16];
    for (int e = 0; e < 16; e++) {
        bias[e] = (float)(0.2 * uniform(&state) - 0.1);
        scales[e] = (float)(0.5 + uniform(&state));
    }
    for (unsigned mode = 0; mode < 4 * 32; mode++) {
        ep_gate_config c = make_config(R4, 16, 3);
        c.select = kinds[mode / 32][0];
        c.weight = kinds[mode / 32][1];
        c.renormalise = c.weight != EP_GATE_SOFTMAX_SELECTED && (mode & 1);
        c.bias = mode & 2 ? bias : NULL;
        c.softcap = mode & 4 ? 3.0f : 0.0f;
        c.sum_min = mode & 8 ? 1.5f : 0.0f;
        c.sum_min = c.renormalise ? c.sum_min : 0.0f;
        c.expert_factors = mode & 16 ? scales : NULL;
        c.scaling_factor = 1.75f;
        check_against_f64(&c, mode, 20);
    }
}

/* ---- by hand ---- */

Test(gate, chosen_experts_are_taken_in_their_order_and_weighed_by_their_logits)
{
    const float logits[] = {0, 3, 1, 2, 5, 5, 5, 5};
    const int32_t chosen[] = {2, 0, 3, 1};
    int32_t ids[4];
    float weights[4];
    ep_gate_config c = make_config(R4, 4, 2);
    c.chosen = chosen;
    cr_assert_eq(ep_gate(&c, 2, logits, ids, weights, NULL), EP_OK);
    cr_assert_eq(memcmp(ids, chosen, sizeof(ids)), 0);
    cr_assert(fabs((double)weights[0] - 1 / (1 + exp(-1.0))) < 1e-6 && weights[1] == 0.5f &&
              weights[2] == weights[3]);
}

Test(gate, sparsemixer_weighs_each_slot_among_those_near_its_best)
{
    /* Of 2.0 the far ones are below 2 - 2 * 0.1 * 2 = 1.6; of 1.7, left then, those below 1.7 - 0.2
     * * 1.7 = 1.36, but not -9: it is measured by its own size, 10.7 / 9 > 0.2, so it is far
     * too. */
    const float logits[] = {1.5f, 2.0f, 1.7f, -9.0f};
    int32_t ids[2];
    float weights[2];
    ep_gate_config c = make_config(R1, 4, 2);
    c.select = EP_GATE_SPARSEMIXER;
    c.weight = EP_GATE_SPARSEMIXER;
    c.jitter = 0.1f;
    cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, NULL), EP_OK);
    cr_assert(ids[0] == 1 && ids[1] == 2);
    cr_assert(fabs((double)weights[0] - 1 / (1 + exp(-0.3))) < 1e-6, "%g", (double)weights[0]);
    cr_assert(fabs((double)weights[1] - 1 / (1 + exp(-0.2))) < 1e-6, "%g", (double)weights[1]);
}

Test(gate, of_equal_scores_the_lower_id_wins_in_every_family)
{
    float logits[8];
    int32_t ids[8];
    float weights[8];
    for (rule r = R1; r <= R4; r++) {
        for (int e = 0; e < 8; e++) {
            logits[e] = 1.0f;
        }
        ep_gate_config c = make_config(r, 8, 4);
        cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, NULL), EP_OK);
        for (int k = 0; k < 4; k++) {
            cr_assert_eq(ids[k], k);
        }
        logits[5] = 2.0f;
        logits[7] = 2.0f;
        cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, NULL), EP_OK);
        const int32_t want[] = {5, 7, 0, 1};
        cr_assert_eq(memcmp(ids, want, sizeof(want)), 0);
    }
}

Test(gate, of_equal_groups_the_lower_one_wins)
{
    const float logits[] = {1, 0, 1, 0, 1, 0, 1, 0};
    int32_t ids[2];
    float weights[2];
    for (rule r = R3; r <= R4; r++) {
        ep_gate_config c = make_config(r, 8, 2);
        c.groups = 4;
        c.groups_kept = 2;
        cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, NULL), EP_OK);
        cr_assert_eq(ids[0], 0);
        cr_assert_eq(ids[1], 2);
    }
}

Test(gate, group_mask_zero_may_select_a_masked_expert_and_minus_infinity_never)
{
    /* Biased scores of the kept group (experts 0, 1) are negative, so a masked 0.0 beats them. */
    const float logits[] = {0, 0, 0, 0};
    const float bias[] = {-0.6f, -0.7f, -0.9f, -0.9f};
    int32_t ids[2];
    float weights[2];
    ep_gate_config c = make_config(R4, 4, 2);
    c.groups = 2;
    c.groups_kept = 1;
    c.bias = bias;
    c.group_mask = EP_GROUP_MASK_ZERO;
    cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, NULL), EP_OK);
    cr_assert(ids[0] == 2 && ids[1] == 3, "%d %d", ids[0], ids[1]);
    c.group_mask = EP_GROUP_MASK_MINUS_INF;
    cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, NULL), EP_OK);
    cr_assert(ids[0] == 0 && ids[1] == 1, "%d %d", ids[0], ids[1]);
    cr_assert(weights[0] == 0.5f, "the weight is the unbiased score");
}

Test(gate, r4_ranks_groups_by_their_best_two_and_r3_by_their_best)
{
    /* group 0 has the single best, group 1 the best pair */
    const float logits[] = {2.0f, -4.0f, 1.0f, 1.0f};
    int32_t id;
    float weight;
    ep_gate_config c = make_config(R4, 4, 1);
    c.groups = 2;
    c.groups_kept = 1;
    cr_assert_eq(ep_gate(&c, 1, logits, &id, &weight, NULL), EP_OK);
    cr_assert_eq(id, 2);
    c.group_best = 1;
    cr_assert_eq(ep_gate(&c, 1, logits, &id, &weight, NULL), EP_OK);
    cr_assert_eq(id, 0);
}

Test(gate, masked_logits_of_minus_infinity_have_weight_0)
{
    const float logits[] = {-INFINITY, 1.0f, -INFINITY};
    int32_t ids[2];
    float weights[2];
    ep_gate_config c = make_config(R2, 3, 2);
    cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, NULL), EP_OK);
    cr_assert(ids[0] == 1 && weights[0] == 1.0f && ids[1] == 0 && weights[1] == 0.0f);
}

static float halve(void *arg, uint32_t token, uint32_t slot, uint32_t expert, float weight)
{
    unsigned *calls = arg;
    *calls += 1000 * token + 100 * slot + expert;
    return weight * 0.5f;
}

Test(gate, the_callers_weight_function_has_the_last_word)
{
    const float logits[] = {0, 1, 0, 1};
    int32_t ids[2];
    float weights[2];
    unsigned calls = 0;
    ep_gate_config c = make_config(R1, 2, 1);
    c.weight_func = halve;
    c.weight_func_arg = &calls;
    cr_assert_eq(ep_gate(&c, 2, logits, ids, weights, NULL), EP_OK);
    cr_assert(weights[0] == 0.5f && weights[1] == 0.5f);
    cr_assert_eq(calls, 1 + 1001);
}

Test(gate, noise_is_repeatable_by_seed_and_follows_gumbel_top_k)
{
    enum { TOKENS = 20000 };
    static float logits[TOKENS * 4];
    static int32_t ids[TOKENS];
    static int32_t again[TOKENS];
    static float weights[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        for (int e = 0; e < 4; e++) {
            logits[t * 4 + e] = logf((float)(e + 1));
        }
    }
    ep_gate_config c = make_config(R1, 4, 1);
    c.noise_temperature = 1.0f;
    c.seed = 5;
    cr_assert_eq(ep_gate(&c, TOKENS, logits, ids, weights, NULL), EP_OK);
    cr_assert_eq(ep_gate(&c, TOKENS, logits, again, weights, NULL), EP_OK);
    cr_assert_eq(memcmp(ids, again, sizeof(ids)), 0);
    c.seed = 6;
    cr_assert_eq(ep_gate(&c, TOKENS, logits, again, weights, NULL), EP_OK);
    cr_assert_neq(memcmp(ids, again, sizeof(ids)), 0);
    /* argmax(log p + Gumbel) is a draw from p = 0.1, 0.2, 0.3, 0.4: 5 standard deviations are below
     * 0.018 */
    unsigned counts[4] = {0};
    for (int t = 0; t < TOKENS; t++) {
        counts[ids[t]]++;
    }
    for (int e = 0; e < 4; e++) {
        cr_assert(fabs((double)counts[e] / TOKENS - 0.1 * (e + 1)) < 0.018, "expert %d: %u", e,
                  counts[e]);
    }
}

/* Each way to select, with a way to weigh that goes with it. */
static const struct {
    ep_gate_score select, weight;
} families[] = {{EP_GATE_LOGIT, EP_GATE_SOFTMAX_SELECTED},
                {EP_GATE_LOGIT, EP_GATE_LOGIT},
                {EP_GATE_SOFTMAX, EP_GATE_SOFTMAX},
                {EP_GATE_SIGMOID, EP_GATE_SIGMOID},
                {EP_GATE_SQRT_SOFTPLUS, EP_GATE_SQRT_SOFTPLUS},
                {EP_GATE_SPARSEMIXER, EP_GATE_SPARSEMIXER}};
#define FAMILIES (sizeof(families) / sizeof(families[0]))

/* Argmax of l / T + Gumbel noise is a draw from softmax(l / T): chi-square of the counts has E - 1
 * degrees of freedom. */
static void check_draws(size_t family, float temperature)
{
    enum { TOKENS = 10000, E = 64 };
    static float logits[TOKENS * E];
    static int32_t ids[TOKENS];
    static float weights[TOKENS];
    unsigned counts[E] = {0};
    int parts = 0;
    double chi_square = 0;
    for (int e = 0; e < E; e++) {
        parts += e == 5 ? 0 : e % 7 + 1;
    }
    for (int t = 0; t < TOKENS; t++) {
        for (int e = 0; e < E; e++) { /* expert 5 has 0.9, the others unequal parts of 0.1 */
            logits[t * E + e] =
                temperature * logf(e == 5 ? 0.9f : 0.1f * (float)(e % 7 + 1) / (float)parts);
        }
    }
    ep_gate_config c = make_config(R1, E, 1);
    c.select = families[family].select;
    c.weight = families[family].weight;
    c.jitter = 0.01f;
    c.noise_temperature = temperature;
    c.seed = 42 + family;
    cr_assert_eq(ep_gate(&c, TOKENS, logits, ids, weights, NULL), EP_OK);
    for (int t = 0; t < TOKENS; t++) {
        counts[ids[t]]++;
    }
    for (int e = 0; e < E; e++) {
        double expected = TOKENS * exp((double)logits[e] / (double)temperature);
        chi_square += ((double)counts[e] - expected) * ((double)counts[e] - expected) / expected;
    }
    cr_assert(chi_square < 63 + 5 * sqrt(2 * 63),
              "family %zu, temperature %g: chi-square %g, best %u of %d", family,
              (double)temperature, chi_square, counts[5], TOKENS);
}

Test(gate, noise_draws_experts_by_their_probability_in_every_family)
{
    for (size_t family = 0; family < FAMILIES; family++) {
        check_draws(family, 1.0f);
        check_draws(family, 0.5f);
        check_draws(family, 3.0f);
    }
}

Test(gate, choice_and_weights_are_those_of_the_noised_logits)
{
    enum { TOKENS = 50, E = 16, K = 4 };
    float logits[TOKENS * E], noised[TOKENS * E], all_weights[TOKENS * E];
    int32_t all_ids[TOKENS * E];
    uint64_t state = 7;
    for (int i = 0; i < TOKENS * E; i++) {
        logits[i] = (float)(uniform(&state) * 4 - 2);
    }
    ep_gate_config all = make_config(R1, E, E);
    all.weight = EP_GATE_LOGIT; /* so that weights are the logits after noise */
    all.softcap = 30.0f;
    all.noise_temperature = 0.7f;
    cr_assert_eq(ep_gate(&all, TOKENS, logits, all_ids, all_weights, NULL), EP_OK);
    for (int i = 0; i < TOKENS * E; i++) {
        noised[i / E * E + all_ids[i]] = all_weights[i];
    }
    for (size_t family = 0; family < FAMILIES; family++) {
        int32_t ids[2][TOKENS * K];
        float weights[2][TOKENS * K];
        ep_gate_config c = make_config(R1, E, K);
        c.select = families[family].select;
        c.weight = families[family].weight;
        c.jitter = 0.1f;
        cr_assert_eq(ep_gate(&c, TOKENS, noised, ids[0], weights[0], NULL), EP_OK);
        c.softcap = 30.0f;
        c.noise_temperature = 0.7f;
        cr_assert_eq(ep_gate(&c, TOKENS, logits, ids[1], weights[1], NULL), EP_OK);
        cr_assert_eq(memcmp(ids[0], ids[1], sizeof(ids[0])), 0, "family %zu", family);
        cr_assert_eq(memcmp(weights[0], weights[1], sizeof(weights[0])), 0, "family %zu", family);
    }
}

Test(gate, dropout_leaves_experts_out_but_always_fills_every_slot)
{
    enum { TOKENS = 20000 };
    static float logits[TOKENS * 2];
    static int32_t ids[TOKENS * 2];
    static float weights[TOKENS * 2];
    unsigned dropped = 0;
    for (int t = 0; t < TOKENS; t++) {
        logits[t * 2] = 1.0f;
    }
    ep_gate_config c = make_config(R1, 2, 1);
    c.expert_dropout = 0.25f;
    cr_assert_eq(ep_gate(&c, TOKENS, logits, ids, weights, NULL), EP_OK);
    for (int t = 0; t < TOKENS; t++) {
        dropped += ids[t] == 1;
    }
    /* expert 1 is chosen when 0 is dropped and 1 is not: 0.25 * 0.75 */
    cr_assert(fabs((double)dropped / TOKENS - 0.1875) < 0.014, "%u", dropped);
    c.top_k = 2;
    cr_assert_eq(ep_gate(&c, TOKENS, logits, ids, weights, NULL), EP_OK);
    for (int t = 0; t < TOKENS; t++) {
        cr_assert_eq(ids[2 * t] + ids[2 * t + 1], 1);
    }
}

/* Neither dropout nor a logit of -inf makes an expert worse than those of groups that were not
 * kept. */
Test(gate, experts_outside_the_groups_kept_are_never_taken_under_minus_inf)
{
    enum { TOKENS = 2000, E = 12, GROUPS = 3, SIZE = E / GROUPS };
    static float logits[TOKENS * E];
    static int32_t ids[TOKENS * SIZE];
    static float weights[TOKENS * SIZE];
    for (int t = 0; t < TOKENS; t++) {
        for (int e = 0; e < E; e++) {
            logits[t * E + e] = e / SIZE == t % GROUPS ? 2.0f + (float)e : (float)(e % SIZE);
        }
        logits[t * E + t % GROUPS * SIZE + t % SIZE] = -INFINITY;
    }
    ep_gate_config c = make_config(R1, E, SIZE);
    c.groups = GROUPS;
    c.groups_kept = 1;
    c.group_best = 1;
    c.group_mask = EP_GROUP_MASK_MINUS_INF;
    for (int dropout = 0; dropout < 2; dropout++) {
        c.expert_dropout = 0.5f * (float)dropout;
        cr_assert_eq(ep_gate(&c, TOKENS, logits, ids, weights, NULL), EP_OK);
        for (int i = 0; i < TOKENS * SIZE; i++) {
            const int t = i / SIZE;
            cr_assert_eq(ids[i] / SIZE, t % GROUPS, "dropout %d, token %d: expert %d", dropout, t,
                         ids[i]);
        }
    }
}

/* Two tokens of known logits, by hand. */
Test(gate, load_is_that_of_the_formulas)
{
    enum { E = 4, K = 2, TOKENS = 3 };
    const float logits[TOKENS * E] = {0, logf(2), logf(4), logf(1), 9,         9,
                                      9, 9,       logf(8), 0,       -INFINITY, logf(7)};
    const uint8_t active[] = {1, 0, 1};
    int32_t ids[TOKENS * K] = {0};
    float weights[TOKENS * K];
    double fractions[E], probabilities[E];
    ep_error error;
    ep_gate_load load = {
        .struct_bytes = sizeof(load), .fractions = fractions, .mean_probabilities = probabilities};
    ep_gate_config c = make_config(R2, E, K);
    ASSERT_OK(ep_gate(&c, TOKENS, logits, ids, weights, &error), error);
    ASSERT_OK(ep_gate_load_compute(&c, TOKENS, logits, ids, active, &load, &error), error);
    /* slots: 2, 1 and 0, 3 */
    const double p[] = {(1.0 / 8 + 8.0 / 16) / 2, (2.0 / 8 + 1.0 / 16) / 2, (4.0 / 8) / 2,
                        (1.0 / 8 + 7.0 / 16) / 2};
    for (int e = 0; e < E; e++) {
        cr_assert_float_eq(fractions[e], 0.25, 1e-12);
        cr_assert_float_eq(probabilities[e], p[e], 1e-7);
    }
    cr_assert(load.slots == 4 && load.max_over_mean == 1);
    cr_assert_float_eq(load.auxiliary_loss, 1, 1e-7, "even fractions");
    cr_assert_float_eq(load.z_loss, (log(8) * log(8) + log(16) * log(16)) / 2, 1e-6);

    c.load = &load; /* of all tokens: the second takes experts 0 and 1 */
    ASSERT_OK(ep_gate(&c, TOKENS, logits, ids, weights, &error), error);
    cr_assert(load.slots == 6 && fractions[0] == 2.0 / 6 && fractions[3] == 1.0 / 6 &&
              load.max_over_mean == 2.0 / 6 * E);
    cr_assert_float_eq(load.auxiliary_loss,
                       E *
                           (2 * (2 * p[0] + 0.25) / 3 + 2 * (2 * p[1] + 0.25) / 3 +
                            (2 * p[2] + 0.25) / 3 + (2 * p[3] + 0.25) / 3) /
                           6,
                       1e-7);
    ASSERT_OK(ep_gate(&c, 0, logits, ids, weights, &error), error);
    cr_assert(load.slots == 0 && load.auxiliary_loss == 0 && load.z_loss == 0 &&
              fractions[0] == 0 && probabilities[0] == 0);

    c.select = c.weight = EP_GATE_SIGMOID;
    ASSERT_OK(ep_gate(&c, 1, logits, ids, weights, &error), error);
    const double sigmoids = 1.0 / 2 + 2.0 / 3 + 4.0 / 5 + 1.0 / 2;
    cr_assert_float_eq(probabilities[2], 4.0 / 5 / sigmoids, 1e-7);

    ids[1] = 4;
    load.slots = 77;
    cr_assert_eq(ep_gate_load_compute(&c, 1, logits, ids, NULL, &load, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert(strcmp(error.text, "expert of token 0, slot 1 is 4: allowed 0..3") == 0 &&
                  load.slots == 77,
              "%s", error.text);
    load.struct_bytes = 8;
    cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ids[1], 4, "outputs must stay untouched");
}

Test(gate, works_above_the_stack_limit_and_for_no_tokens)
{
    enum { E = 5000 };
    float *logits = calloc(E, sizeof(float));
    int32_t ids[3];
    float weights[3];
    logits[4999] = 3.0f;
    logits[17] = 2.0f;
    ep_gate_config c = make_config(R2, E, 3);
    cr_assert_eq(ep_gate(&c, 1, logits, ids, weights, NULL), EP_OK);
    cr_assert(ids[0] == 4999 && ids[1] == 17 && ids[2] == 0);
    cr_assert_eq(ep_gate(&c, 0, NULL, NULL, NULL, NULL), EP_OK);
    free(logits);
}

static void expect_refused(const ep_gate_config *c, const float *logits, uint32_t tokens,
                           const char *text)
{
    int32_t ids[64];
    float weights[64];
    memset(ids, 0x55, sizeof(ids));
    memset(weights, 0x55, sizeof(weights));
    ep_error error;
    cr_assert_eq(ep_gate(c, tokens, logits, ids, weights, &error), EP_ERR_INVALID_ARGUMENT,
                 "accepted, expected: %s", text);
    cr_assert_str_eq(error.text, text);
    for (int i = 0; i < 64; i++) {
        cr_assert_eq(ids[i], 0x55555555, "outputs must stay untouched");
    }
}

Test(gate, refuses_logits_it_cannot_order)
{
    float logits[8] = {0};
    ep_gate_config c = make_config(R4, 4, 2);
    logits[6] = NAN;
    expect_refused(&c, logits, 2, "router logit is NaN at token 1, expert 2");
    logits[6] = INFINITY;
    int32_t ids[4];
    float weights[4];
    cr_assert_eq(ep_gate(&c, 2, logits, ids, weights, NULL), EP_OK, "a sigmoid takes infinities");
    c.weight = EP_GATE_SOFTMAX_SELECTED;
    expect_refused(&c, logits, 2,
                   "router logit is inf at token 1, expert 2: a softmax needs a finite maximum");
    for (int e = 0; e < 4; e++) {
        logits[e] = -INFINITY;
    }
    expect_refused(&c, logits, 2,
                   "router logit is -inf at token 0, expert 0: a softmax needs a finite maximum");
}

Test(gate, refuses_a_wrong_configuration_by_name)
{
    const float logits[64] = {0};
    const float bias[] = {0, 0, NAN, 0, 0, 0, 0, 0};
    const int32_t chosen[] = {7, 8};
    ep_gate_config c;
#define REFUSED(change, text)                                                                      \
    c = make_config(R4, 8, 2);                                                                     \
    change;                                                                                        \
    expect_refused(&c, logits, 1, text)
    REFUSED(c.select = (ep_gate_score)0, "router selects by score 0: allowed 1..4, 6");
    REFUSED(c.select = EP_GATE_SOFTMAX_SELECTED, "router selects by score 5: allowed 1..4, 6");
    REFUSED(c.weight = (ep_gate_score)7, "router weighs by score 7: allowed 1..6");
    REFUSED(c.weight = EP_GATE_SPARSEMIXER,
            "router selects by score 3 and weighs by 6: allowed with 6 (sparsemixer): both 6");
    REFUSED((c.select = c.weight = EP_GATE_SPARSEMIXER, c.expert_dropout = 0.5f),
            "a sparsemixer router has a bias, groups, chosen experts or dropout: allowed none");
    REFUSED((c.chosen = chosen, c.noise_temperature = 1),
            "a router with chosen experts has noise or dropout: allowed neither, for nothing is "
            "left to choose");
    REFUSED(c.experts = 0, "router has 0 experts: allowed 1..65535");
    REFUSED(c.top_k = 9, "router's top_k 9: allowed 1..8");
    REFUSED(c.top_k = 0, "router's top_k 0: allowed 1..8");
    REFUSED(c.groups = 3, "router has 3 groups: allowed 0..256, a divisor of 8 experts");
    REFUSED(c.groups_kept = 2, "router keeps 2 groups: allowed 0, 1 without groups");
    REFUSED((c.groups = 4, c.groups_kept = 5), "router keeps 5 groups: allowed 1..4");
    REFUSED((c.groups = 4, c.group_best = 3), "a group's score is of its best 3: allowed 1, 2");
    REFUSED((c.groups = 8, c.group_mask = EP_GROUP_MASK_MINUS_INF),
            "router's top_k 2: allowed 1..1, the experts of the groups kept");
    REFUSED(c.scaling_factor = -1, "router's scaling factor -1: allowed 0 or more");
    REFUSED(c.sum_min = INFINITY, "router's smallest sum inf: allowed 0 or more");
    REFUSED(c.softcap = -2, "router's softcap -2: allowed 0 or more");
    REFUSED(c.jitter = NAN, "router's jitter nan: allowed 0 or more");
    REFUSED(c.expert_factors = bias,
            "router's factor of expert 2 is nan: only finite values are allowed");
    REFUSED(c.chosen = chosen, "expert chosen for token 0, slot 1 is 8: allowed 0..7");
    REFUSED(c.epsilon = -1, "router's epsilon -1: allowed 0 or more");
    REFUSED(c.noise_temperature = 0.05f,
            "router's noise temperature 0.05: allowed 0 (off) or 0.1..10");
    REFUSED(c.noise_temperature = 11, "router's noise temperature 11: allowed 0 (off) or 0.1..10");
    REFUSED(c.expert_dropout = 0.6f, "router's expert dropout 0.6: allowed 0..0.5");
    REFUSED(c.bias = bias, "router's bias of expert 2 is nan: only finite values are allowed");
#undef REFUSED
    c = make_config(R1, 8, 2);
    c.struct_bytes = 8;
    ep_error error;
    int32_t id;
    float weight;
    ASSERT_FAILS(ep_gate(&c, 1, logits, &id, &weight, &error), EP_ERR_INVALID_ARGUMENT, error,
                 "struct_bytes of the gate is 8");
}
