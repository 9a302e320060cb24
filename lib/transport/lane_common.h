/* SPDX-License-Identifier: Apache-2.0 */
/* What every lane needs: checked limits, a queue of checked sends, a count of what needs its
 * threads, and threads that leave the program's signals alone. */
#ifndef EP_TRANSPORT_LANE_COMMON_H
#define EP_TRANSPORT_LANE_COMMON_H

#include <pthread.h>
#include <sys/uio.h>

#include "transport/transport.h"

typedef struct ep_send_queue {
    ep_send *head;
    ep_send *tail;
    size_t bytes;
} ep_send_queue;

/* A copy with prefix_bytes set. Refuses limits that cannot work, naming the one. Errors:
 * INVALID_ARGUMENT. */
ep_err ep_lane_limits_take(const ep_lane_limits *limits, bool for_listener,
                           ep_lane_limits *out_limits, ep_error *out_error);

/*
 * The length of the frame that begins so, when it may be received; large_allowed:
 * ep_conn_allow_large was called. Errors: RESOURCE_EXHAUSTED naming the limit, PROTOCOL, those of
 * frame_bytes.
 */
ep_err ep_lane_frame_length(const ep_lane_limits *limits, bool large_allowed,
                            const uint8_t prefix[EP_FRAME_PREFIX_BYTES], const char *peer,
                            size_t *out_bytes, ep_error *out_error);

/* Appends a prepared send. The caller holds the lock, and keeps to its bound. */
void ep_send_queue_append(ep_send_queue *queue, ep_send *send);
/* Takes the oldest; NULL when empty. */
ep_send *ep_send_queue_pop(ep_send_queue *queue);
/* Copies bytes of the gather list from offset on; returns how many were copied (fewer only at its
 * end). */
size_t ep_send_copy(const ep_send *send, size_t offset, uint8_t *out, size_t bytes);

/* The bytes that are not sent yet, as long as iovs last; patient: also of patient frames and what
 * is behind them. Returns how many iovs are used. */
unsigned ep_send_queue_gather(const ep_send_queue *queue, bool patient, unsigned iovs_max,
                              struct iovec *out_iovs, size_t *out_bytes);

/*
 * How many threads a lane's loops have: two at least, since bulk traffic or a long callback of one
 * connection must not delay another's small frames; more only where CPUs are many.
 */
#define EP_LANE_THREADS_MAX 4
uint32_t ep_lane_threads_count(void);
/* Starts a thread that blocks every signal. name: up to 15 characters. Errors: IO. */
ep_err ep_lane_thread_create(const char *name, void *(*func)(void *), void *arg,
                             pthread_t *out_thread);

/* Counts what needs the lanes' threads: connections, listeners, dials. */
void ep_lane_hold(void);
/* In a forked child: what the parent holds is not there. */
void ep_lane_holds_forget(void);
void ep_lane_drop(void);
/* Waits until nothing is held; false: not within wait_ms. */
bool ep_lane_wait_dropped(uint32_t wait_ms);

#endif
