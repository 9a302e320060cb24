/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of random batches: every slot exactly once, rows once per node, the stated order. */
#include "moe/routing_plan.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "unit/moe/random_batch.h"
#include "support/plan_whole.h"

#define NODES_MAX 7

typedef struct {
    ep_routing_layer layer;
    uint32_t offsets[64];
    uint32_t copies[64 * NODES_MAX];
    uint32_t chosen[64];
    uint8_t usable[NODES_MAX];
    uint32_t nodes;
} cluster;

static void choose(const ep_routing_layer *layer, const uint8_t *usable, uint64_t spread,
                   uint32_t *out_chosen)
{
    static uint32_t order[64];
    static float busy[NODES_MAX];
    const ep_copy_choice choice = {.nodes_count = NODES_MAX,
                                   .usable = usable,
                                   .pass_slots = EP_COPY_PASS_SLOTS,
                                   .spread = spread,
                                   .order = order,
                                   .busy = busy};
    ep_choose_copies(layer, &choice, out_chosen);
}

static void make_cluster(cluster *c, const ep_layer_shape *shape, uint64_t *state)
{
    memset(c, 0, sizeof(*c));
    c->nodes = 1 + random_below(state, NODES_MAX);
    c->layer = (ep_routing_layer){.shape = *shape, .offsets = c->offsets, .copies = c->copies};
    uint32_t experts = shape->experts + shape->shared_experts;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t count = 1 + random_below(state, c->nodes);
        uint32_t first = random_below(state, c->nodes);
        for (uint32_t i = 0; i < count; i++) {
            c->copies[c->offsets[e] + i] = (first + i) % c->nodes;
        }
        c->offsets[e + 1] = c->offsets[e] + count;
    }
    memset(c->usable, 1, sizeof(c->usable));
    choose(&c->layer, c->usable, random_below(state, 100), c->chosen);
}

/* Limits that cut often: rooms from less than one slot to more than the batch. */
static const ep_plan_cut *random_cut(ep_plan_cut *cut, uint64_t *room, uint64_t *state)
{
    *cut = (ep_plan_cut){.row_bytes = random_below(state, 100),
                         .slot_bytes = 1 + random_below(state, 12),
                         .reply_slot_bytes = random_below(state, 100),
                         .room_bytes = room};
    for (uint32_t n = 0; n < NODES_MAX; n++) {
        room[n] = random_below(state, random_below(state, 3) ? 200 : 3000);
    }
    return random_below(state, 4) == 0 ? NULL : cut;
}

static bool fits(const ep_plan_cut *cut, uint32_t node, uint64_t rows, uint64_t slots)
{
    return cut == NULL ||
           (rows * cut->row_bytes + slots * cut->slot_bytes <= cut->room_bytes[node] &&
            slots * cut->reply_slot_bytes <= cut->room_bytes[node]);
}

/* One chunk: its limits, rows ascending and all used, slots by expert, then token. */
static void check_chunk(const ep_routing_plan *plan, const ep_plan_chunk *chunk, const cluster *c,
                        const ep_plan_cut *cut, uint32_t spt)
{
    const uint32_t *tokens = plan->row_tokens + chunk->rows_begin;
    uint8_t *row_used = calloc(chunk->rows_count, 1);
    cr_assert(chunk->rows_count > 0 && chunk->slots_count > 0);
    cr_assert(chunk->slots_count == 1 ||
                  fits(cut, chunk->node, chunk->rows_count, chunk->slots_count),
              "%u rows and %u slots are above the limit", chunk->rows_count, chunk->slots_count);
    for (uint32_t r = 1; r < chunk->rows_count; r++) {
        cr_assert_lt(tokens[r - 1], tokens[r], "a token is one row of a chunk");
    }
    for (uint32_t i = 0; i < chunk->slots_count; i++) {
        const ep_plan_slot *slot = &plan->slots[chunk->slots_begin + i];
        cr_assert_eq(c->chosen[slot->expert], chunk->node);
        cr_assert_lt(slot->row, chunk->rows_count);
        cr_assert_eq(tokens[slot->row], slot->slot_number / spt);
        row_used[slot->row] = 1;
        if (i > 0) {
            const ep_plan_slot *before = slot - 1;
            cr_assert(before->expert < slot->expert || (before->expert == slot->expert &&
                                                        before->slot_number < slot->slot_number),
                      "slots must be by expert, then token");
        }
    }
    cr_assert(memchr(row_used, 0, chunk->rows_count) == NULL, "a row that nobody uses");
    free(row_used);
}

/* A node's chunks have ascending tokens, and a token is in two of them only when its slots do not
 * fit an empty one. No chunk could have taken the next one's first token. */
