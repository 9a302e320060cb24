/* SPDX-License-Identifier: Apache-2.0 */
/* Membership and placement under a clock the test owns: nodes come, load, fall silent, come
 * back. */
#include <criterion/criterion.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "coordinator/drain_report.h"
#include "coordinator/policy.h"
#include "coordinator/state_kept.h"
#include "support/expect.h"

static ep_error error; /* of the last call */

#define EXPERTS 8
#define LAYERS 2
#define NODES_MAX 6

/* A node as the coordinator sees it: what it offers, what it has loaded. */
typedef struct fake_node {
    char name[16];
    char url[40];
    uint64_t incarnation;
    const char *secret; /* NULL: of an older version */
    uint64_t loaded_number;
    uint32_t owned[LAYERS][EXPERTS];
    size_t owned_count[LAYERS];
    uint32_t devices;
    uint64_t devices_lost;
    uint64_t busy_us;
    uint64_t busy_work;
    uint32_t left_to_load;
    uint32_t weights; /* expert e has the digest weights + e; 0: the node tells none */
    uint32_t digests[LAYERS][EXPERTS];
    Expertd__V1__LayerInfo layers[LAYERS];
    Expertd__V1__LayerInfo *layer_list[LAYERS];
    Expertd__V1__ModelInfo model;
    Expertd__V1__ModelInfo *model_list[1];
} fake_node;

static ep_coordinator_state *cluster;
static fake_node nodes[NODES_MAX];
static uint64_t now_ns = 1000 * EP_NS_PER_S;

static ep_coordinator_state_config config;

static void stop(void)
{
    ep_coordinator_state_destroy(cluster);
    cluster = NULL;
}

TestSuite(coordinator_state, .fini = stop);

/* Anew, with the configuration as it stands. */
static void create(void)
{
    stop();
    cr_assert_eq(ep_coordinator_state_create(&config, &cluster), EP_OK);
}

static void start(uint32_t copies, uint32_t min_nodes, const ep_expert_map *map)
{
    config = (ep_coordinator_state_config){.copies = copies,
                                           .min_nodes = min_nodes,
                                           .heartbeat_ms = 500,
                                           .heartbeat_dead_count = 3,
                                           .restore_ms = 10000,
                                           .nodes_max = NODES_MAX,
                                           .decode_tokens_max = 256,
                                           .term = 7,
                                           .expert_map = map};
    create();
    for (int i = 0; i < NODES_MAX; i++) {
        fake_node *n = &nodes[i];
        memset(n, 0, sizeof(*n));
        snprintf(n->name, sizeof(n->name), "node-%d", i);
        snprintf(n->url, sizeof(n->url), "tcp://127.0.0.1:%d", 9000 + i);
        n->incarnation = 100u + (unsigned)i;
        expertd__v1__model_info__init(&n->model);
        n->model.name = "demo";
        n->model.version = "v1";
        n->model.numerics = "portable/bf16/rne/00000000";
        n->model.layers = n->layer_list;
        n->model.n_layers = LAYERS;
        n->model_list[0] = &n->model;
        for (int l = 0; l < LAYERS; l++) {
            expertd__v1__layer_info__init(&n->layers[l]);
            n->layers[l].layer = (uint32_t)l + 3;
            n->layers[l].hidden = 64;
            n->layers[l].inner = 32;
            n->layers[l].experts = EXPERTS;
            n->layers[l].top_k = 2;
            n->layers[l].owned = n->owned[l];
            n->layer_list[l] = &n->layers[l];
        }
    }
}

static void describe(fake_node *n)
{
    for (int l = 0; l < LAYERS; l++) {
        n->layers[l].n_owned = n->owned_count[l];
        for (size_t k = 0; n->weights != 0 && k < n->owned_count[l]; k++) {
            n->digests[l][k] = n->weights + n->owned[l][k];
        }
        if (n->weights != 0) {
            n->layers[l].owned_digests = n->digests[l];
            n->layers[l].n_owned_digests = n->owned_count[l];
        }
    }
}

static Expertd__V1__RegisterRequest registration(int i)
{
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    request.node = nodes[i].name;
    request.url = nodes[i].url;
    request.host = (char *)(uintptr_t)(i < 2 ? "h0" : "h1");
    request.incarnation = nodes[i].incarnation;
    request.secret = (char *)(uintptr_t)(nodes[i].secret != NULL ? nodes[i].secret : "");
    request.models = nodes[i].model_list;
    request.n_models = 1;
    describe(&nodes[i]);
    return request;
}

static ep_err enroll(const Expertd__V1__RegisterRequest *request, ep_error *out_error)
{
    uint32_t id;
    return ep_coordinator_state_register(cluster, now_ns, request, &id, out_error);
}

static ep_err join(int i, ep_error *out_error)
{
    const Expertd__V1__RegisterRequest request = registration(i);
    return enroll(&request, out_error);
}

static ep_err beat_with(int i, Expertd__V1__ModelInfo **models, const char *state,
                        bool *out_reregister, ep_error *out_error)
{
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    Expertd__V1__HeartbeatRequest request = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
    epoch.term = config.term;
    epoch.number = nodes[i].loaded_number;
    request.epoch = &epoch;
    request.node = nodes[i].name;
    request.incarnation = nodes[i].incarnation;
    request.state = (char *)(uintptr_t)state;
    request.secret = (char *)(uintptr_t)(nodes[i].secret != NULL ? nodes[i].secret : "");
    request.devices = nodes[i].devices;
    request.devices_lost = nodes[i].devices_lost;
    request.busy_us = nodes[i].busy_us;
    request.busy_work = nodes[i].busy_work;
    request.experts_to_load = nodes[i].left_to_load;
    request.models = models;
    request.n_models = 1;
    describe(&nodes[i]);
    return ep_coordinator_state_heartbeat(cluster, now_ns, &request, out_reregister, out_error);
}

static ep_err try_beat(int i, const char *state, bool *out_reregister, ep_error *out_error)
{
    return beat_with(i, nodes[i].model_list, state, out_reregister, out_error);
}

static void join_first(int count)
{
    for (int i = 0; i < count; i++) {
        cr_assert_eq(join(i, NULL), EP_OK);
    }
}

static ep_coordinator_drain set_drained(int i, bool back)
{
    ep_coordinator_drain drain;
    cr_assert_eq(ep_coordinator_state_drain(cluster, nodes[i].name, back, &drain, NULL), EP_OK);
    return drain;
}

static ep_coordinator_drain order_drain(int i)
{
    return set_drained(i, false);
}

static ep_coordinator_drain order_back(int i)
{
    return set_drained(i, true);
}

static bool beat(int i, const char *state)
{
    bool reregister;
    cr_assert_eq(try_beat(i, state, &reregister, NULL), EP_OK);
    return reregister;
}

static bool owns(int i, int l, uint32_t expert)
{
    for (size_t e = 0; e < nodes[i].owned_count[l]; e++) {
        if (nodes[i].owned[l][e] == expert) {
            return true;
        }
    }
    return false;
}

static ep_routing_table *table_now(void)
{
    return ep_coordinator_state_table(cluster);
}

static ep_epoch table_epoch(void)
{
    return table_now()->epoch;
}

static uint64_t committed(void)
{
    return ep_coordinator_state_committed_epoch(cluster).number;
}

static uint64_t assigned(void)
{
    return ep_coordinator_state_assignment_epoch(cluster).number;
}

static const ep_error *placement_error(void)
{
    return ep_coordinator_state_placement_error(cluster);
}

/* Time goes on, in which only the first nodes are heard. */
static void hear_first(int count, uint64_t by_ns)
{
    now_ns += by_ns;
    for (int i = 0; i < count; i++) {
        beat(i, "serving");
    }
    ep_coordinator_state_tick(cluster, now_ns);
}

/* The node has loaded what it is given, but not expert `bad` of any layer (EXPERTS: all); or drops
 * the rest. */
static void take(int i, uint32_t bad, bool drops)
{
    Expertd__V1__NodeAssignment **list;
    size_t count;
    bool given[LAYERS][EXPERTS] = {{false}};
    cr_assert_eq(ep_coordinator_state_assignments(cluster, nodes[i].name, &list, &count), EP_OK);
    for (size_t a = 0; a < count; a++) {
        uint32_t l = list[a]->layer - 3;
        for (size_t e = 0; e < list[a]->n_experts; e++) {
            given[l][list[a]->experts[e]] = true;
        }
    }
    ep_coordinator_state_assignments_free(list, count);
    nodes[i].loaded_number = assigned();
    for (int l = 0; l < LAYERS; l++) {
        uint32_t owned[EXPERTS], owned_count = 0;
        for (uint32_t e = 0; e < EXPERTS; e++) {
            bool had = owns(i, l, e);
            if (had ? given[l][e] || !drops : given[l][e] && e != bad) {
                owned[owned_count++] = e;
            }
        }
        memcpy(nodes[i].owned[l], owned, sizeof(owned));
        nodes[i].owned_count[l] = owned_count;
    }
}

/* The node loads, says so, and once the assignment is committed drops the rest, as expertd does. */
static void load_until(int i, uint32_t bad, int passes)
{
    for (int pass = 0; pass < passes; pass++) {
        take(i, bad, pass == 1);
        cr_assert_not(beat(i, "serving"));
        if (committed() < nodes[i].loaded_number) {
            return;
        }
    }
}

static void load_without(int i, uint32_t bad)
{
    load_until(i, bad, 2);
}

static void load(int i)
{
    load_without(i, EXPERTS);
}

static void load_first(int count)
{
    for (int i = 0; i < count; i++) {
        load(i);
    }
}

/* So many nodes have loaded what they were given. */
static void start_loaded(uint32_t copies, int count)
{
    start(copies, (uint32_t)count, NULL);
    join_first(count);
    load_first(count);
}

/* Within the grace, in which nothing is dropped. */
static void load_and_keep(int count)
{
    for (int i = 0; i < count; i++) {
        load_until(i, EXPERTS, 1);
    }
}

static uint32_t copies_of(uint32_t layer_index, uint32_t expert)
{
    const ep_routing_layer *layer = &table_now()->layers[layer_index];
    return layer->offsets[expert + 1] - layer->offsets[expert];
}

static Expertd__V1__NodeEntry view_of(size_t i)
{
    Expertd__V1__NodeEntry view;
    cr_assert(ep_coordinator_state_node(cluster, i, now_ns, &view));
    return view;
}

/* Every expert of the layer has copies, whatever moves. */
static void assert_whole(uint32_t layer_index)
{
    for (uint32_t e = 0; e < EXPERTS; e++) {
        cr_assert_geq(copies_of(layer_index, e), 1u, "expert %u is lost", e);
    }
}

static void assert_copies(uint32_t want)
{
    ep_routing_table *table = table_now();
    cr_assert_not_null(table);
    ASSERT_OK(ep_routing_table_check(table, &error), error);
    cr_assert_eq(table->layers_count, (uint32_t)LAYERS);
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            cr_assert_eq(copies_of(l, e), want, "layer %u expert %u has %u copies", l, e,
                         copies_of(l, e));
        }
    }
}

Test(coordinator_state, first_table_waits_for_min_nodes_and_for_loading)
{
    start(1, 2, NULL);
    cr_assert_eq(join(0, NULL), EP_OK);
    load(0);
    cr_assert_null(table_now());
    cr_assert_eq(join(1, NULL), EP_OK);
    cr_assert_null(table_now());
    load(0);
    cr_assert_null(table_now());
    cr_assert_eq(committed(), 0u, "nothing is committed before all have loaded");
    load(1);
    assert_copies(1);
    cr_assert_eq(committed(), assigned());
    cr_assert_eq(table_epoch().term, 7u);
}

static uint32_t held(int i)
{
    return (uint32_t)(nodes[i].owned_count[0] + nodes[i].owned_count[1]);
}

static void load_all(int count)
{
    for (int round = 0; round < 2; round++) { /* what one drops another must have loaded first */
        load_first(count);
    }
}

