/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a call is cut into windows and frames. Decode and prefill differ only in these numbers; other
 * files ask for the mode only to pick the connection and to tell the node the scheduling class.
 *
 *   decode    one frame per node on the decode connection
 *   prefill   windows of tokens, four under way at a time. In a window each node's tokens are cut
 *             into frames whose request and reply fit chunk_bytes_max, all in flight on the bulk
 *             connection
 *
 * A streamed prefill call (on_tokens) begins with smaller windows: nodes merge the rows of all
 * windows that they have, so the first of four equal windows would return only when nearly all do.
 *
 * A window's reply rows are bounded, so that one call cannot take the whole buffer budget. Pure.
 */
#ifndef EP_CLIENT_FLOW_H
#define EP_CLIENT_FLOW_H

#include "moe/routing_plan.h"

/* The most that fixed part, protobuf header and alignment take of a frame. */
#define EP_FLOW_FRAME_OVERHEAD_BYTES 4096u
#define EP_FLOW_DECODE_TOKENS_DEFAULT 256u
#define EP_FLOW_WINDOW_TOKENS_MIN 256u
/* A streamed call's first window: a 64th of the tokens, at least 32, at most an eighth of a full
 * window. The four that are sent at once then have an eighth of the tokens, and no more than one
 * full window. A 32nd is too much: each window costs a pass over the weights, and with 32 experts
 * on a node the first tokens would come after a third of the call's time. */
#define EP_FLOW_FIRST_TOKENS_MIN 32u
#define EP_FLOW_FIRST_TOKENS_PART 64u
#define EP_FLOW_FIRST_WINDOW_PART 8u
/* under way at once; with fewer the wire is idle while a window waits for its last rows */
#define EP_FLOW_WINDOWS 4u

typedef struct ep_flow_limits {
    size_t frame_bytes_max;     /* of any frame */
    size_t chunk_bytes_max;     /* of prefill frames */
    size_t window_bytes_max;    /* for reply rows of windows under way */
    uint32_t window_tokens;     /* prefill; 0: max(256, 32*E/K) */
    uint32_t decode_tokens_max; /* auto: the greatest T for decode; 0: 256 */
    bool is_streamed;           /* on_tokens is called while other tokens are under way */
    bool has_few_nodes;         /* auto: fewer nodes than the policy wants for decode */
} ep_flow_limits;

typedef struct ep_flow {
    bool prefill;
    /* tokens are combined while others are under way; unstreamed decode is too short for it */
    bool is_piecewise;
    /* results are combined in scratch memory first, since out is written only on success; not in a
     * streamed call, which writes to out at once */
    bool is_aside;
    uint32_t window_tokens; /* >= 1 */
    uint32_t first_tokens;  /* of the first window, 1..window_tokens */
    uint32_t windows_count; /* >= 1 */
    size_t frame_bytes;     /* limit for a frame, request or reply */
    uint64_t row_bytes;     /* of a request */
    ep_plan_cut cut;        /* how the plan counts bytes; the caller sets room_bytes */
    uint64_t reply_row_bytes;
    uint64_t one_slot_bytes; /* size of a frame with one slot or of its reply, the larger one */
} ep_flow;

void ep_flow_pick(const ep_flow_limits *limits, ep_mode mode, const ep_batch *batch,
                  const ep_layer_shape *shape, ep_flow *out_flow);
/* Size of the window that begins after `begin` tokens, if the batch has as many. The first one has
 * first_tokens; each next one is as long as all before it together, up to window_tokens. */
uint32_t ep_flow_window_at(const ep_flow *flow, uint32_t begin);
/* Errors: INVALID_ARGUMENT when one row does not fit a frame, naming the limit and what is
 * needed. */
ep_err ep_flow_check(const ep_flow *flow, ep_error *out_error);
/* Room for tensors in a frame to a peer that accepts peer_frame_bytes_max (0: not known). */
uint64_t ep_flow_room_bytes(const ep_flow *flow, uint64_t peer_frame_bytes_max);
/* The most frames that a window of so many slots is cut into, spread over nodes. */
uint32_t ep_flow_frames_max(const ep_flow *flow, uint64_t slots, uint32_t nodes);

/* The most bytes of pool buffers for the replies to `slots` slots, however they are spread over
 * frames. A buffer is below twice its frame, so below twice its rows plus the smallest class. */
uint64_t ep_flow_claim_bytes(const ep_flow *flow, uint64_t slots, uint32_t nodes);

#endif
