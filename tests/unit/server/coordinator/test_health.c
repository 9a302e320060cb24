/* SPDX-License-Identifier: Apache-2.0 */
/* Each problem of a service: made by the facts that call for it, and by nothing else. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "coordinator/health.h"
#include "support/expect.h"

#define NODES 2
#define DAY UINT64_C(86400)

static struct {
    ep_health_facts facts;
    Expertd__V1__ClusterStatusReply cluster;
    Expertd__V1__NodeEntry entries[NODES];
    Expertd__V1__NodeEntry *list[NODES];
    ep_routing_table *table;
} f;
static ep_health health;

static char *text_of(const char *text)
{
    return (char *)(uintptr_t)text;
}

static void set_copies(uint32_t layer, uint32_t first, uint32_t second, uint32_t third)
{
    uint32_t *offsets = f.table->layers[layer].offsets;
    memcpy(offsets, (uint32_t[]){0, first, first + second, first + second + third},
           4 * sizeof(uint32_t));
}

/* A service without a fault: two nodes hold the three experts of two layers of "demo". */
static void setup(void)
{
    static char *const names[NODES] = {"a", "b"};
    memset(&f, 0, sizeof(f));
    expertd__v1__cluster_status_reply__init(&f.cluster);
    f.cluster.policy = text_of("uniform");
    f.cluster.copies = 2;
    f.cluster.min_nodes = NODES;
    for (int i = 0; i < NODES; i++) {
        expertd__v1__node_entry__init(&f.entries[i]);
        f.entries[i].name = names[i];
        f.entries[i].url = text_of("tcp://h:1");
        f.entries[i].state = text_of("serving");
        f.entries[i].host = text_of("left");
        f.entries[i].last_seen_ms = 300;
        f.list[i] = &f.entries[i];
    }
    f.cluster.nodes = f.list;
    f.cluster.n_nodes = NODES;
    cr_assert_eq(ep_routing_table_create(NODES, 2, 2, &f.table), EP_OK);
    cr_assert_eq(ep_routing_table_model_init(f.table, 0, "demo", "v1", 2), EP_OK);
    cr_assert_eq(ep_routing_table_model_init(f.table, 1, "other", "v2", 1), EP_OK);
    strcpy(f.table->models[0].numerics[0], "portable");
    strcpy(f.table->models[0].numerics[1], "avx2");
    f.table->models[0].numerics_count = 1;
    for (uint32_t l = 0; l < 2; l++) {
        const ep_layer_shape shape = {
            .layer = 4 + l, .hidden = 8, .inner = 8, .experts = 3, .top_k = 2};
        cr_assert_eq(ep_routing_table_layer_init(f.table, l, 0, &shape, 6), EP_OK);
        memcpy(f.table->layers[l].copies, (uint32_t[]){0, 1, 0, 1, 0, 1}, 6 * sizeof(uint32_t));
        set_copies(l, 2, 2, 2);
    }
    f.facts = (ep_health_facts){.cluster = &f.cluster, .table = f.table};
}

static void teardown(void)
{
    ep_routing_table_unref(f.table);
}

static void judge(void)
{
    ep_health_judge(&f.facts, &health);
}

/* The one problem there is. */
static void expect(ep_health_code code, const char *text)
{
    judge();
    cr_assert_eq(health.problems_count, 1u, "%u problems, wanted %s", health.problems_count,
                 ep_health_rules[code].word);
    cr_assert_eq(health.problems[0].code, code, "%s", health.problems[0].text);
    ASSERT_TEXT(health.problems[0], text);
    cr_assert_eq(health.counts[code], 1u);
    cr_assert_eq(ep_health_count(&health, ep_health_rules[code].is_error), 1u);
    cr_assert_eq(ep_health_count(&health, !ep_health_rules[code].is_error), 0u);
    cr_assert_eq(ep_health_end_of_service(&health) != NULL, ep_health_rules[code].ends_service);
}

TestSuite(health, .init = setup, .fini = teardown);

