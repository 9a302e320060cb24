/* SPDX-License-Identifier: Apache-2.0 */
/* Plans for machines that do not exist yet: costs against numbers worked out by hand, loads drawn
 * and read, figures of a machine worked out of times and read. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plan_cost.h"
#include "plan_load.h"
#include "plan_machine.h"
#include "support/expect.h"

#define NEAR(a, b) cr_assert_float_eq(a, b, 1e-9, "%.12g is not %.12g", a, b)

/* Each token takes all four experts, so that nothing is left to a draw. Expert 0 on both nodes, 1
 * on the first, 2 and 3 on the second, which has the shared expert if there is one. Clients take
 * expert 0 from the first. */
static const double even[] = {0.25, 0.25, 0.25, 0.25};
static uint32_t offsets[] = {0, 2, 3, 4, 5, 6}, copies[] = {0, 1, 0, 1, 1, 1};
#define VISITS_0                                                                                   \
    (1 - pow(1 - 0.375, 4)) /* a token goes to the first node: 1.5 of 4 slots, of one copy in two  \
                             */
#define VISITS_1 (1 - pow(1 - 0.625, 4))

static ep_plan_layer layer_of(bool has_shared)
{
    return (ep_plan_layer){.nodes = 2,
                           .experts = 4,
                           .has_shared = has_shared,
                           .top_k = 4,
                           .shares = even,
                           .offsets = offsets,
                           .copies = copies,
                           .expert_weights = 500,
                           .shared_weights = 250,
                           .weight_bytes = 2,
                           .row_bytes = 100};
}

static ep_plan_machine machine_of(double compute_per_s, uint32_t nodes_per_host,
                                  uint32_t nodes_at_once)
{
    return (ep_plan_machine){.memory_bytes_per_s = 1000,
                             .compute_per_s = compute_per_s,
                             .link_bytes_per_s = 300,
                             .round_trip_s = 0.25,
                             .nodes_per_host = nodes_per_host,
                             .nodes_at_once = nodes_at_once};
}

static ep_plan_cost cost(const ep_plan_layer *layer, ep_plan_machine machine, double tokens)
{
    ep_plan_cost out;
    cr_assert_eq(ep_plan_cost_of(layer, &machine, tokens, &out), EP_OK);
    return out;
}

Test(plan, one_token_reads_weights)
{
    const ep_plan_layer layer = layer_of(false);
    const ep_plan_cost one = cost(&layer, machine_of(1e15, 1, 1), 1);
    NEAR(one.nodes_per_token, VISITS_0 + VISITS_1);
    NEAR(one.dispatch_bytes, 100 * (VISITS_0 + VISITS_1));
    NEAR(one.combine_bytes, 400.0); /* a row of each expert */
    NEAR(one.read_bytes, 2000.0);
    NEAR(one.time_s, 0.25 + 2 + 100 * (VISITS_1 + 2) / 300); /* both compute as long; more rows go
                                                                to the second */
}

Test(plan, a_shared_expert_is_where_every_token_goes)
{
    const ep_plan_layer layer = layer_of(true);
    const ep_plan_cost one = cost(&layer, machine_of(1e15, 1, 1), 1);
    NEAR(one.nodes_per_token, VISITS_0 + 1);
    NEAR(one.combine_bytes, 500.0);
    NEAR(one.read_bytes, 2500.0);
    NEAR(one.time_s, 0.25 + 2.5 + 100 * (1 + 3) / 300.0);
}

Test(plan, many_tokens_compute)
{
    const ep_plan_layer layer = layer_of(false);
    const ep_plan_cost many = cost(&layer, machine_of(1000, 1, 1),
                                   100000); /* a second for an expert's row, and to read it */
    NEAR(many.read_bytes, 2000.0);
    NEAR(many.time_s, 0.25 + 2 * 100000 + 100 * 100000 * (VISITS_1 + 2) / 300);
}

Test(plan, nodes_of_a_host_share_it)
{
    const ep_plan_layer layer = layer_of(true);
    const double network_s = 100 * (VISITS_0 + 1 + 5) / 300;
    /* Alone they would take 2 and 2.5 s. */
    NEAR(cost(&layer, machine_of(1e15, 2, 1), 1).time_s, 0.25 + 4.5 + network_s);
    NEAR(cost(&layer, machine_of(1e15, 2, 2), 1).time_s, 0.25 + 5 + network_s);
}

