/* SPDX-License-Identifier: Apache-2.0 */
/* What every lane needs: checked limits, queues of checked sends, and a count of objects that need
 * the lanes' threads. */
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

/* Copies the limits and sets prefix_bytes. Refuses limits that cannot work, naming the one. Errors:
 * INVALID_ARGUMENT. */
ep_err ep_lane_limits_take(const ep_lane_limits *limits, bool for_listener,
                           ep_lane_limits *out_limits, ep_error *out_error);

/*
 * The length of the frame that begins with this prefix, if it may be received; large_allowed:
 * ep_conn_allow_large was called. Errors: RESOURCE_EXHAUSTED naming the limit, PROTOCOL, those of
 * frame_bytes.
 */
ep_err ep_lane_frame_length(const ep_lane_limits *limits, bool large_allowed,
                            const uint8_t prefix[EP_FRAME_PREFIX_BYTES], const char *peer,
                            size_t *out_bytes, ep_error *out_error);

/* Appends a prepared send. The caller holds the lock and checks send_queue_bytes_max. */
void ep_send_queue_append(ep_send_queue *queue, ep_send *send);
/* Removes the oldest; NULL when empty. */
ep_send *ep_send_queue_pop(ep_send_queue *queue);
/* Copies bytes of the gather list from offset on; returns how many (fewer only at its end). */
size_t ep_send_copy(const ep_send *send, size_t offset, uint8_t *out, size_t bytes);

/* Points out_iovs to the bytes that are not sent yet, up to iovs_max pieces. patient: includes
 * patient frames and what is behind them. Returns how many iovs are used. */
unsigned ep_send_queue_gather(const ep_send_queue *queue, bool patient, unsigned iovs_max,
                              struct iovec *out_iovs, size_t *out_bytes);

/*
 * How many threads a lane has: at least two, since bulk traffic or a long callback of one
 * connection must not delay small frames of another; more only where there are many CPUs.
 */
#define EP_LANE_THREADS_MAX 4
uint32_t ep_lane_threads_count(void);

/* Counts an object that needs the lanes' threads: a connection, listener or dial. */
void ep_lane_hold(void);
/* In a forked child: forgets the objects of the parent. */
void ep_lane_holds_forget(void);
void ep_lane_drop(void);
/* Waits until no object is left; false: some are after wait_ms. */
bool ep_lane_wait_dropped(uint32_t wait_ms);

#endif
