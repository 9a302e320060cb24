/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Builds a routing plan in two passes: the first counts slots per expert and rows per node, the second places
 * each slot. Slots are visited in ascending number, so the counting sort leaves them by node, expert, token.
 */
#include "moe/routing_plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#define NO_TOKEN UINT32_MAX

/* A slot that some node must serve. */
typedef struct {
    uint32_t slot_number;
    uint32_t expert;
} needed_slot;

typedef struct {
    uint32_t slots_begin;
    uint32_t slots_count;
    uint32_t rows_begin;
    uint32_t rows_count; /* second pass: rows placed so far */
    uint32_t last_token; /* token of the newest row */
} node_scratch;

typedef struct {
    size_t slots_capacity;
    size_t rows_capacity;
    size_t experts_capacity;
    size_t nodes_capacity;
    needed_slot *needed;     /* [slots_capacity] */
    uint32_t *expert_cursor; /* [experts_capacity] first a count, then the next place */
    node_scratch *by_node;   /* [nodes_capacity] */
} plan_scratch;

void ep_routing_plan_init(ep_routing_plan *plan)
{
    memset(plan, 0, sizeof(*plan));
}

void ep_routing_plan_fini(ep_routing_plan *plan)
{
    plan_scratch *scratch = plan->priv;
    if (scratch != NULL) {
        free(scratch->needed);
        free(scratch->expert_cursor);
        free(scratch->by_node);
        free(scratch);
    }
    free(plan->nodes);
    free(plan->row_tokens);
    free(plan->slots);
    memset(plan, 0, sizeof(*plan));
}

/* Replaces the array at *array by one of count elements; nothing in it is kept, each build fills it anew. */
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

static ep_err reserve(ep_routing_plan *plan, size_t slots, size_t rows, size_t experts, size_t nodes)
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
            renew(&plan->slots, slots, sizeof(*plan->slots)) != EP_OK) {
            return EP_ERR_NO_MEMORY;
        }
        scratch->slots_capacity = slots;
    }
    if (rows > scratch->rows_capacity) {
        scratch->rows_capacity = 0;
        if (renew(&plan->row_tokens, rows, sizeof(*plan->row_tokens)) != EP_OK) {
            return EP_ERR_NO_MEMORY;
        }
        scratch->rows_capacity = rows;
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
        if (renew(&scratch->by_node, nodes, sizeof(*scratch->by_node)) != EP_OK ||
            renew(&plan->nodes, nodes, sizeof(*plan->nodes)) != EP_OK) {
            return EP_ERR_NO_MEMORY;
        }
        scratch->nodes_capacity = nodes;
    }
    return EP_OK;
}

/* A token gives at most one row per node and one per slot. */
static size_t rows_max(size_t tokens, size_t slots_per_token, size_t nodes)
{
    return tokens * (slots_per_token < nodes ? slots_per_token : nodes);
}

ep_err ep_routing_plan_reserve(ep_routing_plan *plan, uint32_t tokens_max, uint32_t slots_per_token,
                               uint32_t experts, uint32_t nodes)
{
    return reserve(plan, (size_t)tokens_max * slots_per_token, rows_max(tokens_max, slots_per_token, nodes),
                   experts, nodes);
}

typedef struct {
    const ep_batch *batch;
    const ep_routing_layer *layer;
    const uint32_t *chosen;
    uint32_t slots_per_token;
    uint32_t nodes_count;
} build_input;

/* First pass for one slot: remembers it and counts it for its expert and its node. */
static ep_err count_slot(plan_scratch *scratch, const build_input *in, uint32_t slot_number,
                         uint32_t *needed_count, ep_error *out_error)
{
    uint32_t expert;
    uint32_t token = slot_number / in->slots_per_token;
    ep_slot_kind kind =
        ep_batch_slot(in->batch, &in->layer->shape, token, slot_number % in->slots_per_token, &expert);
    if (kind != EP_SLOT_ROUTED && kind != EP_SLOT_SHARED) {
        return EP_OK;
    }
    uint32_t node_index = in->chosen[expert];
    if (node_index == EP_NO_EXPERT) {
        ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                     "no usable node holds expert %" PRIu32 " of layer %" PRIu32, expert,
                     in->layer->shape.layer);
        if (out_error != NULL) {
            out_error->layer = (int32_t)in->layer->shape.layer;
            out_error->expert = (int32_t)expert;
        }
        return EP_ERR_UNAVAILABLE;
    }
    EP_ASSERT(node_index < in->nodes_count);

    node_scratch *node = &scratch->by_node[node_index];
    scratch->needed[(*needed_count)++] = (needed_slot){slot_number, expert};
    scratch->expert_cursor[expert]++;
    node->slots_count++;
    if (node->last_token != token) {
        node->last_token = token;
        node->rows_count++;
    }
    return EP_OK;
}

