/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_alg = AUTO: whether a call's rows go straight to the nodes of a host, or once to one node
 * that passes them on. Each host is decided separately.
 *
 * Bytes that cross to a host, and back. rows(n): tokens with a slot at node n of the host; rows(h):
 * tokens with a slot at any of its nodes, since "by host" sends each row once. row, slot, reply
 * row: bytes of each. With sums (combine_at = NODE_SUM) the last column is the way back.
 *
 *              to the host                       back, rows         back, sums
 *   straight   sum rows(n) * row + slots * slot  slots * reply row  sum rows(n) * reply row
 *   by host    rows(h) * row + slots * slot      slots * reply row  rows(h) * reply row
 *
 * Time       of either way: its round trip + bytes / its bytes per second. Both are measured for
 *            each way, over whole calls. So the figures of "by host" include its extra hop: a
 *            second round trip, and rows that cross the host's inner links once more. They also
 *            include computing and the load of other callers. A way without figures is tried now
 *            and then.
 * Source     the bytes: the two-level dispatch of Ascend's MoeDistributeDispatch with comm_alg
 *            "hierarchy" (a row once per token and server, spread inside it). The time: R. Hockney,
 *            The communication challenge for MPP, Parallel Computing 20 (1994), t = t0 + n / r.
 * Bits       rows are the same either way. Sums (combine_at = NODE_SUM) are not: a frame sums the
 *            slots that it carries. Callers that need repeatable sums must not use AUTO.
 * Threads    pure.
 */
#ifndef EP_MOE_HOST_CHOICE_H
#define EP_MOE_HOST_CHOICE_H

#include "moe/batch.h"

/* Of a larger batch, only this many tokens are counted, spread over all of it. */
#define EP_HOST_COUNTED_TOKENS 256u
/* Measured calls that a way needs before its figures are used. */
#define EP_HOST_SAMPLES_MIN 8u
/* Until "by host" has them, one call in this many goes by host, the others straight. */
#define EP_HOST_LEARN_OF 7u
/* After that, the slower way is tried in one call of this many, more rarely the slower it is, so
 * that fresh figures cost less than 1 % of the time. Both numbers are primes, so that each layer of
 * a model, whose layers call in turn, gets its tries. */
#define EP_HOST_TRY_OF 127u
/* "By host" must be quicker by this part and save this part of the bytes, since "straight" has no
 * second node that can fail. */
#define EP_HOST_GAIN_MIN 0.03

typedef struct ep_host_load {
    uint64_t node_rows; /* sum of rows(n) */
    uint64_t host_rows; /* rows(h) */
    uint64_t slots;
    uint32_t nodes; /* nodes of the host that get a row of the counted tokens */
} ep_host_load;

/*
 * What a checked batch of `tokens` tokens sends to each host, estimated from the tokens in
 * [token_begin, token_end).
 *   chosen [experts, the shared ones last]  the node that computes each; nodes_count or more: none
 *   groups [nodes_count]                    the node that stands for each node's host (host_plan.h)
 *   out_loads [nodes_count]                 a host's load, at that node; 0 elsewhere
 *   scratch [2 * nodes_count]
 */
void ep_host_count_loads(const ep_batch *batch, const ep_layer_shape *shape, const uint32_t *chosen,
                         const uint32_t *groups, uint32_t nodes_count, uint32_t token_begin,
                         uint32_t token_end, uint32_t tokens, uint32_t *scratch,
                         ep_host_load *out_loads);

/* Measured figures of a way. */
typedef struct ep_host_way {
    double round_trip_us;
    double us_per_byte;
    uint32_t samples; /* 0: the other fields mean nothing */
} ep_host_way;

typedef struct ep_host_question {
    ep_host_load load;
    /* of a request's row; the next two: of a request's slot and of a reply's row */
    uint64_t row_bytes;
    uint64_t slot_bytes;
    uint64_t reply_row_bytes;
    bool is_sums;
    bool is_local;   /* it is the caller's own host, so nothing crosses between hosts */
    bool is_refused; /* its nodes have just refused to pass rows on */
    ep_host_way straight;
    ep_host_way by_host;
    uint64_t turn; /* number of the call */
} ep_host_question;

/* Numbers as in ep_moe_comm_why. */
typedef enum ep_host_why {
    EP_HOST_ALONE = 1,
    EP_HOST_NO_BYTES = 2,
    EP_HOST_REFUSED = 3,
    EP_HOST_LEARNING = 4,
    EP_HOST_TRIED = 5,
    EP_HOST_MEASURED = 6
} ep_host_why;

typedef struct ep_host_choice {
    bool by_host;
    ep_host_why why;
    uint64_t straight_bytes;
    uint64_t by_host_bytes;
    double straight_us; /* 0: unknown; also for the next */
    double by_host_us;
} ep_host_choice;

void ep_host_choose(const ep_host_question *question, ep_host_choice *out_choice);

#endif