Test(plan, reading_and_computing_overlap)
{
    NEAR(ep_plan_expert_s(3, 4, true), cbrt(27 + 64));
    NEAR(ep_plan_expert_s(5, 12, false), 13.0);
    NEAR(ep_plan_expert_s(0, 4, true), 4.0);
    NEAR(ep_plan_expert_part_s(cbrt(27 + 64), 3, true), 4.0);
    NEAR(ep_plan_expert_part_s(13, 12, false), 5.0);
    cr_assert(isnan(ep_plan_expert_part_s(3, 3, true)));
}

/* Two nodes of one expert; each token goes to one of them. */
static double two_nodes_s(double tokens)
{
    static const double halves[] = {0.5, 0.5};
    static uint32_t ends[] = {0, 1, 2}, nodes[] = {0, 1};
    const ep_plan_layer layer = {.nodes = 2,
                                 .experts = 2,
                                 .top_k = 1,
                                 .shares = halves,
                                 .offsets = ends,
                                 .copies = nodes,
                                 .expert_weights = 500,
                                 .weight_bytes = 2};
    ep_plan_machine machine = machine_of(1000, 1, 1);
    machine.memory_bytes_per_s = 1e15;
    return cost(&layer, machine, tokens).time_s - 0.25;
}

Test(plan, a_step_ends_with_its_busiest_node)
{
    NEAR(two_nodes_s(1), 1.0);
    cr_assert_float_eq(two_nodes_s(2), 1.5, 0.07); /* the mean of a node is 1, and every other time
                                                      one has both */
    const double many =
        two_nodes_s(1e6) / 5e5; /* of the mean: a thousandth above it, 0.8 standard deviations */
    cr_assert(many > 1.0002 && many < 1.002, "%g", many);
}

/* Experts 0 and 1 on the first node, 3 to 66 on the second. Each token takes the first three and
 * one of the others; expert 2 has copies from first_node to last_node. */
static double read_with_copies(uint32_t first_node, uint32_t last_node, double tokens)
{
    enum { FEW = 64 };
    double shares[3 + FEW];
    uint32_t ends[3 + FEW + 1] = {0, 1, 2}, nodes[3 + FEW + 1] = {0, 0, first_node, last_node};
    uint32_t count = 3 + last_node - first_node;
    for (uint32_t e = 0; e < 3 + FEW; e++) {
        shares[e] = e < 3 ? 0.25 : 0.25 / FEW;
        if (e >= 3) {
            ends[e] = count;
            nodes[count++] = 1;
        }
    }
    ends[3 + FEW] = count;
    const ep_plan_layer layer = {.nodes = 2,
                                 .experts = 3 + FEW,
                                 .top_k = 4,
                                 .shares = shares,
                                 .offsets = ends,
                                 .copies = nodes,
                                 .expert_weights = 500,
                                 .weight_bytes = 2};
    return cost(&layer, machine_of(1000, 1, 1), tokens).read_bytes;
}

/* The first node always has twice the slots, and fewer experts to read. */
Test(plan, copies_are_chosen_by_passes_over_weights_too)
{
    NEAR(read_with_copies(1, 1, 8), read_with_copies(0, 0, 8) + 1000);
    NEAR(read_with_copies(0, 1, 8), read_with_copies(0, 0, 8));
    NEAR(read_with_copies(0, 1, 5000), read_with_copies(1, 1, 5000));
}

