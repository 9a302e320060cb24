/* SPDX-License-Identifier: Apache-2.0 */
/* Tables: life, search, checksum, and every mistake the check names. */
#include "moe/routing_table.h"

#include <math.h>
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

/* 3 nodes, 2 models, layers 0 and 4 of the first and 0 of the second; 3 experts, 1 of them shared,
 * copies on e and e+1. */
static ep_routing_table *make_table(void)
{
    ep_routing_table *table;
    cr_assert_eq(ep_routing_table_create(3, 2, 3, &table), EP_OK);
    table->epoch = (ep_epoch){2, 17};
    strcpy(table->policy, "uniform");
    table->decode_tokens_max = 256;
    for (uint32_t n = 0; n < 3; n++) {
        table->nodes[n].node_id = 10 + n;
        snprintf(table->nodes[n].name, EP_NODE_NAME_BYTES, "node-%u", n);
        snprintf(table->nodes[n].url, EP_URL_BYTES, "tcp://127.0.0.1:%u", 9000 + n);
    }
    const char *names[] = {"alpha", "beta"};
    for (uint32_t m = 0; m < 2; m++) {
        cr_assert_eq(ep_routing_table_model_init(table, m, names[m], "v1", 1), EP_OK);
        strcpy(table->models[m].numerics[0], "portable-bf16");
        for (uint32_t n = 0; n < 3; n++) {
            table->models[m].numerics_of_node[n] = 0;
        }
    }
    const uint32_t layers[] = {0, 4, 0};
    for (uint32_t l = 0; l < 3; l++) {
        ep_layer_shape shape = {.layer = layers[l],
                                .hidden = 8,
                                .inner = 16,
                                .experts = 2,
                                .shared_experts = 1,
                                .top_k = 2};
        cr_assert_eq(ep_routing_table_layer_init(table, l, l == 2, &shape, 6), EP_OK);
        for (uint32_t e = 0; e < 3; e++) {
            table->layers[l].offsets[e + 1] = 2 * (e + 1);
            table->layers[l].copies[2 * e] = e;
            table->layers[l].copies[2 * e + 1] = (e + 1) % 3;
        }
    }
    return table;
}

static void expect_refused(ep_routing_table *table, const char *text)
{
    ep_error error;
    cr_assert_eq(ep_routing_table_check(table, &error), EP_ERR_INVALID_ARGUMENT,
                 "accepted, expected: %s", text);
    cr_assert_str_eq(error.text, text);
    ep_routing_table_unref(table);
}

Test(routing_table, a_proper_table_passes_and_an_expert_may_have_no_copy)
{
    ep_routing_table *table = make_table();
    cr_assert_eq(ep_routing_table_check(table, NULL), EP_OK);
    table->layers[0].offsets[1] = 0;
    table->layers[0].offsets[2] = 0;
    table->layers[0].offsets[3] = 2;
    cr_assert_eq(ep_routing_table_check(table, NULL), EP_OK);
    ep_routing_table_unref(table);
}

Test(routing_table, references_keep_it_alive)
{
    ep_routing_table *table = make_table();
    cr_assert_eq(ep_routing_table_ref(table), table);
    ep_routing_table_unref(table);
    cr_assert_eq(table->epoch.number, 17);
    ep_routing_table_unref(table);
    ep_routing_table_unref(NULL);
}

Test(routing_table, create_refuses_more_than_its_limits)
{
    ep_routing_table *table;
    ep_layer_shape wide = {.experts = EP_EXPERTS_MAX, .shared_experts = 1};
    cr_assert_eq(ep_routing_table_create(EP_NODES_MAX + 1, 1, 1, &table), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_routing_table_create(1, EP_MODELS_MAX + 1, 1, &table), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_routing_table_create(1, 1, EP_TABLE_LAYERS_MAX + 1, &table),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_routing_table_create(1, 1, 1, &table), EP_OK);
    cr_assert_eq(ep_routing_table_layer_init(table, 0, 0, &wide, 0), EP_ERR_INVALID_ARGUMENT);
    ep_routing_table_unref(table);
}

Test(routing_table, finds_models_and_layers)
{
    ep_routing_table *table = make_table();
    uint32_t index = 99;
    cr_assert_eq(ep_routing_table_find_model(table, "beta", "v1", &index), &table->models[1]);
    cr_assert_eq(index, 1);
    cr_assert_eq(ep_routing_table_find_model(table, "alpha", NULL, NULL), &table->models[0]);
    cr_assert_null(ep_routing_table_find_model(table, "alpha", "v2", NULL));
    cr_assert_null(ep_routing_table_find_model(table, "gamma", "", NULL));
    strcpy(table->models[1].name, "alpha");
    strcpy(table->models[1].version, "v2");
    cr_assert_eq(ep_routing_table_find_model(table, "alpha", "", NULL), &table->models[1],
                 "the version listed last");
    cr_assert_eq(ep_routing_table_find_model(table, "alpha", "v1", NULL), &table->models[0]);

    cr_assert_eq(ep_routing_table_find_layer(table, 0, 0), &table->layers[0]);
    cr_assert_eq(ep_routing_table_find_layer(table, 0, 4), &table->layers[1]);
    cr_assert_eq(ep_routing_table_find_layer(table, 1, 0), &table->layers[2]);
    cr_assert_null(ep_routing_table_find_layer(table, 0, 3));
    cr_assert_null(ep_routing_table_find_layer(table, 1, 4));
    ep_routing_table_unref(table);
}

