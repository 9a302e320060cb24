/* SPDX-License-Identifier: Apache-2.0 */
/* Which copy of an expert serves one call. */
#include <math.h>

#include "base/random.h"
#include "moe/routing_plan.h"

#define NO_NODE UINT32_MAX

/* From the best to the worst. */
typedef enum copy_rank { RANK_QUICK, RANK_SLOW, RANK_LAST, RANK_NONE } copy_rank;

typedef struct chooser {
    const ep_routing_layer *layer;
    const ep_copy_choice *choice;
    uint32_t probed; /* a slow node that this call treats as quick */
} chooser;

static float slowness_of(const chooser *c, uint32_t node)
{
    return c->choice->slowness == NULL || node == c->probed ? 1 : c->choice->slowness[node];
}

static copy_rank rank_of(const chooser *c, uint32_t copy)
{
    uint32_t node = c->layer->copies[copy];
    uint8_t usable = c->choice->usable[node];
    if (usable == 0 || (c->choice->tried != NULL && c->choice->tried[copy] != 0)) {
        return RANK_NONE;
    }
    return usable != 1 ? RANK_LAST : slowness_of(c, node) >= EP_COPY_SLOW ? RANK_SLOW : RANK_QUICK;
}

static uint32_t pick_probed(const ep_copy_choice *choice)
{
    uint64_t state = ~choice->spread;
    uint64_t draw = ep_splitmix64(&state);
    uint32_t slow = 0;
    if (draw % EP_COPY_PROBE_OF != 0) {
        return NO_NODE;
    }
    for (uint32_t n = 0; n < choice->nodes_count; n++) {
        slow += choice->usable[n] == 1 && choice->slowness[n] > 1;
    }
    uint64_t nth = slow > 0 ? draw / EP_COPY_PROBE_OF % slow : 0;
    for (uint32_t n = 0; n < choice->nodes_count && slow > 0; n++) {
        if (choice->usable[n] == 1 && choice->slowness[n] > 1 && nth-- == 0) {
            return n;
        }
    }
    return NO_NODE;
}

static uint32_t choose_one(const chooser *c, uint32_t expert)
{
    uint32_t begin = c->layer->offsets[expert];
    uint32_t end = c->layer->offsets[expert + 1];
    copy_rank best = RANK_NONE;
    uint32_t count = 0; /* how many copies have the best rank */
    for (uint32_t copy = begin; copy < end; copy++) {
        copy_rank rank = rank_of(c, copy);
        count = rank < best ? 1 : count + (rank == best);
        best = rank < best ? rank : best;
    }
    if (best == RANK_NONE) {
        return EP_NO_EXPERT;
    }
    uint64_t state = expert; /* the hash is one step of splitmix64 */
    uint32_t skip = count > 1 ? (uint32_t)((ep_splitmix64(&state) + c->choice->spread) % count) : 0;
    const float work =
        c->choice->pass_slots + (c->choice->slots != NULL ? (float)c->choice->slots[expert] : 1);
    uint32_t chosen = EP_NO_EXPERT;
    float chosen_time = INFINITY;
    uint32_t seen = 0;
    for (uint32_t copy = begin; seen < skip + count; copy = copy + 1 < end ? copy + 1 : begin) {
        uint32_t node = c->layer->copies[copy];
        if (rank_of(c, copy) != best || seen++ < skip) {
            continue;
        }
        float time = slowness_of(c, node) * (c->choice->busy[node] + work);
        if (time < chosen_time) {
            chosen = node;
            chosen_time = time;
        }
    }
    c->choice->busy[chosen] += work;
    return chosen;
}

/* Sorts by slots, the most first, then by number: Shell sort, which needs no memory. */
static void sort_by_slots(uint32_t *experts, uint32_t count, const uint32_t *slots)
{
    for (uint32_t gap = count / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11) {
        for (uint32_t i = gap; i < count; i++) {
            uint32_t e = experts[i];
            uint32_t at = i;
            for (uint32_t o; at >= gap; at -= gap) {
                o = experts[at - gap];
                if (slots[o] > slots[e] || (slots[o] == slots[e] && o < e)) {
                    break;
                }
                experts[at] = o;
            }
            experts[at] = e;
        }
    }
}

void ep_choose_copies(const ep_routing_layer *layer, const ep_copy_choice *choice,
                      uint32_t *out_chosen)
{
    const bool may_probe = choice->slowness != NULL && choice->slots != NULL;
    const chooser c = {layer, choice, may_probe ? pick_probed(choice) : NO_NODE};
    uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
    uint32_t open = 0;
    for (uint32_t n = 0; n < choice->nodes_count; n++) {
        choice->busy[n] = 0;
    }
    for (uint32_t e = 0; e < experts; e++) {
        out_chosen[e] = EP_NO_EXPERT;
        if (choice->slots != NULL && choice->slots[e] == 0) {
            continue;
        }
        if (layer->offsets[e + 1] - layer->offsets[e] > 1) {
            choice->order[open++] = e;
        } else {
            out_chosen[e] = choose_one(&c, e);
        }
    }
    if (choice->slots != NULL && open > 1) {
        sort_by_slots(choice->order, open, choice->slots);
    }
    for (uint32_t i = 0; i < open; i++) {
        out_chosen[choice->order[i]] = choose_one(&c, choice->order[i]);
    }
}
