/* SPDX-License-Identifier: Apache-2.0 */
/* Plans for machines that do not exist yet: the formulas against numbers worked out by hand, loads
 * drawn and read. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plan_cost.h"
#include "plan_load.h"

#define NEAR(a, b) cr_assert_float_eq(a, b, 1e-9, "%.12g is not %.12g", a, b)

/* Expert 0 on both nodes, 1 on the first, 2 and 3 on the second, which has the shared expert if
 * there is one. */
static const double shares[] = {0.4, 0.3, 0.2, 0.1};
static const uint32_t offsets[] = {0, 2, 3, 4, 5, 6}, copies[] = {0, 1, 0, 1, 1, 1};
static const ep_plan_machine machine = {
    .memory_bytes_per_s = 1000, .link_bytes_per_s = 300, .round_trip_s = 0.25};

static ep_plan_cost cost(bool has_shared, double tokens)
{
    const ep_plan_layer layer = {.nodes = 2,
                                 .experts = 4,
                                 .has_shared = has_shared,
                                 .top_k = 2,
                                 .shares = shares,
                                 .offsets = offsets,
                                 .copies = copies,
                                 .expert_bytes = 1000,
                                 .shared_bytes = 500,
                                 .row_bytes = 100};
    ep_plan_cost out;
    cr_assert_eq(ep_plan_cost_of(&layer, &machine, tokens, &out), EP_OK);
    return out;
}

Test(plan, cost_of_one_token)
{
    const ep_plan_cost one = cost(false, 1);
    NEAR(one.nodes_per_token, 1.5); /* half of the slots on each: 1 - 0.5^2, twice */
    NEAR(one.network_bytes, 150.0);
    NEAR(one.read_bytes, 1000 * ((1 - 0.8 * 0.8) + (1 - 0.8 * 0.8) +
                                 (1 - 0.9 * 0.9))); /* the second: 910, the first: 870 */
    NEAR(one.time_s, 0.91 + 2 * 100 * 0.75 / 300 + 0.25);
}

Test(plan, a_shared_expert_is_where_every_token_goes)
{
    const ep_plan_cost one = cost(true, 1);
    NEAR(one.nodes_per_token, 0.75 + 1);
    NEAR(one.read_bytes, 910.0 + 500);
    NEAR(one.time_s, 1.41 + 200.0 / 300 + 0.25);
}

Test(plan, many_tokens_read_every_expert_once)
{
    const ep_plan_cost many = cost(false, 100000);
    NEAR(many.read_bytes, 3000.0);
    NEAR(many.nodes_per_token, 1.5);
    NEAR(many.time_s, 3 + 200.0 * 100000 * 0.75 / 300 + 0.25);
}

static void expect_capped(const double *before, uint32_t experts, uint32_t top_k,
                          const double *after)
{
    double out[4];
    memcpy(out, before, experts * sizeof(double));
    ep_plan_cap_shares(out, experts, top_k);
    for (uint32_t e = 0; e < experts; e++) {
        NEAR(out[e], after[e]);
    }
}

Test(plan, no_expert_gets_more_than_a_slot_of_each_token)
{
    expect_capped((const double[]){8, 1, 1}, 3, 2, (const double[]){0.5, 0.25, 0.25});
    expect_capped((const double[]){1, 1, 2}, 3, 2, (const double[]){0.25, 0.25, 0.5});
    expect_capped((const double[]){60, 30, 5, 5}, 4, 3,
                  (const double[]){1 / 3.0, 1 / 3.0, 1 / 6.0, 1 / 6.0}); /* the second only then */
    expect_capped((const double[]){4, 3, 2, 1}, 4, 4, (const double[]){0.25, 0.25, 0.25, 0.25});
    expect_capped((const double[]){4, 3, 2, 1}, 4, 1, shares);
}

static const ep_layer_shape layers[] = {{.layer = 1, .experts = 4, .top_k = 2},
                                        {.layer = 2, .experts = 4, .top_k = 2}};

