/* SPDX-License-Identifier: Apache-2.0 */
/* What every lane needs: checked limits, a checked and bounded send queue, and threads that leave
 * the program's signals alone. */
#ifndef EP_TRANSPORT_LANE_COMMON_H
#define EP_TRANSPORT_LANE_COMMON_H

#include <pthread.h>

#include "transport/transport.h"

typedef struct ep_send_queue {
    ep_send *head;
    ep_send *tail;
    size_t bytes;
} ep_send_queue;

/* Refuses limits that cannot work, naming the one. Errors: INVALID_ARGUMENT. */
ep_err ep_lane_limits_check(const ep_lane_limits *limits, bool for_listener, ep_error *out_error);

/*
 * Whether a frame of this length may be received; large_allowed: ep_conn_allow_large was called.
 * Errors: RESOURCE_EXHAUSTED, naming the limit.
 */
ep_err ep_lane_frame_check(const ep_lane_limits *limits, bool large_allowed, size_t frame_bytes,
                           const char *peer, ep_error *out_error);

/* What ep_conn_allow_large does to a connection's own limits, in on_frame. */
static inline void ep_lane_limits_allow_large(ep_lane_limits *limits, ep_buffer_pool *pool,
                                              bool *large_allowed)
{
    limits->pool = pool != NULL ? pool : limits->pool;
    __atomic_store_n(large_allowed, true, __ATOMIC_RELEASE);
}

/* The shortest frame, and what must be there before frame_bytes is asked. */
static inline size_t ep_lane_prefix_bytes(const ep_lane_limits *limits)
{
    return limits->prefix_bytes != 0 ? limits->prefix_bytes : EP_FRAME_PREFIX_BYTES;
}

/* Checks a send and fills its private fields. Errors: INVALID_ARGUMENT (parts, length). */
ep_err ep_send_prepare(ep_send *send, const ep_lane_limits *limits);

/* Appends a prepared send. Errors: RESOURCE_EXHAUSTED (nothing appended). The caller holds the
 * lock. */
ep_err ep_send_queue_push(ep_send_queue *queue, ep_send *send, size_t bytes_max);
/* Takes the oldest; NULL when empty. */
ep_send *ep_send_queue_pop(ep_send_queue *queue);
/* Copies bytes of the gather list from offset on; returns how many were copied (fewer only at its
 * end). */
size_t ep_send_copy(const ep_send *send, size_t offset, uint8_t *out, size_t bytes);

/* Starts a thread that blocks every signal. name: up to 15 characters. Errors: IO. */
ep_err ep_lane_thread_create(const char *name, void *(*func)(void *), void *arg,
                             pthread_t *out_thread);

/* Counts what needs the lanes' threads: connections, listeners, dials. */
void ep_lane_hold(void);
void ep_lane_drop(void);
/* Waits until nothing is held; false: not within wait_ms. */
bool ep_lane_wait_dropped(uint32_t wait_ms);

#endif