Test(coordinator_state, copies_are_on_different_hosts)
{
    start(2, 4, NULL);
    join_first(4); /* two on h0, two on h1 */
    load_all(4);
    assert_copies(2);
    for (int l = 0; l < LAYERS; l++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            cr_assert_eq(owns(0, l, e) + owns(1, l, e), 1, "layer %d, expert %u", l, e);
        }
    }
}

static void come_back(int i)
{
    nodes[i].incarnation++;
    nodes[i].loaded_number = 0;
    nodes[i].owned_count[0] = nodes[i].owned_count[1] = 0;
    cr_assert_eq(join(i, NULL), EP_OK);
}

/* Two nodes of `other`, 0 and 3, and two of the usual id; the first two hold the whole model. */
static void start_two_of_each(void)
{
    static char other[] = "bf16dp/bf16/rne/00000000";
    start(2, 4, NULL);
    nodes[0].model.numerics = nodes[3].model.numerics = other;
    join_first(4);
    load_all(4);
    cr_assert(held(0) == LAYERS * EXPERTS && held(3) == LAYERS * EXPERTS && held(1) + held(2) == 0);
}

/* Copies with other bits are no copies: the nodes of one numerics id hold everything, those of most
 * nodes. */
Test(coordinator_state, only_nodes_of_one_numerics_id_get_experts)
{
    start_two_of_each();
    assert_copies(2); /* the first of them was there first */

    /* One becomes as the two idle ones: they are most then, and take over; until they have loaded
     * all stays listed. */
    nodes[3].model.numerics = nodes[1].model.numerics;
    come_back(3);
    load(0);
    cr_assert_eq(held(0), (uint32_t)(LAYERS * EXPERTS));
    load_all(4);
    assert_copies(2);
    cr_assert_eq(held(0), 0u);
    cr_assert_eq(held(1) + held(2) + held(3), (uint32_t)(2 * LAYERS * EXPERTS));

    /* As many of each: those that hold the experts keep them. */
    ep_epoch before = table_epoch();
    nodes[4].model.numerics = nodes[5].model.numerics = nodes[0].model.numerics;
    cr_assert(join(4, NULL) == EP_OK && join(5, NULL) == EP_OK);
    load_all(6);
    assert_copies(2);
    cr_assert(held(0) + held(4) + held(5) == 0 && table_epoch().number > before.number);
}

/* Time passes in steps of heartbeats of all nodes but the one that is away. */
static void pass_without(int away, uint64_t ms)
{
    for (uint64_t done = 0; done < ms; done += 500) {
        now_ns += 500 * EP_NS_PER_MS;
        for (int i = 0; i < 4; i++) {
            if (i != away) {
                load(i);
            }
        }
        ep_coordinator_state_tick(cluster, now_ns);
    }
}

static void expect_model_on_others_of(int away, int stays)
{
    cr_assert_eq(held(stays), (uint32_t)(LAYERS * EXPERTS));
    cr_assert_eq(held(1) + held(2), 0u, "the model moved to the other id while node-%d was away",
                 away);
}

/* A clean restart says draining first; the node's id keeps its vote meanwhile, also when it takes
 * longer than the silence allowed. */
Test(coordinator_state, a_restart_moves_no_model_to_another_numerics_id)
{
    start_two_of_each();
    beat(3, "draining");
    pass_without(3, 6000); /* forgotten after 1500 */
    expect_model_on_others_of(3, 0);
    assert_copies(1);
    come_back(3);
    load_all(4);
    expect_model_on_others_of(3, 0);
    assert_copies(2);
}

/* A node that dies is given restore_ms to come back before its experts go to others, and as long
 * again before its vote goes. */
Test(coordinator_state, a_dead_node_votes_on_for_a_while)
{
    start_two_of_each();
    pass_without(0, 15000); /* forgotten after 11500 */
    expect_model_on_others_of(0, 3);
    come_back(0);
    load_all(4);
    expect_model_on_others_of(0, 3);
    assert_copies(2);
    pass_without(0, 30000); /* for good */
    cr_assert_eq(held(3), 0u);
    cr_assert_eq(held(1) + held(2), (uint32_t)(2 * LAYERS * EXPERTS));
}

/* An operator's drain takes the vote: the node is not coming back to its work. */
Test(coordinator_state, a_drained_node_has_no_vote_for_its_numerics_id)
{
    start_two_of_each();
    cr_assert_eq(ep_coordinator_state_left_out(cluster)->code, EP_ERR_FAILED_PRECONDITION);
    cr_assert_str_eq(
        ep_coordinator_state_left_out(cluster)->text,
        "model demo:v1: 2 of 4 nodes compute with other numerics ('portable/bf16/rne/00000000'): "
        "only those of 'bf16dp/bf16/rne/00000000' get experts");
    order_drain(3);
    load_all(4);
    cr_assert_eq(held(0) + held(3), 0u);
    assert_copies(2);
}

/* What no node of the chosen id can load stays on one that computes the same bits, though it is
 * drained. */
Test(coordinator_state, an_expert_nobody_takes_stays_with_its_numerics_id)
{
    static char other[] = "bf16dp/bf16/rne/00000000";
    start(1, 3, NULL);
    nodes[0].model.numerics = other;
    join_first(3);
    load_all(3);
    cr_assert_eq(join(3, NULL), EP_OK);
    order_drain(1);
    order_drain(2);
    for (int l = 0; l < LAYERS; l++) { /* left there from another time */
        nodes[0].owned[l][0] = 5;
        nodes[0].owned_count[l] = 1;
    }
    beat(0, "serving");
    load_without(3, 5);
    load_without(3, 5);
    cr_assert_eq(placement_error()->code, EP_ERR_RESOURCE_EXHAUSTED);
    ASSERT_TEXT(*placement_error(), "it stays on node node-");
    cr_assert_null(strstr(placement_error()->text, "stays on node node-0"), "%s",
                   placement_error()->text);
}

static void expect_neighbours(const char *node, const char *names)
{
    char got[256] = "";
    Expertd__V1__Neighbour **list;
    size_t count;
    cr_assert_eq(ep_coordinator_state_neighbours(cluster, node, &list, &count), EP_OK);
    for (size_t i = 0; i < count; i++) {
        size_t n = strlen(got);
        snprintf(got + n, sizeof(got) - n, "%s=%s ", list[i]->node, list[i]->url);
    }
    free(list);
    cr_expect_str_eq(got, names);
}

Test(coordinator_state, a_node_is_told_the_others_of_its_host_in_the_table)
{
    start(1, 4, NULL);
    join_first(3);
    expect_neighbours("node-0", ""); /* there is no table */
    join(3, NULL);
    load_first(4);
    expect_neighbours("node-0", "node-1=tcp://127.0.0.1:9001 ");
    expect_neighbours("node-3", "node-2=tcp://127.0.0.1:9002 ");
    expect_neighbours("nobody", "");
}

Test(coordinator_state, eight_experts_on_six_nodes)
{
    start_loaded(1, 6);
    assert_copies(1);
}

Test(coordinator_state, a_node_that_joins_a_running_cluster_gets_its_part)
{
    start(1, 2, NULL);
    join_first(2);
    load_all(2);
    cr_assert(held(0) == EXPERTS && held(1) == EXPERTS);
    cr_assert_eq(join(2, NULL), EP_OK);
    assert_copies(1); /* all stays listed where it is until it is loaded there */
    load_all(3);
    assert_copies(1);
    for (int i = 0; i < 3; i++) {
        cr_assert(held(i) >= 4 && held(i) <= 6, "node %d holds %u of 16", i, held(i));
    }
}

static void join_with_room(int i, uint64_t bytes)
{
    for (int l = 0; l < LAYERS; l++) {
        nodes[i].layers[l].expert_bytes = 100;
    }
    Expertd__V1__RegisterRequest request = registration(i);
    request.host = (char *)(uintptr_t) "";
    request.capacity_bytes = bytes;
    cr_assert_eq(enroll(&request, NULL), EP_OK);
}

Test(coordinator_state, a_node_gets_no_more_than_it_has_memory_for_while_others_have_it)
{
    for (int is_balanced = 0; is_balanced < 2; is_balanced++) {
        start(1, 2, NULL);
        config.is_balanced = is_balanced != 0;
        create();
        join_with_room(0, 300);
        join_with_room(1, 0);
        load_all(2);
        assert_copies(1);
        cr_assert_eq(held(0), 3u, "%s: %u copies in room for 3",
                     ep_coordinator_state_policy(&config), held(0));
        /* Nobody has room for all: they share as if there were no limit. */
        start(1, 2, NULL);
        join_with_room(0, 300);
        join_with_room(1, 500);
        load_all(2);
        assert_copies(1);
        cr_assert_eq(held(0), 8u);
    }
}

static void expect_moves(size_t index, uint32_t to_load, uint32_t to_drop)
{
    uint32_t load_count, drop_count;
    ep_coordinator_state_moves(cluster, index, &load_count, &drop_count);
    cr_assert(load_count == to_load && drop_count == to_drop, "node %zu: %u to load, %u to drop",
              index, load_count, drop_count);
}

/* Drained, a node's experts are loaded by the other one before it gives them up. */
Test(coordinator_state, moves_are_counted_until_they_are_done)
{
    ep_coordinator_layer_view *view = malloc(sizeof(*view));
    start(1, 2, NULL);
    join_first(2);
    expect_moves(0, EXPERTS, 0);
    load_all(2);
    expect_moves(0, 0, 0);
    expect_moves(1, 0, 0);
    order_drain(0);
    expect_moves(0, 0, EXPERTS);
    expect_moves(1, EXPERTS, 0);
    cr_assert(ep_coordinator_state_layer(cluster, "demo", "v1", 4, view));
    cr_assert(view->heat_count == 0 && view->to_load.count == EXPERTS / 2 &&
              view->to_drop.count == EXPERTS / 2);
    for (size_t i = 0; i < view->to_load.count; i++) {
        cr_assert_eq(view->to_load.list[i].expert, view->to_drop.list[i].expert,
                     "what one loads the other gives up");
        cr_assert(owns(0, 1, view->to_drop.list[i].expert) &&
                  view->to_load.list[i].node_id != view->to_drop.list[i].node_id);
    }
    load_all(2);
    expect_moves(0, 0, 0);
    expect_moves(1, 0, 0);
    uint64_t sums[EXPERTS] = {[3] = 100000}, passes[EXPERTS] = {[3] = 1000, [5] = 7};
    ep_coordinator_state_take_heat(cluster, "demo", "v1", 4, sums, passes, EXPERTS);
    cr_assert(ep_coordinator_state_layer(cluster, "demo", "v1", 4, view));
    cr_assert(view->heat_count == EXPERTS && view->heat[3] == 116000.0 && view->heat[5] == 112.0 &&
              view->to_load.count == 0);
    free(view->heat);
    cr_assert(ep_coordinator_state_layer(cluster, "demo", "v1", 99, view));
    cr_assert(view->heat_count == 0 && view->to_drop.count == 0);
    free(view);
}

Test(coordinator_state, calls_of_a_node_begin_anew_with_its_process)
{
    bool reregister;
    start(1, 1, NULL);
    cr_assert_eq(join(0, NULL), EP_OK);
    Expertd__V1__HeartbeatRequest request = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
    request.node = nodes[0].name;
    request.incarnation = nodes[0].incarnation;
    request.state = (char *)(uintptr_t) "serving";
    request.requests_failed = 4;
    request.requests_hedged = 3;
    request.requests_refused = 2;
    request.weight_bytes = 4096;
    request.weight_quant_error = 0.25;
    request.weight_quant_output_error = 0.5;
    cr_assert_eq(ep_coordinator_state_heartbeat(cluster, now_ns, &request, &reregister, NULL),
                 EP_OK);
    cr_assert(view_of(0).requests_failed == 4 && view_of(0).requests_hedged == 3 &&
              view_of(0).requests_refused == 2 && view_of(0).weight_bytes == 4096 &&
              view_of(0).weight_quant_error == 0.25 && view_of(0).weight_quant_output_error == 0.5);
    nodes[0].incarnation++;
    cr_assert_eq(join(0, NULL), EP_OK);
    cr_assert(view_of(0).requests_failed == 0 && view_of(0).requests_hedged == 0 &&
              view_of(0).requests_refused == 0 && view_of(0).weight_bytes == 0 &&
              view_of(0).weight_quant_error == 0 && view_of(0).weight_quant_output_error == 0);
}