static void check_node(const ep_routing_plan *plan, uint32_t node, const ep_plan_cut *cut,
                       uint32_t spt, uint32_t tokens_count, const uint32_t *expected,
                       const cluster *c)
{
    const ep_plan_chunk *before = NULL;
    uint32_t *slots_of = calloc(tokens_count + 1, sizeof(*slots_of));
    for (uint32_t s = 0; s < tokens_count * spt; s++) {
        slots_of[s / spt] += expected[s] != EP_NO_EXPERT && c->chosen[expected[s]] == node;
    }
    for (uint32_t i = 0; i < plan->chunks_count; i++) {
        const ep_plan_chunk *chunk = &plan->chunks[i];
        if (chunk->node != node) {
            continue;
        }
        if (before != NULL) {
            uint32_t last = plan->row_tokens[before->rows_begin + before->rows_count - 1];
            uint32_t first = plan->row_tokens[chunk->rows_begin];
            cr_assert(last <= first && cut != NULL);
            cr_assert(last < first || !fits(cut, node, 1, slots_of[first]),
                      "token %u travels twice to one node", first);
            cr_assert(!fits(cut, node, (uint64_t)before->rows_count + (last < first),
                            (uint64_t)before->slots_count + (last < first ? slots_of[first] : 1)),
                      "a chunk was closed with room for the next token");
        }
        before = chunk;
    }
    free(slots_of);
}

/* The plan against the batch: expected[] says for each slot number which expert it needs. */
static void check_plan(const ep_routing_plan *plan, const random_batch *rb, const cluster *c,
                       const ep_plan_cut *cut, const uint32_t *expected, uint32_t slots_all)
{
    uint32_t spt = ep_batch_slots_per_token(&rb->batch, &rb->shape);
    uint8_t *seen = calloc(slots_all + 1, 1);
    uint32_t rows = 0;
    uint32_t slots = 0;
    for (uint32_t n = 0; n < plan->chunks_count; n++) {
        const ep_plan_chunk *chunk = &plan->chunks[n];
        cr_assert_lt(chunk->node, c->nodes);
        cr_assert_eq(chunk->rows_begin, rows);
        cr_assert_eq(chunk->slots_begin, slots);
        cr_assert(n == 0 ||
                      plan->row_tokens[plan->chunks[n - 1].rows_begin] <= plan->row_tokens[rows],
                  "chunks are by first token");
        check_chunk(plan, chunk, c, cut, spt);
        for (uint32_t i = 0; i < chunk->slots_count; i++) {
            const ep_plan_slot *slot = &plan->slots[chunk->slots_begin + i];
            cr_assert_lt(slot->slot_number, slots_all);
            cr_assert_eq(seen[slot->slot_number], 0, "slot %u twice", slot->slot_number);
            seen[slot->slot_number] = 1;
            cr_assert_eq(slot->expert, expected[slot->slot_number]);
        }
        rows += chunk->rows_count;
        slots += chunk->slots_count;
    }
    cr_assert_eq(rows, plan->rows_count);
    cr_assert_eq(slots, plan->slots_count);
    for (uint32_t s = 0; s < slots_all; s++) {
        cr_assert_eq(seen[s], expected[s] != EP_NO_EXPERT, "slot %u: seen %u", s, seen[s]);
    }
    for (uint32_t n = 0; n < c->nodes; n++) {
        check_node(plan, n, cut, spt, rb->batch.tokens, expected, c);
    }
    free(seen);
}

/* What each slot needs, restricted to [begin, end) and, with pick, to a random part. */
static uint32_t *expected_slots(const random_batch *rb, uint32_t slots_all, uint32_t begin,
                                uint32_t end, uint64_t *pick)
{
    uint32_t spt = ep_batch_slots_per_token(&rb->batch, &rb->shape);
    uint32_t *expected = calloc(slots_all + 1, sizeof(*expected));
    for (uint32_t s = 0; s < slots_all; s++) {
        uint32_t expert;
        ep_slot_kind kind = ep_batch_slot(&rb->batch, &rb->shape, s / spt, s % spt, &expert);
        bool needed =
            (kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED) && s / spt >= begin && s / spt < end;
        if (pick != NULL && random_below(pick, 2) == 0) {
            needed = false;
        }
        expected[s] = needed ? expert : EP_NO_EXPERT;
    }
    return expected;
}

/* The bound that memory is reserved by. */
static void check_chunks_max(const ep_routing_plan *plan, const cluster *c, const ep_plan_cut *cut)
{
    uint64_t room_slots = UINT32_MAX;
    for (uint32_t n = 0; cut != NULL && n < c->nodes; n++) {
        uint64_t request = cut->row_bytes + cut->slot_bytes;
        uint64_t largest = request > cut->reply_slot_bytes ? request : cut->reply_slot_bytes;
        uint64_t fitting = cut->room_bytes[n] / largest;
        room_slots = fitting < room_slots ? fitting : room_slots;
    }
    cr_assert_leq(plan->chunks_count, ep_plan_chunks_max(plan->slots_count, room_slots, c->nodes));
}

