/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_assembler.h. */
#include "transport/lane_assembler.h"

#include <stdlib.h>
#include <string.h>

#include "base/path_count.h"
#include "transport/lane_common.h"

/* copying smaller frames is cheaper than receiving them one by one */
#define AHEAD_BYTES_MIN 4096
/* after this many smaller frames in a row, less is expected */
#define SMALLER_COUNT_MAX 8

ep_err ep_assembler_init(ep_assembler *a, bool receives_ahead)
{
    memset(a, 0, sizeof(*a));
    a->receives_ahead = receives_ahead;
    a->staging = malloc(EP_ASSEMBLER_STAGING_BYTES);
    return a->staging != NULL ? EP_OK : EP_ERR_NO_MEMORY;
}

void ep_assembler_fini(ep_assembler *a)
{
    ep_buffer_unref(a->frame);
    ep_buffer_unref(a->ahead);
    free(a->staging);
    memset(a, 0, sizeof(*a));
}

static size_t ahead_unread(const ep_assembler *a)
{
    return a->ahead_end - a->ahead_begin;
}

static size_t staged_unread(const ep_assembler *a)
{
    return a->staged_end - a->staged_begin;
}

static void drop_ahead(ep_assembler *a)
{
    ep_buffer_unref(a->ahead);
    a->ahead = NULL;
    a->ahead_begin = 0;
    a->ahead_end = 0;
}

void ep_assembler_rest(ep_assembler *a)
{
    if (ahead_unread(a) == 0) {
        drop_ahead(a);
    }
    if (a->frame != NULL && a->frame->charged_bytes > EP_BUFFER_ARRIVING_BYTES) {
        /* never more than before: gives back the charge for bytes announced but not sent */
        (void)ep_buffer_recharge(a->frame, a->frame_have_bytes);
    }
}

void ep_assembler_note(ep_assembler *a, uint64_t now_ns)
{
    size_t have = a->frame != NULL ? a->frame_have_bytes : ahead_unread(a) + staged_unread(a);
    if (have == 0) {
        now_ns = 0;
    } else if (!a->frame_taken && a->begun_ns != 0) {
        now_ns = a->begun_ns;
    }
    a->frame_taken = false;
    __atomic_store_n(&a->begun_bytes, have, __ATOMIC_RELAXED);
    __atomic_store_n(&a->begun_ns, now_ns, __ATOMIC_RELAXED);
}

void ep_assembler_read_noted(const ep_assembler *a, ep_conn_receiving *out_receiving)
{
    out_receiving->begun_ns = __atomic_load_n(&a->begun_ns, __ATOMIC_RELAXED);
    out_receiving->begun_bytes = __atomic_load_n(&a->begun_bytes, __ATOMIC_RELAXED);
}

/* How much of the buffer may be written. */
static size_t paid_bytes(const ep_buffer *frame)
{
    return frame->charged_bytes < frame->bytes ? frame->charged_bytes : frame->bytes;
}

unsigned ep_assembler_room(ep_assembler *a, const ep_lane_limits *limits,
                           struct iovec out_iovs[EP_ASSEMBLER_IOVS_MAX])
{
    unsigned count = 0;
    size_t staging = EP_ASSEMBLER_STAGING_BYTES - a->staged_end;
    bool large = a->receives_ahead && a->expected_bytes >= AHEAD_BYTES_MIN;
    if (a->frame != NULL) {
        size_t room = paid_bytes(a->frame) - a->frame_have_bytes;
        out_iovs[count++] =
            (struct iovec){.iov_base = a->frame->data + a->frame_have_bytes, .iov_len = room};
        if (room < a->frame->bytes - a->frame_have_bytes) {
            return count; /* the staging memory takes what follows the frame */
        }
    } else if (!large || staged_unread(a) > 0) {
        drop_ahead(a); /* it is empty, and new bytes must come after the staged ones */
    } else {
        a->staged_begin = 0;
        a->staged_end = 0;
        if (a->ahead != NULL && a->ahead->capacity_bytes < a->expected_bytes) {
            drop_ahead(a);
        }
        if (a->ahead != NULL ||
            ep_buffer_acquire(limits->pool, a->expected_bytes, &a->ahead) == EP_OK) {
            out_iovs[count++] =
                (struct iovec){.iov_base = a->ahead->data, .iov_len = a->expected_bytes};
        }
    }
    /* room for the next prefix is enough: its frame then receives the rest in place */
    if (large && count > 0) {
        staging = staging < limits->prefix_bytes ? staging : limits->prefix_bytes;
    }
    out_iovs[count++] = (struct iovec){.iov_base = a->staging + a->staged_end, .iov_len = staging};
    return count;
}

void ep_assembler_received(ep_assembler *a, size_t bytes)
{
    if (a->frame != NULL) {
        size_t rest = a->frame->bytes - a->frame_have_bytes;
        size_t in_place = bytes < rest ? bytes : rest;
        a->frame_have_bytes += in_place;
        bytes -= in_place;
    } else if (a->ahead != NULL) {
        a->ahead_begin = 0;
        a->ahead_end = bytes < a->expected_bytes ? bytes : a->expected_bytes;
        bytes -= a->ahead_end;
    }
    a->staged_end += bytes;
}

