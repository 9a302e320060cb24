/* SPDX-License-Identifier: Apache-2.0 */
/* Expert maps applied to a model and its nodes. */
#include "placement/placement.h"
#include "support/expect.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    ep_placement_node nodes[3];
    ep_placement_layer layers[2];
    ep_placement_input input;
} problem;

/* Two nodes, named against their index; one MoE layer, number 3, of 8 experts. */
static void setup(problem *p)
{
    memset(p, 0, sizeof(*p));
    p->nodes[0] = (ep_placement_node){.node_id = 1, .name = "zeta"};
    p->nodes[1] = (ep_placement_node){.node_id = 2, .name = "alpha"};
    p->nodes[2] = (ep_placement_node){.node_id = 3, .name = "mid"};
    for (uint32_t l = 0; l < 2; l++) {
        p->layers[l].shape =
            (ep_layer_shape){.layer = 3 + l, .hidden = 4, .inner = 4, .experts = 8, .top_k = 2};
        p->layers[l].expert_bytes = 10;
    }
    p->input = (ep_placement_input){
        .nodes_count = 2, .nodes = p->nodes, .layers_count = 1, .layers = p->layers, .copies = 1};
}

static ep_expert_map *make_map(const char *first, const char *second)
{
    char text[512];
    ep_expert_map *map;
    ep_error error = {0};
    snprintf(text, sizeof(text),
             "{\"moe_layer_count\": 1, \"layer_list\": [{\"layer_id\": 0, \"device_count\": 2, "
             "\"device_list\": ["
             "{\"device_id\": 0, \"device_expert\": [%s]}, {\"device_id\": 1, \"device_expert\": "
             "[%s]}]}]}",
             first, second);
    ASSERT_OK(ep_expert_map_parse(text, strlen(text), "map.json", &map, &error), error);
    return map;
}

static ep_placement *solve(const problem *p, const char *first, const char *second,
                           const uint32_t *order)
{
    ep_placement *placement = NULL;
    ep_error error = {0};
    ep_expert_map *map = make_map(first, second);
    ASSERT_OK(ep_placement_static(&p->input, map, order, &placement, &error), error);
    ep_expert_map_destroy(map);
    return placement;
}

static void expect_refused(const problem *p, const char *first, const char *second,
                           const uint32_t *order, ep_err code, const char *text)
{
    ep_placement *placement = NULL;
    ep_error error = {0};
    ep_expert_map *map = make_map(first, second);
    cr_assert_eq(ep_placement_static(&p->input, map, order, &placement, &error), code,
                 "expected: %s", text);
    cr_assert_str_eq(error.text, text);
    cr_assert_null(placement);
    ep_expert_map_destroy(map);
}

Test(static_map, device_d_is_the_dth_node_by_name)
{
    problem p;
    setup(&p);
    ep_placement *placement = solve(&p, "0,1,2,3", "4,5,6,7", NULL);
    for (uint32_t e = 0; e < 8; e++) {
        cr_assert_eq(placement->layers[0].offsets[e], e);
        cr_assert_eq(placement->layers[0].copies[e], e < 4 ? 1 : 0, "device 0 is alpha");
    }
    cr_assert_eq(placement->layers[0].layer, 3);
    cr_assert_eq(placement->copies_added, 8);
    ep_placement_destroy(placement);
}

Test(static_map, a_given_order_wins_over_names_and_an_expert_may_have_copies)
{
    problem p;
    setup(&p);
    const uint32_t order[] = {0, 1};
    ep_placement *placement = solve(&p, "0,1,2,3,7", "4,5,6,7", order);
    cr_assert_eq(placement->layers[0].copies[0], 0);
    cr_assert_eq(placement->layers[0].offsets[8] - placement->layers[0].offsets[7], 2);
    cr_assert_eq(placement->copies_total, 9);
    ep_placement_destroy(placement);
}

Test(static_map, a_node_may_own_nothing_and_shared_experts_are_spread)
{
    problem p;
    setup(&p);
    p.input.copies = 2;
    p.layers[0].shape.shared_experts = 1;
    ep_placement *placement = solve(&p, "0,1,2,3,4,5,6,7", "", NULL);
    const ep_placed_layer *layer = &placement->layers[0];
    cr_assert_eq(layer->experts, 9);
    cr_assert_eq(layer->offsets[8], 8);
    cr_assert_eq(layer->offsets[9], 10, "the shared expert has both copies");
    ep_placement_destroy(placement);
}

Test(static_map, names_every_mistake)
{
    problem p;
    setup(&p);
    expect_refused(&p, "0,1,2,3", "4,5,6", NULL, EP_ERR_INVALID_ARGUMENT,
                   "map.json: layer_id 0: routing table has 7 experts, model has 8");
    expect_refused(&p, "0,1,2,3,8", "4,5,6,7", NULL, EP_ERR_INVALID_ARGUMENT,
                   "map.json: layer_id 0: routing table has 9 experts, model has 8");
    expect_refused(
        &p, "0,1,2,3", "4,5,7", NULL, EP_ERR_INVALID_ARGUMENT,
        "map.json: layer_id 0: expert 6 is on no device: every expert of 0..7 needs one");
    expect_refused(&p, "0,1,2,3", "4,5,7,9", NULL, EP_ERR_INVALID_ARGUMENT,
                   "map.json: layer_id 0, device_id 1: expert 9: allowed 0..7");
    p.input.nodes_count = 1;
    expect_refused(&p, "0,1,2,3", "4,5,6,7", NULL, EP_ERR_INVALID_ARGUMENT,
                   "map.json: layer_id 0: device_count 2: the cluster has 1 nodes");
    setup(&p);
    p.input.layers_count = 2;
    expect_refused(&p, "0,1,2,3", "4,5,6,7", NULL, EP_ERR_INVALID_ARGUMENT,
                   "map.json: moe_layer_count 1: the model has 2 MoE layers");
    setup(&p);
    const uint32_t outside[] = {0, 2};
    const uint32_t twice[] = {1, 1};
    expect_refused(&p, "0,1,2,3", "4,5,6,7", outside, EP_ERR_INVALID_ARGUMENT,
                   "device_id 1 is node 2: allowed 0..1");
    expect_refused(&p, "0,1,2,3", "4,5,6,7", twice, EP_ERR_INVALID_ARGUMENT,
                   "device_id 0 and 1 are both node alpha");
    p.nodes[0].capacity_bytes = 35;
    expect_refused(
        &p, "0,1,2,3", "4,5,6,7", NULL, EP_ERR_RESOURCE_EXHAUSTED,
        "map.json: layer_id 0, device_id 1: node zeta has no room for expert 7: it holds 3 "
        "experts of 30 bytes");
}

Test(static_map, the_certificate_counts_what_must_be_loaded)
{
    problem p;
    setup(&p);
    ep_placement *before = solve(&p, "0,1,2,3", "4,5,6,7", NULL);
    p.layers[0].owned_offsets = before->layers[0].offsets;
    p.layers[0].owned = before->layers[0].copies;
    ep_placement *after = solve(&p, "0,1,2,7", "4,5,6,3", NULL);
    cr_assert_eq(after->copies_added, 2);
    cr_assert_eq(after->copies_dropped, 2);
    cr_assert_eq(after->bytes_added, 20);
    ep_placement_destroy(before);
    ep_placement_destroy(after);
}
