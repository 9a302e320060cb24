/* SPDX-License-Identifier: Apache-2.0 */
/* What counts as healthy, and how the status is printed. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "cli/status.h"

typedef struct cluster_fixture {
    Expertd__V1__ClusterStatusReply reply;
    Expertd__V1__Epoch epoch;
    Expertd__V1__NodeEntry nodes[2];
    Expertd__V1__NodeEntry *list[2];
    Expertd__V1__Problem problem[2];
    Expertd__V1__Problem *problems[2];
    ep_routing_table *table;
} cluster_fixture;

static void setup(cluster_fixture *f)
{
    static char *const names[2] = {"a", "b"};
    static char *const urls[2] = {"tcp://h:1", "tcp://h:2"};
    const ep_layer_shape shape = {.layer = 4, .hidden = 8, .inner = 8, .experts = 3, .top_k = 2};
    expertd__v1__cluster_status_reply__init(&f->reply);
    expertd__v1__epoch__init(&f->epoch);
    f->epoch.term = 7;
    f->epoch.number = 2;
    f->reply.epoch = &f->epoch;
    f->reply.policy = (char *)(uintptr_t) "uniform";
    f->reply.copies = 2;
    for (int i = 0; i < 2; i++) {
        expertd__v1__node_entry__init(&f->nodes[i]);
        f->nodes[i].name = names[i];
        f->nodes[i].url = urls[i];
        f->nodes[i].state = (char *)(uintptr_t) "serving";
        f->nodes[i].host = (char *)(uintptr_t) "a7b6c5d4-e3f2-4a1b";
        f->nodes[i].rows_served = 100;
        f->nodes[i].requests_failed = 3;
        f->nodes[i].weight_bytes = 3ull << 30;
        f->nodes[i].weight_quant_error = 0.0625;
        f->nodes[i].copies_to_load = 2;
        f->nodes[i].last_seen_ms = 300;
        f->nodes[i].speed = 0.25;
        f->list[i] = &f->nodes[i];
    }
    f->reply.judged = true;
    for (int i = 0; i < 2; i++) {
        expertd__v1__problem__init(&f->problem[i]);
        f->problem[i].text =
            (char *)(uintptr_t)(i == 0 ? "node b is suspect" : "2 experts have no copy");
        f->problems[i] = &f->problem[i];
    }
    f->reply.problems = f->problems;
    f->reply.nodes = f->list;
    f->reply.n_nodes = 2;
    cr_assert_eq(ep_routing_table_create(2, 1, 1, &f->table), EP_OK);
    cr_assert_eq(ep_routing_table_model_init(f->table, 0, "demo", "v1", 1), EP_OK);
    strcpy(f->table->models[0].numerics[0], "portable");
    cr_assert_eq(ep_routing_table_layer_init(f->table, 0, 0, &shape, 4), EP_OK);
    /* expert 0 on both nodes, 1 on a, 2 on b */
    memcpy(f->table->layers[0].offsets, (uint32_t[]){0, 2, 3, 4}, 4 * sizeof(uint32_t));
    memcpy(f->table->layers[0].copies, (uint32_t[]){0, 1, 0, 1}, 4 * sizeof(uint32_t));
}

static char *print_cluster(const cluster_fixture *f, const ep_cli_problems *problems,
                           ep_cli_format format)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    cr_assert(ep_cli_cluster_print("tcp://c:1", &f->reply, f->table, problems, format, out));
    fclose(out);
    return text;
}

Test(status, all_serving_is_healthy)
{
    static cluster_fixture f;
    static ep_cli_problems problems;
    uint32_t min, max;
    setup(&f);
    f.reply.copies = 1;
    ep_cli_cluster_check(&f.reply, &problems);
    cr_assert_eq(problems.count, 0);
    ep_cli_placement_copies(&f.table->layers[0], &min, &max);
    cr_assert_eq(min, 1);
    cr_assert_eq(max, 2);
    char *text = print_cluster(&f, &problems, EP_CLI_TABLE);
    cr_assert(strstr(text, "epoch        7/2\n") && strstr(text, "uniform, 1 copies\n"));
    cr_assert_not_null(strstr(
        text,
        "NODE  STATE    ROWS SERVED  FAILED     WEIGHTS  SPEED  LAST SEEN  HOST           URL\n"
        "a     serving          100       3  3221225472   0.25       0.3s  a7b6c5d4-e3f2  "
        "tcp://h:1\n"));
    cr_assert_not_null(strstr(text, "MODEL  VERSION  LAYERS  EXPERTS  COPIES  NUMERICS\n"
                                    "demo   v1            1        3     1-2  portable\n"));
    cr_assert_not_null(strstr(text, "\nhealthy\n"));
    free(text);
    ep_routing_table_unref(f.table);
}

