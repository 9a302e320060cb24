/* SPDX-License-Identifier: Apache-2.0 */
/* Rates and the order of the hottest, from two samples. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "cli/top.h"

#define NODES 2

typedef struct sample {
    ep_top_sample sample;
    ep_cli_node nodes[NODES];
    Expertd__V1__NodeStatusReply status[NODES];
    Expertd__V1__LayerStatus layers[NODES][2];
    Expertd__V1__LayerStatus *layer_list[NODES][2];
    Expertd__V1__StatisticsReply statistics;
    Expertd__V1__LayerStatistics layer;
    Expertd__V1__LayerStatistics *list[1];
    uint64_t counts[3];
} sample;

static void make(sample *s, uint64_t at_s, const uint64_t rows[NODES][2], const uint64_t counts[3])
{
    static char *const names[NODES] = {"a", "b"};
    memset(s, 0, sizeof(*s));
    for (int i = 0; i < NODES; i++) {
        expertd__v1__node_status_reply__init(&s->status[i]);
        s->status[i].node = names[i];
        s->status[i].state = (char *)(uintptr_t) "serving";
        s->status[i].incarnation = (uint64_t)i + 1;
        s->status[i].rows_served = rows[i][0] + rows[i][1];
        for (int l = 0; l < 2; l++) {
            expertd__v1__layer_status__init(&s->layers[i][l]);
            s->layers[i][l].model = (char *)(uintptr_t) "demo";
            s->layers[i][l].layer = (uint32_t)l;
            s->layers[i][l].rows_served = rows[i][l];
            s->layer_list[i][l] = &s->layers[i][l];
        }
        s->status[i].layers = s->layer_list[i];
        s->status[i].n_layers = 2;
        s->nodes[i].status = &s->status[i];
        strcpy(s->nodes[i].url, i == 0 ? "tcp://h:1" : "tcp://h:2");
    }
    expertd__v1__statistics_reply__init(&s->statistics);
    expertd__v1__layer_statistics__init(&s->layer);
    memcpy(s->counts, counts, sizeof(s->counts));
    s->layer.model = (char *)(uintptr_t) "demo";
    s->layer.counts = s->counts;
    s->layer.n_counts = 3;
    s->list[0] = &s->layer;
    s->statistics.layers = s->list;
    s->statistics.n_layers = 1;
    s->sample.at_ns = at_s * 1000000000u;
    s->sample.nodes = (ep_cli_node_list){.nodes = s->nodes, .count = NODES};
    s->sample.statistics = &s->statistics;
    ep_error_clear(&s->sample.coordinator_error);
}

static sample before, now;

static void setup(void)
{
    make(&before, 10, (const uint64_t[NODES][2]){{100, 100}, {100, 100}},
         (const uint64_t[3]){5, 5, 5});
    make(&now, 12, (const uint64_t[NODES][2]){{120, 300}, {140, 100}},
         (const uint64_t[3]){15, 5, 45});
}

static char *print_view(ep_top_view *view, size_t *out_shown)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    cr_assert(ep_top_print(&before.sample, &now.sample, view, out_shown, out));
    fclose(out);
    return text;
}

static char *print(void)
{
    return print_view(&(ep_top_view){.hottest = 8}, NULL);
}

Test(top, rates_are_growth_per_second_and_never_negative)
{
    cr_assert_float_eq(ep_top_rate(10, 30, 2000000000u), 10.0, 1e-9);
    cr_assert_float_eq(ep_top_rate(30, 10, 2000000000u), 0.0, 1e-9);
    cr_assert_float_eq(ep_top_rate(10, 30, 0), 0.0, 1e-9);
}

Test(top, layers_add_up_over_nodes_hottest_first)
{
    ep_top_hot hot[4];
    setup();
    cr_assert_eq(ep_top_hot_layers(&before.sample, &now.sample, hot, 4), 2u);
    cr_assert_eq(hot[0].layer, 1u);
    cr_assert_float_eq(hot[0].per_s, 100.0, 1e-9);
    cr_assert_eq(hot[1].layer, 0u);
    cr_assert_float_eq(hot[1].per_s, 30.0, 1e-9);
    cr_assert_eq(ep_top_hot_layers(&before.sample, &now.sample, hot, 1), 1u);
    cr_assert_eq(hot[0].layer, 1u);
}

Test(top, cold_experts_are_left_out)
{
    ep_top_hot hot[4];
    setup();
    cr_assert_eq(ep_top_hot_experts(&before.sample, &now.sample, hot, 4), 2u);
    cr_assert_eq(hot[0].expert, 2);
    cr_assert_float_eq(hot[0].per_s, 20.0, 1e-9);
    cr_assert_eq(hot[1].expert, 0);
}

Test(top, a_restarted_node_has_no_rate_yet)
{
    setup();
    now.status[0].incarnation = 77;
    char *text = print();
    cr_assert_not_null(strstr(text, "\na     serving       -        -       0 "), "%s", text);
    cr_assert_not_null(strstr(text, "\nb     serving      20        0       0 "), "%s", text);
    free(text);
}

Test(top, a_silent_node_and_a_lost_coordinator_are_shown)
{
    setup();
    now.nodes[1].status = NULL;
    now.sample.nodes.lost_count = 3;
    now.sample.statistics = NULL;
    ep_error_set(&now.sample.coordinator_error, EP_ERR_UNAVAILABLE, "tcp://c:1: refused");
    char *text = print();
    cr_assert_not_null(
        strstr(text, "coordinator lost, going on with the nodes: tcp://c:1: refused"), "%s", text);
    cr_assert_not_null(strstr(text, "  1 of 5 nodes serving, 3 lost  "), "%s", text);
    cr_assert_not_null(strstr(text, "silent"), "%s", text);
    cr_assert_null(strstr(text, "HOTTEST EXPERTS"), "%s", text);
    free(text);
}

#define MANY 30

/* Nodes n00, n01, ... of which each does as node a did. */
static void setup_many(void)
{
    static ep_cli_node nodes[MANY];
    static Expertd__V1__NodeStatusReply status[MANY];
    static char names[MANY][8];
    setup();
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof(names[i]), "n%02d", i);
        status[i] = now.status[0];
        status[i].node = names[i];
        nodes[i].status = &status[i];
    }
    now.sample.nodes = (ep_cli_node_list){.nodes = nodes, .count = MANY};
}