Test(routing_table, orders_epochs_by_term_first)
{
    cr_assert_lt(ep_epoch_compare((ep_epoch){1, 9}, (ep_epoch){2, 1}), 0);
    cr_assert_gt(ep_epoch_compare((ep_epoch){2, 2}, (ep_epoch){2, 1}), 0);
    cr_assert_eq(ep_epoch_compare((ep_epoch){2, 2}, (ep_epoch){2, 2}), 0);
}

Test(routing_table, the_checksum_sees_every_field)
{
    ep_routing_table *a = make_table();
    ep_routing_table *b = make_table();
    uint64_t sum = ep_routing_table_checksum(a);
    cr_assert_eq(sum, ep_routing_table_checksum(b));
    ep_routing_table_unref(a);

#define CHANGES(field, value)                                                                      \
    do {                                                                                           \
        __typeof__(field) before = (field);                                                        \
        (field) = (value);                                                                         \
        cr_assert_neq(ep_routing_table_checksum(b), sum, "%s is not part of the checksum",         \
                      #field);                                                                     \
        (field) = before;                                                                          \
    } while (0)
    CHANGES(b->epoch.term, 3);
    CHANGES(b->epoch.number, 18);
    CHANGES(b->policy[0], 'x');
    CHANGES(b->decode_tokens_max, 1);
    CHANGES(b->nodes[1].node_id, 99);
    CHANGES(b->nodes[1].name[0], 'x');
    CHANGES(b->nodes[2].url[0], 'x');
    CHANGES(b->nodes[2].host[0], 'x');
    CHANGES(b->models[0].name[0], 'x');
    CHANGES(b->models[0].version[0], 'x');
    CHANGES(b->models[1].numerics[0][0], 'x');
    CHANGES(b->models[1].numerics_of_node[2], UINT32_MAX);
    CHANGES(b->layers[1].shape.layer, 5);
    CHANGES(b->layers[1].shape.hidden, 5);
    CHANGES(b->layers[1].shape.inner, 5);
    CHANGES(b->layers[1].shape.top_k, 5);
    CHANGES(b->layers[1].model_index, 1);
    CHANGES(b->layers[2].offsets[1], 1);
    CHANGES(b->layers[2].copies[5], 2);
#undef CHANGES
    cr_assert_eq(ep_routing_table_checksum(b), sum);
    const uint64_t policy_sum = ep_routing_table_policy_checksum(b);
    b->caller_policy.revision = 4;
    cr_assert_eq(ep_routing_table_checksum(b), sum,
                 "builds without a policy find another checksum");
    cr_assert_neq(ep_routing_table_policy_checksum(b), policy_sum);
    const uint64_t next_sum = ep_routing_table_policy_checksum(b);
    const uint64_t mode_sum = ep_routing_table_mode_checksum(b);
    b->caller_policy.decode_nodes_min = 64;
    cr_assert_eq(ep_routing_table_policy_checksum(b), next_sum,
                 "builds without decode_nodes_min find another checksum");
    cr_assert_neq(ep_routing_table_mode_checksum(b), mode_sum);
    ep_routing_table_unref(b);
}

Test(routing_table, counts_the_nodes_of_a_model)
{
    ep_routing_table *t = make_table();
    uint32_t *numerics = t->models[0].numerics_of_node;
    for (uint32_t serving = 0; serving <= t->nodes_count; serving++) {
        for (uint32_t n = 0; n < t->nodes_count; n++) {
            numerics[n] = n < serving ? 0 : UINT32_MAX;
        }
        cr_assert_eq(ep_routing_table_count_nodes(t, 0), serving);
    }
    ep_routing_table_unref(t);
}

Test(routing_table, names_every_mistake_of_a_layer)
{
    ep_routing_table *t = make_table();
    t->layers[1].copies[3] = 3;
    expect_refused(t, "model alpha, layer 4, expert 1: node index 3: the table has 3 nodes");
    t = make_table();
    t->layers[1].copies[3] = t->layers[1].copies[2];
    expect_refused(t, "model alpha, layer 4: expert 1 has two copies on node node-1");
    t = make_table();
    t->layers[2].offsets[1] = 5;
    expect_refused(t, "model beta, layer 0, expert 1: offset 5 is above the next one, 4");
    t = make_table();
    t->layers[2].offsets[0] = 1;
    expect_refused(t, "model beta, layer 0: its copies do not begin at offset 0");
    t = make_table();
    t->layers[2].offsets[1] = t->layers[2].offsets[2] = 4;
    expect_refused(t, "model beta, layer 0, expert 0: 4 copies: allowed 0..3, one per node");
    t = make_table();
    t->layers[1].shape.layer = 0;
    expect_refused(t, "model alpha, layer 0 follows model alpha, layer 0: layers must ascend");
    t = make_table();
    t->layers[1].model_index = 2;
    expect_refused(t, "layer entry 1: model index 2: the table has 2 models");
    t = make_table();
    t->layers[0].shape.hidden = 0;
    expect_refused(t, "model alpha: layer 0: hidden 0: allowed 1..65536");
    t = make_table();
    t->layers[0].shape.top_k = 65;
    expect_refused(t, "model alpha: layer 0: top_k 65: allowed 1..64");
}

Test(routing_table, names_every_mistake_of_nodes_and_models)
{
    ep_routing_table *t = make_table();
    t->nodes[2].node_id = 10;
    expect_refused(t, "node id 10 is given twice: to node-0 and to node-2");
    t = make_table();
    strcpy(t->nodes[2].name, "node-1");
    expect_refused(t, "node name node-1 is given twice");
    t = make_table();
    t->nodes[0].name[0] = '\0';
    expect_refused(t, "node 0 of the routing table has no proper name or url");
    t = make_table();
    memset(t->nodes[1].host, 'x', sizeof(t->nodes[1].host));
    expect_refused(t, "the host of node node-1 has more than 63 characters");
    t = make_table();
    strcpy(t->models[1].name, "alpha");
    expect_refused(t, "model alpha version v1 is given twice");
    t = make_table();
    t->models[1].numerics_of_node[1] = 1;
    expect_refused(t, "model beta, node node-1: numerics index 1: the model has 1");
    t = make_table();
    t->models[1].numerics_of_node[1] = UINT32_MAX;
    expect_refused(
        t,
        "model beta, layer 0: expert 0 has a copy on node node-1, which does not serve the model");
}

Test(routing_table, checks_every_number_of_a_shape)
{
#define UNTOLD                                                                                     \
    false, 0,                                                                                      \
    {                                                                                              \
        0.0f, 0.0f, 0.0f                                                                           \
    }
    const ep_layer_shape good = {
        .layer = 3, .hidden = 8, .inner = 16, .experts = 4, .shared_experts = 1, .top_k = 2};
    cr_assert_eq(ep_layer_shape_check(&good, NULL), EP_OK);
    const struct {
        ep_layer_shape shape;
        const char *text;
    } cases[] = {
        {{0x80000000u, 8, 16, 4, 0, 2, EP_ACT_SILU, UNTOLD},
         "layer 2147483648: allowed 0..2147483647"},
        {{3, 65537, 16, 4, 0, 2, EP_ACT_SILU, UNTOLD}, "layer 3: hidden 65537: allowed 1..65536"},
        {{3, 8, 0, 4, 0, 2, EP_ACT_SILU, UNTOLD}, "layer 3: inner 0: allowed 1..1048576"},
        {{3, 8, 16, 0, 0, 2, EP_ACT_SILU, UNTOLD}, "layer 3: 0 experts: allowed 1..65535"},
        {{3, 8, 16, 65535, 1, 2, EP_ACT_SILU, UNTOLD},
         "layer 3: 1 shared experts: allowed 0..0 beside 65535 routed ones"},
        {{3, 8, 16, 4, UINT32_MAX, 2, EP_ACT_SILU, UNTOLD},
         "layer 3: 4294967295 shared experts: allowed 0..65531 beside 4 routed ones"},
        {{3, 8, 16, 4, 0, 0, EP_ACT_SILU, UNTOLD}, "layer 3: top_k 0: allowed 1..64"},
        {{3, 8, 16, 4, 0, 2, (ep_activation)12, UNTOLD}, "layer 3: activation 12: allowed 0..11"},
        {{3, 8, 16, 4, 0, 2, EP_ACT_SILU, true, 1048577, {0.0f, 0.0f, 0.0f}},
         "layer 3: shared inner 1048577: allowed 0..1048576"},
        {{3, 8, 16, 4, 0, 2, EP_ACT_SITU, true, 0, {4.0f, 25.0f, NAN}},
         "layer 3: activation with alpha 4, beta 25, limit nan: allowed are finite numbers"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ep_error error;
        cr_assert_eq(ep_layer_shape_check(&cases[i].shape, &error), EP_ERR_INVALID_ARGUMENT);
        cr_assert_str_eq(error.text, cases[i].text);
    }
}