Test(status, what_is_wrong_is_named)
{
    static cluster_fixture f;
    static ep_cli_problems problems;
    setup(&f);
    f.nodes[1].state = (char *)(uintptr_t) "suspect";
    f.reply.n_problems = 2;
    f.reply.problems_dropped = 4;
    memcpy(f.table->layers[0].offsets, (uint32_t[]){0, 2, 2, 2}, 4 * sizeof(uint32_t));
    ep_cli_cluster_check(&f.reply, &problems);
    cr_assert_eq(problems.count, 3);
    cr_assert_str_eq(problems.texts[0], "node b is suspect");
    cr_assert_str_eq(problems.texts[1], "2 experts have no copy");
    cr_assert_str_eq(problems.texts[2], "4 problems more");
    char *text = print_cluster(&f, &problems, EP_CLI_JSON);
    json_t *json = json_loads(text, 0, NULL);
    cr_assert_not_null(json);
    cr_assert(json_is_false(json_object_get(json, "healthy")));
    cr_assert_eq(json_array_size(json_object_get(json, "problems")), 3);
    cr_assert_eq(json_array_size(json_object_get(json, "nodes")), 2);
    cr_assert_eq(json_integer_value(json_object_get(
                     json_array_get(json_object_get(json, "nodes"), 1), "rows_served")),
                 100);
    const json_t *node = json_array_get(json_object_get(json, "nodes"), 1);
    cr_assert_eq(json_integer_value(json_object_get(node, "requests_failed")), 3);
    cr_assert_eq(json_integer_value(json_object_get(node, "weight_bytes")), 3ll << 30);
    cr_assert_eq(json_real_value(json_object_get(node, "weight_quant_error")), 0.0625);
    cr_assert(json_is_null(json_object_get(node, "weight_quant_output_error")));
    cr_assert_eq(json_integer_value(json_object_get(node, "copies_to_load")), 2);
    cr_assert_eq(json_integer_value(json_object_get(
                     json_array_get(json_object_get(json, "models"), 0), "copies_min")),
                 0);
    cr_assert_eq(json_integer_value(json_object_get(json_object_get(json, "epoch"), "number")), 2);
    json_decref(json);
    free(text);
    ep_routing_table_unref(f.table);
}

Test(status, before_the_first_table_there_are_no_models)
{
    static cluster_fixture f;
    static ep_cli_problems problems;
    setup(&f);
    ep_routing_table_unref(f.table);
    f.table = NULL;
    f.reply.epoch = NULL;
    char *text = print_cluster(&f, &problems, EP_CLI_TABLE);
    cr_assert_not_null(strstr(text, "epoch        0/0\n"), "%s", text);
    cr_assert_null(strstr(text, "MODEL"), "%s", text);
    free(text);
    text = print_cluster(&f, &problems, EP_CLI_JSON);
    cr_assert_not_null(strstr(text, "\"models\": []"), "%s", text);
    free(text);
}

/* An older coordinator names no problems, which says nothing about them. */
Test(status, a_coordinator_that_does_not_judge_is_not_healthy)
{
    static cluster_fixture f;
    static ep_cli_problems problems;
    setup(&f);
    f.reply.judged = false;
    f.reply.software = (char *)(uintptr_t) "expertd 0.0.9";
    ep_cli_cluster_check(&f.reply, &problems);
    cr_assert_eq(problems.count, 1);
    char *text = print_cluster(&f, &problems, EP_CLI_TABLE);
    cr_assert_not_null(
        strstr(text, "\nnot healthy: the coordinator runs 'expertd 0.0.9', which does not judge"));
    cr_assert_null(strstr(text, "\nhealthy\n"));
    free(text);
    ep_routing_table_unref(f.table);
}

Test(status, nodes_that_do_not_answer_or_drain)
{
    static ep_cli_problems problems;
    Expertd__V1__NodeStatusReply status = EXPERTD__V1__NODE_STATUS_REPLY__INIT;
    ep_cli_node nodes[2] = {{.url = "tcp://h:1"}, {.url = "tcp://h:2"}};
    ep_cli_node_list list = {.nodes = nodes, .count = 2};
    char *text = NULL;
    size_t bytes = 0;
    status.node = (char *)(uintptr_t) "a";
    status.state = (char *)(uintptr_t) "draining";
    status.rows_served = 55;
    nodes[0].status = &status;
    ep_error_set(&nodes[1].error, EP_ERR_UNAVAILABLE, "tcp://h:2: refused");
    ep_cli_nodes_check(&list, &problems);
    cr_assert_eq(problems.count, 2);
    cr_assert_str_eq(problems.texts[0], "node a at tcp://h:1 is draining");
    cr_assert_str_eq(problems.texts[1], "tcp://h:2: refused");
    FILE *out = open_memstream(&text, &bytes);
    cr_assert(ep_cli_nodes_print(&list, &problems, EP_CLI_TABLE, out));
    fclose(out);
    cr_assert(strstr(text, "draining") && strstr(text, "unreachable") &&
              strstr(text, "not healthy: tcp://h:2: refused\n"));
    free(text);
}

Test(status, problems_are_bounded)
{
    static ep_cli_problems problems;
    char *text = NULL;
    size_t bytes = 0;
    for (int i = 0; i < EP_CLI_PROBLEMS_MAX + 3; i++) {
        ep_cli_problem_add(&problems, "p%d", i);
    }
    FILE *out = open_memstream(&text, &bytes);
    ep_cli_problems_print(&problems, out);
    fclose(out);
    cr_assert_not_null(strstr(text, "not healthy: 3 more\n"));
    free(text);
}
