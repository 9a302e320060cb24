/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of the chaos proxy: whole frames, damaged or lying. */
#ifndef EP_TESTS_SUPPORT_CHAOS_FRAMES_H
#define EP_TESTS_SUPPORT_CHAOS_FRAMES_H

#include "support/chaos_proxy.h"

#define CHAOS_CALLS_MAX 256

/* A Forward request that has no answer yet. */
typedef struct chaos_call {
    uint64_t id;
    uint32_t slots;
} chaos_call;

/* Those of one connection, newest last; the oldest is forgotten when there are more. */
typedef struct chaos_calls {
    chaos_call items[CHAOS_CALLS_MAX];
    uint32_t count;
} chaos_calls;

/* Adds a Forward request, takes out what a reply answers. data: a whole frame. */
void chaos_calls_note(chaos_calls *calls, const uint8_t *data, size_t bytes);

/*
 * A malloc'ed copy of a whole frame with the fault in it: a bit flipped, or a lie with right CRCs.
 * NULL when the fault does not fit this frame: no such section, no Forward reply, no other call.
 */
uint8_t *chaos_frame_change(ep_chaos_fault fault, const uint8_t *data, size_t bytes,
                            const chaos_calls *calls, uint64_t *random, size_t *out_bytes);

#endif
