/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chooses copies of experts, and builds a routing plan in one pass over the ids and a radix sort.
 * The pass lists the slots that need a row, in ascending number, and counts them. Once copies are
 * chosen, each gets its chunk and its row. Two stable scatters, by expert and by chunk, then order
 * the slots by chunk, expert, token.
 */
#include "moe/routing_plan.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/random.h"

#define NO_CHUNK UINT32_MAX
#define NO_NODE UINT32_MAX
#define CHUNKS_MIN 16u

/* A slot that some node must serve. */
typedef struct {
    uint32_t slot_number;
    uint32_t expert;
    uint32_t chunk;
    uint32_t row; /* row index in the chunk */
} needed_slot;

typedef struct {
    uint32_t chunk;       /* the chunk that takes the node's next row */
    uint32_t token_slots; /* slots of the present token, until the first of them is placed */
    uint32_t row_chunk;   /* the chunk that already has this token's row */
} node_scratch;

typedef struct {
    uint32_t slots_per_token; /* of what is listed, as the next */
    uint32_t needed_count;
    size_t slots_capacity;
    size_t experts_capacity;
    size_t nodes_capacity;
    size_t chunks_capacity;
    needed_slot *needed;     /* [slots_capacity] ascending slot number */
    needed_slot *by_expert;  /* [slots_capacity] */
    uint32_t *expert_cursor; /* [experts_capacity] first a count, then the next place */
    node_scratch *by_node;   /* [nodes_capacity] */
} plan_scratch;

uint64_t ep_plan_chunks_max(uint64_t slots, uint64_t room_slots, uint32_t nodes)
{
    /* Two consecutive chunks of a node together hold more than room_slots. */
    uint64_t chunks = 2 * slots / (room_slots + 1) + nodes;
    return chunks < slots ? chunks : slots;
}

void ep_routing_plan_init(ep_routing_plan *plan)
{
    memset(plan, 0, sizeof(*plan));
}

void ep_routing_plan_fini(ep_routing_plan *plan)
{
    plan_scratch *scratch = plan->priv;
    if (scratch != NULL) {
        free(scratch->needed);
        free(scratch->by_expert);
        free(scratch->expert_cursor);
        free(scratch->by_node);
        free(scratch);
    }
    free(plan->chunks);
    free(plan->row_tokens);
    free(plan->slots);
    memset(plan, 0, sizeof(*plan));
}

