/* SPDX-License-Identifier: Apache-2.0 */
/* The documents of the status page: what is in them, whatever bytes and numbers nodes tell. */
#include <math.h>
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/status_json.h"

#define NODES 3
#define NOW 1000000000u
#define DAY 86400u

static struct {
    Expertd__V1__ClusterStatusReply cluster;
    Expertd__V1__Epoch epoch;
    Expertd__V1__NodeEntry entries[NODES];
    Expertd__V1__NodeEntry *nodes[NODES];
    Expertd__V1__Problem problem[2];
    Expertd__V1__Problem *problems[2];
    ep_routing_table *table;
    ep_coordinator_layer_view view;
} f;

static char *words(const char *text)
{
    return (char *)(uintptr_t)text;
}

/* Nodes 10, 11, 12; the first two hold the three experts and the shared one of layer 7 of
 * "demo". */
static void setup(void)
{
    const ep_layer_shape shape = {
        .layer = 7, .hidden = 8, .inner = 8, .experts = 3, .shared_experts = 1, .top_k = 2};
    memset(&f, 0, sizeof(f));
    expertd__v1__cluster_status_reply__init(&f.cluster);
    expertd__v1__epoch__init(&f.epoch);
    f.epoch.term = UINT64_MAX;
    f.epoch.number = 5;
    f.cluster.epoch = &f.epoch;
    f.cluster.policy = words("uniform");
    for (uint32_t i = 0; i < NODES; i++) {
        static char *const names[NODES] = {"a", "b", "c"};
        expertd__v1__node_entry__init(&f.entries[i]);
        f.entries[i].node_id = 10 + i;
        f.entries[i].name = names[i];
        f.entries[i].state = words("serving");
        f.nodes[i] = &f.entries[i];
    }
    f.cluster.nodes = f.nodes;
    f.cluster.n_nodes = NODES;
    for (int p = 0; p < 2; p++) {
        expertd__v1__problem__init(&f.problem[p]);
        f.problem[p].code = words("node-lost");
        f.problem[p].text = words("node c is lost");
        f.problem[p].is_error = p == 0;
        f.problems[p] = &f.problem[p];
    }
    f.cluster.problems = f.problems;
    cr_assert_eq(ep_routing_table_create(2, 1, 1, &f.table), EP_OK);
    f.table->nodes[0].node_id = 11; /* not in the order of the status */
    f.table->nodes[1].node_id = 10;
    cr_assert_eq(ep_routing_table_model_init(f.table, 0, "demo", "v1", 1), EP_OK);
    cr_assert_eq(ep_routing_table_layer_init(f.table, 0, 0, &shape, 5), EP_OK);
    memcpy(f.table->layers[0].offsets, (uint32_t[]){0, 2, 3, 4, 5}, 5 * sizeof(uint32_t));
    memcpy(f.table->layers[0].copies, (uint32_t[]){0, 1, 0, 1, 0}, 5 * sizeof(uint32_t));
}

static void teardown(void)
{
    ep_routing_table_unref(f.table);
}