Test(plan, a_token_takes_an_expert_once_and_by_its_share)
{
    enum { TOKENS = 20000 };
    static const double uneven[] = {0.3, 0.5, 0.05, 0.15};
    uint32_t order[] = {0, 1, 2, 3}, slots[4], sum = 0;
    uint64_t random = 3;
    ep_plan_draw(uneven, 4, 2, TOKENS, &random, order, slots);
    cr_assert_eq(slots[1], TOKENS);
    for (int e = 0; e < 4; e++) {
        cr_assert_float_eq((double)slots[e] / TOKENS, 2 * uneven[e], 0.015, "%d: %u", e, slots[e]);
        sum += slots[e];
    }
    cr_assert_eq(sum, 2 * TOKENS);
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
    expect_capped((const double[]){4, 3, 2, 1}, 4, 1, (const double[]){0.4, 0.3, 0.2, 0.1});
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

#define PATH "/tmp/plan-XXXXXX"

static void write_text(const char *text, char path[sizeof(PATH)])
{
    strcpy(path, PATH);
    const int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
}

static ep_err read_text(const char *text, ep_plan_load *out_load, ep_error *error)
{
    char path[sizeof(PATH)];
    write_text(text, path);
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
    ASSERT_OK(read_text(FILE_OF(GOOD "," ENTRY(1, 4, LOAD(0, 0, 5, 5))), &load, &error), error);
    for (int e = 0; e < 4; e++) {
        NEAR(load.shares[0][e], e < 2 ? 0.0 : 0.5);
        NEAR(load.shares[1][e], (4 - e) / 10.0);
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
        {FILE_OF(GOOD ",{\"model\":\"m\",\"version\":\"w\"}"), "holds versions v and w, allowed"},
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

/* ---- figures of a machine ---- */

/* 8 experts of 64 x 32, two of them a token, on one node unless told otherwise. */
static ep_routing_table *table_of(const char *numerics, uint32_t nodes, uint32_t shared_experts)
{
    const ep_layer_shape shape = {.layer = 3,
                                  .hidden = 64,
                                  .inner = 32,
                                  .experts = 8,
                                  .shared_experts = shared_experts,
                                  .top_k = 2};
    ep_routing_table *table;
    cr_assert_eq(ep_routing_table_create(nodes, 1, 1, &table), EP_OK);
    cr_assert_eq(ep_routing_table_model_init(table, 0, "m", "v", 1), EP_OK);
    snprintf(table->models[0].numerics[0], EP_NUMERICS_BYTES, "%s", numerics);
    cr_assert_eq(ep_routing_table_layer_init(table, 0, 0, &shape, 8 + shared_experts), EP_OK);
    for (uint32_t e = 0; e < 8 + shared_experts; e++) {
        table->layers[0].offsets[e + 1] = e + 1;
        table->layers[0].copies[e] = e % nodes;
    }
    return table;
}

/* As a machine with these figures takes: 1e8 bytes/s, 1e9 operations/s, 1e7 bytes/s of network, 1
 * ms. */
static ep_plan_measured as_measured(double tokens, double expert_bytes, bool is_plain)
{
    const double read = tokens == 1 ? 2 : 8; /* experts */
    const double compute_s =
        read *
        ep_plan_expert_s(expert_bytes / 1e8, 2 * 3 * 64 * 32 * tokens * 2 / read / 1e9, is_plain);
    return (ep_plan_measured){tokens, 1e-3 + compute_s + tokens * 64 * 2 * 3 / 1e7, compute_s};
}

static void expect_figures(const char *numerics, double expert_bytes, bool is_plain)
{
    const ep_plan_measured few = as_measured(1, expert_bytes, is_plain),
                           many = as_measured(256, expert_bytes, is_plain);
    ep_routing_table *table = table_of(numerics, 1, 0);
    ep_plan_machine machine = {0};
    ep_error error = {0};
    ASSERT_OK(ep_plan_machine_fit(table, &table->layers[0], &few, &many, &machine, &error), error);
    ep_routing_table_unref(table);
    cr_assert_float_eq(machine.memory_bytes_per_s / 1e8, 1, 1e-6);
    cr_assert_float_eq(machine.compute_per_s / 1e9, 1, 1e-6);
    cr_assert_float_eq(machine.link_bytes_per_s / 1e7, 1, 1e-6);
    cr_assert_float_eq(machine.round_trip_s / 1e-3, 1, 1e-6);
}

Test(plan, figures_follow_from_two_sizes)
{
    expect_figures("bf16dp/bf16/rne/8235a8a3", 3 * 64 * 32 * 2, true);
    expect_figures("bf16dp/mxfp4/rne/b6c61960", 3 * 64 * 32 * 4.25 / 8, false);
}

Test(plan, figures_that_do_not_follow_are_refused)
{
    const ep_plan_measured few = as_measured(1, 12288, true), many = as_measured(256, 12288, true);
    const ep_plan_measured some = as_measured(64, 12288, true), slow = {1, 1, 0.9},
                           quick = {256, few.total_s, few.compute_s};
    const struct {
        const char *numerics;
        uint32_t nodes, shared_experts;
        const ep_plan_measured *few, *many;
        const char *part;
    } cases[] = {
        {"bf16dp/bf16/rne/1", 2, 0, &few, &many, "layer 3 is not whole on one node"},
        {"bf16dp/bf16/rne/1", 1, 1, &few, &many, "layer 3 has a shared expert"},
        {"bf16dp/bf16+mxfp4/rne/1", 1, 0, &few, &many,
         "the numerics of m are bf16dp/bf16+mxfp4/rne/1"},
        {"", 1, 0, &few, &many, "no single weight format"},
        {"bf16dp/bf16/rne/1", 1, 0, &few, &some,
         "sizes 1 to 64 were measured: of layer 3 one token, and 128 or more"},
        {"bf16dp/bf16/rne/1", 1, 0, &some, &many, "one token, and 128 or more"},
        {"bf16dp/bf16/rne/1", 1, 0, &slow, &many,
         "1 tokens took 1000000 us, 900000 of them computing"},
        {"bf16dp/bf16/rne/1", 1, 0, &few, &quick, "other load was in the way"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ep_routing_table *table =
            table_of(cases[i].numerics, cases[i].nodes, cases[i].shared_experts);
        ep_plan_machine machine;
        ep_error error = {0};
        cr_assert_eq(ep_plan_machine_fit(table, &table->layers[0], cases[i].few, cases[i].many,
                                         &machine, &error),
                     EP_ERR_INVALID_ARGUMENT);
        cr_assert_not_null(strstr(error.text, cases[i].part), "%s\nis not: %s", error.text,
                           cases[i].part);
        ep_routing_table_unref(table);
    }
}

#define FIGURES(memory, rest)                                                                      \
    "{\"machine\":{\"memory_bytes_per_s\":" memory                                                 \
    ",\"compute_per_s\":2e12,\"link_bytes_per_s\":3e9" rest "}}"

Test(plan, figures_are_read_as_tune_writes_them)
{
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"{}", "has no \"machine\": expertctl tune -o json writes it"},
        {"{\"machine\":null,\"machine_why\":\"too busy\"}",
         "has no \"machine\": too busy: expertctl tune"},
        {FIGURES("1e11", ""), "machine: round_trip_seconds is not given, allowed: 1e-06 to 60"},
        {FIGURES("1e11", ",\"round_trip_seconds\":61"),
         "round_trip_seconds is 61, allowed: 1e-06 to 60"},
        {FIGURES("1e-310", ",\"round_trip_seconds\":1e-4"),
         "machine: memory_bytes_per_s is 1e-310, allowed: 1024 to 1.1259e+15"},
        {FIGURES("1e16", ",\"round_trip_seconds\":1e-4"),
         "machine: memory_bytes_per_s is 1e+16, allowed"},
        {FIGURES("0", ",\"round_trip_seconds\":1e-4"), "machine: memory_bytes_per_s is 0, allowed"},
        {FIGURES("\"1\"", ",\"round_trip_seconds\":1e-4"),
         "machine: memory_bytes_per_s is \"1\", allowed"},
    };
    char path[sizeof(PATH)];
    ep_plan_machine machine = {.nodes_per_host = 7};
    ep_error error = {0};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_text(cases[i].text, path);
        cr_assert_eq(ep_plan_machine_read(path, &machine, &error), EP_ERR_BAD_FILE, "%s",
                     cases[i].text);
        unlink(path);
        cr_assert_not_null(strstr(error.text, cases[i].part), "%s\nis not: %s", error.text,
                           cases[i].part);
    }
    const ep_plan_machine wrote = {1e11, 2e12, 3e9, 1e-4, 0, 0};
    json_t *root = json_pack("{s:o}", "machine", ep_plan_machine_json(&wrote));
    char *text = json_dumps(root, 0);
    write_text(text, path);
    ASSERT_OK(ep_plan_machine_read(path, &machine, &error), error);
    unlink(path);
    free(text);
    json_decref(root);
    NEAR(machine.memory_bytes_per_s, 1e11);
    NEAR(machine.compute_per_s, 2e12);
    NEAR(machine.link_bytes_per_s, 3e9);
    NEAR(machine.round_trip_s, 1e-4);
    cr_assert_eq(machine.nodes_per_host, 7u, "is no figure of the file");
}