/* Order decides which problems are kept, and which one the end of service is. */
Test(health, the_worst_codes_come_first_and_all_have_advice)
{
    for (int code = 0; code < EP_HEALTH_CODES; code++) {
        const ep_health_rule *rule = &ep_health_rules[code];
        cr_assert(rule->word != NULL && rule->advice != NULL && rule->advice[0] != '\0', "code %d",
                  code);
        cr_assert(!rule->ends_service || rule->is_error, "%s", rule->word);
        cr_assert(code == 0 || ep_health_rules[code - 1].ends_service >= rule->ends_service, "%s",
                  rule->word);
        cr_assert(code == 0 || ep_health_rules[code - 1].is_error >= rule->is_error, "%s",
                  rule->word);
    }
}

Test(health, a_service_without_fault_has_no_problem)
{
    judge();
    cr_assert_eq(health.problems_count, 0u, "%s", health.problems[0].text);
    cr_assert_null(ep_health_end_of_service(&health));
    cr_assert_eq(health.nodes_seen, 2u);
    cr_assert_eq(health.nodes_expected, 2u);
    cr_assert_eq(health.experts_without_copy + health.experts_with_few_copies, 0u);
}

Test(health, without_a_table_nodes_are_missing_or_load)
{
    f.facts.table = NULL;
    f.cluster.min_nodes = 3;
    expect(EP_HEALTH_MIN_NODES, "2 of min_nodes 3");
    cr_assert_eq(health.nodes_expected, 3u);
    f.cluster.min_nodes = 2;
    expect(EP_HEALTH_NO_TABLE, "although 2 nodes are here");
}

/* All nodes were stopped in order and forgotten: the table of before lists no copy any more,
 * whether it names the model or not. */
Test(health, a_table_that_serves_nothing_is_the_end_of_service)
{
    f.cluster.n_nodes = 0;
    set_copies(0, 0, 0, 0);
    set_copies(1, 0, 0, 0);
    judge();
    cr_assert_eq(health.problems[0].code, EP_HEALTH_NOTHING_SERVED);
    cr_assert_str_eq(health.problems[0].text,
                     "no expert is served: 0 nodes take part, min_nodes is 2");
    cr_assert_eq(ep_health_end_of_service(&health), &health.problems[0]);
    cr_assert_eq(health.experts_without_copy, 6u);
    cr_assert(health.nodes_seen == 0 && health.nodes_expected == 2);
    f.table->layers_count = 0;
    f.table->models_count = 0;
    expect(EP_HEALTH_NOTHING_SERVED, "no expert is served");
    f.table->layers_count = 2; /* for its destructor */
    f.table->models_count = 2;
}

Test(health, the_coordinators_own_troubles_are_told)
{
    f.cluster.placement_error = text_of("no room");
    expect(EP_HEALTH_PLACEMENT, "no room");
    f.cluster.placement_error = text_of("");
    f.cluster.store_error = text_of("disk full");
    expect(EP_HEALTH_STORE, "disk full");
    f.cluster.store_error = text_of("");
    f.cluster.copy_error = text_of("SHA-256 differs");
    expect(EP_HEALTH_COPY_DIFFERS, "SHA-256 differs");
    f.cluster.copy_error = text_of("");
    f.facts.unix_now = 1000 * DAY;
    f.facts.tls_expiry = 1014 * DAY;
    judge();
    cr_assert_eq(health.problems_count, 0u, "14 days are enough");
    f.facts.tls_expiry--;
    expect(EP_HEALTH_CERTIFICATE_ENDS, "the coordinator: a certificate in force ends in 13 days");
    f.facts.tls_expiry = 999 * DAY;
    expect(EP_HEALTH_CERTIFICATE_ENDED,
           "the coordinator: a certificate in force ended 24 hours ago");
    f.facts.tls_expiry = 0;
    f.facts.tls_error = "flag --tls-ca-file: /ca.pem holds no certificate in PEM form";
    expect(EP_HEALTH_TLS_REFUSED, "the coordinator: a restart would fail");
    ASSERT_TEXT(health.problems[0], "/ca.pem holds no certificate in PEM form");
    f.facts.tls_error = NULL;
    f.facts.memory_error = "exhausted: 1 of 1 bytes lent";
    expect(EP_HEALTH_MEMORY, "exhausted: 1 of 1");
}

