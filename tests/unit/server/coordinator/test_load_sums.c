/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of reports: copies add up, restarts and late reports take nothing away, wrong reports are
 * refused. */
#include "coordinator/statistics.h"
#include "support/expect.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ep_error error; /* of the last call */

enum { EXPERTS = 4 };

static uint32_t experts_of(void *arg, const char *model, const char *version, uint32_t layer)
{
    (void)arg;
    return strcmp(model, "m") == 0 && strcmp(version, "v") == 0 && layer == 3 ? EXPERTS : 0;
}

static size_t passes_left_out; /* of a report, the last ones */

static ep_err report(ep_load_sums *sums, const char *node, uint64_t incarnation, size_t count,
                     const uint32_t *experts, const uint64_t *slots, ep_error *out_error)
{
    Expertd__V1__LayerLoad load = EXPERTD__V1__LAYER_LOAD__INIT;
    Expertd__V1__LayerLoad *list[] = {&load};
    Expertd__V1__HeartbeatRequest request = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
    uint32_t named[8];
    uint64_t values[8], passes[8];
    memcpy(named, experts, count * sizeof(*experts));
    memcpy(values, slots, count * sizeof(*slots));
    load.model = (char *)(uintptr_t) "m";
    load.version = (char *)(uintptr_t) "v";
    load.layer = 3;
    load.experts = named;
    load.n_experts = count;
    load.slots = values;
    load.n_slots = count;
    for (size_t i = 0; i < count; i++) {
        passes[i] = 2 * slots[i];
    }
    load.passes = passes;
    load.n_passes = count - passes_left_out;
    request.node = (char *)(uintptr_t)node;
    request.incarnation = incarnation;
    request.loads = list;
    request.n_loads = 1;
    return ep_load_sums_take(sums, experts_of, NULL, &request, out_error);
}

static void expect(ep_load_sums *sums, uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    const uint64_t wanted[EXPERTS] = {a, b, c, d};
    ep_load_layer *layers;
    size_t count;
    cr_assert_eq(ep_load_sums_read(sums, &layers, &count), EP_OK);
    cr_assert_eq(count, 1);
    cr_assert(layers[0].layer == 3 && layers[0].experts == EXPERTS &&
              strcmp(layers[0].model, "m") == 0);
    for (int e = 0; e < EXPERTS; e++) {
        cr_assert_eq(layers[0].counts[e], wanted[e], "expert %d: %llu, not %llu", e,
                     (unsigned long long)layers[0].counts[e], (unsigned long long)wanted[e]);
        cr_assert_eq(layers[0].passes[e], 2 * wanted[e]);
    }
    ep_load_layers_free(layers, count);
}

#define REPORT(node, incarnation, experts, slots)                                                  \
    cr_assert_eq(report(sums, node, incarnation, sizeof((uint32_t[])experts) / 4,                  \
                        (uint32_t[])experts, (uint64_t[])slots, &error),                           \
                 EP_OK, "%s", error.text)
#define LIST(...)                                                                                  \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

Test(load_sums, never_go_back)
{
    ep_load_sums *sums;
    cr_assert_eq(ep_load_sums_create(8, &sums), EP_OK);
    REPORT("a", 1, LIST(0, 2), LIST(10, 5));
    expect(sums, 10, 0, 5, 0);
    REPORT("a", 1, LIST(0, 2), LIST(10, 5)); /* told twice */
    expect(sums, 10, 0, 5, 0);
    REPORT("b", 9, LIST(0, 3), LIST(7, 1)); /* a copy of expert 0 elsewhere */
    expect(sums, 17, 0, 5, 1);
    REPORT("a", 1, LIST(0, 1, 2), LIST(12, 4, 5));
    expect(sums, 19, 4, 5, 1);
    REPORT("a", 1, LIST(0, 2), LIST(11, 5)); /* late */
    expect(sums, 19, 4, 5, 1);
    REPORT("a", 2, LIST(0), LIST(3)); /* began again at 0 */
    expect(sums, 22, 4, 5, 1);
    REPORT("a", 2, LIST(0), LIST(4));
    expect(sums, 23, 4, 5, 1);
    ep_load_sums_destroy(sums);
}

/* As many as a large cluster has, from each node in another order, and with layers that come
 * later. */
enum { LAYERS = 97, NODES = 64 };

static uint32_t experts_of_all(void *arg, const char *model, const char *version, uint32_t layer)
{
    (void)arg, (void)model, (void)version;
    return layer < LAYERS ? EXPERTS : 0;
}

