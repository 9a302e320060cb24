/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A TCP proxy between peers that finds the frames in the stream (wire/frame.h) and injects faults
 * into them, by rate or into the frame of a given number. One thread per proxy. Random draws depend
 * only on the seed, the connection's number and the direction.
 *
 * A LIE fault has false contents with right CRCs, so only a check of the contents can refuse it.
 * Lies that no peer can detect do not exist here: other numbers in the tensors, another layer or an
 * equally wide type in the request, the rows of another call of the same size. CRCs and checks
 * guard against damage, not against a malicious peer.
 *
 * Threads    all functions from any thread; create and destroy once.
 */
#ifndef EP_TESTS_SUPPORT_CHAOS_PROXY_H
#define EP_TESTS_SUPPORT_CHAOS_PROXY_H

#include <stdbool.h>
#include <stdint.h>

#include "wire/frame.h"

/* Each fault, and the meaning of its amount_min..amount_max. */
#define EP_CHAOS_FAULTS(X)                                                                         \
    X(DELAY, delay) /* ms; what comes behind it waits too */                                       \
    X(HOLD, hold)   /* frames that pass it */                                                      \
    X(SWAP, swap)   /* goes after the next one */                                                  \
    X(DROP, drop)                                                                                  \
    X(DUPLICATE, duplicate)                                                                        \
    X(SPLIT, split)           /* bytes of each piece, at most */                                   \
    X(STALL, stall)           /* ms in which this direction is not read */                         \
    X(CUT, cut)               /* nothing more passes in this direction of this connection */       \
    X(RESET, reset)           /* RST to both ends */                                               \
    X(TRUNCATE, truncate)     /* part of the frame, then the end */                                \
    X(FLIP_FIXED, flip_fixed) /* one bit, CRCs as they were */                                     \
    X(FLIP_HEADER, flip_header)                                                                    \
    X(FLIP_TENSORS, flip_tensors)                                                                  \
    X(LIE_CALL, lie_call) /* a Forward reply names another call, which asked for other rows */     \
    X(LIE_NO_CALL, lie_no_call)   /* ... a call that nobody began */                               \
    X(LIE_ATTEMPT, lie_attempt)   /* ... another attempt */                                        \
    X(LIE_METHOD, lie_method)     /* ... another method */                                         \
    X(LIE_SEQUENCE, lie_sequence) /* ... another place in a stream */                              \
    X(LIE_SLOTS, lie_slots)       /* a Forward request or reply says one slot more */              \
    X(LIE_HIDDEN, lie_hidden)     /* ... another width */                                          \
    X(LIE_DTYPE, lie_dtype)       /* ... another element type */                                   \
    X(LIE_NUMERICS, lie_numerics) /* ... other numerics */                                         \
    X(LIE_ROWS, lie_rows)         /* ... has 64 tensor bytes less */                               \
    X(LIE_HEADER, lie_header)     /* one bit of a Forward reply's message */

typedef enum ep_chaos_fault {
#define X(upper, lower) EP_CHAOS_##upper,
    EP_CHAOS_FAULTS(X)
#undef X
        EP_CHAOS_FAULTS_COUNT
} ep_chaos_fault;

#define EP_CHAOS_TO_SERVER 1u
#define EP_CHAOS_TO_CLIENT 2u
#define EP_CHAOS_RULES_MAX 32

/* A frame gets at most one fault: that of the first rule which fits and is drawn. */
typedef struct ep_chaos_rule {
    ep_chaos_fault fault;
    uint32_t directions; /* EP_CHAOS_TO_..., at least one */
    uint32_t kinds;      /* 1u << ep_frame_kind; 0: any */
    uint32_t rate;       /* of 10,000 frames that fit */
    /* not 0: instead of rate, the frame of this number, counted from 1 in its direction */
    uint32_t number;
    uint32_t amount_min;
    uint32_t amount_max;
    uint64_t limit; /* most faults of this rule over all connections; 0: no limit */
} ep_chaos_rule;

typedef struct ep_chaos_counts {
    uint64_t connections;
    uint64_t frames;
    uint64_t faults[EP_CHAOS_FAULTS_COUNT];
    uint64_t raw_bytes; /* passed unchanged because they are not frames */
} ep_chaos_counts;

typedef struct ep_chaos_proxy ep_chaos_proxy;

/* Listens on a free port of 127.0.0.1. Connections are closed until there is an upstream. NULL on
 * failure. */
ep_chaos_proxy *ep_chaos_proxy_create(uint64_t seed);
void ep_chaos_proxy_destroy(ep_chaos_proxy *proxy);
/* "tcp://127.0.0.1:port"; valid as long as the proxy. */
const char *ep_chaos_proxy_url(const ep_chaos_proxy *proxy);
/* Sets where new connections go: "tcp://127.0.0.1:port". */
void ep_chaos_proxy_set_upstream(ep_chaos_proxy *proxy, const char *url);
/* Replaces all rules. Without rules waiting frames go on at once; cut directions stay cut. */
void ep_chaos_proxy_set_rules(ep_chaos_proxy *proxy, const ep_chaos_rule *rules, uint32_t count);
void ep_chaos_proxy_read(ep_chaos_proxy *proxy, ep_chaos_counts *out_counts);

const char *ep_chaos_fault_name(ep_chaos_fault fault);

#endif