static void start_balanced(uint32_t spare_copies)
{
    start(1, 3, NULL);
    config.is_balanced = true;
    config.spare_copies = spare_copies;
    create();
    join_first(3);
    load_all(3);
}

static void note_heat(const uint64_t *sums)
{
    static const uint64_t passes[EXPERTS];
    for (uint32_t l = 0; l < LAYERS; l++) {
        ep_coordinator_state_take_heat(cluster, "demo", "v1", l + 3, sums, passes, EXPERTS);
    }
}

static void draw_uneven(uint64_t *sums)
{
    for (uint32_t e = 0; e < EXPERTS; e++) {
        sums[e] = e % 3 == 0 ? 9000 + 500u * e : 1000;
    }
}

static void draw_steep(uint64_t *sums)
{
    for (uint32_t e = 0; e < EXPERTS; e++) {
        sums[e] = 100 + (uint64_t)e * e * 200;
    }
}

static void take_heat(uint64_t factor, uint32_t hot, uint64_t *sums)
{
    for (uint32_t e = 0; e < EXPERTS; e++) {
        sums[e] += e == hot ? 10 * factor : factor;
    }
    note_heat(sums);
    ep_coordinator_state_rebalance(cluster);
    load_all(3);
}

Test(coordinator_state, balanced_placement_follows_the_heat_and_no_copy_is_ever_missing)
{
    uint64_t sums[EXPERTS] = {0};
    start_balanced(2);
    cr_assert_str_eq(table_now()->policy, "balanced");
    take_heat(1, 5, sums); /* a few slots say nothing */
    const ep_epoch before = table_epoch();
    take_heat(1, 5, sums);
    cr_assert_eq(table_epoch().number, before.number);
    take_heat(1000, 5, sums);
    cr_assert_eq(copies_of(0, 5), 3u, "the hot expert has %u copies", copies_of(0, 5));
    cr_assert_eq(copies_of(1, 5), 3u);
    for (int round = 0; round < 6; round++) {
        take_heat(1000, 2, sums);
    }
    cr_assert_geq(copies_of(0, 2), 2u, "the heat went on to expert 2, which has %u copies",
                  copies_of(0, 2));
    const ep_epoch settled = table_epoch();
    take_heat(1000, 2, sums);
    cr_assert_eq(table_epoch().number, settled.number, "the same load moves nothing");
    assert_whole(0);
}

/* Half a second in which nodes were busy for so long; node 2 has done share of the others' work. */
static void work_on(uint64_t busy_us, double share)
{
    now_ns += 500 * EP_NS_PER_MS;
    for (int i = 0; i < 3; i++) {
        nodes[i].busy_us += busy_us;
        nodes[i].busy_work += (uint64_t)((double)busy_us * 40 * (i == 2 ? share : 1));
        beat(i, "serving");
    }
    ep_coordinator_state_tick(cluster, now_ns);
}

Test(coordinator_state, a_slow_node_is_known_after_some_work_and_forgiven_when_it_is_quick_again)
{
    start_balanced(2);
    work_on(0, 1);
    cr_assert_eq(view_of(2).speed, 0.0, "nobody told anything");
    work_on(50000, 0.1);
    cr_assert_eq(view_of(2).speed, 0.0, "a thread off its core for once says nothing");
    for (int i = 0; i < 4; i++) {
        work_on(200000, 1);
    }
    cr_assert_float_eq(view_of(0).speed, 1, 0.01);
    cr_assert(view_of(2).speed > 0.9 && view_of(2).slow_ms == 0);
    work_on(200000, 0.1);
    cr_assert(view_of(2).speed > 0.5, "once is not for ever: %.2f", view_of(2).speed);
    for (int i = 0; i < 20; i++) {
        work_on(200000, 0.1);
    }
    cr_assert_float_eq(view_of(2).speed, 0.1, 0.01);
    cr_assert_geq(view_of(2).slow_ms, 5000u);
    cr_assert(view_of(0).slow_ms == 0 && view_of(0).speed > 0.99);
    cr_assert_str_eq(view_of(2).state, "serving");
    work_on(0, 1);
    cr_assert_float_eq(view_of(2).speed, 0.1, 0.01, "nothing new is known");
    for (int i = 0; i < 30; i++) {
        work_on(200000, 0.4);
    }
    cr_assert_neq(view_of(2).slow_ms, 0, "between a third and a half it stays what it was");
    for (int i = 0; i < 4; i++) {
        work_on(200000, 1);
    }
    cr_assert_eq(view_of(2).slow_ms, 0);
    nodes[2].busy_us = nodes[2].busy_work = 0; /* a report that was under way for long */
    beat(2, "serving");
    cr_assert_gt(view_of(2).speed, 0.5);
    nodes[2].incarnation++;
    cr_assert_eq(join(2, NULL), EP_OK);
    ep_coordinator_state_tick(cluster, now_ns);
    cr_assert_eq(view_of(2).speed, 0.0, "another process may be on another machine");
}

/* Heat that a node has by its copies, when copies share it by speed. */
static double heat_of(int node, double speed)
{
    double heat = 0;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        double speeds = 0;
        for (int i = 0; i < 3; i++) {
            speeds += owns(i, 0, e) ? (i == 2 ? speed : 1) : 0;
        }
        heat += owns(node, 0, e) ? (e == 5 ? 10 : 1) * (node == 2 ? speed : 1) / speeds : 0;
    }
    return heat;
}

Test(coordinator_state, balanced_placement_gives_a_slow_node_less)
{
    uint64_t sums[EXPERTS] = {0};
    start_balanced(2);
    for (int round = 0; round < 6; round++) {
        work_on(200000, 1);
        take_heat(1000, 5, sums);
    }
    double even = heat_of(2, 1);
    for (int i = 0; i < 20; i++) {
        work_on(200000, 0.2);
    }
    for (int round = 0; round < 6; round++) { /* the heat is as before */
        ep_coordinator_state_rebalance(cluster);
        load_all(3);
    }
    cr_assert_lt(heat_of(2, 0.2), even / 2, "%.1f of %.1f", heat_of(2, 0.2), even);
    assert_whole(0);
}

static Expertd__V1__PlanReply *plan(bool apply)
{
    Expertd__V1__PlanReply *reply = NULL;
    ASSERT_OK(ep_coordinator_state_plan(cluster, apply, true, &reply, &error), error);
    cr_assert_eq(reply->n_layers, (size_t)LAYERS);
    return reply;
}

static void free_plan(Expertd__V1__PlanReply *reply)
{
    expertd__v1__plan_reply__free_unpacked(reply, NULL);
}

static void assert_balance(const Expertd__V1__LayerBalance *as)
{
    ep_coordinator_balance balance;
    cr_assert(ep_coordinator_state_balance(cluster, "demo", "v1", 3, &balance));
    cr_assert_float_eq(balance.busiest_over_mean, as->busiest_over_mean, 1e-9);
    cr_assert_float_eq(balance.busiest_over_bound, as->busiest_over_bound, 1e-9);
}

/* A plan says what its order then does, and alone changes nothing. */
Test(coordinator_state, a_plan_changes_nothing_until_it_is_applied)
{
    uint64_t sums[EXPERTS];
    Expertd__V1__PlanReply *reply = NULL;
    start(1, 3, NULL);
    cr_assert_eq(ep_coordinator_state_plan(cluster, false, false, &reply, &error),
                 EP_ERR_UNAVAILABLE);
    cr_assert_str_eq(error.text, "nothing is placed yet: the coordinator waits until min_nodes 3 "
                                 "have registered, 0 are here");

    start_balanced(1);
    ep_coordinator_balance balance;
    cr_assert_not(ep_coordinator_state_balance(cluster, "demo", "v1", 3, &balance),
                  "nothing is known of the load yet");
    cr_assert_not(ep_coordinator_state_balance(cluster, "demo", "v2", 3, &balance));
    draw_uneven(sums);
    note_heat(sums);
    const uint64_t revision = ep_coordinator_state_revision(cluster);
    const ep_epoch before = ep_coordinator_state_assignment_epoch(cluster);
    Expertd__V1__PlanReply *dry = plan(false), *again = plan(false);
    cr_assert_eq(ep_coordinator_state_revision(cluster), revision);
    cr_assert_eq(assigned(), before.number);
    uint32_t to_load = 0, on_nodes = 0;
    for (size_t l = 0; l < LAYERS; l++) {
        const Expertd__V1__LayerPlan *layer = dry->layers[l];
        cr_assert(layer->has_heat);
        cr_assert_eq(layer->copies, EXPERTS + 1u + layer->copies_to_load - layer->copies_given_up);
        cr_assert_lt(layer->after->busiest_over_bound, layer->before->busiest_over_bound);
        cr_assert_geq(layer->after->busiest_over_mean, 1 - 1e-9);
        cr_assert_eq(layer->n_node_indexes, (size_t)layer->copies);
        cr_assert_eq(again->layers[l]->copies_to_load, layer->copies_to_load);
        to_load += layer->copies_to_load;
    }
    for (size_t n = 0; n < dry->n_nodes; n++) {
        on_nodes += dry->nodes[n]->copies_to_load;
        cr_assert_str_eq(dry->nodes[n]->name, nodes[n].name);
    }
    assert_balance(dry->layers[0]->before);
    cr_assert_gt(to_load, 0u);
    cr_assert_eq(on_nodes, to_load);
    cr_assert_not(dry->applied);

    Expertd__V1__PlanReply *done = plan(true);
    cr_assert(done->applied);
    cr_assert_gt(assigned(), before.number);
    for (size_t l = 0; l < LAYERS; l++) {
        cr_assert_eq(memcmp(done->layers[l]->node_indexes, dry->layers[l]->node_indexes,
                            dry->layers[l]->copies * sizeof(uint32_t)),
                     0);
    }
    ASSERT_FAILS(ep_coordinator_state_plan(cluster, true, false, &reply, &error),
                 EP_ERR_UNAVAILABLE, error, "still load what they were given before");
    Expertd__V1__PlanReply *meanwhile = plan(false);
    cr_assert_gt(meanwhile->n_loading, 0u);
    load_all(3);
    Expertd__V1__PlanReply *left = plan(false);
    cr_assert_eq(left->n_loading, 0u);
    assert_balance(dry->layers[0]->after);
    for (size_t l = 0; l < LAYERS; l++) {
        cr_assert_eq(left->layers[l]->copies_to_load + left->layers[l]->copies_given_up, 0u);
        cr_assert_float_eq(left->layers[l]->before->busiest_over_bound,
                           done->layers[l]->after->busiest_over_bound, 1e-9);
    }
    free_plan(dry);
    free_plan(again);
    free_plan(done);
    free_plan(meanwhile);
    free_plan(left);
}

/* move_rate is for what the coordinator does by itself: an order is done at once, and what comes
 * after pays for it. */
