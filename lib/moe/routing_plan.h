/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From (token, slot) to the frames that travel: each token row once per node, cut by token into
 * chunks that keep to a frame's limits, slots inside a chunk sorted by expert, then token. One plan
 * is built from one routing table epoch. Pure.
 *
 * With smooth scales each slot brings a row of its own instead (moe/batch.h).
 * A token's slots for one node stay in one chunk. Only a token whose slots do not fit an empty
 * chunk is spread over several, and its row travels with each.
 *
 * Memory     a plan is reused: arrays grow to the largest batch seen and stay.
 *            ep_routing_plan_reserve makes later builds allocate nothing.
 * Threads    one at a time per plan.
 */
#ifndef EP_MOE_ROUTING_PLAN_H
#define EP_MOE_ROUTING_PLAN_H

#include "moe/batch.h"
#include "moe/routing_table.h"

typedef struct ep_plan_slot {
    uint32_t row;         /* index among the chunk's rows */
    uint32_t expert;      /* table index */
    uint32_t slot_number; /* t * slots_per_token + k */
} ep_plan_slot;

/* What one frame carries. */
typedef struct ep_plan_chunk {
    uint32_t node;       /* node index in the table */
    uint32_t rows_begin; /* in plan->row_tokens */
    uint32_t rows_count;
    uint32_t slots_begin; /* in plan->slots */
    uint32_t slots_count;
} ep_plan_chunk;

typedef struct ep_routing_plan {
    uint32_t chunks_count;
    /* by their first token: nodes take turns; a node's chunks have ascending tokens */
    ep_plan_chunk *chunks;
    uint32_t rows_count;
    uint32_t *row_tokens; /* token of each row, ascending inside a chunk */
    uint32_t slots_count;
    ep_plan_slot *slots;
    const uint32_t *expert_slots; /* [experts] listed slots of each, until the plan is built */
    void *priv;                   /* scratch and capacities */
} ep_routing_plan;

/* Bytes that count towards a chunk's limits. */
typedef struct ep_plan_cut {
    uint64_t row_bytes;  /* of a request, for each row */
    uint64_t slot_bytes; /* of a request, for each slot */
    uint64_t reply_slot_bytes;
    /* [nodes_count] a chunk's rows and slots, and its reply's rows, stay at or below; a chunk has
     * at least one slot */
    const uint64_t *room_bytes;
} ep_plan_cut;

/* Chunks that `slots` slots are cut into at most, when each chunk has room for room_slots slots
 * that each bring a row of their own. */
uint64_t ep_plan_chunks_max(uint64_t slots, uint64_t room_slots, uint32_t nodes);

void ep_routing_plan_init(ep_routing_plan *plan);
void ep_routing_plan_fini(ep_routing_plan *plan);
ep_err ep_routing_plan_reserve(ep_routing_plan *plan, uint32_t tokens_max, uint32_t slots_per_token,
                               uint32_t experts, uint32_t nodes, uint32_t chunks_max);

#define EP_COPY_PASS_SLOTS 16 /* ep_copy_choice.pass_slots where nobody tells */
/* a node this many times as slow as others is left alone where there is another copy */
#define EP_COPY_SLOW 4.0f
/* one call in so many tries a slow node as if it were quick: it may be by now */
#define EP_COPY_PROBE_OF 256

/* What copies are chosen by, and memory to do it in. */
typedef struct ep_copy_choice {
    uint32_t nodes_count;
    const uint8_t *usable; /* [nodes] 0 no, 1 yes, 2 only where the expert has no better copy */
    const uint8_t *tried;  /* [copies of the layer] 1: not this one; NULL: none is left out */
    /* [nodes] time for the same work against the others' 1; NULL: all are 1 */
    const float *slowness;
    /* [experts] of this build, 0: the expert is not needed; NULL: all are, and none is a probe */
    const uint32_t *slots;
    float pass_slots; /* reading an expert's weights takes as long as so many slots more */
    /* differs from call to call (call sequence): spreads calls over copies that are as good */
    uint64_t spread;
    uint32_t *order; /* [experts] scratch, as the next */
    float *busy;     /* [nodes] */
} ep_copy_choice;

/*
 * Begins a plan: lists all routed and shared slots of tokens [token_begin, token_end) of a checked
 * batch or, when slot_numbers is not NULL, of just those slot numbers (re-routing after a loss;
 * ascending), and counts them (expert_slots), for whoever chooses copies. Errors: NO_MEMORY.
 */
ep_err ep_routing_plan_list(ep_routing_plan *plan, const ep_batch *batch,
                            const ep_layer_shape *shape, uint32_t token_begin, uint32_t token_end,
                            const uint32_t *slot_numbers, uint32_t slot_numbers_count,
                            ep_error *out_error);

/*
 * Which copy serves which expert in one build: chosen[e] is a node index, or EP_NO_EXPERT when no
 * usable copy is left or the expert is not needed. All slots of one expert in a build go to one
 * copy.
 * Choice: first experts with one copy, then the others by their slots, the most first, each to the
 * copy whose node ends first with what it has got and this, by slots, passes over weights and
 * slowness; among equals, by (hash(e) + spread). A few tokens thus go to where the fewest experts
 * are read, many to where the fewest slots are. Nodes from EP_COPY_SLOW on come behind the quicker
 * ones. Pure.
 */
void ep_choose_copies(const ep_routing_layer *layer, const ep_copy_choice *choice,
                      uint32_t *out_chosen);

/*
 * Builds the plan of what is listed. cut NULL: one chunk per node.
 * Errors: UNAVAILABLE naming layer and expert when chosen[] has EP_NO_EXPERT for a listed expert
 * (the list stays); NO_MEMORY.
 */
ep_err ep_routing_plan_build(ep_routing_plan *plan, const ep_batch *batch,
                             const ep_routing_layer *layer, uint32_t nodes_count,
                             const uint32_t *chosen, const ep_plan_cut *cut, ep_error *out_error);

#endif
