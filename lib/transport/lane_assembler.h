/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes frames from a stream of bytes, for the stream lanes.
 *
 * Bytes arrive in the staging memory until a frame's length is known. Then the frame gets its
 * buffer, whose charge grows as bytes arrive. Staged bytes are copied into it, and the rest is
 * received in place. After the end of a frame, the staging memory takes what follows.
 *
 * A lane that asks for room only when bytes are there may also receive ahead: straight into a
 * buffer of the last frame's size. The next frame keeps this buffer, and none of its bytes is
 * copied, if it fits and fills more than half of the buffer or is of its size class.
 *
 * Threads  one at a time.
 */
#ifndef EP_TRANSPORT_LANE_ASSEMBLER_H
#define EP_TRANSPORT_LANE_ASSEMBLER_H

#include <sys/uio.h>

#include "transport/transport.h"

#define EP_ASSEMBLER_IOVS_MAX 2
#define EP_ASSEMBLER_STAGING_BYTES 16384 /* small frames arrive here, several per system call */

typedef enum ep_assembler_step {
    EP_ASSEMBLER_MORE,  /* it needs more bytes */
    EP_ASSEMBLER_BEGUN, /* the present frame has its buffer, with at least the prefix in it */
    EP_ASSEMBLER_FRAME, /* a whole frame */
    /* the pool has no buffer: try again later, and receive nothing meanwhile */
    EP_ASSEMBLER_NO_MEMORY,
    EP_ASSEMBLER_ERROR /* the connection must be closed */
} ep_assembler_step;

typedef struct ep_assembler {
    uint8_t *staging;
    size_t staged_begin; /* unread bytes are [staged_begin, staged_end) */
    size_t staged_end;
    ep_buffer *frame; /* the frame being received */
    size_t frame_have_bytes;
    bool receives_ahead;
    size_t expected_bytes;  /* expected size of the next frame; 0: unknown */
    unsigned smaller_count; /* how many frames in a row were smaller */
    ep_buffer *ahead; /* buffer received ahead; its unread bytes come before the staged ones */
    size_t ahead_begin;
    size_t ahead_end;
    bool frame_taken;     /* a frame was completed since the last note */
    uint64_t begun_ns;    /* atomic; see ep_conn_receiving */
    uint64_t begun_bytes; /* atomic */
} ep_assembler;

/* Errors: NO_MEMORY. */
ep_err ep_assembler_init(ep_assembler *a, bool receives_ahead);
void ep_assembler_fini(ep_assembler *a);

/* Where to put the next bytes, never 0 bytes; returns how many of out_iovs are used. */
unsigned ep_assembler_room(ep_assembler *a, const ep_lane_limits *limits,
                           struct iovec out_iovs[EP_ASSEMBLER_IOVS_MAX]);
/* This many bytes were put there. */
void ep_assembler_received(ep_assembler *a, size_t bytes);
/*
 * Makes one step with the bytes received; call it until it needs something. *out_frame: with BEGUN
 * the present frame, which stays here; with FRAME a whole frame, which is the caller's. *out_error:
 * with ERROR.
 */
ep_assembler_step ep_assembler_next(ep_assembler *a, const ep_lane_limits *limits,
                                    bool large_allowed, const char *peer, ep_buffer **out_frame,
                                    ep_error *out_error);
/* No bytes are expected for a while: gives back memory that waits for bytes, also for a partial
 * frame. */
void ep_assembler_rest(ep_assembler *a);
/* Call after the steps for bytes that came at now_ns: notes since when there is a partial frame,
 * and how much of it. */
void ep_assembler_note(ep_assembler *a, uint64_t now_ns);
/* From any thread: the last note. */
void ep_assembler_read_noted(const ep_assembler *a, ep_conn_receiving *out_receiving);

/* The error for a connection that ended here: what was lost, and why. */
void ep_assembler_describe_end(const ep_assembler *a, const char *peer, const char *reason,
                               ep_error *out_error);

#endif