Test(health, states_of_nodes_are_told)
{
    static const struct {
        const char *state;
        ep_health_code code;
        uint32_t seen;
        uint32_t expected;
    } states[] = {
        {"suspect", EP_HEALTH_NODE_SUSPECT, 1, 2},   {"lost", EP_HEALTH_NODE_LOST, 1, 2},
        {"draining", EP_HEALTH_NODE_DRAINING, 1, 1}, {"drained", EP_HEALTH_NODE_DRAINED, 1, 1},
        {"starting", EP_HEALTH_NODE_STARTING, 2, 2}, {"degraded", EP_HEALTH_NODE_DEGRADED, 2, 2}};
    f.cluster.min_nodes = 2; /* who was taken out on purpose is not missed for it */
    for (size_t i = 0; i < sizeof(states) / sizeof(states[0]); i++) {
        f.entries[1].state = text_of(states[i].state);
        expect(states[i].code, "node b");
        cr_assert_eq(health.nodes_seen, states[i].seen, "%s", states[i].state);
        cr_assert_eq(health.nodes_expected, states[i].expected, "%s", states[i].state);
    }
    f.entries[1].state = text_of("starting");
    f.entries[1].waits_to_load = true;
    expect(EP_HEALTH_NODE_STARTING,
           "node b is starting, and waits for its turn to load (loading_nodes_max)");
    f.entries[1].state = text_of("degraded");
    f.entries[1].devices = 3;
    f.entries[1].devices_lost = 1u << 2 | 1u << 0;
    expect(EP_HEALTH_DEVICE_LOST,
           "node b has lost 2 of 3 devices (0, 2): its experts come on the others");
    f.entries[1].devices_lost |= 1u << 1;
    expect(EP_HEALTH_DEVICE_LOST, "node b has lost 3 of 3 devices (0, 1, 2): it computes nothing");
    f.entries[1].devices = 64;
    f.entries[1].devices_lost = UINT64_MAX; /* whatever a node says: the list ends */
    expect(EP_HEALTH_DEVICE_LOST, "node b has lost 64 of 64 devices (0, 1, ");
    f.entries[1].devices_lost = 0;
    f.entries[1].state = text_of("serving");
    f.entries[1].behind_ms = 299999;
    judge();
    cr_assert_eq(health.problems_count, 0u, "loading takes time");
    f.entries[1].behind_ms = 301000;
    expect(EP_HEALTH_NODE_BEHIND, "node b serves by an old assignment: for 301 s");
    f.entries[1].behind_ms = 0;
    f.entries[1].speed = 0.125;
    f.entries[1].slow_ms = 4999;
    judge();
    cr_assert_eq(health.problems_count, 0u, "it may be passing");
    cr_assert_eq(health.speed_min, 0.125);
    f.entries[1].slow_ms = 7000;
    expect(EP_HEALTH_NODE_SLOW,
           "node b is slow: for 7 s it has computed 0.12 of what the median node does");
    f.entries[1].slow_ms = 0;
    f.entries[1].host = text_of("");
    expect(EP_HEALTH_HOST_UNKNOWN, "node b does not know");
}

Test(health, missing_and_few_copies_are_told_by_model)
{
    set_copies(0, 2, 0, 2);
    set_copies(1, 0, 0, 2);
    expect(EP_HEALTH_NO_COPY,
           "model demo v1: 3 experts in 2 layers have no copy, layer 4 expert 1 first");
    cr_assert_eq(health.experts_without_copy, 3u);
    set_copies(0, 2, 2, 2);
    set_copies(1, 2, 1, 2);
    expect(EP_HEALTH_FEW_COPIES, "model demo v1: 1 experts in 1 layers have fewer than 2 copies");
    cr_assert_eq(health.experts_with_few_copies, 1u);
    f.facts.copies_waiting = (const uint32_t[]){3, 0};
    f.facts.move_rate = 100 << 20;
    expect(EP_HEALTH_FEW_COPIES, "have fewer than 2 copies; 3 copies wait for move_rate 100M");
    f.facts.copies_waiting = NULL;
    f.cluster.policy = text_of("static"); /* the map says how many */
    judge();
    cr_assert_eq(health.problems_count, 0u);
    /* the second and third are then one routed and one shared expert */
    f.table->layers[1].shape.experts = 2;
    f.table->layers[1].shape.shared_experts = 1;
    set_copies(1, 2, 1, 1);
    expect(EP_HEALTH_FEW_COPIES, "1 experts in 1 layers");
}