/* Replaces *array by one of count elements. The content is lost: each build fills it anew. */
static ep_err renew(void *array, size_t count, size_t element_bytes)
{
    void *old;
    void *fresh = calloc(count, element_bytes);
    if (fresh == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    memcpy(&old, array, sizeof(old));
    free(old);
    memcpy(array, &fresh, sizeof(fresh));
    return EP_OK;
}

/* The only array that grows while it is being filled. */
static ep_err reserve_chunks(ep_routing_plan *plan, size_t count)
{
    plan_scratch *scratch = plan->priv;
    if (count > scratch->chunks_capacity) {
        size_t capacity =
            scratch->chunks_capacity * 2 < CHUNKS_MIN ? CHUNKS_MIN : scratch->chunks_capacity * 2;
        capacity = capacity < count ? count : capacity;
        ep_plan_chunk *chunks = realloc(plan->chunks, capacity * sizeof(*chunks));
        if (chunks == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        plan->chunks = chunks;
        scratch->chunks_capacity = capacity;
    }
    return EP_OK;
}

/* A slot brings at most one row. */
static ep_err reserve(ep_routing_plan *plan, size_t slots, size_t experts, size_t nodes,
                      size_t chunks)
{
    plan_scratch *scratch = plan->priv;
    if (scratch == NULL) {
        scratch = calloc(1, sizeof(*scratch));
        if (scratch == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        plan->priv = scratch;
    }
    if (slots > scratch->slots_capacity) {
        scratch->slots_capacity = 0;
        if (renew(&scratch->needed, slots, sizeof(*scratch->needed)) != EP_OK ||
            renew(&scratch->by_expert, slots, sizeof(*scratch->by_expert)) != EP_OK ||
            renew(&plan->row_tokens, slots, sizeof(*plan->row_tokens)) != EP_OK ||
            renew(&plan->slots, slots, sizeof(*plan->slots)) != EP_OK) {
            return EP_ERR_NO_MEMORY;
        }
        scratch->slots_capacity = slots;
    }
    if (experts > scratch->experts_capacity) {
        scratch->experts_capacity = 0;
        if (renew(&scratch->expert_cursor, experts, sizeof(*scratch->expert_cursor)) != EP_OK) {
            return EP_ERR_NO_MEMORY;
        }
        scratch->experts_capacity = experts;
    }
    if (nodes > scratch->nodes_capacity) {
        scratch->nodes_capacity = 0;
        if (renew(&scratch->by_node, nodes, sizeof(*scratch->by_node)) != EP_OK) {
            return EP_ERR_NO_MEMORY;
        }
        scratch->nodes_capacity = nodes;
    }
    return reserve_chunks(plan, chunks);
}

ep_err ep_routing_plan_reserve(ep_routing_plan *plan, uint32_t tokens_max, uint32_t slots_per_token,
                               uint32_t experts, uint32_t nodes, uint32_t chunks_max)
{
    return reserve(plan, (size_t)tokens_max * slots_per_token, experts, nodes, chunks_max);
}

ep_err ep_routing_plan_list(ep_routing_plan *plan, const ep_batch *batch,
                            const ep_layer_shape *shape, uint32_t token_begin, uint32_t token_end,
                            const uint32_t *slot_numbers, uint32_t slot_numbers_count,
                            ep_error *out_error)
{
    const uint32_t per_token = ep_batch_slots_per_token(batch, shape);
    const uint32_t experts = shape->experts + shape->shared_experts;
    EP_ASSERT(token_begin <= token_end && token_end <= batch->tokens);
    const size_t slots =
        slot_numbers != NULL ? slot_numbers_count : (size_t)(token_end - token_begin) * per_token;
    if (reserve(plan, slots, experts, 0, 0) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a plan of %zu slots",
                            slots);
    }
    plan_scratch *scratch = plan->priv;
    scratch->slots_per_token = per_token;
    scratch->needed_count = 0;
    memset(scratch->expert_cursor, 0, experts * sizeof(*scratch->expert_cursor));
    plan->expert_slots = scratch->expert_cursor;
    /* most batches have nothing but ids: then a slot's kind takes no call */
    const bool is_plain = batch->mask_tokens == NULL && batch->mask_slots.data == NULL &&
                          batch->form != EP_RESULT_PARTIAL;
    uint32_t token = 0;
    for (size_t n = 0; n < slots; n++) {
        const uint32_t number =
            slot_numbers != NULL ? slot_numbers[n] : token_begin * per_token + (uint32_t)n;
        EP_ASSERT(n == 0 || slot_numbers == NULL || slot_numbers[n - 1] < number);
        if (n == 0 || number - token * per_token >= per_token) {
            token = number / per_token;
        }
        const uint32_t k = number - token * per_token;
        const int64_t id = is_plain && k < batch->top_k ? ep_batch_id(batch, token, k) : -1;
        uint32_t expert = (uint32_t)id;
        ep_slot_kind kind = id >= 0 && id < shape->experts
                                ? EP_SLOT_ROUTED
                                : ep_batch_slot(batch, shape, token, k, &expert);
        if (kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED) {
            scratch->needed[scratch->needed_count++] =
                (needed_slot){.slot_number = number, .expert = expert};
            scratch->expert_cursor[expert]++;
        }
    }
    return EP_OK;
}

typedef struct {
    const ep_batch *batch;
    const ep_routing_layer *layer;
    const uint32_t *chosen;
    const ep_plan_cut *cut;
    uint32_t nodes_count;
} build_input;

static bool fits(const build_input *in, uint32_t node, uint64_t rows, uint64_t slots)
{
    const ep_plan_cut *cut = in->cut;
    return cut == NULL ||
           (rows <= EP_TOKENS_MAX &&
            rows * cut->row_bytes + slots * cut->slot_bytes <= cut->room_bytes[node] &&
            slots * cut->reply_slot_bytes <= cut->room_bytes[node]);
}

/* Gives the slots of one token, needed[first..end), their chunks and rows. For its first slot at a
 * node, checks whether all of them fit the chunk. */
static ep_err place_slots(ep_routing_plan *plan, const build_input *in, uint32_t first,
                          uint32_t end)
{
    plan_scratch *scratch = plan->priv;
    const bool is_own = ep_batch_row_per_slot(in->batch);
    for (uint32_t i = first; i < end; i++) {
        needed_slot *slot = &scratch->needed[i];
        uint32_t node_index = in->chosen[slot->expert];
        node_scratch *node = &scratch->by_node[node_index];
        uint32_t more = 1;
        if (node->token_slots != 0) {
            more = node->token_slots;
            node->token_slots = 0;
            node->row_chunk = NO_CHUNK;
        }
        ep_plan_chunk *chunk = node->chunk != NO_CHUNK ? &plan->chunks[node->chunk] : NULL;
        bool has_row = node->row_chunk == node->chunk && chunk != NULL && !is_own;
        uint32_t more_rows = is_own ? more : !has_row;
        if (chunk == NULL || !fits(in, node_index, (uint64_t)chunk->rows_count + more_rows,
                                   (uint64_t)chunk->slots_count + more)) {
            ep_err err = reserve_chunks(plan, (size_t)plan->chunks_count + 1);
            if (err != EP_OK) {
                return err;
            }
            node->chunk = plan->chunks_count++;
            plan->chunks[node->chunk] = (ep_plan_chunk){.node = node_index};
            chunk = &plan->chunks[node->chunk];
            has_row = false;
        }
        if (!has_row) {
            node->row_chunk = node->chunk;
            chunk->rows_count++;
        }
        chunk->slots_count++;
        slot->chunk = node->chunk;
        slot->row = chunk->rows_count - 1;
    }
    return EP_OK;
}

static ep_err no_copy(const build_input *in, uint32_t expert, ep_error *out_error)
{
    ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                 "no usable node holds expert %" PRIu32 " of layer %" PRIu32, expert,
                 in->layer->shape.layer);
    if (out_error != NULL) {
        out_error->layer = (int32_t)in->layer->shape.layer;
        out_error->expert = (int32_t)expert;
    }
    return EP_ERR_UNAVAILABLE;
}

/* Counts each token's slots for each node, then places them. */
static ep_err assign_slots(ep_routing_plan *plan, const build_input *in, ep_error *out_error)
{
    plan_scratch *scratch = plan->priv;
    uint32_t placed = 0;
    uint64_t token_end = 0; /* slot number */
    ep_err err = EP_OK;
    for (uint32_t i = 0; i < scratch->needed_count; i++) {
        const needed_slot *slot = &scratch->needed[i];
        if (slot->slot_number >= token_end) {
            err = place_slots(plan, in, placed, i);
            if (err != EP_OK) {
                break;
            }
            placed = i;
            token_end = ((uint64_t)slot->slot_number / scratch->slots_per_token + 1) *
                        scratch->slots_per_token;
        }
        const uint32_t node = in->chosen[slot->expert];
        if (node == EP_NO_EXPERT) {
            return no_copy(in, slot->expert, out_error);
        }
        EP_ASSERT(node < in->nodes_count);
        scratch->by_node[node].token_slots++;
    }
    if (err == EP_OK) {
        err = place_slots(plan, in, placed, scratch->needed_count);
    }
    return err == EP_OK ? EP_OK : ep_error_set(out_error, err, "no memory for a plan");
}

/* Turns counts into positions of the first elements, then writes the elements. Slots in `needed`
 * ascend, so their tokens are found without a division each. */
static void sort_slots(ep_routing_plan *plan, uint32_t experts)
{
    plan_scratch *scratch = plan->priv;
    const uint32_t per_token = scratch->slots_per_token, count = scratch->needed_count;
    uint32_t token = count > 0 ? scratch->needed[0].slot_number / per_token : 0;
    uint32_t place = 0;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t slots = scratch->expert_cursor[e];
        scratch->expert_cursor[e] = place;
        place += slots;
    }
    for (uint32_t c = 0; c < plan->chunks_count; c++) {
        ep_plan_chunk *chunk = &plan->chunks[c];
        chunk->slots_begin = plan->slots_count;
        chunk->rows_begin = plan->rows_count;
        plan->slots_count += chunk->slots_count;
        plan->rows_count += chunk->rows_count;
        chunk->slots_count = 0; /* incremented again while the slots are written */
    }
    for (uint32_t i = 0; i < count; i++) {
        const needed_slot *slot = &scratch->needed[i];
        if (slot->slot_number - token * per_token >= per_token) {
            token = slot->slot_number / per_token;
        }
        plan->row_tokens[plan->chunks[slot->chunk].rows_begin + slot->row] = token;
        scratch->by_expert[scratch->expert_cursor[slot->expert]++] = *slot;
    }
    for (uint32_t i = 0; i < count; i++) {
        const needed_slot *slot = &scratch->by_expert[i];
        ep_plan_chunk *chunk = &plan->chunks[slot->chunk];
        plan->slots[chunk->slots_begin + chunk->slots_count++] =
            (ep_plan_slot){slot->row, slot->expert, slot->slot_number};
    }
}

ep_err ep_routing_plan_build(ep_routing_plan *plan, const ep_batch *batch,
                             const ep_routing_layer *layer, uint32_t nodes_count,
                             const uint32_t *chosen, const ep_plan_cut *cut, ep_error *out_error)
{
    const build_input in = {batch, layer, chosen, cut, nodes_count};
    plan_scratch *scratch = plan->priv;
    const uint32_t slots = scratch->needed_count;
    plan->chunks_count = 0;
    plan->rows_count = 0;
    plan->slots_count = 0;
    if (reserve(plan, 0, 0, nodes_count, nodes_count < slots ? nodes_count : slots) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory for a plan of %" PRIu32 " slots", slots);
    }
    for (uint32_t n = 0; n < nodes_count; n++) {
        scratch->by_node[n] = (node_scratch){.chunk = NO_CHUNK, .row_chunk = NO_CHUNK};
    }
    ep_err err = assign_slots(plan, &in, out_error);
    if (err == EP_OK) {
        sort_slots(plan, layer->shape.experts + layer->shape.shared_experts);
    }
    return err;
}

/* ---- which copy of an expert serves one call ---- */

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