/* Takes up to bytes of the unread bytes, in order. Returns how many. */
static size_t take_unread(ep_assembler *a, uint8_t *out, size_t bytes)
{
    size_t first = ahead_unread(a) < bytes ? ahead_unread(a) : bytes;
    if (first > 0) {
        memcpy(out, a->ahead->data + a->ahead_begin, first);
        a->ahead_begin += first;
    }
    size_t second = staged_unread(a) < bytes - first ? staged_unread(a) : bytes - first;
    memcpy(out + first, a->staging + a->staged_begin, second);
    a->staged_begin += second;
    return first + second;
}

/* Moves all unread bytes to the front of the staging memory, when they fit, so that the next
 * receive has room. */
static void unread_to_front(ep_assembler *a)
{
    size_t first = ahead_unread(a);
    size_t second = staged_unread(a);
    if (first + second > EP_ASSEMBLER_STAGING_BYTES) {
        return;
    }
    memmove(a->staging + first, a->staging + a->staged_begin, second);
    if (first > 0) {
        memcpy(a->staging, a->ahead->data + a->ahead_begin, first);
        a->ahead_begin = a->ahead_end;
    }
    a->staged_begin = 0;
    a->staged_end = first + second;
}

/* Gets the frame's buffer, with what has arrived of the frame. */
static ep_assembler_step begin_frame(ep_assembler *a, const ep_lane_limits *limits, size_t bytes)
{
    bool keeps_ahead = ahead_unread(a) > 0 && a->ahead_begin == 0 && a->ahead_end <= bytes &&
                       bytes <= a->ahead->capacity_bytes &&
                       (a->ahead->capacity_bytes / 2 < bytes ||
                        a->ahead->capacity_bytes == ep_buffer_class_bytes(bytes));
    a->frame_have_bytes = 0;
    if (keeps_ahead) {
        a->frame = a->ahead;
        a->frame->bytes = bytes;
        a->frame_have_bytes = a->ahead_end;
        a->ahead = NULL;
        a->ahead_begin = 0;
        a->ahead_end = 0;
    } else if (ep_buffer_acquire_arriving(limits->pool, bytes, ahead_unread(a) + staged_unread(a),
                                          &a->frame) != EP_OK) {
        unread_to_front(a);
        ep_assembler_rest(a); /* releases memory that the pool may need for the frame */
        return EP_ASSEMBLER_NO_MEMORY;
    }
    /* The unread bytes are covered by the first charge, which is several times as much. */
    size_t copied =
        take_unread(a, a->frame->data + a->frame_have_bytes, bytes - a->frame_have_bytes);
    ep_path_count(EP_PATH_LANE, copied);
    a->frame_have_bytes += copied;
    if (bytes >= a->expected_bytes || ++a->smaller_count == SMALLER_COUNT_MAX) {
        a->expected_bytes = bytes;
        a->smaller_count = 0;
    }
    return EP_ASSEMBLER_BEGUN;
}

ep_assembler_step ep_assembler_next(ep_assembler *a, const ep_lane_limits *limits,
                                    bool large_allowed, const char *peer, ep_buffer **out_frame,
                                    ep_error *out_error)
{
    if (a->frame == NULL) {
        size_t bytes = 0;
        const size_t need = limits->prefix_bytes;
        const size_t first = ahead_unread(a) < need ? ahead_unread(a) : need;
        uint8_t prefix[EP_FRAME_PREFIX_BYTES] = {0};
        if (ahead_unread(a) + staged_unread(a) < need) {
            unread_to_front(a);
            return EP_ASSEMBLER_MORE;
        }
        if (first > 0) {
            memcpy(prefix, a->ahead->data + a->ahead_begin, first);
        }
        if (first < need) {
            memcpy(prefix + first, a->staging + a->staged_begin, need - first);
        }
        if (ep_lane_frame_length(limits, large_allowed, prefix, peer, &bytes, out_error) != EP_OK) {
            return EP_ASSEMBLER_ERROR;
        }
        ep_assembler_step step = begin_frame(a, limits, bytes);
        *out_frame = a->frame;
        return step;
    }
    if (a->frame_have_bytes < a->frame->bytes) { /* all unread bytes are then in the frame */
        a->staged_begin = 0;
        a->staged_end = 0;
        bool paid = a->frame_have_bytes < paid_bytes(a->frame) ||
                    ep_buffer_recharge(a->frame, a->frame_have_bytes) == EP_OK;
        return paid ? EP_ASSEMBLER_MORE : EP_ASSEMBLER_NO_MEMORY;
    }
    *out_frame = a->frame;
    a->frame = NULL;
    a->frame_taken = true;
    return EP_ASSEMBLER_FRAME;
}

void ep_assembler_describe_end(const ep_assembler *a, const char *peer, const char *reason,
                               ep_error *out_error)
{
    if (a->frame != NULL) {
        ep_error_set(out_error, EP_ERR_CONNECTION_LOST,
                     "connection to %s lost in the middle of a frame, %zu of %zu bytes: %s", peer,
                     a->frame_have_bytes, a->frame->bytes, reason);
    } else {
        ep_error_set(out_error, EP_ERR_CONNECTION_LOST, "connection to %s lost: %s", peer, reason);
    }
}
