/* SPDX-License-Identifier: Apache-2.0 */
/* A table made of what nodes say: joined, counted, and refused when they disagree. */
#include <criterion/criterion.h>
#include <string.h>

#include "cluster/hello_table.h"
#include "support/expect.h"

typedef struct node {
    Expertd__V1__Hello hello;
    Expertd__V1__ModelInfo model;
    Expertd__V1__LayerInfo layer;
    Expertd__V1__ModelInfo *models[1];
    Expertd__V1__LayerInfo *layers[1];
    uint32_t owned[8];
} node;

static void make(node *n, const char *name, const char *numerics, const uint32_t *owned,
                 size_t owned_count)
{
    expertd__v1__hello__init(&n->hello);
    expertd__v1__model_info__init(&n->model);
    expertd__v1__layer_info__init(&n->layer);
    n->hello.node = (char *)(uintptr_t)name;
    n->model.name = (char *)(uintptr_t) "demo";
    n->model.version = (char *)(uintptr_t) "v1";
    n->model.config_hash = (char *)(uintptr_t) "h";
    n->model.numerics = (char *)(uintptr_t)numerics;
    n->layer.layer = 3;
    n->layer.hidden = 16;
    n->layer.inner = 32;
    n->layer.experts = 3;
    n->layer.shared_experts = 1;
    n->layer.top_k = 2;
    memcpy(n->owned, owned, owned_count * sizeof(*owned));
    n->layer.owned = n->owned;
    n->layer.n_owned = owned_count;
    n->layers[0] = &n->layer;
    n->models[0] = &n->model;
    n->model.layers = n->layers;
    n->model.n_layers = 1;
    n->hello.models = n->models;
    n->hello.n_models = 1;
}

static node a, b;
static ep_hello_source sources[2] = {{"tcp://a:1", &a.hello}, {"tcp://b:1", &b.hello}};
static ep_routing_table *table;
static ep_error error;

static void make_two(void)
{
    make(&a, "na", "portable", (uint32_t[]){0, 1}, 2);
    make(&b, "nb", "other", (uint32_t[]){1, 2, 3}, 3);
}

Test(hello_table, joins_nodes_into_one_table)
{
    make_two();
    b.hello.host = (char *)(uintptr_t) "h2";
    ASSERT_OK(ep_hello_table_build(sources, 2, (ep_epoch){0, 9}, &table, &error), error);
    cr_assert_eq(table->epoch.number, 9);
    cr_assert_eq(table->nodes_count, 2);
    cr_assert_str_eq(table->nodes[1].name, "nb");
    cr_assert_str_eq(table->nodes[1].url, "tcp://b:1");
    cr_assert_str_eq(table->nodes[1].host, "h2");
    cr_assert_str_eq(table->nodes[0].host, "");
    cr_assert_eq(table->models_count, 1);
    cr_assert_eq(table->models[0].numerics_count, 2);
    cr_assert_str_eq(table->models[0].numerics[table->models[0].numerics_of_node[1]], "other");
    const ep_routing_layer *layer = ep_routing_table_find_layer(table, 0, 3);
    cr_assert_not_null(layer);
    static const uint32_t offsets[] = {0, 1, 3, 4, 5};
    static const uint32_t copies[] = {0, 0, 1, 1, 1};
    cr_assert_arr_eq(layer->offsets, offsets, sizeof(offsets));
    cr_assert_arr_eq(layer->copies, copies, sizeof(copies));
    ep_routing_table_unref(table);
}

Test(hello_table, an_expert_nobody_holds_and_no_nodes_at_all_are_legal)
{
    make_two();
    ASSERT_OK(ep_hello_table_build(sources, 1, (ep_epoch){0, 1}, &table, &error), error);
    cr_assert_eq(table->layers[0].offsets[4], 2);
    ep_routing_table_unref(table);
    ASSERT_OK(ep_hello_table_build(sources, 0, (ep_epoch){0, 1}, &table, &error), error);
    cr_assert_eq(table->layers_count, 0);
    ep_routing_table_unref(table);
}

static void expect(ep_err code, const char *part)
{
    cr_assert_eq(ep_hello_table_build(sources, 2, (ep_epoch){0, 1}, &table, &error), code, "%s: %s",
                 part, error.text);
    ASSERT_TEXT(error, part);
}

Test(hello_table, names_what_nodes_disagree_about)
{
    make_two();
    b.layer.hidden = 17;
    expect(EP_ERR_FAILED_PRECONDITION,
           "nodes na and nb disagree about the shape of layer 3 of model demo:v1");
    make_two();
    b.model.config_hash = (char *)(uintptr_t) "g";
    expect(EP_ERR_FAILED_PRECONDITION, "the config hash");
    make_two();
    b.hello.node = a.hello.node;
    expect(EP_ERR_FAILED_PRECONDITION, "both call themselves na");
}

Test(hello_table, refuses_impossible_values)
{
    make_two();
    b.owned[0] = 4;
    expect(EP_ERR_INVALID_ARGUMENT, "node nb says it owns expert 4 of layer 3: allowed 0..3");
    make_two();
    b.owned[0] = 2;
    expect(EP_ERR_INVALID_ARGUMENT, "");
    make_two();
    a.layer.hidden = b.layer.hidden = 0;
    expect(EP_ERR_INVALID_ARGUMENT, "hidden");
    char long_name[200];
    memset(long_name, 'n', sizeof(long_name) - 1);
    long_name[199] = 0;
    make_two();
    a.model.name = long_name;
    expect(EP_ERR_INVALID_ARGUMENT, "nnnn");
    make_two();
    a.model.numerics = long_name;
    expect(EP_ERR_INVALID_ARGUMENT, "numerics id of node na has 199 bytes");
}
