/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From (token, slot) to the frames that travel: each token row once per node. Rows are cut by token
 * into chunks within a frame's limits; inside a chunk, slots are sorted by expert, then token. A
 * plan is built from one routing table epoch. Pure. With smooth scales each slot has a row of its
 * own instead (moe/batch.h).
 * A token's slots for one node stay in one chunk. Only a token whose slots do not fit an empty
 * chunk is spread over several, and its row travels with each.
 *
 * Memory     a plan is reused: its arrays grow to the largest batch seen and stay.
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

/* The content of one frame. */
typedef struct ep_plan_chunk {
    uint32_t node;       /* node index in the table */
    uint32_t rows_begin; /* in plan->row_tokens */
    uint32_t rows_count;
    uint32_t slots_begin; /* in plan->slots */
    uint32_t slots_count;
} ep_plan_chunk;

typedef struct ep_routing_plan {
    uint32_t chunks_count;
    /* by their first token, so that nodes take turns; a node's chunks have ascending tokens */
    ep_plan_chunk *chunks;
    uint32_t rows_count;
    uint32_t *row_tokens; /* token of each row, ascending inside a chunk */
    uint32_t slots_count;
    ep_plan_slot *slots;
    const uint32_t *expert_slots; /* [experts] listed slots of each, until the plan is built */
    void *priv;                   /* scratch and capacities */
} ep_routing_plan;

/* The bytes that count towards a chunk's limits. */
typedef struct ep_plan_cut {
    uint64_t row_bytes;  /* of a request, for each row */
    uint64_t slot_bytes; /* of a request, for each slot */
    uint64_t reply_slot_bytes;
    /* [nodes_count] limit of a chunk's rows and slots, and its reply's rows; at least one slot
     * fits */
    const uint64_t *room_bytes;
} ep_plan_cut;

/* The most chunks that `slots` slots are cut into, when each chunk has room for room_slots slots
 * that each have a row of their own. */
uint64_t ep_plan_chunks_max(uint64_t slots, uint64_t room_slots, uint32_t nodes);

void ep_routing_plan_init(ep_routing_plan *plan);
void ep_routing_plan_fini(ep_routing_plan *plan);
ep_err ep_routing_plan_reserve(ep_routing_plan *plan, uint32_t tokens_max, uint32_t slots_per_token,
                               uint32_t experts, uint32_t nodes, uint32_t chunks_max);

#define EP_COPY_PASS_SLOTS 16 /* ep_copy_choice.pass_slots when nodes report none */
/* a node this many times as slow as the others is avoided where another copy exists */
#define EP_COPY_SLOW 4.0f
/* one call in this many treats a slow node as a quick one, since it may be quick by now */
#define EP_COPY_PROBE_OF 256

/* The basis for choosing copies, and scratch memory for it. */
typedef struct ep_copy_choice {
    uint32_t nodes_count;
    const uint8_t *usable; /* [nodes] 0 no, 1 yes, 2 only for experts without a better copy */
    /* [copies of the layer] 1: do not choose this copy; NULL: all may be chosen */
    const uint8_t *tried;
    /* [nodes] time that the node takes for work that takes the others 1; NULL: all 1 */
    const float *slowness;
    /* [experts] slots in this build, 0: the expert is not needed; NULL: all are needed, and there
     * is no probe of a slow node */
    const uint32_t *slots;
    float pass_slots; /* reading an expert's weights takes as long as this many slots */
    /* differs from call to call (call sequence): spreads calls over equally good copies */
    uint64_t spread;
    uint32_t *order; /* [experts] scratch, like the next */
    float *busy;     /* [nodes] */
} ep_copy_choice;

/*
 * Begins a plan: lists all routed and shared slots of tokens [token_begin, token_end) of a checked
 * batch or, when slot_numbers is not NULL, just those slot numbers (ascending; re-routing after a
 * loss). Counts them in expert_slots, for the choice of copies. Errors: NO_MEMORY.
 */
ep_err ep_routing_plan_list(ep_routing_plan *plan, const ep_batch *batch,
                            const ep_layer_shape *shape, uint32_t token_begin, uint32_t token_end,
                            const uint32_t *slot_numbers, uint32_t slot_numbers_count,
                            ep_error *out_error);

/*
 * Which copy serves which expert in one build: chosen[e] is a node index, or EP_NO_EXPERT when no
 * usable copy is left or the expert is not needed. All slots of one expert in a build go to one
 * copy. Choice: first the experts with one copy. Then the others, the most slots first, each to the
 * copy whose node would then end first; a node's time is counted in slots, passes over weights and
 * slowness. Equals are decided by (hash(e) + spread). So a few tokens go to where the fewest
 * experts are read, many tokens to where the fewest slots are. Nodes from EP_COPY_SLOW on come
 * after the quicker ones. Pure.
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