Test(coordinator_state, a_plan_is_applied_whatever_the_pace)
{
    uint64_t sums[EXPERTS];
    start(1, 3, NULL);
    config.is_balanced = true;
    config.move_rate = 100;
    create();
    for (int i = 0; i < 3; i++) {
        join_with_room(i, 0);
    }
    load_all(3);
    ep_coordinator_state_tick(cluster, now_ns);
    draw_uneven(sums);
    note_heat(sums);
    Expertd__V1__PlanReply *dry = plan(false), *done = plan(true);
    uint64_t bytes = 0;
    for (size_t l = 0; l < LAYERS; l++) {
        cr_assert_eq(done->layers[l]->copies_to_load, dry->layers[l]->copies_to_load);
        bytes += done->layers[l]->bytes_to_load;
    }
    cr_assert_gt(bytes, 2 * config.move_rate, "the pace would have allowed it");
    load_all(3);
    Expertd__V1__PlanReply *left = plan(false);
    for (size_t l = 0; l < LAYERS; l++) {
        cr_assert_eq(left->layers[l]->copies_to_load, 0u, "copies of the order waited");
    }
    const ep_epoch after = ep_coordinator_state_assignment_epoch(cluster);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        sums[e] += e % 3 == 1 ? 90000 : 1000;
    }
    note_heat(sums);
    ep_coordinator_state_rebalance(cluster);
    cr_assert_eq(assigned(), after.number, "the order was not paid for");
    free_plan(dry);
    free_plan(done);
    free_plan(left);
}

/* It would load nothing, and the copies would be missing once it is lost. */
Test(coordinator_state, a_plan_is_not_applied_while_a_node_is_suspect)
{
    uint64_t sums[EXPERTS];
    Expertd__V1__PlanReply *reply = NULL;
    ep_coordinator_drain drain;
    start_balanced(0);
    draw_steep(sums);
    note_heat(sums);
    hear_first(2, 2 * EP_NS_PER_S);
    const uint64_t number = assigned();
    ep_coordinator_state_rebalance(cluster);
    ASSERT_FAILS(ep_coordinator_state_plan(cluster, true, false, &reply, &error),
                 EP_ERR_UNAVAILABLE, error, "node node-2 is suspect");
    cr_assert_eq(assigned(), number);
    free_plan(plan(false));
    beat(2, "serving");
    ep_coordinator_state_rebalance(cluster);
    cr_assert_gt(assigned(), number, "nothing would have moved");
    load_all(3);
    hear_first(2, 2 * EP_NS_PER_S);
    cr_assert_eq(ep_coordinator_state_drain(cluster, "node-2", false, &drain, &error), EP_OK);
    load_all(2);
    free_plan(plan(true)); /* nothing is moved to a drained one */
}

/* What a node gave up it still holds for a while; who places must not take that for copies, nor
 * move back and forth.
 */
Test(coordinator_state, copies_given_up_are_none)
{
    uint64_t sums[EXPERTS];
    start_balanced(0);
    draw_steep(sums);
    note_heat(sums);
    ep_coordinator_state_rebalance(cluster);
    const ep_epoch moved = ep_coordinator_state_assignment_epoch(cluster);
    cr_assert_gt(moved.number, committed(), "nothing moved");
    load_and_keep(3);
    cr_assert_eq(committed(), moved.number);
    cr_assert_gt(held(0) + held(1) + held(2), (uint32_t)(LAYERS * EXPERTS),
                 "nobody holds what it gave up");
    Expertd__V1__PlanReply *left = plan(false);
    cr_assert_eq(left->layers[0]->copies_given_up + left->layers[1]->copies_given_up, 0u);
    free_plan(left);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        sums[e] *= 2;
    }
    note_heat(sums);
    ep_coordinator_state_rebalance(cluster);
    cr_assert_eq(assigned(), moved.number, "the same load moved copies again");
}

Test(coordinator_state, a_silent_node_leaves_the_table_then_loses_its_experts)
{
    start_loaded(2, 3);
    assert_copies(2);
    uint64_t number = table_epoch().number;

    hear_first(2, 1400 * EP_NS_PER_MS);
    cr_assert_eq(table_epoch().number, number, "not dead before three heartbeats");

    hear_first(0, 200 * EP_NS_PER_MS);
    Expertd__V1__NodeEntry view;
    cr_assert_str_eq(view_of(2).state, "suspect");
    cr_assert_gt(table_epoch().number, number);
    assert_whole(0);

    hear_first(2, 11 * EP_NS_PER_S);
    load(0);
    now_ns += 400 * EP_NS_PER_S; /* node 1 is busy with its assignment */
    beat(0, "serving");
    beat(1, "serving");
    cr_assert_eq(view_of(0).behind_ms, 0u);
    cr_assert_geq(view_of(1).behind_ms, 400000u);
    load(1);
    cr_assert_eq(view_of(1).behind_ms, 0u);
    assert_copies(2);

    cr_assert_not(ep_coordinator_state_node(cluster, 2, now_ns, &view));
    cr_assert(ep_coordinator_state_lost(cluster, 0, now_ns, &view),
              "it is missing until it comes back");
    cr_assert_str_eq(view.state, EP_NODE_LOST);
    cr_assert_eq(view.last_seen_ms, 412600u);
    cr_assert_not(ep_coordinator_state_lost(cluster, 1, now_ns, &view));
    cr_assert_eq(join(2, NULL), EP_OK);
    cr_assert_not(ep_coordinator_state_lost(cluster, 0, now_ns, &view));
}

/* Who left in order is not missed, and who is gone for good is drained by name. */
Test(coordinator_state, a_node_that_left_is_not_lost)
{
    Expertd__V1__NodeEntry view;
    ep_coordinator_drain drain;
    start_loaded(1, 3);
    beat(1, "leaving");
    ep_coordinator_state_node(cluster, 2, now_ns, &view);
    char silent[EP_NODE_NAME_BYTES];
    snprintf(silent, sizeof(silent), "%s", view.name);
    for (int i = 0; i < 2; i++) {
        hear_first(1, 13 * EP_NS_PER_S);
    }
    cr_assert(ep_coordinator_state_lost(cluster, 0, now_ns, &view));
    cr_assert_str_eq(view.name, silent);
    cr_assert_not(ep_coordinator_state_lost(cluster, 1, now_ns, &view));
    ASSERT_OK(ep_coordinator_state_drain(cluster, silent, false, &drain, &error), error);
    cr_assert_not(ep_coordinator_state_lost(cluster, 0, now_ns, &view));
}

/* Time in which the coordinator did not run is no silence of nodes, neither before they are suspect
 * nor after. */
Test(coordinator_state, a_blind_coordinator_forgets_nobody)
{
    start_loaded(2, 3);
    uint64_t number = table_epoch().number;
    now_ns += 3600 * EP_NS_PER_S;
    beat(0, "serving"); /* one was heard before the tick: it is not seen in the future */
    ep_coordinator_state_excuse(cluster, now_ns, 3600 * EP_NS_PER_S);
    ep_coordinator_state_tick(cluster, now_ns);
    cr_assert_eq(table_epoch().number, number);
    for (size_t i = 0; i < 3; i++) {
        cr_assert_str_eq(view_of(i).state, "serving");
        cr_assert_lt(view_of(i).last_seen_ms, 1000u);
    }
    hear_first(0, 1600 * EP_NS_PER_MS); /* from here on silence counts again */
    cr_assert_str_eq(view_of(2).state, "suspect");
}

Test(coordinator_state, a_suspect_that_speaks_again_is_back_at_once)
{
    start_loaded(1, 2);
    hear_first(1, 2 * EP_NS_PER_S);
    cr_assert_eq(copies_of(0, 0) + copies_of(0, 1), 1u, "one of two nodes is gone");
    cr_assert_not(beat(1, "serving"));
    assert_copies(1);
}

Test(coordinator_state, draining_node_leaves_the_table_and_others_take_over)
{
    start_loaded(1, 2);
    beat(1, "draining");
    load(0);
    assert_copies(1);
    const ep_routing_layer *layer = &table_now()->layers[0];
    for (uint32_t i = 0; i < layer->offsets[EXPERTS]; i++) {
        cr_assert_eq(layer->copies[i], 0u);
    }
}

Test(coordinator_state, a_drained_node_that_is_gone_gets_nothing_back)
{
    start_loaded(1, 2);
    beat(1, "draining");
    load(0);
    assert_copies(1);
    hear_first(1, 2 * EP_NS_PER_S);
    Expertd__V1__NodeEntry view;
    cr_assert_not(ep_coordinator_state_node(cluster, 1, now_ns, &view),
                  "it drained and fell silent: forgotten");
    assert_copies(1);
    cr_assert_eq(join(2, NULL), EP_OK); /* places anew */
    assert_copies(1);
    load(0);
    load(2);
    assert_copies(1);
}

Test(coordinator_state, nodes_and_models_that_are_gone_are_forgotten)
{
    start(1, 1, NULL);
    for (int round = 0; round < 40; round++) {
        char name[16], version[16];
        snprintf(name, sizeof(name), "pod-%d", round);
        snprintf(version, sizeof(version), "v%d", round);
        snprintf(nodes[0].name, sizeof(nodes[0].name), "%s", name);
        nodes[0].model.version = version;
        nodes[0].incarnation++;
        cr_assert_eq(join(0, NULL), EP_OK, "round %d: names and models pile up", round);
        load(0);
        assert_copies(1);
        cr_assert_eq(table_now()->models_count, 1u);
        now_ns += 20 * EP_NS_PER_S;
        ep_coordinator_state_tick(cluster, now_ns);
    }
}

Test(coordinator_state, versions_that_a_node_leaves_in_place_are_forgotten)
{
    start(1, 1, NULL);
    for (int round = 0; round < 300; round++) { /* more than a table may have models */
        char version[16];
        snprintf(version, sizeof(version), "v%d", round);
        nodes[0].model.version = version;
        nodes[0].incarnation++;
        cr_assert_eq(join(0, NULL), EP_OK, "round %d", round);
        load(0);
        assert_copies(1);
        cr_assert_eq(table_now()->models_count, 1u);
    }
}

static void restart(void)
{
    ep_coordinator_kept kept;
    cr_assert_eq(ep_coordinator_state_save(cluster, &kept), EP_OK);
    ep_coordinator_state_destroy(cluster);
    config.term++;
    now_ns = 5 * EP_NS_PER_S; /* another boot: another clock */
    cr_assert_eq(ep_coordinator_state_create(&config, &cluster), EP_OK);
    cr_assert_eq(ep_coordinator_state_restore(cluster, now_ns, &kept), EP_OK);
    ep_coordinator_kept_fini(&kept);
}

/* "" none. At most one of a name: the codec refuses a table with two. */
static const char *default_version(void)
{
    const ep_routing_table *table = table_now();
    const char *version = "";
    for (uint32_t m = 0; table != NULL && m < table->models_count; m++) {
        if (table->models[m].is_default) {
            cr_assert_str_eq(version, "", "two defaults");
            version = table->models[m].version;
        }
    }
    return version;
}

static ep_err set_default(const char *version, char *out_before, ep_error *out_error)
{
    return ep_coordinator_state_set_default(cluster, "demo", version, out_before, out_error);
}

Test(coordinator_state, the_first_whole_version_is_the_default_until_an_operator_moves_it)
{
    char before[EP_VERSION_BYTES];
    start(1, 1, NULL);
    nodes[1].model.version = "v2";
    ASSERT_FAILS(set_default("v1", before, &error), EP_ERR_NOT_FOUND, error, "known: none");
    join_first(2);
    ASSERT_FAILS(set_default("v1", before, &error), EP_ERR_UNAVAILABLE, error,
                 "version v1 of model demo is not in the routing table yet");
    load(1);
    load_first(2);
    cr_assert_eq(table_now()->models_count, 2u);
    const char *first = default_version()[1] == '1' ? "v1" : "v2";
    const char *other = first[1] == '1' ? "v2" : "v1";
    cr_assert_str_eq(default_version(), first);

    ep_epoch epoch = table_epoch();
    ASSERT_OK(set_default(other, before, &error), error);
    cr_assert_str_eq(before, first);
    cr_assert_str_eq(default_version(), other);
    cr_assert_gt(ep_epoch_compare(table_epoch(), epoch), 0, "clients are not told");
    epoch = table_epoch();
    cr_assert_eq(set_default(other, before, &error), EP_OK);
    cr_assert_str_eq(before, other);
    cr_assert_eq(ep_epoch_compare(table_epoch(), epoch), 0, "nothing changed");
    cr_assert_eq(set_default("v3", before, &error), EP_ERR_NOT_FOUND);
    cr_assert(strstr(error.text, "'v3'") && strstr(error.text, "demo v1") &&
                  strstr(error.text, "demo v2"),
              "%s", error.text);
    load_first(2);
    cr_assert_str_eq(default_version(), other, "it moved by itself");

    restart();
    cr_assert_str_eq(default_version(), other, "a restart forgot what the operator chose");
}

