/* SPDX-License-Identifier: Apache-2.0 */
/* Plans for hosts: every slot once, each row once per host, parts sorted and owned as they say. */
#include "moe/host_plan.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "unit/moe/random_batch.h"
#include "support/plan_whole.h"

#define NODES 7
#define MEMBERS 3

static ep_routing_table *table_of(const char *const *hosts, uint32_t count)
{
    ep_routing_table *table;
    cr_assert_eq(ep_routing_table_create(count, 0, 0, &table), EP_OK);
    for (uint32_t n = 0; n < count; n++) {
        snprintf(table->nodes[n].host, EP_HOST_BYTES, "%s", hosts[n]);
    }
    return table;
}

Test(host_plan, nodes_of_a_host_form_groups)
{
    static const char *const hosts[] = {"b", "", "a", "b", "", "a", "b", "b", "b", "b", "c"};
    /* three nodes a group at most */
    static const uint32_t wanted[] = {0, 1, 2, 0, 4, 2, 0, 7, 7, 7, 10};
    uint32_t groups[11];
    ep_routing_table *table = table_of(hosts, 11);
    cr_assert_eq(ep_host_groups(table, MEMBERS, groups), EP_OK);
    cr_assert_arr_eq(groups, wanted, sizeof(wanted));
    ep_routing_table_unref(table);
}

typedef struct host_case {
    random_batch rb;
    ep_routing_layer layer;
    uint32_t chosen[16];
    uint32_t grouped[16];
    ep_routing_plan plan;
    uint32_t per_token;
} host_case;

static void case_init(host_case *c, uint64_t seed, const uint32_t *groups)
{
    memset(c, 0, sizeof(*c));
    random_batch_init(&c->rb, seed);
    uint32_t experts = c->rb.shape.experts + c->rb.shape.shared_experts;
    cr_assert_leq(experts, 16);
    c->layer.shape = c->rb.shape;
    for (uint32_t e = 0; e < experts; e++) {
        c->chosen[e] = random_below(&c->rb.state, NODES);
        c->grouped[e] = groups[c->chosen[e]];
    }
    c->per_token = ep_batch_slots_per_token(&c->rb.batch, &c->rb.shape);
    const uint64_t small = 1 + random_below(&c->rb.state, 40);
    const uint64_t rooms[NODES] = {small, small, small, small, small, small, small};
    const ep_plan_cut cut = {
        .row_bytes = 1, .slot_bytes = 1, .reply_slot_bytes = 1, .room_bytes = rooms};
    ep_routing_plan_init(&c->plan);
    cr_assert_eq(plan_whole(&c->plan, &c->rb.batch, &c->layer, NODES, c->grouped,
                            seed % 2 ? &cut : NULL, 0, c->rb.batch.tokens, NULL, 0, NULL),
                 EP_OK);
}

static void check_chunk(host_case *c, uint32_t index, uint64_t spread, const uint32_t *groups,
                        uint8_t *seen)
{
    static ep_plan_slot scratch[256];
    static ep_plan_slot before[256];
    ep_host_part parts[MEMBERS];
    const ep_plan_chunk chunk = c->plan.chunks[index];
    const ep_plan_slot *slots = c->plan.slots + chunk.slots_begin;
    memcpy(before, slots, chunk.slots_count * sizeof(before[0]));
    uint32_t count =
        ep_host_plan_split(&c->plan, index, c->chosen, spread, scratch, parts, MEMBERS);
    uint32_t place = 0;
    cr_assert_eq(c->plan.chunks[index].node, parts[0].node);
    for (uint32_t p = 0; p < count; p++) {
        cr_assert(parts[p].begin == place && parts[p].count > 0);
        cr_assert_eq(groups[parts[p].node], chunk.node, "a node of another host");
        cr_assert(p < 2 || parts[p].node > parts[p - 1].node);
        uint32_t from = 0; /* the part's slots are those it had, in their order */
        for (uint32_t i = 0; i < parts[p].count; i++, from++) {
            const ep_plan_slot *slot = &slots[place + i];
            while (c->chosen[before[from].expert] != parts[p].node) {
                from++;
            }
            cr_assert_eq(memcmp(slot, &before[from], sizeof(*slot)), 0);
            cr_assert_eq(seen[slot->slot_number]++, 0, "a slot travels twice");
        }
        place += parts[p].count;
    }
    cr_assert_eq(place, chunk.slots_count);
}

Test(host_plan, a_chunk_is_split_by_owner_and_no_slot_is_lost)
{
    static const char *const hosts[NODES] = {"a", "b", "a", "b", "a", "", "b"};
    uint32_t groups[NODES];
    unsigned receivers[NODES] = {0};
    ep_routing_table *table = table_of(hosts, NODES);
    cr_assert_eq(ep_host_groups(table, MEMBERS, groups), EP_OK);
    for (uint64_t seed = 0; seed < 3000; seed++) {
        host_case c;
        uint8_t seen[256] = {0};
        uint32_t expert;
        case_init(&c, seed, groups);
        for (uint32_t i = 0; i < c.plan.chunks_count; i++) {
            check_chunk(&c, i, seed + i, groups, seen);
            receivers[c.plan.chunks[i].node]++;
        }
        for (uint32_t s = 0; s < c.rb.batch.tokens * c.per_token; s++) {
            ep_slot_kind kind =
                ep_batch_slot(&c.rb.batch, &c.rb.shape, s / c.per_token, s % c.per_token, &expert);
            cr_assert_eq(seen[s], kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED);
        }
        ep_routing_plan_fini(&c.plan);
        random_batch_fini(&c.rb);
    }
    for (uint32_t n = 0; n < NODES; n++) {
        cr_assert_gt(receivers[n], 100u, "node %u never got a frame", n);
    }
    ep_routing_table_unref(table);
}