static json_t *parse(char *taken_text)
{
    json_error_t error;
    cr_assert_not_null(taken_text);
    json_t *json = json_loads(taken_text, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(json, "%s in %s", error.text, taken_text);
    free(taken_text);
    return json;
}

static json_t *status(bool stopping)
{
    return parse(ep_status_json(&f.cluster, f.table, stopping, NOW));
}

static const json_t *node_of(const json_t *json, size_t n)
{
    return json_array_get(json_object_get(json, "nodes"), n);
}

static json_int_t number_of(const json_t *json, const char *key)
{
    const json_t *value = json_object_get(json, key);
    cr_assert(json_is_integer(value), "%s", key);
    return json_integer_value(value);
}

static void expect_text(const json_t *json, const char *key, const char *text)
{
    cr_expect_str_eq(json_string_value(json_object_get(json, key)), text, "%s", key);
}

static void expect_verdict(const char *summary, bool healthy, bool answers, bool stopping)
{
    json_t *json = status(stopping);
    expect_text(json, "summary", summary);
    cr_expect_eq(json_is_true(json_object_get(json, "healthy")), healthy, "%s", summary);
    cr_expect_eq(json_is_true(json_object_get(json, "answers")), answers, "%s", summary);
    json_decref(json);
}

TestSuite(status_json, .init = setup, .fini = teardown);

Test(status_json, one_sentence_follows_the_judgement)
{
    expect_verdict("Healthy: 3 nodes, and every expert has its copies.", true, true, false);
    expect_verdict("The coordinator is stopping.", false, false, true);
    f.cluster.n_problems = 1;
    expect_verdict("Calls are answered, with 1 error and 0 warnings.", false, true, false);
    f.cluster.n_problems = 2;
    f.cluster.problems_dropped = 9;
    f.cluster.copies_waiting = 12;
    json_t *json = status(false);
    cr_expect_eq(number_of(json, "copies_waiting"), 12);
    json_decref(json);
    expect_verdict("Calls are answered, with 1 error and 1 warning, and more.", false, true, false);
    f.problem[0].ends_service = true;
    expect_verdict("No call can be answered: node c is lost.", false, false, false);
}

Test(status_json, nodes_have_their_copies_in_the_table_and_no_secrets)
{
    f.entries[1].requests_failed = 4;
    f.entries[1].requests_hedged = 3;
    f.entries[1].requests_refused = 2;
    f.entries[1].weight_bytes = 5ull << 40;
    f.entries[1].weight_quant_error = 0.125;
    f.entries[1].weight_quant_output_error = (double)NAN; /* a node may say anything */
    f.entries[1].copies_to_load = 6;
    f.entries[1].copies_to_drop = 7;
    f.entries[1].devices = 8;
    f.entries[1].devices_lost = 1u << 7 | 1;
    f.entries[1].incarnation = 4242424242u;
    f.cluster.store = words("/var/lib/expertd/coordinator.db");
    char *text = ep_status_json(&f.cluster, f.table, false, NOW);
    cr_expect(strstr(text, "4242424242") == NULL && strstr(text, "coordinator.db") == NULL, "%s",
              text);
    json_t *json = parse(text);
    cr_expect_eq(number_of(node_of(json, 0), "experts"), 2);
    cr_expect_eq(number_of(node_of(json, 1), "experts"), 3);
    cr_expect_eq(number_of(node_of(json, 2), "experts"), 0);
    static const struct {
        const char *key;
        json_int_t value;
    } of_b[] = {{"id", 11},
                {"requests_failed", 4},
                {"requests_hedged", 3},
                {"requests_refused", 2},
                {"weight_bytes", 5ll << 40},
                {"copies_to_load", 6},
                {"copies_to_drop", 7},
                {"devices", 8},
                {"devices_lost", 2}};
    for (size_t i = 0; i < sizeof(of_b) / sizeof(of_b[0]); i++) {
        cr_expect_eq(number_of(node_of(json, 1), of_b[i].key), of_b[i].value, "%s", of_b[i].key);
    }
    cr_expect_eq(
        json_integer_value(json_array_get(
            json_object_get(json_array_get(json_object_get(json, "models"), 0), "layers"), 0)),
        7);
    cr_expect_eq(json_real_value(json_object_get(node_of(json, 1), "weight_quant_error")), 0.125);
    cr_expect(json_is_null(json_object_get(node_of(json, 1), "weight_quant_output_error")));
    cr_expect(json_is_null(json_object_get(node_of(json, 0), "weight_quant_error")));
    expect_text(json_object_get(json, "epoch"), "term", "18446744073709551615");
    json_decref(json);
}

Test(status_json, certificates_count_days_to_and_after_their_end)
{
    f.entries[0].tls_expiry = NOW + 3 * DAY + 5;
    f.entries[1].tls_expiry = NOW - 1;
    json_t *json = status(false);
    cr_expect_eq(number_of(node_of(json, 0), "tls_days"), 3);
    cr_expect_eq(number_of(node_of(json, 1), "tls_days"), -1);
    cr_expect(json_is_null(json_object_get(node_of(json, 2), "tls_days")));
    json_decref(json);
}

Test(status_json, any_bytes_and_numbers_stay_one_document)
{
    f.cluster.n_problems = 1;
    f.problem[0].text = words("\xff\xfe </script>\"\\\n\x1b[31m");
    f.entries[0].name = words("<img/src=x/onerror=alert(1)>");
    f.entries[0].rows_served = UINT64_MAX;
    f.entries[0].tls_expiry = UINT64_MAX;
    f.entries[0].devices_lost = UINT64_MAX;
    f.entries[0].last_seen_ms = UINT64_MAX;
    json_t *json = status(false);
    expect_text(node_of(json, 0), "name", "<img/src=x/onerror=alert(1)>");
    cr_expect_eq(number_of(node_of(json, 0), "rows_served"), INT64_MAX);
    cr_expect_gt(number_of(node_of(json, 0), "tls_days"), 0);
    cr_expect_eq(number_of(node_of(json, 0), "devices_lost"), 64);
    expect_text(json_array_get(json_object_get(json, "problems"), 0), "text",
                "\\xff\\xfe </script>\"\\\\x0a\\x1b[31m");
    json_decref(json);
}

Test(status_json, before_the_first_table_there_are_no_models)
{
    json_t *json = parse(ep_status_json(&f.cluster, NULL, false, NOW));
    cr_expect_eq(json_array_size(json_object_get(json, "models")), 0);
    cr_expect_eq(json_array_size(json_object_get(json, "nodes")), NODES);
    json_decref(json);
}

Test(status_json, a_layer_has_copies_by_node_id_load_and_moves)
{
    double heat[] = {1.5, 0, 9};
    uint64_t slots[] = {1, 2, UINT64_MAX};
    const ep_load_layer load = {.layer = 7, .experts = 3, .counts = slots};
    json_t *json = parse(ep_placement_json(f.table, &f.table->layers[0], &f.view, NULL));
    json_t *copies = json_pack("[[i,i],[i],[i],[i]]", 11, 10, 11, 10, 11);
    cr_expect(json_equal(json_object_get(json, "copies"), copies));
    cr_expect(number_of(json, "layer") == 7 && number_of(json, "experts") == 3 &&
              number_of(json, "shared_experts") == 1);
    cr_expect(json_is_null(json_object_get(json, "heat")) &&
              json_is_null(json_object_get(json, "slots")));
    json_decref(copies);
    json_decref(json);
    f.view.heat = heat;
    f.view.heat_count = 3;
    f.view.to_load.count = EP_COORDINATOR_MOVES_MAX + 5;
    f.view.to_drop.count = 1;
    f.view.to_drop.list[0].expert = 2;
    f.view.to_drop.list[0].node_id = 12;
    json = parse(ep_placement_json(f.table, &f.table->layers[0], &f.view, &load));
    cr_expect_eq(json_integer_value(json_array_get(json_object_get(json, "heat"), 2)), 9);
    cr_expect_eq(json_array_size(json_object_get(json, "slots")), 3);
    cr_expect_eq(json_array_size(json_object_get(json, "to_load")), EP_COORDINATOR_MOVES_MAX);
    cr_expect_eq(number_of(json, "to_load_more"), 5);
    cr_expect_eq(
        json_integer_value(json_array_get(json_array_get(json_object_get(json, "to_drop"), 0), 1)),
        12);
    cr_expect_eq(number_of(json, "to_drop_more"), 0);
    json_decref(json);
}