Test(coordinator_state, a_default_that_no_node_offers_any_more_gives_way)
{
    char before[EP_VERSION_BYTES];
    start(1, 1, NULL);
    cr_assert_eq(join(0, NULL), EP_OK);
    load(0);
    cr_assert_str_eq(default_version(), "v1");
    nodes[1].model.version = "v2";
    cr_assert_eq(join(1, NULL), EP_OK);
    cr_assert_str_eq(default_version(), "v1", "a newcomer took over");
    ASSERT_FAILS(set_default("v2", before, &error), EP_ERR_UNAVAILABLE, error,
                 "version v2 of model demo is not whole: 16 of its experts have no copy");
    cr_assert_str_eq(default_version(), "v1");
    load(1);
    load(0);
    cr_assert_str_eq(default_version(), "v1", "a newcomer took over");
    for (int i = 0; i < 40; i++) {
        now_ns += EP_NS_PER_S;
        beat(1, "serving");
        ep_coordinator_state_tick(cluster, now_ns);
    }
    cr_assert_eq(table_now()->models_count, 1u);
    cr_assert_str_eq(default_version(), "v2");
}

static ep_err join_with(int i, Expertd__V1__ModelInfo **models, size_t count, ep_error *out_error)
{
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    request.node = nodes[i].name;
    request.url = nodes[i].url;
    request.incarnation = nodes[i].incarnation;
    request.models = models;
    request.n_models = count;
    return enroll(&request, out_error);
}

/* Two sizes of one layer: what is owned of the larger one does not fit into the smaller one. */
Test(coordinator_state, what_is_described_twice_in_one_registration_is_refused)
{
    static uint32_t far_expert[] = {4000};
    start(1, 1, NULL);
    nodes[0].layers[1].layer = nodes[0].layers[0].layer;
    nodes[0].layers[1].experts = 4096;
    nodes[0].layers[1].owned = far_expert;
    nodes[0].layers[1].n_owned = 1;
    ASSERT_FAILS(join_with(0, nodes[0].model_list, 1, &error), EP_ERR_INVALID_ARGUMENT, error,
                 "model demo, layer 3 is given twice");
    Expertd__V1__ModelInfo *twice[] = {&nodes[1].model, &nodes[2].model};
    ASSERT_FAILS(join_with(1, twice, 2, &error), EP_ERR_INVALID_ARGUMENT, error,
                 "model demo version v1 is given twice");
}

/* A table that is too large to be made would be missing for all. */
Test(coordinator_state, a_node_with_too_many_models_is_refused_and_others_go_on)
{
    enum { MANY = 300 };
    static Expertd__V1__ModelInfo models[MANY];
    static Expertd__V1__ModelInfo *list[MANY];
    static char names[MANY][16];
    start(1, 1, NULL);
    cr_assert_eq(join(0, NULL), EP_OK);
    load(0);
    for (int m = 0; m < MANY; m++) {
        models[m] = nodes[1].model;
        snprintf(names[m], sizeof(names[m]), "m%d", m);
        models[m].name = names[m];
        list[m] = &models[m];
    }
    ASSERT_FAILS(join_with(1, list, MANY, &error), EP_ERR_RESOURCE_EXHAUSTED, error,
                 "300 models, allowed up to 256");
    ASSERT_FAILS(join_with(1, list, 256, &error), EP_ERR_RESOURCE_EXHAUSTED, error,
                 "257 models and 514 layers, allowed up to 256 and 65536");
    load(0);
    assert_copies(1);
    ASSERT_OK(join_with(1, list, 255, &error), error);
}

Test(coordinator_state, a_copy_with_other_weights_is_not_listed)
{
    uint32_t digests[2][EXPERTS];
    start(2, 2, NULL);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        digests[0][e] = 0x1000 + e;
        /* one differs on node 1, one it has not read yet */
        digests[1][e] = e == 5 ? 7 : e == 2 ? 0 : 0x1000 + e;
    }
    join_first(2);
    for (int i = 0; i < 2; i++) {
        nodes[i].layers[0].owned_digests = digests[i];
        nodes[i].layers[0].n_owned_digests = EXPERTS;
        load(i);
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        cr_assert_eq(copies_of(0, e), e == 5 ? 1u : 2u, "expert %u", e);
    }
    const ep_error *problem = ep_coordinator_state_copy_error(cluster);
    cr_assert_eq(problem->code, EP_ERR_DATA_LOSS);
    ASSERT_TEXT(*problem, "not used, of: node-1 (1); as expert 5 of layer 3 of "
                          "model demo:v1: SHA-256 07000000.. on 1");
    nodes[1].layers[0].n_owned_digests = 3;
    nodes[1].incarnation++;
    ASSERT_FAILS(join(1, &error), EP_ERR_INVALID_ARGUMENT, error, "3 digests of 8 owned experts");
}

Test(coordinator_state, unknown_or_restarted_nodes_are_told_to_register)
{
    start(1, 1, NULL);
    cr_assert(beat(0, "serving"));
    join(0, NULL);
    cr_assert_not(beat(0, "starting"));
    nodes[0].incarnation++;
    cr_assert(beat(0, "serving"));
}

Test(coordinator_state, a_restarted_coordinator_keeps_what_nodes_hold)
{
    start(1, 2, NULL);
    nodes[0].owned_count[0] = nodes[0].owned_count[1] = 4;
    nodes[1].owned_count[0] = nodes[1].owned_count[1] = 4;
    for (uint32_t e = 0; e < 4; e++) {
        nodes[0].owned[0][e] = nodes[0].owned[1][e] = 2 * e;
        nodes[1].owned[0][e] = nodes[1].owned[1][e] = 2 * e + 1;
    }
    join_first(2);
    load_first(2);
    assert_copies(1);
    for (uint32_t e = 0; e < 4; e++) {
        cr_assert_eq(nodes[0].owned[0][e], 2 * e);
        cr_assert_eq(nodes[1].owned[1][e], 2 * e + 1);
    }
}

Test(coordinator_state, bad_registrations_are_refused_by_name)
{
    start(1, 1, NULL);
    cr_assert_eq(join(0, &error), EP_OK);
    nodes[1].layers[0].experts = 7;
    ASSERT_FAILS(join(1, &error), EP_ERR_INVALID_ARGUMENT, error, "layer 3 has 7 experts");
    ASSERT_TEXT(error, "have 8");
    nodes[5].layers[0].inner = 0;
    cr_assert_eq(join(5, &error), EP_ERR_INVALID_ARGUMENT,
                 "what clients refuse in a table must not get into one");
    ASSERT_TEXT(error, "inner");
    nodes[2].owned[0][0] = 8;
    nodes[2].owned_count[0] = 1;
    ASSERT_FAILS(join(2, &error), EP_ERR_INVALID_ARGUMENT, error, "owned expert 8, allowed 0..7");
    nodes[3].name[0] = 0;
    ASSERT_FAILS(join(3, &error), EP_ERR_INVALID_ARGUMENT, error,
                 "node name has 0 characters, allowed 1..63");
    snprintf(nodes[4].name, sizeof(nodes[4].name), "node-0");
    ASSERT_FAILS(join(4, &error), EP_ERR_ALREADY_EXISTS, error,
                 "node-0 is in use by a live node at tcp://127.0.0.1:9000");
}

/* The name of a live node is no word that anybody may say: url and incarnation are known to all,
 * its secret is not. */
Test(coordinator_state, a_live_name_is_its_owners)
{
    bool reregister;
    start(1, 1, NULL);
    nodes[0].secret = "0123456789abcdef";
    cr_assert_eq(join(0, &error), EP_OK);
    load(0);
    nodes[1] = nodes[0]; /* another process of the same name, url and incarnation */
    nodes[1].secret = "another";
    ASSERT_FAILS(join(1, &error), EP_ERR_ALREADY_EXISTS, error, "silent for 1000 ms");
    cr_assert_null(strstr(error.text, nodes[0].secret));
    nodes[1].secret = NULL;
    cr_assert_eq(join(1, &error), EP_ERR_ALREADY_EXISTS, "nor as a node of an older version");
    cr_assert_eq(try_beat(1, "draining", &reregister, &error), EP_ERR_PERMISSION_DENIED);
    cr_assert_str_eq(view_of(0).state, "serving");
    cr_assert_eq(join(0, &error), EP_OK, "it may itself");
    cr_assert_not(beat(0, "serving"));

    nodes[1].secret = "started anew";
    nodes[1].incarnation++;
    now_ns += 999 * EP_NS_PER_MS;
    cr_assert_eq(join(1, &error), EP_ERR_ALREADY_EXISTS);
    now_ns += 2 * EP_NS_PER_MS;
    cr_assert_eq(join(1, &error), EP_OK, "the one before is silent");
    cr_assert(beat(0, "serving"), "and is told that it is another's now");
    cr_assert_not(beat(1, "draining"));
    cr_assert_eq(join(0, &error), EP_OK, "a node that drains gives its name free");
}

Test(coordinator_state, a_map_of_seven_experts_for_eight_is_named)
{
    static const char text[] = "{\"moe_layer_count\":2,\"layer_list\":["
                               "{\"layer_id\":0,\"device_count\":1,\"device_list\":[{\"device_id\":"
                               "0,\"device_expert\":[0,1,2,3,4,5,6]}]},"
                               "{\"layer_id\":1,\"device_count\":1,\"device_list\":[{\"device_id\":"
                               "0,\"device_expert\":[0,1,2,3,4,5,6]}]}]}";
    ep_expert_map *map;
    cr_assert_eq(ep_expert_map_parse(text, strlen(text), "map.json", &map, NULL), EP_OK);
    start(1, 1, map);
    join(0, NULL);
    const ep_error *problem = placement_error();
    cr_assert_neq(problem->code, EP_OK);
    ASSERT_TEXT(*problem, "routing table has 7 experts, model has 8");
    cr_assert_null(table_now());
    stop();
    ep_expert_map_destroy(map);
}

/* ---- drain ---- */

static const char *state_of(int i)
{
    Expertd__V1__NodeEntry view;
    for (size_t n = 0; ep_coordinator_state_node(cluster, n, now_ns, &view); n++) {
        if (strcmp(view.name, nodes[i].name) == 0) {
            return view.state;
        }
    }
    return "absent";
}

/* Copies of node i in the table. */
static uint32_t listed(int i)
{
    const ep_routing_table *table = table_now();
    uint32_t count = 0;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        for (uint32_t c = 0; c < table->layers[l].offsets[EXPERTS]; c++) {
            count += strcmp(table->nodes[table->layers[l].copies[c]].name, nodes[i].name) == 0;
        }
    }
    return count;
}

/* All nodes load what they are given until nobody is given anything else. */
static void settle(int count)
{
    uint64_t number;
    do {
        number = assigned();
        load_first(count);
    } while (assigned() != number);
    cr_assert_eq(committed(), number, "nothing is committed");
}

static void start_nodes(uint32_t copies, int count)
{
    start(copies, (uint32_t)count, NULL);
    join_first(count);
    settle(count);
    assert_copies(copies);
}