Test(load_sums, layers_in_any_order)
{
    static const uint32_t steps[] = {1, 47, 5, 31};
    ep_load_sums *sums;
    ep_load_layer *layers;
    size_t count;
    static Expertd__V1__LayerLoad loads[LAYERS];
    static Expertd__V1__LayerLoad *list[LAYERS];
    cr_assert_eq(ep_load_sums_create(NODES, &sums), EP_OK);
    for (uint64_t round = 1; round <= 3; round++) {
        for (uint32_t n = 0; n < NODES; n++) {
            uint32_t told = round == 1 ? LAYERS / 2 : LAYERS;
            char name[16];
            Expertd__V1__HeartbeatRequest request = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
            for (uint32_t l = 0; l < told; l++) {
                uint32_t expert = 1;
                uint64_t slots = round;
                expertd__v1__layer_load__init(&loads[l]);
                loads[l].model = (char *)(uintptr_t) "m";
                loads[l].version = (char *)(uintptr_t) "v";
                loads[l].layer = l * steps[n % 4] % told; /* each once: no step divides 48 or 97 */
                loads[l].n_experts = loads[l].n_slots = 1;
                loads[l].experts = memcpy(malloc(sizeof(expert)), &expert, sizeof(expert));
                loads[l].slots = memcpy(malloc(sizeof(slots)), &slots, sizeof(slots));
                list[l] = &loads[l];
            }
            snprintf(name, sizeof(name), "n%u", n);
            request.node = name;
            request.incarnation = 1;
            request.loads = list;
            request.n_loads = told;
            ASSERT_OK(ep_load_sums_take(sums, experts_of_all, NULL, &request, &error), error);
            for (uint32_t l = 0; l < told; l++) {
                free(loads[l].experts);
                free(loads[l].slots);
            }
        }
    }
    cr_assert_eq(ep_load_sums_read(sums, &layers, &count), EP_OK);
    cr_assert_eq(count, (size_t)LAYERS);
    for (uint32_t l = 0; l < LAYERS; l++) {
        cr_assert(layers[l].layer == l && layers[l].counts[1] == 3 * NODES &&
                      layers[l].counts[0] == 0,
                  "layer %u: %llu", l, (unsigned long long)layers[l].counts[1]);
    }
    ep_load_layers_free(layers, count);
    ep_load_sums_destroy(sums);
}

static void expect_one(ep_load_sums *sums, uint32_t expert, uint64_t slots, uint64_t passes)
{
    ep_load_layer *layers;
    size_t count;
    cr_assert_eq(ep_load_sums_read(sums, &layers, &count), EP_OK);
    cr_assert_eq(layers[0].counts[expert], slots);
    cr_assert_eq(layers[0].passes[expert], passes, "%llu passes",
                 (unsigned long long)layers[0].passes[expert]);
    ep_load_layers_free(layers, count);
}

Test(load_sums, while_an_older_node_tells_slots_alone_nobodys_passes_count)
{
    ep_load_sums *sums;
    cr_assert_eq(ep_load_sums_create(8, &sums), EP_OK);
    uint64_t slots = 1;
    REPORT("b", 1, LIST(1), LIST(slots));
    expect_one(sums, 1, slots, 2);
    for (; slots <= 20; slots++) {
        passes_left_out = 1;
        REPORT("a", 1, LIST(2), LIST(slots));
        passes_left_out = 0;
        REPORT("b", 1, LIST(1), LIST(slots));
        expect_one(sums, 2, slots, 0);
        expect_one(sums, 1, slots, 2);
    }
    for (; slots <= 40; slots++) { /* a new process, of a newer version */
        REPORT("a", 2, LIST(2), LIST(slots - 20));
        REPORT("b", 1, LIST(1), LIST(slots));
    }
    ep_load_layer *layers;
    size_t count;
    cr_assert_eq(ep_load_sums_read(sums, &layers, &count), EP_OK);
    const uint64_t passes = layers[0].passes[1];
    cr_assert(passes > 2 && passes < 2 + 2 * 20, "what they took meanwhile does not come later");
    ep_load_layers_free(layers, count);
    REPORT("b", 1, LIST(1), LIST(slots));
    expect_one(sums, 1, slots, passes + 2);
    ep_load_sums_destroy(sums);
}

