/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames out of a stream of bytes, for the stream lanes. Bytes arrive in the staging memory until a
 * frame's length is known;
 * then the frame gets its buffer, which is charged as bytes arrive, takes along what is staged, and
 * the rest is received in place. Behind the rest of a frame the staging memory takes what follows.
 *
 * A lane that asks for room only when bytes are there may also receive ahead: straight into a
 * buffer of the size the last frame had. When the next frame fits and fills more than half of it,
 * or is of its size class, it keeps the buffer, and none of its bytes is copied.
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
    EP_ASSEMBLER_MORE,  /* more bytes are needed */
    EP_ASSEMBLER_BEGUN, /* the frame at hand has its buffer, and at least its prefix is in it */
    EP_ASSEMBLER_FRAME, /* a whole frame */
    /* the pool gave no buffer: try again later, receive nothing meanwhile */
    EP_ASSEMBLER_NO_MEMORY,
    EP_ASSEMBLER_ERROR /* the connection is to be closed */
} ep_assembler_step;

typedef struct ep_assembler {
    uint8_t *staging;
    size_t staged_begin; /* unread bytes are [staged_begin, staged_end) */
    size_t staged_end;
    ep_buffer *frame; /* being received */
    size_t frame_have_bytes;
    bool receives_ahead;
    size_t expected_bytes;  /* what the next frame may have; 0: no idea */
    unsigned smaller_count; /* frames in a row that were smaller */
    ep_buffer *ahead;       /* its unread bytes come before the staged ones */
    size_t ahead_begin;
    size_t ahead_end;
    bool frame_taken;     /* a whole frame since the last note */
    uint64_t begun_ns;    /* atomic; see ep_conn_receiving */
    uint64_t begun_bytes; /* atomic */
} ep_assembler;

/* Errors: NO_MEMORY. */
ep_err ep_assembler_init(ep_assembler *a, bool receives_ahead);
void ep_assembler_fini(ep_assembler *a);

/* Where the next bytes go, never 0 of them; returns how many of iovs are used. */
unsigned ep_assembler_room(ep_assembler *a, const ep_lane_limits *limits,
                           struct iovec out_iovs[EP_ASSEMBLER_IOVS_MAX]);
/* So many bytes were put there. */
void ep_assembler_received(ep_assembler *a, size_t bytes);
/*
 * One step with the bytes at hand; to be called until it needs something. *out_frame: on BEGUN the
 * frame at hand, which stays here; on FRAME a whole one, which is the caller's. *out_error: on
 * ERROR.
 */
ep_assembler_step ep_assembler_next(ep_assembler *a, const ep_lane_limits *limits,
                                    bool large_allowed, const char *peer, ep_buffer **out_frame,
                                    ep_error *out_error);
/* No bytes are expected for a while: gives back what is held for them only, also of a frame that is
 * there in part. */
void ep_assembler_rest(ep_assembler *a);
/* After the steps with what came at now_ns: since when a frame is there in part, and how much of
 * it. */
void ep_assembler_note(ep_assembler *a, uint64_t now_ns);
/* From any thread: what was noted last. */
void ep_assembler_read_noted(const ep_assembler *a, ep_conn_receiving *out_receiving);

/* The error of a connection that ended here: what was lost with it and why. */
void ep_assembler_describe_end(const ep_assembler *a, const char *peer, const char *reason,
                               ep_error *out_error);

#endif