Test(coordinator_state, a_drained_node_serves_until_others_have_its_experts)
{
    ep_coordinator_drain drain;
    start_nodes(1, 3);
    uint32_t before = listed(1);
    cr_assert_gt(before, 0u);
    drain = order_drain(1);
    cr_assert_str_eq(drain.node, "node-1");
    cr_assert_str_eq(drain.state, "draining");
    cr_assert_eq(drain.copies_to_move, before);
    assert_copies(1);
    load(0);
    cr_assert_eq(listed(1), before, "node 2 has not loaded its part yet");
    assert_whole(0);
    load(2);
    cr_assert_eq(listed(1), before, "node 1 has not said yet that it knows");
    load(1);
    assert_copies(1);
    cr_assert_eq(listed(1), 0u);
    cr_assert_str_eq(state_of(1), "drained");
    cr_assert_eq(nodes[1].owned_count[0] + nodes[1].owned_count[1], 0u);
    drain = order_drain(1); /* again is no error */
    cr_assert_eq(drain.copies_to_move, 0u);
    cr_assert_str_eq(drain.state, "drained");

    drain = order_back(1);
    settle(3);
    assert_copies(1);
    cr_assert_geq(listed(1), 4u, "it takes part again: %u copies", listed(1));
    cr_assert_str_eq(state_of(1), "serving");
}

/* ---- a table that no client can take ---- */

enum { WIDE = 65000, WIDE_LAYERS = 9 };

/* While experts move, all that nodes hold is listed: more than a registration is counted with. */
Test(coordinator_state, a_table_that_no_client_can_take_is_not_published)
{
    static uint32_t every[WIDE];
    static Expertd__V1__LayerInfo layers[WIDE_LAYERS];
    Expertd__V1__LayerInfo *list[WIDE_LAYERS];
    bool reregister;
    start(1, NODES_MAX, NULL);
    Expertd__V1__ModelInfo model = nodes[0].model, *models[1] = {&model};
    for (uint32_t e = 0; e < WIDE; e++) {
        every[e] = e;
    }
    for (uint32_t l = 0; l < WIDE_LAYERS; l++) {
        layers[l] = nodes[0].layers[0];
        layers[l].layer = l;
        layers[l].experts = WIDE;
        layers[l].owned = every;
        layers[l].n_owned = WIDE;
        list[l] = &layers[l];
    }
    model.layers = list;
    model.n_layers = WIDE_LAYERS;
    for (int i = 0; i < NODES_MAX; i++) {
        ASSERT_OK(join_with(i, models, 1, &error), error);
    }
    for (int i = 0; i < NODES_MAX; i++) {
        nodes[i].loaded_number = assigned();
        ASSERT_OK(beat_with(i, models, "serving", &reregister, &error), error);
    }
    const ep_epoch served = table_epoch(),
                   committed = ep_coordinator_state_committed_epoch(cluster);
    cr_assert_eq(placement_error()->code, EP_OK);

    order_drain(0);
    cr_assert_eq(ep_epoch_compare(table_epoch(), served), 0, "the one before is served on");
    cr_assert_eq(ep_epoch_compare(ep_coordinator_state_committed_epoch(cluster), committed), 0,
                 "what it needs is kept");
    const ep_error *problem = placement_error();
    cr_assert_eq(problem->code, EP_ERR_RESOURCE_EXHAUSTED);
    ASSERT_TEXT(*problem, "6 nodes, 1 models, 9 layers");
    ASSERT_TEXT(*problem, "clients take up to 4194304");

    for (int i = 0; i < NODES_MAX; i++) {
        nodes[i].loaded_number = assigned();
        ASSERT_OK(beat_with(i, models, "serving", &reregister, &error), error);
    }
    cr_assert_gt(table_epoch().number, served.number, "one copy each: it fits");
    cr_assert_eq(placement_error()->code, EP_OK);
}

/* ---- copies with other weights ---- */

enum { WRONG = 0x7000, RIGHT = 0x1000 };

static void start_wrong_first(void)
{
    start(2, 1, NULL);
    for (int i = 0; i < NODES_MAX; i++) {
        nodes[i].weights = i == 0 ? WRONG : RIGHT;
    }
    cr_assert_eq(join(0, NULL), EP_OK);
    settle(1);
    assert_copies(1);
}

static void join_right(int i)
{
    cr_assert_eq(join(i, NULL), EP_OK);
    settle(i + 1);
}

static void expect_copy_error(const char *text)
{
    const ep_error *problem = ep_coordinator_state_copy_error(cluster);
    ASSERT_TEXT(*problem, text);
}

Test(coordinator_state, most_nodes_decide_which_weights_are_used_not_the_first)
{
    start_wrong_first();
    join_right(1);
    cr_assert(listed(0) == LAYERS * EXPERTS && listed(1) == 0,
              "two that differ: nobody can tell, nothing moves");
    expect_copy_error("not used, of: node-1 (16); as expert 0 of layer 3 of model demo:v1: SHA-256 "
                      "00100000.. on 1, used 00700000.. on 1 (node-0), no majority");
    join_right(2);
    assert_copies(2);
    cr_assert_eq(listed(0), 0u);
    expect_copy_error("not used, of: node-0 (16); as expert 0 of layer 3 of model demo:v1: SHA-256 "
                      "00700000.. on 1, used 00100000.. on 2 (node-1), the majority");
    load(0);
    cr_assert_eq(held(0), 0u, "what is not used is dropped, and its node named all the same");

    nodes[0].weights = RIGHT; /* the operator copied the checkpoint again */
    come_back(0);
    settle(3);
    assert_copies(2);
    cr_assert_eq(ep_coordinator_state_copy_error(cluster)->code, EP_OK);
}

Test(coordinator_state, weights_of_a_node_that_is_gone_bind_nobody)
{
    start_wrong_first();
    join_right(1);
    for (int passed = 0; passed < 2000; passed += 500) {
        now_ns += 500 * EP_NS_PER_MS;
        beat(1, "serving");
        ep_coordinator_state_tick(cluster, now_ns);
    }
    cr_assert_str_eq(state_of(0), "suspect");
    assert_copies(1);
    cr_assert_eq(listed(1), (uint32_t)(LAYERS * EXPERTS), "of equals that one which is up");
    beat(0, "serving");
    cr_assert(listed(0) == 0 && listed(1) == LAYERS * EXPERTS, "and back it does not go");
    now_ns += 20 * EP_NS_PER_S;
    beat(1, "serving");
    ep_coordinator_state_tick(cluster, now_ns);
    cr_assert_str_eq(state_of(0), "absent");
    cr_assert_eq(ep_coordinator_state_copy_error(cluster)->code, EP_OK);
    assert_copies(1);
}

Test(coordinator_state, a_drained_node_has_no_say_about_weights)
{
    start_wrong_first();
    join_right(1);
    cr_assert_eq(listed(1), 0u);
    order_drain(0);
    settle(2);
    cr_assert(listed(0) == 0 && listed(1) == LAYERS * EXPERTS);
    cr_assert_eq(ep_coordinator_state_copy_error(cluster)->code, EP_OK);
    order_back(0);
    settle(2);
    cr_assert(listed(0) == 0 && listed(1) == LAYERS * EXPERTS);
    expect_copy_error("not used, of: node-0 (16)");
}

/* Neither while they are cut off, nor while they restart one after the other. */
Test(coordinator_state, a_wrong_node_does_not_take_over_while_most_are_silent)
{
    start_wrong_first();
    join_right(1);
    join_right(2);
    hear_first(1, 3 * EP_NS_PER_S);
    cr_assert_str_eq(state_of(1), "suspect");
    cr_assert_str_eq(state_of(2), "suspect");
    cr_assert_eq(listed(0), 0u);
    settle(3);
    assert_copies(2);
    for (int i = 1; i < 3; i++) {
        come_back(i);
        cr_assert_eq(listed(0), 0u);
        settle(3);
        assert_copies(2);
        cr_assert_eq(listed(0), 0u);
    }
}

Test(coordinator_state, an_unknown_node_cannot_be_drained)
{
    ep_coordinator_drain drain;
    start_nodes(1, 2);
    cr_assert_eq(ep_coordinator_state_drain(cluster, "node-7", false, &drain, &error),
                 EP_ERR_NOT_FOUND);
    cr_assert_str_eq(error.text, "no node 'node-7'; known: node-0, node-1");
}

Test(coordinator_state, the_last_node_keeps_its_experts_when_drained)
{
    ep_coordinator_drain drain;
    start_nodes(1, 2);
    drain = order_drain(0);
    settle(2);
    drain = order_drain(1);
    cr_assert_eq(drain.copies_to_move, (uint32_t)(LAYERS * EXPERTS));
    const ep_error *problem = placement_error();
    cr_assert_eq(problem->code, EP_ERR_RESOURCE_EXHAUSTED);
    ASSERT_TEXT(*problem, "they keep their experts");
    settle(2);
    assert_copies(1);
}

Test(coordinator_state, a_drained_name_stays_drained_while_the_node_is_away)
{
    start_nodes(1, 2);
    order_drain(1);
    settle(2);
    hear_first(1, 60 * EP_NS_PER_S);
    cr_assert_str_eq(state_of(1), "absent");
    nodes[1].incarnation++;
    cr_assert_eq(join(1, NULL), EP_OK);
    settle(2);
    cr_assert_eq(listed(1), 0u);
    cr_assert_str_eq(state_of(1), "drained");
}

Test(coordinator_state, a_node_that_says_leaving_is_emptied_while_it_says_so)
{
    ep_coordinator_drain drain;
    start_nodes(1, 3);
    uint32_t before = listed(1);
    beat(1, "leaving");
    ep_coordinator_state_leaving(cluster, "node-1", &drain);
    cr_assert_eq(drain.copies_to_move, before);
    cr_assert_str_eq(drain.state, "draining");
    cr_assert(drain.is_leaving);
    load(0);
    load(2);
    cr_assert_eq(listed(1), before, "node 1 has not loaded its empty assignment yet");
    nodes[1].loaded_number = assigned();
    beat(1, "leaving");
    assert_copies(1);
    cr_assert_eq(listed(1), 0u);
    ep_coordinator_state_leaving(cluster, "node-1", &drain);
    cr_assert_eq(drain.copies_to_move, 0u);
    cr_assert_str_eq(drain.state, "drained");
    drain = order_back(1);
    cr_assert_str_eq(drain.state, "drained", "its own wish is not undone here");
    cr_assert_eq(listed(1), 0u);

    beat(1, "serving");
    settle(3);
    assert_copies(1);
    cr_assert_geq(listed(1), 4u, "it takes part again: %u copies", listed(1));
    cr_assert_str_eq(state_of(1), "serving");
}

Test(coordinator_state, a_restarted_node_is_no_longer_leaving_and_the_wish_is_not_kept)
{
    ep_coordinator_kept kept;
    ep_coordinator_drain drain;
    start_nodes(1, 2);
    beat(1, "leaving");
    cr_assert_eq(ep_coordinator_state_save(cluster, &kept), EP_OK);
    cr_assert_eq(kept.drained_count, 0u);
    ep_coordinator_kept_fini(&kept);
    nodes[1].incarnation++;
    cr_assert_eq(join(1, NULL), EP_OK);
    ep_coordinator_state_leaving(cluster, "node-1", &drain);
    cr_assert_not(drain.is_leaving);
    settle(2);
    cr_assert_str_eq(state_of(1), "serving");
}

/* ---- experts that fail to load ---- */

static size_t given_count(int i)
{
    Expertd__V1__NodeAssignment **list;
    size_t count, experts = 0;
    cr_assert_eq(ep_coordinator_state_assignments(cluster, nodes[i].name, &list, &count), EP_OK);
    for (size_t a = 0; a < count; a++) {
        experts += list[a]->n_experts;
    }
    ep_coordinator_state_assignments_free(list, count);
    return experts;
}

