/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How one call travels. Decode and prefill differ only in these numbers; no file below asks which
 * it is, except to pick the connection and to tell the node its scheduling class.
 *
 *   decode    one frame per node on the decode connection
 *   prefill   windows of tokens, four under way at a time; in a window each node's tokens cut into
 *             frames whose request and reply both fit chunk_bytes_max, all in flight on the bulk
 *             connection
 *
 * A streamed call (on_tokens) begins prefill with smaller windows. Nodes merge the rows of all
 * windows they have, so the first of four equal windows is back only when all nearly are.
 *
 * In both a window's reply rows are bounded, so that one call cannot take the whole buffer budget.
 * Pure.
 */
#ifndef EP_CLIENT_FLOW_H
#define EP_CLIENT_FLOW_H

#include "moe/routing_plan.h"

/* What fixed part, protobuf header and alignment take of a frame at most. */
#define EP_FLOW_FRAME_OVERHEAD_BYTES 4096u
#define EP_FLOW_DECODE_TOKENS_DEFAULT 256u
#define EP_FLOW_WINDOW_TOKENS_MIN 256u
/* A streamed call's first window: a 64th of the tokens, at least 32, at most an eighth of a full
 * window. The four that are sent at once then hold an eighth of the tokens, and no more than one
 * full window. A 32nd is too much: each window costs a pass over weights, and with 32 experts a
 * node the first tokens come after a third of the call's time. */
#define EP_FLOW_FIRST_TOKENS_MIN 32u
#define EP_FLOW_FIRST_TOKENS_PART 64u
#define EP_FLOW_FIRST_WINDOW_PART 8u
/* under way at once: with fewer, one that waits for its last rows leaves the wire idle */
#define EP_FLOW_WINDOWS 4u

typedef struct ep_flow_limits {
    size_t frame_bytes_max;     /* of any frame */
    size_t chunk_bytes_max;     /* of prefill frames */
    size_t window_bytes_max;    /* reply rows of the windows that are under way */
    uint32_t window_tokens;     /* prefill; 0: max(256, 32*E/K) */
    uint32_t decode_tokens_max; /* auto: up to this T is decode; 0: 256 */
    bool is_streamed;           /* the caller is told of tokens while others travel */
    bool has_few_nodes;         /* auto: fewer than the policy wants for decode */
} ep_flow_limits;

typedef struct ep_flow {
    bool prefill;
    /* tokens are combined while others still travel: decode that is not streamed is over before
     * that would pay */
    bool is_piecewise;
    /* Results are combined in scratch memory first, since out is written on success only. A
     * streamed call writes into out at once: false. */
    bool is_aside;
    uint32_t window_tokens; /* >= 1 */
    uint32_t first_tokens;  /* of the first window, 1..window_tokens */
    uint32_t windows_count; /* >= 1 */
    size_t frame_bytes;     /* a frame, request or reply, stays at or below it */
    uint64_t row_bytes;     /* of a request */
    ep_plan_cut cut;        /* how the plan counts bytes; room_bytes is the caller's to set */
    uint64_t reply_row_bytes;
    uint64_t one_slot_bytes; /* of a frame or its reply, with a single slot: the larger one */
} ep_flow;

void ep_flow_pick(const ep_flow_limits *limits, ep_mode mode, const ep_batch *batch,
                  const ep_layer_shape *shape, ep_flow *out_flow);
/* Tokens of the window that begins after `begin` tokens, if the batch has them. Windows grow from
 * first_tokens on, each as long as all before it together, up to window_tokens. */
uint32_t ep_flow_window_at(const ep_flow *flow, uint32_t begin);
/* Errors: INVALID_ARGUMENT when one row does not fit a frame, naming the limit and what is
 * needed. */
ep_err ep_flow_check(const ep_flow *flow, ep_error *out_error);
/* Tensor bytes of one frame to a peer that accepts frames of peer_frame_bytes_max (0: not
 * known). */
uint64_t ep_flow_room_bytes(const ep_flow *flow, uint64_t peer_frame_bytes_max);
/* Frames a window of this many slots is cut into at most, spread over nodes. */
uint32_t ep_flow_frames_max(const ep_flow *flow, uint64_t slots, uint32_t nodes);

/* Bytes of pool buffers the replies to `slots` slots may hold, however they are spread over frames:
 * a buffer is below twice its frame, so below twice its rows plus the smallest class. */
uint64_t ep_flow_claim_bytes(const ep_flow *flow, uint64_t slots, uint32_t nodes);

#endif