Test(routing_plan, holds_every_slot_once_and_every_row_once_per_node)
{
    ep_plan_cut cut_storage;
    uint64_t room[NODES_MAX];
    unsigned many_chunks = 0;
    ep_routing_plan plan;
    ep_routing_plan_init(&plan);
    for (uint64_t seed = 0; seed < 4000; seed++) {
        random_batch rb;
        cluster c;
        random_batch_init(&rb, seed);
        make_cluster(&c, &rb.shape, &rb.state);
        cr_assert_eq(ep_batch_check(&rb.batch, &rb.shape, NULL), EP_OK);
        uint32_t slots_all = rb.batch.tokens * ep_batch_slots_per_token(&rb.batch, &rb.shape);
        uint32_t begin = random_below(&rb.state, rb.batch.tokens + 1);
        uint32_t end = begin + random_below(&rb.state, rb.batch.tokens - begin + 1);

        const ep_plan_cut *cut = random_cut(&cut_storage, room, &rb.state);
        uint32_t *expected = expected_slots(&rb, slots_all, begin, end, NULL);
        cr_assert_eq(plan_whole(&plan, &rb.batch, &c.layer, c.nodes, c.chosen, cut, begin, end,
                                NULL, 0, NULL),
                     EP_OK);
        check_plan(&plan, &rb, &c, cut, expected, slots_all);
        check_chunks_max(&plan, &c, cut);
        many_chunks += plan.chunks_count > c.nodes;
        free(expected);

        uint64_t pick = seed;
        expected = expected_slots(&rb, slots_all, 0, rb.batch.tokens, &pick);
        uint32_t *numbers = calloc(slots_all + 1, sizeof(*numbers));
        uint32_t count = 0;
        for (uint32_t s = 0; s < slots_all; s++) {
            if (expected[s] != EP_NO_EXPERT) {
                numbers[count++] = s;
            }
        }
        cr_assert_eq(plan_whole(&plan, &rb.batch, &c.layer, c.nodes, c.chosen, cut, 0, 0, numbers,
                                count, NULL),
                     EP_OK);
        check_plan(&plan, &rb, &c, cut, expected, slots_all);
        check_chunks_max(&plan, &c, cut);
        free(numbers);
        free(expected);
        random_batch_fini(&rb);
    }
    cr_assert_gt(many_chunks, 300u, "the limits must cut: %u", many_chunks);
    ep_routing_plan_fini(&plan);
}

Test(routing_plan, allocates_nothing_after_reserve)
{
    ep_routing_plan plan;
    ep_plan_cut cut;
    uint64_t room[NODES_MAX];
    ep_routing_plan_init(&plan);
    cr_assert_eq(ep_routing_plan_reserve(&plan, 12, 8 + 2, 64, NODES_MAX, 120), EP_OK);
    const void *before[] = {plan.chunks, plan.row_tokens, plan.slots, plan.priv};
    for (uint64_t seed = 0; seed < 200; seed++) {
        random_batch rb;
        cluster c;
        random_batch_init(&rb, seed);
        make_cluster(&c, &rb.shape, &rb.state);
        cr_assert_eq(plan_whole(&plan, &rb.batch, &c.layer, c.nodes, c.chosen,
                                random_cut(&cut, room, &rb.state), 0, rb.batch.tokens, NULL, 0,
                                NULL),
                     EP_OK);
        random_batch_fini(&rb);
    }
    const void *after[] = {plan.chunks, plan.row_tokens, plan.slots, plan.priv};
    cr_assert_eq(memcmp(before, after, sizeof(before)), 0);
    ep_routing_plan_fini(&plan);
}

Test(routing_plan, names_layer_and_expert_without_a_copy)
{
    int32_t ids[] = {0, 2};
    float scales[] = {1, 1};
    float x[4] = {0};
    ep_layer_shape shape = {.layer = 5, .hidden = 4, .inner = 4, .experts = 3, .top_k = 2};
    ep_batch batch = {.tokens = 1,
                      .top_k = 2,
                      .hidden = 4,
                      .x = {x, 16, EP_DTYPE_F32},
                      .ids = {ids, 8, EP_DTYPE_I32},
                      .scales = {scales, 8, EP_DTYPE_F32},
                      .wire_dtype = EP_DTYPE_F32,
                      .out_dtype = EP_DTYPE_F32};
    uint32_t offsets[] = {0, 1, 2, 3};
    uint32_t copies[] = {0, 0, 1};
    uint8_t usable[NODES_MAX] = {1, 0};
    uint32_t chosen[3];
    ep_routing_layer layer = {.shape = shape, .offsets = offsets, .copies = copies};
    choose(&layer, usable, 7, chosen);
    cr_assert_eq(chosen[0], 0);
    cr_assert_eq(chosen[2], EP_NO_EXPERT);

    ep_error error;
    ep_routing_plan plan;
    ep_routing_plan_init(&plan);
    cr_assert_eq(plan_whole(&plan, &batch, &layer, 2, chosen, NULL, 0, 1, NULL, 0, &error),
                 EP_ERR_UNAVAILABLE);
    cr_assert_eq(error.layer, 5);
    cr_assert_eq(error.expert, 2);
    cr_assert_str_eq(error.text, "no usable node holds expert 2 of layer 5");
    ep_routing_plan_fini(&plan);
}