Test(load_sums, nodes_are_bounded)
{
    ep_load_sums *sums;
    cr_assert_eq(ep_load_sums_create(2, &sums), EP_OK);
    REPORT("a", 1, LIST(0), LIST(1));
    REPORT("b", 1, LIST(0), LIST(1));
    REPORT("a", 1, LIST(0), LIST(2));
    REPORT("c", 1, LIST(0), LIST(1)); /* in the place of b */
    expect(sums, 4, 0, 0, 0);
    REPORT("a", 1, LIST(0), LIST(3));
    expect(sums, 5, 0, 0, 0);
    ep_load_sums_destroy(sums);
}

Test(load_sums, wrong_reports)
{
    ep_load_sums *sums;
    cr_assert_eq(ep_load_sums_create(8, &sums), EP_OK);
    REPORT("a", 1, LIST(0), LIST(1));
    ASSERT_FAILS(report(sums, "a", 1, 1, (uint32_t[]){EXPERTS}, (uint64_t[]){1}, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "expert 4: allowed 0..3");
    cr_assert_eq(report(sums, "a", 1, 2, (uint32_t[]){1, 1}, (uint64_t[]){5, 5}, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(report(sums, "a", 1, 2, (uint32_t[]){2, 1}, (uint64_t[]){5, 5}, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(
        report(sums, "a", 1, 5, (uint32_t[]){0, 1, 2, 3, 4}, (uint64_t[]){5, 5, 5, 5, 5}, &error),
        EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(report(sums, "a", 1, 1, (uint32_t[]){0}, (uint64_t[]){UINT64_MAX}, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(report(sums, "a", 1, 1, (uint32_t[]){0}, (uint64_t[]){EP_LOAD_SLOTS_MAX}, &error),
                 EP_ERR_INVALID_ARGUMENT, "passes too");
    passes_left_out = 1;
    ASSERT_FAILS(report(sums, "a", 1, 2, (uint32_t[]){0, 1}, (uint64_t[]){5, 5}, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "2 experts and 1 passes");
    expect(sums, 1, 0, 0, 0);
    const double sums_of[EXPERTS] = {1, 2, 3, 4};
    ep_load_layer *layers;
    size_t count;
    ep_load_sums_add_probabilities(sums, "m", "v", 3, EXPERTS, sums_of, 10);
    ep_load_sums_add_probabilities(sums, "m", "v", 2, EXPERTS, sums_of, 10);
    cr_assert_eq(ep_load_sums_read(sums, &layers, &count), EP_OK);
    cr_assert(count == 2 && layers[0].layer == 2 && layers[1].tokens == 10 &&
              layers[1].probability_sums[3] == 4 && layers[1].counts[0] == 1);
    ep_load_layers_free(layers, count);
    ep_load_sums_destroy(sums);
}

static bool balance_of(void *arg, const char *model, const char *version, uint32_t layer,
                       ep_coordinator_balance *out_balance)
{
    (void)model, (void)version, (void)layer;
    *out_balance = (ep_coordinator_balance){1.5, 1.25};
    return *(const bool *)arg;
}

static void expect_gauges(ep_load_sums *sums, ep_metrics *metrics, bool is_known, const char *mean,
                          const char *bound)
{
    char *text, line[160];
    size_t bytes;
    ep_statistics_collect(sums, balance_of, &is_known, metrics, false);
    cr_assert_eq(ep_metrics_write(metrics, &text, &bytes), EP_OK);
    snprintf(line, sizeof(line),
             "expertd_placement_busiest_over_mean{model=\"m\",version=\"v\"} %s\n", mean);
    cr_assert_not_null(strstr(text, line), "%s is not in %s", line, text);
    snprintf(line, sizeof(line),
             "expertd_placement_busiest_over_bound{model=\"m\",version=\"v\"} %s\n", bound);
    cr_assert_not_null(strstr(text, line), "%s is not in %s", line, text);
    free(text);
}

Test(load_sums, a_balance_that_is_not_known_any_more_leaves_no_old_figure)
{
    ep_load_sums *sums;
    ep_metrics *metrics;
    cr_assert_eq(ep_load_sums_create(8, &sums), EP_OK);
    cr_assert_eq(ep_metrics_create(&metrics), EP_OK);
    REPORT("a", 1, LIST(0, 2), LIST(10, 5));
    expect_gauges(sums, metrics, true, "1.5", "1.25");
    expect_gauges(sums, metrics, false, "0", "0");
    ep_metrics_destroy(metrics);
    ep_load_sums_destroy(sums);
}
