/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sending half of an nng stream. Queued frames leave in slices of up to STREAM_IOVS_MAX pieces,
 * small frames several at a time; a slice may be taken only partly, so each next slice is built
 * anew from what has been sent.
 */
#include <string.h>

#include "base/path_count.h"
#include "transport/nng/nng_lane.h"

typedef struct slice {
    nng_iov iovs[STREAM_IOVS_MAX];
    unsigned count;
    uint8_t *scratch;
    size_t scratch_used;
    bool last_is_scratch;
    bool tls;
} slice;

/* Copies up to bytes to the scratch memory, joining the last piece when that is there too. Returns
 * how many fit. */
static size_t slice_copy(slice *s, const uint8_t *data, size_t bytes)
{
    size_t room = STREAM_SCRATCH_BYTES - s->scratch_used;
    size_t taken = bytes < room ? bytes : room;
    uint8_t *at = s->scratch + s->scratch_used;
    if (taken == 0 || (!s->last_is_scratch && s->count == STREAM_IOVS_MAX)) {
        return 0;
    }
    memcpy(at, data, taken);
    ep_path_count(EP_PATH_LANE, taken);
    s->scratch_used += taken;
    if (s->last_is_scratch) {
        s->iovs[s->count - 1].iov_len += taken;
    } else {
        s->iovs[s->count++] = (nng_iov){.iov_buf = at, .iov_len = taken};
        s->last_is_scratch = true;
    }
    return taken;
}

/* Adds a piece; false when the slice is full (the piece may then be added in part). */
static bool slice_add(slice *s, const uint8_t *data, size_t bytes)
{
    bool copied =
        s->tls ? s->count > 0 || bytes < STREAM_SCRATCH_BYTES : bytes <= STREAM_COALESCE_BYTES_MAX;
    if (copied && (s->tls || STREAM_SCRATCH_BYTES - s->scratch_used >= bytes)) {
        return slice_copy(s, data, bytes) == bytes;
    }
    if (s->count == STREAM_IOVS_MAX) {
        return false;
    }
    /* nng reads only; nng_iov has no const */
    s->iovs[s->count++] = (nng_iov){.iov_buf = (void *)(uintptr_t)data, .iov_len = bytes};
    s->last_is_scratch = false;
    return !s->tls; /* tls sends the first piece only */
}

static bool slice_add_send(slice *s, const ep_send *send)
{
    size_t skip = send->sent_bytes;
    for (uint32_t i = 0; i < send->parts_count; i++) {
        const ep_send_part *part = &send->parts[i];
        if (skip >= part->bytes) {
            skip -= part->bytes;
            continue;
        }
        if (!slice_add(s, (const uint8_t *)part->data + skip, part->bytes - skip)) {
            return false;
        }
        skip = 0;
    }
    return true;
}

void ep_nng_stream_send_post(stream_conn *conn)
{
    slice s = {.scratch = conn->scratch, .tls = conn->tls};
    const ep_send *send = conn->queue.head;
    while (send != NULL && slice_add_send(&s, send)) {
        send = send->next;
    }
    conn->posting++;
    pthread_mutex_unlock(&conn->lock);
    nng_aio_set_iov(conn->send_aio, s.count, s.iovs);
    nng_stream_send(conn->stream, conn->send_aio);
    pthread_mutex_lock(&conn->lock);
    conn->posting--;
}

/* Takes the frames that are now sent whole off the queue, as a list by next. Lock held. */
static ep_send *advance(stream_conn *conn, size_t sent)
{
    ep_send *first = NULL;
    ep_send **last = &first;
    while (sent > 0 && conn->queue.head != NULL) {
        ep_send *head = conn->queue.head;
        size_t left = head->total_bytes - head->sent_bytes;
        if (sent < left) {
            head->sent_bytes += sent;
            break;
        }
        sent -= left;
        *last = ep_send_queue_pop(&conn->queue);
        last = &(*last)->next;
    }
    return first;
}

void ep_nng_stream_send_done(void *arg)
{
    stream_conn *conn = arg;
    int failed = nng_aio_result(conn->send_aio);
    size_t sent = nng_aio_count(conn->send_aio);
    pthread_mutex_lock(&conn->lock);
    ep_send *whole = failed == 0 ? advance(conn, sent) : NULL;
    pthread_mutex_unlock(&conn->lock);
    while (whole != NULL) {
        ep_send *next = whole->next;
        whole->next = NULL;
        whole->done(whole, EP_OK);
        whole = next;
    }
    pthread_mutex_lock(&conn->lock);
    if (failed != 0 && !conn->closing) {
        ep_error lost;
        ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "sending to %s failed: %s", conn->peer,
                     nng_strerror(failed));
        ep_nng_stream_conn_begin_end(conn, &lost);
    }
    if (conn->closing || conn->queue.head == NULL) {
        conn->send_busy = false;
    } else {
        ep_nng_stream_send_post(conn);
    }
    ep_nng_stream_conn_leave(conn);
}
