/* SPDX-License-Identifier: Apache-2.0 */
/* Which numerics id a client pins, and while it waits with that: nodes count by what they hold. */
#include <criterion/criterion.h>
#include <string.h>

#include "cluster/numerics_pick.h"
#include "cluster/view.h"

enum { NODES = 5, EXPERTS = 4 };

static char portable[] = "portable/1";
static char bf16dp[] = "bf16dp/1";

/* One layer; expert e has one copy on node owners[e], none for UINT32_MAX. The first three nodes
 * are of portable. */
static ep_routing_table *make(const uint32_t owners[EXPERTS])
{
    const ep_layer_shape shape = {
        .layer = 1, .hidden = 8, .inner = 8, .experts = EXPERTS, .top_k = 2};
    ep_routing_table *table = NULL;
    uint32_t count = 0;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        count += owners[e] != UINT32_MAX;
    }
    cr_assert_eq(ep_routing_table_create(NODES, 1, 1, &table), EP_OK);
    cr_assert_eq(ep_routing_table_model_init(table, 0, "demo", "v1", NODES), EP_OK);
    cr_assert_eq(ep_routing_table_layer_init(table, 0, 0, &shape, count), EP_OK);
    ep_routing_model *model = &table->models[0];
    strcpy(model->numerics[0], portable);
    strcpy(model->numerics[1], bf16dp);
    model->numerics_count = 2;
    for (uint32_t n = 0; n < NODES; n++) {
        model->numerics_of_node[n] = n < 3 ? 0 : 1;
    }
    ep_routing_layer *layer = &table->layers[0];
    uint32_t used = 0;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        layer->offsets[e] = used;
        if (owners[e] != UINT32_MAX) {
            layer->copies[used++] = owners[e];
        }
    }
    layer->offsets[EXPERTS] = used;
    return table;
}

Test(numerics_pick, nodes_without_a_copy_do_not_count)
{
    /* the first three are drained */
    ep_routing_table *table = make((const uint32_t[EXPERTS]){3, 4, 3, 4});
    cr_assert_str_eq(ep_numerics_pick(table, 0), bf16dp);
    cr_assert(ep_numerics_cover(table, 0, bf16dp));
    cr_assert_not(ep_numerics_cover(table, 0, portable));
    ep_routing_table_unref(table);
}

Test(numerics_pick, most_nodes_that_hold_then_most_copies)
{
    ep_routing_table *table = make((const uint32_t[EXPERTS]){0, 1, 3, 3});
    cr_assert_str_eq(ep_numerics_pick(table, 0), portable);
    ep_routing_table_unref(table);
    table = make((const uint32_t[EXPERTS]){0, 3, 3, 3});
    cr_assert_str_eq(ep_numerics_pick(table, 0), bf16dp);
    cr_assert_not(ep_numerics_cover(table, 0, bf16dp), "expert 0 is on a node of the other id");
    ep_routing_table_unref(table);
}

Test(numerics_pick, nothing_is_chosen_while_no_copy_is_listed)
{
    ep_error error;
    ep_view *view = NULL;
    const uint32_t none[EXPERTS] = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX};
    ep_routing_table *table = make(none);
    cr_assert_null(ep_numerics_pick(table, 0));
    cr_assert_not(ep_numerics_cover(table, 0, portable));
    cr_assert_eq(ep_view_create(table, &view), EP_OK); /* pins and allowed are empty */
    cr_assert(ep_view_has_numerics(view, 0, &error), "%s: calls are to wait", error.text);
    view->pins[0] = "portable/2";
    cr_assert_not(ep_view_has_numerics(view, 0, &error));
    cr_assert_not_null(strstr(error.text, "is pinned to numerics 'portable/2'"), "%s", error.text);
    ep_view_unref(view);
}
