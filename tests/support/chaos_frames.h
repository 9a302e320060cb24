/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the chaos proxy: changes whole frames, by damage or by false contents. */
#ifndef EP_TESTS_SUPPORT_CHAOS_FRAMES_H
#define EP_TESTS_SUPPORT_CHAOS_FRAMES_H

#include "support/chaos_proxy.h"

#define CHAOS_CALLS_MAX 256

/* A Forward request that has no answer yet. */
typedef struct chaos_call {
    uint64_t id;
    uint32_t slots;
} chaos_call;

/* The open calls of one connection, newest last; beyond the limit the oldest is dropped. */
typedef struct chaos_calls {
    chaos_call items[CHAOS_CALLS_MAX];
    uint32_t count;
} chaos_calls;

/* Adds the call of a Forward request, or removes that of a reply. data: a whole frame. */
void chaos_calls_note(chaos_calls *calls, const uint8_t *data, size_t bytes);

/*
 * Returns a malloc'ed copy of a whole frame with the fault in it: a flipped bit, or false contents
 * with right CRCs. NULL if the fault does not fit this frame: no such section, no Forward reply, no
 * other call.
 */
uint8_t *chaos_frame_change(ep_chaos_fault fault, const uint8_t *data, size_t bytes,
                            const chaos_calls *calls, uint64_t *random, size_t *out_bytes);

#endif