static ep_err count_slots(plan_scratch *scratch, const build_input *in, uint32_t token_begin,
                          uint32_t token_end, const uint32_t *slot_numbers, uint32_t slot_numbers_count,
                          uint32_t *out_needed, ep_error *out_error)
{
    ep_err err = EP_OK;
    uint32_t needed = 0;
    if (slot_numbers != NULL) {
        for (uint32_t i = 0; i < slot_numbers_count && err == EP_OK; i++) {
            EP_ASSERT(i == 0 || slot_numbers[i - 1] < slot_numbers[i]);
            err = count_slot(scratch, in, slot_numbers[i], &needed, out_error);
        }
    } else {
        uint32_t end = token_end * in->slots_per_token;
        for (uint32_t s = token_begin * in->slots_per_token; s < end && err == EP_OK; s++) {
            err = count_slot(scratch, in, s, &needed, out_error);
        }
    }
    *out_needed = needed;
    return err;
}

/* Gives every node its range and every expert its first place, and lists the nodes that get rows. */
static void lay_out(ep_routing_plan *plan, const build_input *in, uint32_t experts)
{
    plan_scratch *scratch = plan->priv;
    for (uint32_t n = 0; n < in->nodes_count; n++) {
        node_scratch *node = &scratch->by_node[n];
        if (node->slots_count == 0) {
            continue;
        }
        node->slots_begin = plan->slots_count;
        node->rows_begin = plan->rows_count;
        plan->nodes[plan->nodes_count++] =
            (ep_plan_node){n, node->rows_begin, node->rows_count, node->slots_begin, node->slots_count};
        plan->slots_count += node->slots_count;
        plan->rows_count += node->rows_count;
        node->rows_count = 0;
        node->last_token = NO_TOKEN;
    }
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t count = scratch->expert_cursor[e];
        if (count > 0) {
            node_scratch *node = &scratch->by_node[in->chosen[e]];
            scratch->expert_cursor[e] = node->slots_begin;
            node->slots_begin += count;
        }
    }
}

static void place_slots(ep_routing_plan *plan, const build_input *in, uint32_t needed_count)
{
    plan_scratch *scratch = plan->priv;
    for (uint32_t i = 0; i < needed_count; i++) {
        needed_slot slot = scratch->needed[i];
        node_scratch *node = &scratch->by_node[in->chosen[slot.expert]];
        uint32_t token = slot.slot_number / in->slots_per_token;
        if (node->last_token != token) {
            node->last_token = token;
            plan->row_tokens[node->rows_begin + node->rows_count++] = token;
        }
        plan->slots[scratch->expert_cursor[slot.expert]++] =
            (ep_plan_slot){node->rows_count - 1, slot.expert, slot.slot_number};
    }
}

ep_err ep_routing_plan_build(ep_routing_plan *plan, const ep_batch *batch, const ep_routing_layer *layer,
                             uint32_t nodes_count, const uint32_t *chosen, uint32_t token_begin,
                             uint32_t token_end, const uint32_t *slot_numbers, uint32_t slot_numbers_count,
                             ep_error *out_error)
{
    build_input in = {batch, layer, chosen, ep_batch_slots_per_token(batch, &layer->shape), nodes_count};
    uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
    EP_ASSERT(token_begin <= token_end && token_end <= batch->tokens);
    size_t tokens = slot_numbers != NULL ? slot_numbers_count : token_end - token_begin;
    size_t per_token = slot_numbers != NULL ? 1 : in.slots_per_token;

    plan->nodes_count = 0;
    plan->rows_count = 0;
    plan->slots_count = 0;
    if (reserve(plan, tokens * per_token, rows_max(tokens, per_token, nodes_count), experts, nodes_count) !=
        EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a plan of %zu slots",
                            tokens * per_token);
    }
    plan_scratch *scratch = plan->priv;
    memset(scratch->expert_cursor, 0, experts * sizeof(*scratch->expert_cursor));
    for (uint32_t n = 0; n < nodes_count; n++) {
        scratch->by_node[n] = (node_scratch){.last_token = NO_TOKEN};
    }

    uint32_t needed = 0;
    ep_err err = count_slots(scratch, &in, token_begin, token_end, slot_numbers, slot_numbers_count, &needed,
                             out_error);
    if (err != EP_OK) {
        return err;
    }
    lay_out(plan, &in, experts);
    place_slots(plan, &in, needed);
    return EP_OK;
}