static size_t count_lines(const char *text)
{
    size_t lines = 0;
    for (; *text != '\0'; text++) {
        lines += *text == '\n';
    }
    return lines;
}

Test(top, all_headings_stay_on_any_screen)
{
    setup_many();
    for (size_t rows = 3; rows < 60; rows++) {
        ep_top_view view = {.hottest = 8, .screen = {80, rows}};
        size_t shown = 0;
        char *text = print_view(&view, &shown);
        cr_expect_leq(count_lines(text), rows, "%zu rows: %s", rows, text);
        cr_expect_not_null(strstr(text, "\nNODE  STATE"), "%zu rows: %s", rows, text);
        cr_expect(rows < 12 ||
                      (strstr(text, "\nHOTTEST LAYERS") && strstr(text, "\nHOTTEST EXPERTS")),
                  "%zu rows: %s", rows, text);
        cr_expect(rows < 40 ? shown < MANY : shown == MANY, "%zu rows: %zu nodes", rows, shown);
        free(text);
    }
}

Test(top, nodes_that_do_not_fit_are_reached)
{
    ep_top_view view = {.hottest = 8, .screen = {80, 24}, .first_node = 1000};
    size_t shown = 0;
    setup_many();
    char *text = print_view(&view, &shown);
    cr_assert_eq(view.first_node + shown, MANY);
    cr_assert_not_null(strstr(text, "\nn29 "), "%s", text);
    cr_assert_null(strstr(text, "\nn00 "), "%s", text);
    cr_assert_not_null(strstr(text, "30 of 30 nodes serving, "), "%s", text);
    cr_assert_not_null(strstr(text, "-30 shown"), "%s", text);
    free(text);
}

Test(top, json_has_rates_of_those_that_have_one)
{
    setup();
    now.status[0].incarnation = 77;
    now.nodes[1].status = NULL;
    ep_error_set(&now.nodes[1].error, EP_ERR_UNAVAILABLE, "tcp://h:2: refused");
    json_t *json = ep_top_json(&before.sample, &now.sample, 8);
    const json_t *nodes = json_object_get(json, "nodes");
    const json_t *restarted = json_array_get(nodes, 0);
    const json_t *silent = json_array_get(nodes, 1);
    cr_assert_float_eq(json_real_value(json_object_get(json, "seconds")), 2.0, 1e-9);
    cr_assert(json_is_null(json_object_get(json, "coordinator_error")));
    cr_assert(json_is_null(json_object_get(restarted, "rows_per_s")) &&
              json_is_integer(json_object_get(restarted, "jobs_waiting")));
    cr_assert_str_eq(json_string_value(json_object_get(silent, "state")), "silent");
    cr_assert_str_eq(json_string_value(json_object_get(silent, "error")), "tcp://h:2: refused");
    cr_assert_eq(json_array_size(json_object_get(json, "experts")), 2);
    cr_assert_float_eq(json_real_value(json_object_get(
                           json_array_get(json_object_get(json, "experts"), 0), "slots_per_s")),
                       20.0, 1e-9);
    json_decref(json);
}