/* Nor is it given any others later, until it is started again. */
Test(coordinator_state, a_node_without_a_device_gives_up_all_experts)
{
    start(1, 2, NULL);
    for (int i = 0; i < 2; i++) {
        nodes[i].devices = 2;
        cr_assert_eq(join(i, NULL), EP_OK);
    }
    load_all(2);
    assert_copies(1);
    nodes[0].devices_lost = 1; /* the other device has its experts */
    cr_assert_not(beat(0, "degraded"));
    assert_copies(1);
    cr_assert_eq(held(0), held(1));
    nodes[0].devices_lost = 3;
    nodes[0].owned_count[0] = nodes[0].owned_count[1] = 0;
    cr_assert_not(beat(0, "degraded"));
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            cr_assert_eq(copies_of(l, e), owns(1, (int)l, e), "nobody is sent to node 0");
        }
    }
    load(1);
    assert_copies(1);
    cr_assert_eq(held(1), (uint32_t)(LAYERS * EXPERTS));
    cr_assert(view_of(0).devices == 2 && view_of(0).devices_lost == 3);
    cr_assert_eq(join(2, NULL), EP_OK);
    order_drain(2);
    /* experts move for balance */
    order_back(2);
    cr_assert_eq(given_count(0), 0u);
    cr_assert_gt(given_count(2), 0u);
    nodes[0].incarnation++;
    nodes[0].devices_lost = 0;
    cr_assert_eq(join(0, NULL), EP_OK);
    load_all(3);
    assert_copies(1);
    cr_assert_gt(held(0), 0u);
}

Test(coordinator_state, a_failed_expert_goes_to_another_node_and_the_old_copy_stays_until_then)
{
    start_nodes(1, 3);
    uint32_t moved = nodes[2].owned[0][0];
    order_drain(2);
    load_without(0, moved);
    load_without(1, moved); /* whoever of the two was given it could not load it */
    beat(2, "serving");
    load(2);
    cr_assert_geq(copies_of(0, moved), 1u, "the old copy went too early");
    settle(3); /* the other one can */
    assert_copies(1);
    cr_assert_eq(listed(2), 0u);
}

Test(coordinator_state, an_expert_that_nobody_else_can_load_stays_where_it_is)
{
    start_nodes(1, 3);
    uint32_t moved = nodes[2].owned[0][0];
    order_drain(2);
    for (int round = 0; round < 6; round++) {
        load_without(0, moved);
        load_without(1, moved);
        load(2);
        assert_whole(0);
    }
    cr_assert_eq(committed(), assigned(), "the others' moves must end");
    const ep_error *problem = placement_error();
    cr_assert_eq(problem->code, EP_ERR_RESOURCE_EXHAUSTED);
    ASSERT_TEXT(*problem, "it stays on node node-2");
    cr_assert_str_eq(state_of(2), "draining");
    cr_assert_leq(listed(2), (uint32_t)LAYERS);
    come_back(0); /* a restart may have repaired it */
    settle(3);
    assert_copies(1);
    cr_assert_eq(listed(2), 0u);
    cr_assert_str_eq(state_of(2), "drained");
}

/* ---- restart with a store ---- */

Test(coordinator_state, after_a_restart_the_table_is_there_and_nodes_come_back_one_by_one)
{
    start_nodes(2, 3);
    ep_routing_table *old = ep_routing_table_ref(table_now());
    uint32_t before[3] = {listed(0), listed(1), listed(2)};
    restart();
    ep_routing_table *table = table_now();
    assert_copies(2);
    cr_assert_gt(ep_epoch_compare(table->epoch, old->epoch), 0);
    cr_assert_eq(table->epoch.term, 8u);
    cr_assert_str_eq(table->nodes[1].host, "h0");
    cr_assert_str_eq(table->nodes[2].host, "h1");
    for (int i = 0; i < 3; i++) {
        cr_assert_str_eq(state_of(i), "suspect");
        cr_assert_eq(table->nodes[i].node_id, old->nodes[i].node_id, "ids are stable");
    }
    hear_first(0, 5 * EP_NS_PER_S); /* more than the heartbeats that may be missing */
    assert_copies(2);
    for (int i = 2; i >= 0; i--) {
        cr_assert(beat(i, "serving"),
                  "what it holds is only known from the store: it must register");
        cr_assert_str_eq(state_of(i), "suspect");
        cr_assert_eq(join(i, NULL), EP_OK);
        assert_copies(2);
        cr_assert_eq(listed(i), before[i], "experts were shuffled");
    }
    settle(3);
    assert_copies(2);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(listed(i), before[i], "experts were shuffled");
        cr_assert_str_eq(state_of(i), "serving");
    }
    ep_routing_table_unref(old);
}

Test(coordinator_state, a_node_that_does_not_come_back_after_a_restart_is_replaced)
{
    start_nodes(1, 3);
    restart();
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(join(i, NULL), EP_OK);
        load(i);
    }
    cr_assert_gt(listed(2), 0u, "it may still come back");
    hear_first(2, 12 * EP_NS_PER_S);
    settle(2);
    assert_copies(1);
    cr_assert_str_eq(state_of(2), "absent");
}

Test(coordinator_state, drained_and_new_nodes_after_a_restart)
{
    start_nodes(1, 3);
    order_drain(1);
    restart(); /* in the middle of the move */
    assert_copies(1);
    cr_assert_eq(join(3, NULL), EP_OK);
    for (int i = 0; i < 3; i++) {
        /* restarted too, elsewhere */
        snprintf(nodes[i].url, sizeof(nodes[i].url), "tcp://127.0.0.1:%d", 9100 + i);
        nodes[i].incarnation += 10;
        cr_assert_eq(join(i, NULL), EP_OK);
    }
    settle(4);
    assert_copies(1);
    cr_assert_eq(listed(1), 0u);
    cr_assert_str_eq(state_of(1), "drained");
    Expertd__V1__NodeEntry view;
    uint32_t ids = 0;
    for (size_t n = 0; ep_coordinator_state_node(cluster, n, now_ns, &view); n++) {
        cr_assert_lt(view.node_id, 4u);
        ids |= 1u << view.node_id;
    }
    cr_assert_eq(ids, 15u, "ids must differ");
}

Test(coordinator_state, a_node_on_another_host_makes_a_new_table)
{
    char longest[EP_HOST_BYTES + 1];
    start_nodes(1, 3);
    ep_epoch before = table_epoch();
    nodes[1].incarnation++;
    Expertd__V1__RegisterRequest request = registration(1);
    memset(longest, 'h', EP_HOST_BYTES);
    longest[EP_HOST_BYTES] = 0;
    request.host = longest;
    cr_assert_eq(enroll(&request, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text, "host of node node-1 has 64 characters, allowed 1..63");
    longest[EP_HOST_BYTES - 1] = 0;
    ASSERT_OK(enroll(&request, &error), error);
    settle(3);
    cr_assert_str_eq(table_now()->nodes[1].host, longest);
    cr_assert_gt(ep_epoch_compare(table_epoch(), before), 0);
    cr_assert_str_eq(view_of(1).host, longest);
}

Test(coordinator_state, the_revision_grows_with_what_is_kept)
{
    start_nodes(1, 2);
    uint64_t revision = ep_coordinator_state_revision(cluster);
    beat(0, "serving");
    cr_assert_eq(ep_coordinator_state_revision(cluster), revision, "a heartbeat without news");
    order_drain(1);
    cr_assert_gt(ep_coordinator_state_revision(cluster), revision);
    revision = ep_coordinator_state_revision(cluster);
    settle(2);
    cr_assert_gt(ep_coordinator_state_revision(cluster), revision);
    revision = ep_coordinator_state_revision(cluster);
    cr_assert_eq(join(2, NULL), EP_OK);
    cr_assert_gt(ep_coordinator_state_revision(cluster), revision);
}

/* ---- what operators set ---- */

static ep_policy policy_of(const char *key, const char *value)
{
    ep_policy next;
    const ep_policy_change change = {.key = key, .value = value};
    ASSERT_OK(ep_policy_apply(ep_coordinator_state_get_policy(cluster),
                              ep_coordinator_state_configured(cluster), &change, 1, "me", 1, &next,
                              &error),
              error);
    return next;
}

static void set_policy(const char *key, const char *value)
{
    const ep_policy next = policy_of(key, value);
    ASSERT_OK(ep_coordinator_state_set_policy(cluster, &next, &error), error);
}

Test(coordinator_state, a_policy_goes_out_with_the_next_table_and_outlives_a_restart)
{
    start_nodes(1, 2);
    const ep_epoch before = table_epoch();
    const uint64_t revision = ep_coordinator_state_revision(cluster);
    set_policy("decode_tokens_max", "7");
    const ep_routing_table *table = table_now();
    cr_assert_gt(ep_epoch_compare(table->epoch, before), 0, "clients are not told");
    cr_assert_gt(ep_coordinator_state_revision(cluster), revision, "the store is not told");
    cr_assert_eq(table->decode_tokens_max, 7u);
    cr_assert_eq(table->caller_policy.revision, 1u);
    cr_assert_not(table->caller_policy.has_hedge_permille);
    set_policy("hedge_permille", "0");
    table = table_now();
    cr_assert_eq(table->caller_policy.revision, 2u);
    cr_assert(table->caller_policy.has_hedge_permille && table->caller_policy.hedge_permille == 0);
    set_policy("step_group_us", "3ms");
    cr_assert_eq(table_now()->caller_policy.revision, 3u);
    cr_assert_eq(table_now()->caller_policy.decode_nodes_min, 0u);
    set_policy("decode_nodes_min", "64");
    cr_assert_eq(table_now()->caller_policy.decode_nodes_min, 64u);

    restart();
    table = table_now();
    cr_assert_eq(table->decode_tokens_max, 7u, "the configuration's value came back");
    cr_assert(table->caller_policy.revision == 4 && table->caller_policy.has_hedge_permille);
    cr_assert_eq(table->caller_policy.decode_nodes_min, 64u);
    cr_assert_eq(ep_coordinator_state_get_policy(cluster)->values[EP_POLICY_STEP_GROUP_US].number,
                 3000u);
    set_policy("decode_tokens_max", NULL);
    table = table_now();
    cr_assert_eq(table->decode_tokens_max, 256u);
    cr_assert_eq(table->caller_policy.revision, 5u);
    set_policy("decode_nodes_min", NULL);
    cr_assert_eq(table_now()->caller_policy.decode_nodes_min, 0u);
}

Test(coordinator_state, copies_follow_the_policy_both_ways)
{
    start_nodes(1, 3);
    assert_copies(1);
    set_policy("copies", "3");
    assert_copies(1); /* until they are loaded */
    load_all(3);
    assert_copies(3);
    cr_assert_eq(ep_coordinator_state_in_force(cluster)->copies, 3u);
    restart();
    cr_assert_eq(ep_coordinator_state_in_force(cluster)->copies, 3u);
    join_first(3);
    load_all(3);
    assert_copies(3);
    set_policy("copies", NULL);
    load_all(3);
    assert_copies(1);
}

Test(coordinator_state, copies_whose_table_no_client_can_take_are_refused)
{
    start(1, 1, NULL);
    for (int l = 0; l < LAYERS; l++) {
        nodes[0].layers[l].experts = 20000;
    }
    ASSERT_OK(join(0, &error), error);
    const ep_policy next = policy_of("copies", "64");
    cr_assert_eq(ep_coordinator_state_set_policy(cluster, &next, &error),
                 EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert(strstr(error.text, "copies 64") && strstr(error.text, "clients take up to"), "%s",
              error.text);
    cr_assert_eq(ep_coordinator_state_get_policy(cluster)->revision, 0u);
    cr_assert_eq(ep_coordinator_state_in_force(cluster)->copies, 1u);
}

/* ---- the pace of moves ---- */

#define EXPERT_BYTES 100
#define PACE_COPIES 2 /* a second */

static void start_paced(uint32_t copies, int count)
{
    start(copies, (uint32_t)count, NULL);
    config.move_rate = PACE_COPIES * EXPERT_BYTES;
    create();
    for (int i = 0; i < NODES_MAX; i++) {
        for (int l = 0; l < LAYERS; l++) {
            nodes[i].layers[l].expert_bytes = EXPERT_BYTES;
        }
    }
    join_first(count);
    settle(count);
    assert_copies(copies);
}

/* Time goes on, and the nodes load; then how many copies there are. */
static uint32_t copies_after(uint64_t ms, int count)
{
    uint32_t copies = 0;
    for (uint64_t tick = 0; tick < ms / 250; tick++) {
        now_ns += 250 * EP_NS_PER_MS;
        for (int i = 0; i < count; i++) {
            beat(i, "serving");
        }
        ep_coordinator_state_tick(cluster, now_ns);
        settle(count);
    }
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            cr_assert_geq(copies_of(l, e), 1u, "layer %u lost expert %u", l, e);
            copies += copies_of(l, e);
        }
    }
    return copies;
}