Test(health, copies_that_all_stand_on_one_host_are_told_when_there_are_others)
{
    const ep_layer_shape shape = {.layer = 7, .hidden = 8, .inner = 8, .experts = 2, .top_k = 2};
    ep_routing_table_unref(f.table);
    cr_assert_eq(ep_routing_table_create(3, 1, 1, &f.table), EP_OK);
    cr_assert_eq(ep_routing_table_model_init(f.table, 0, "demo", "v1", 1), EP_OK);
    cr_assert_eq(ep_routing_table_layer_init(f.table, 0, 0, &shape, 4), EP_OK);
    memcpy(f.table->layers[0].offsets, (uint32_t[]){0, 2, 4}, 3 * sizeof(uint32_t));
    memcpy(f.table->layers[0].copies, (uint32_t[]){2, 0, 0, 1}, 4 * sizeof(uint32_t));
    f.facts.table = f.table;
    strcpy(f.table->nodes[0].host, "h0");
    strcpy(f.table->nodes[1].host, "h0");
    strcpy(f.table->nodes[2].host, "h1");
    expect(EP_HEALTH_ONE_HOST, "model demo v1: all copies of 1 experts in 1 layers are on one "
                               "host, layer 7 expert 1 first");
    f.cluster.policy = text_of("static");
    judge();
    cr_assert_eq(health.problems_count, 0u, "a map says where");
    f.cluster.policy = text_of("uniform");
    f.table->nodes[2].host[0] = '\0';
    judge();
    cr_assert_eq(health.problems_count, 0u, "another host that is not known is none");
    strcpy(f.table->nodes[2].host, "h0");
    judge();
    cr_assert_eq(health.problems_count, 0u, "there is no other host");
    f.table->nodes[0].host[0] = f.table->nodes[1].host[0] = '\0';
    judge();
    cr_assert_eq(health.problems_count, 0u, "hosts that are not known are alone");
}

Test(health, more_copies_wanted_than_nodes_is_told)
{
    f.cluster.copies = 3;
    expect(EP_HEALTH_FEW_COPIES, "6 experts in 2 layers have fewer than 3 copies");
}

Test(health, what_differs_in_a_model_is_told)
{
    f.table->models[0].numerics_count = 2;
    expect(EP_HEALTH_NUMERICS, "2 different numerics ids (portable, avx2)");
    f.table->models[0].numerics_count = 1;
    strcpy(f.table->models[1].name, "demo");
    expect(EP_HEALTH_VERSIONS, "served in versions v1 and v2");
}

/* However many nodes are drained, the error is kept and comes first, and all are counted. */
Test(health, the_worst_problems_are_kept)
{
    enum { MANY = EP_HEALTH_PROBLEMS_MAX + 6 };
    Expertd__V1__NodeEntry entries[MANY];
    Expertd__V1__NodeEntry *list[MANY];
    for (int i = 0; i < MANY; i++) {
        entries[i] = f.entries[0];
        entries[i].state = text_of(i == MANY - 1 ? "suspect" : "drained");
        list[i] = &entries[i];
    }
    f.cluster.nodes = list;
    f.cluster.n_nodes = MANY;
    f.cluster.min_nodes = 1;
    judge();
    cr_assert_eq(health.problems_count, (uint32_t)EP_HEALTH_PROBLEMS_MAX);
    cr_assert_eq(health.problems_dropped, 6u);
    cr_assert_eq(health.problems[0].code, EP_HEALTH_NODE_SUSPECT);
    cr_assert_eq(ep_health_count(&health, false), (uint32_t)MANY - 1);
}