Test(plan, drawn_load_is_a_function_of_the_seed)
{
    const ep_layer_shape wide[] = {{.experts = 64, .top_k = 2}, {.experts = 64, .top_k = 2}};
    ep_plan_load load[3];
    double sum = 0, most = 0;
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(ep_plan_load_draw(1, i < 2 ? 7 : 8, wide, 2, &load[i], NULL), EP_OK);
    }
    cr_assert_eq(memcmp(load[0].shares[1], load[1].shares[1], 64 * sizeof(double)), 0);
    cr_assert_neq(memcmp(load[0].shares[0], load[0].shares[1], 64 * sizeof(double)), 0,
                  "layers are alike");
    cr_assert_neq(memcmp(load[0].shares[0], load[2].shares[0], 64 * sizeof(double)), 0,
                  "seeds are alike");
    for (int e = 0; e < 64; e++) {
        sum += load[0].shares[0][e];
        most = fmax(most, load[0].shares[0][e]);
    }
    double harmonic = 0;
    for (int r = 1; r <= 64; r++) {
        harmonic += 1.0 / r;
    }
    NEAR(sum, 1.0);
    NEAR(most, 1 / harmonic);
    for (int i = 0; i < 3; i++) {
        ep_plan_load_fini(&load[i]);
    }
}

static ep_err read_text(const char *text, ep_plan_load *out_load, ep_error *error)
{
    char path[] = "/tmp/plan-load-XXXXXX";
    const int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    const ep_err err = ep_plan_load_read(path, layers, 2, out_load, error);
    unlink(path);
    return err;
}

#define LOAD(a, b, c, d)                                                                           \
    "\"load\":[{\"expert\":0,\"slots\":" #a ",\"share\":0},{\"expert\":1,\"slots\":" #b            \
    "},{\"expert\":2,\"slots\":" #c "},{\"expert\":3,\"slots\":" #d "}]"
#define ENTRY(number, count, load)                                                                 \
    "{\"model\":\"m\",\"version\":\"v\",\"layer\":" #number ",\"experts\":" #count "," load "}"
#define FILE_OF(...) "{\"layers\":[" __VA_ARGS__ "]}"
#define GOOD ENTRY(2, 4, LOAD(4, 3, 2, 1))

Test(plan, load_is_read_as_stats_writes_it)
{
    ep_plan_load load;
    ep_error error = {0};
    cr_assert_eq(read_text(FILE_OF(GOOD "," ENTRY(1, 4, LOAD(0, 0, 5, 5))), &load, &error), EP_OK,
                 "%s", error.text);
    for (int e = 0; e < 4; e++) {
        NEAR(load.shares[0][e], e < 2 ? 0.0 : 0.5);
        NEAR(load.shares[1][e], shares[e]);
    }
    ep_plan_load_fini(&load);
}

Test(plan, load_of_another_model_is_refused_by_name)
{
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"[1]", "is a JSON array, allowed: an object"},
        {"{}", "has no list \"layers\""},
        {FILE_OF(GOOD), "layer 1 of the model is not there"},
        {FILE_OF(GOOD "," GOOD), "layer 2 is there twice"},
        {FILE_OF(ENTRY(3, 4, LOAD(4, 3, 2, 1))),
         "layers entry 0: layer is 3, the model's MoE layers are 1..2: it is of another model"},
        {FILE_OF(ENTRY(1, 8, LOAD(4, 3, 2, 1))),
         "layer 1 has experts 8, the model 4: it is of another model"},
        {FILE_OF(ENTRY(1, 4, "\"load\":[]")),
         "layer 1: load has 0 experts of 4: expertctl stats --experts -o json writes all"},
        {FILE_OF(ENTRY(1, 4, "\"gini\":0")), "load has 0 experts of 4"},
        {FILE_OF(ENTRY(1, 4, LOAD(9, 0, 0, 0))),
         "layer 1: 1 experts have slots, and each token takes 2: let the service run for longer"},
        {FILE_OF(ENTRY(1, 4, LOAD(9, -1, 0, 0))),
         "layer 1, expert 1: slots is -1, allowed: a whole number 0.."},
        {FILE_OF(ENTRY(1, 4, LOAD(9, "2", 0, 0))), "layer 1, expert 1: slots is \"2\", allowed"},
        {FILE_OF(GOOD ",{\"model\":\"n\",\"version\":\"v\"}"), "holds m and n, allowed: one model"},
        {FILE_OF("{\"layer\":1}"), "layers entry 0 has no model or no version"},
        {FILE_OF("7"), "layers entry 0 has no model or no version"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ep_plan_load load;
        ep_error error = {0};
        cr_assert_eq(read_text(cases[i].text, &load, &error), EP_ERR_BAD_FILE, "%s", cases[i].text);
        cr_assert_not_null(strstr(error.text, cases[i].part), "%s\nis not: %s", error.text,
                           cases[i].part);
    }
}