Test(coordinator_state, further_copies_come_at_the_pace_of_moves)
{
    const uint32_t all = LAYERS * EXPERTS;
    start_paced(1, 3);
    /* the first placement waited for nothing; the pace has its second saved up again */
    copies_after(2000, 3);
    set_policy("copies", "2");
    settle(3);
    cr_assert_eq(copies_after(0, 3), all + PACE_COPIES);
    for (uint32_t second = 1; second < all / PACE_COPIES; second++) {
        const uint32_t copies = copies_after(1000, 3);
        cr_assert(copies >= all + second * PACE_COPIES &&
                      copies <= all + (second + 1) * PACE_COPIES,
                  "%u copies after %u s", copies, second);
    }
    copies_after(2000, 3);
    assert_copies(2);
    const uint64_t number = assigned();
    copies_after(3000, 3);
    cr_assert_eq(assigned(), number, "nothing is left to do");
}

Test(coordinator_state, another_pace_holds_at_once)
{
    start_paced(1, 3);
    copies_after(2000, 3);
    set_policy("copies", "2");
    settle(3);
    cr_assert_lt(copies_after(0, 3), 2u * LAYERS * EXPERTS);
    set_policy("move_rate", "0");
    copies_after(250, 3);
    assert_copies(2);
}

static bool has_turn(int i)
{
    /* by a later reading of the clock than the heartbeat that it answers */
    return ep_coordinator_state_take_turn(cluster, now_ns + 1, nodes[i].name);
}

Test(coordinator_state, only_so_many_nodes_load_at_once)
{
    start(1, 3, NULL);
    set_policy("loading_nodes_max", "1");
    join_first(2);
    cr_assert(has_turn(0) && has_turn(1), "nothing is placed yet");
    cr_assert_eq(join(2, NULL), EP_OK);
    cr_assert(has_turn(0) && !has_turn(1) && !has_turn(2) && has_turn(0));
    now_ns += EP_NS_PER_S;
    for (int i = 0; i < 3; i++) {
        cr_assert_not(beat(i, "starting"));
    }
    cr_assert(has_turn(0) && !has_turn(1) && !has_turn(2));
    cr_assert(view_of(1).waits_to_load && view_of(1).behind_ms == 0 && !view_of(0).waits_to_load);
    cr_assert_eq(view_of(0).behind_ms, 1000u);
    load_until(0, EXPERTS, 1);
    cr_assert(has_turn(2) && !has_turn(1));
    set_policy("loading_nodes_max", "2");
    cr_assert(has_turn(1) && !view_of(1).waits_to_load);
    load_until(1, EXPERTS, 1);
    load_until(2, EXPERTS, 1);
    assert_copies(1);

    set_policy("loading_nodes_max", "1");
    /* it gets its part of what the others hold: they have nothing to load */
    cr_assert_eq(join(3, NULL), EP_OK);
    cr_assert(has_turn(3) && has_turn(0) && has_turn(1) && has_turn(2));
    set_policy("copies", "2");
    cr_assert(!has_turn(0) && has_turn(3));
    set_policy("loading_nodes_max", NULL);
    cr_assert(has_turn(0) && has_turn(1) && has_turn(2) && has_turn(3));
}

static void beat_all(int count, uint64_t by_ns)
{
    now_ns += by_ns;
    for (int i = 0; i < count; i++) {
        cr_assert_not(beat(i, "starting"));
    }
    ep_coordinator_state_tick(cluster, now_ns);
}

Test(coordinator_state, a_node_that_dies_or_hangs_holds_up_no_other)
{
    start(1, 3, NULL);
    set_policy("loading_nodes_max", "1");
    join_first(3);
    cr_assert(has_turn(0) && !has_turn(1));
    /* slow, and alive */
    for (nodes[0].left_to_load = 5; nodes[0].left_to_load > 0; nodes[0].left_to_load--) {
        beat_all(3, 50 * EP_NS_PER_S);
        cr_assert(has_turn(0) && !has_turn(1));
    }
    nodes[0].left_to_load = 1;
    beat_all(3, 59 * EP_NS_PER_S);
    cr_assert(!has_turn(1), "it may be about to load the last one");
    beat_all(3, 2 * EP_NS_PER_S);
    cr_assert(!has_turn(0) && has_turn(1) && !has_turn(2), "the one that had a turn asks first");

    now_ns += 2 * EP_NS_PER_S; /* node 1 falls silent */
    beat(0, "starting");
    beat(2, "starting");
    ep_coordinator_state_tick(cluster, now_ns);
    cr_assert(!has_turn(0) && has_turn(2));

    nodes[2].incarnation++; /* started anew */
    nodes[2].loaded_number = 0;
    now_ns += 2 * EP_NS_PER_S;
    beat(0, "starting");
    cr_assert_eq(join(2, NULL), EP_OK);
    cr_assert(!has_turn(2) && has_turn(0));
}

Test(coordinator_state, a_coordinator_that_was_stopped_ends_no_turn)
{
    start(1, 2, NULL);
    set_policy("loading_nodes_max", "1");
    join_first(2);
    cr_assert(has_turn(0) && !has_turn(1));
    now_ns += 3600 * EP_NS_PER_S;
    ep_coordinator_state_excuse(cluster, now_ns, 3600 * EP_NS_PER_S);
    beat_all(2, EP_NS_PER_S);
    cr_assert(!has_turn(1) && has_turn(0));
}

Test(coordinator_state, lost_copies_are_restored_at_the_pace_and_lost_experts_at_once)
{
    start_paced(2, 3);
    hear_first(2, 20 * EP_NS_PER_S); /* node 2 falls silent */
    settle(2);
    const uint32_t copies = copies_after(0, 2);
    cr_assert(copies > LAYERS * EXPERTS && copies < 2 * LAYERS * EXPERTS, "%u copies", copies);
    copies_after(8000, 2);
    assert_copies(2);

    start_paced(1, 3);
    hear_first(2, 20 * EP_NS_PER_S);
    settle(2);
    assert_copies(1); /* nobody else has them */
}

Test(coordinator_state, a_drain_does_not_wait_for_the_pace)
{
    start_paced(2, 4);
    order_drain(3);
    settle(4);
    assert_copies(2);
    cr_assert_str_eq(state_of(3), "drained");
}

Test(coordinator_state, a_node_that_joins_gets_its_part_at_the_pace)
{
    start_paced(1, 2);
    copies_after(2000, 2);
    cr_assert_eq(join(2, NULL), EP_OK);
    settle(3);
    cr_assert_eq(held(2), PACE_COPIES);
    for (int second = 1; second <= 4; second++) {
        const uint32_t before = held(2);
        copies_after(1000, 3);
        cr_assert_leq(held(2), before + 2 * PACE_COPIES, "%u after %u in a second", held(2),
                      before);
    }
    copies_after(4000, 3);
    for (int i = 0; i < 3; i++) {
        cr_assert(held(i) >= 4 && held(i) <= 6, "node %d holds %u of 16", i, held(i));
    }
}

/* Half a second goes on, within the grace. Who has loaded what it was given says so with its next
 * heartbeat; `stuck` never has. */
static void late_beats(int count, bool have_loaded, int stuck)
{
    now_ns += 500 * EP_NS_PER_MS;
    for (int i = 0; i < count; i++) {
        cr_assert_not(beat(i, "serving"));
        if (have_loaded && i != stuck) {
            take(i, EXPERTS, false);
        }
    }
    ep_coordinator_state_tick(cluster, now_ns);
}

Test(coordinator_state, a_drain_ends_while_copies_wait_for_the_pace)
{
    ep_coordinator_drain drain;
    start_paced(2, 5);
    copies_after(2000, 5);
    set_policy("copies", "4"); /* 32 copies more, two a second */
    late_beats(5, true, -1);
    drain = order_drain(4);
    for (int i = 0; i < 9; i++) {
        late_beats(5, i % 3 == 2, -1);
    }
    cr_assert_str_eq(state_of(4), "drained");
    const uint32_t waiting = ep_coordinator_state_copies_waiting(cluster, "demo", "v1");
    cr_assert(waiting > 16 && waiting < 32, "%u copies wait", waiting);
    cr_assert_eq(ep_coordinator_state_copies_waiting(cluster, NULL, NULL), waiting);
    cr_assert_eq(ep_coordinator_state_copies_waiting(cluster, "demo", "v2"), 0u);
    char why[64];
    snprintf(why, sizeof(why), " have fewer than 4 copies: %u copies wait for move_rate 200",
             waiting);
    ep_coordinator_state_leaving(cluster, "node-4", &drain);
    ep_drain_report_complete(cluster, ep_coordinator_state_in_force(cluster), table_now(), false,
                             &drain);
    cr_assert_not_null(strstr(drain.note, why), "%s", drain.note);
    for (int i = 0; i < 100; i++) {
        late_beats(5, true, -1);
        cr_assert_str_eq(state_of(4), "drained", "what was given out later listed it again");
    }
    assert_copies(4);
    cr_assert_eq(ep_coordinator_state_copies_waiting(cluster, NULL, NULL), 0u);
}

Test(coordinator_state, a_node_that_never_loads_does_not_stop_further_copies)
{
    start_paced(1, 4);
    set_policy("copies", "2");
    for (int i = 0; i < 20; i++) {
        late_beats(4, true, 0);
    }
    const uint32_t before = listed(1) + listed(2) + listed(3);
    cr_assert_lt(before, 24u, "none waits any more: this shows nothing");
    for (int i = 0; i < 600; i++) {
        late_beats(4, true, 0);
    }
    cr_assert_eq(listed(1) + listed(2) + listed(3), 24u);
}

Test(coordinator_state, nothing_moves_to_a_suspect_node_for_balance)
{
    start_paced(2, 3);
    copies_after(2000, 3);
    cr_assert_eq(join(3, NULL), EP_OK);
    settle(4);
    const size_t before = given_count(3);
    now_ns += 2000 * EP_NS_PER_MS;
    copies_after(250, 3);
    cr_assert_str_eq(state_of(3), "suspect");
    copies_after(4000, 3);
    cr_assert_eq(given_count(3), before);
    beat(3, "serving");
    copies_after(6000, 4);
    cr_assert_eq(given_count(3), (size_t)LAYERS * EXPERTS / 2);
}

/* The same heat and the same table. */
Test(coordinator_state, balance_is_judged_anew_when_speeds_change)
{
    uint64_t sums[EXPERTS];
    ep_coordinator_balance even, slow;
    start_balanced(0);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        sums[e] = 1000;
    }
    note_heat(sums);
    cr_assert(ep_coordinator_state_balance(cluster, "demo", "v1", 3, &even));
    const uint64_t number = table_epoch().number;
    for (int i = 0; i < 20; i++) {
        work_on(200000, 0.25);
    }
    cr_assert(ep_coordinator_state_balance(cluster, "demo", "v1", 3, &slow));
    cr_assert_gt(slow.busiest_over_bound, 1.5 * even.busiest_over_bound);
    cr_assert_eq(table_epoch().number, number, "another table: this shows nothing");
}

/* What the allocator hands out is not zero. */
Test(coordinator_state, before_anything_is_placed_no_copy_waits)
{
    (void)mallopt(M_PERTURB, 0x55); /* sanitizers fill memory themselves */
    start(1, 2, NULL);
    join_first(1);
    cr_assert_eq(ep_coordinator_state_copies_waiting(cluster, NULL, NULL), 0u);
}
