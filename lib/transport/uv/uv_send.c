/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sending half of a uv stream. One thread at a time is inside the socket (writing): the one
 * that called ep_conn_send, or the worker once the socket was full or a patient frame is next. It
 * gathers what is queued, small frames several at a time.
 */
#include <errno.h>
#include <string.h>

#include "transport/uv/uv_lane.h"

#define IOVS_MAX 64
#define ROUNDS_MAX 16 /* a caller does not write others' frames for ever */

/* Lock held. On the worker all of the queue, elsewhere up to the first patient frame. */
static unsigned gather(const ep_uv_conn *conn, bool on_worker, struct iovec iovs[IOVS_MAX],
                       size_t *out_bytes)
{
    unsigned count = 0;
    *out_bytes = 0;
    for (const ep_send *send = conn->queue.head; send != NULL && (on_worker || !send->is_patient);
         send = send->next) {
        size_t skip = send->sent_bytes;
        for (uint32_t i = 0; i < send->parts_count; i++) {
            const ep_send_part *part = &send->parts[i];
            if (skip >= part->bytes) {
                skip -= part->bytes;
                continue;
            }
            if (count == IOVS_MAX) {
                return count;
            }
            /* the socket reads only; iovec has no const */
            iovs[count++] = (struct iovec){.iov_base = (uint8_t *)(uintptr_t)part->data + skip,
                                           .iov_len = part->bytes - skip};
            *out_bytes += part->bytes - skip;
            skip = 0;
        }
    }
    return count;
}

/* Takes the frames that are whole off the queue; their done() is the worker's but mine's, which is
 * returned. Lock held. */
static ep_send *advance(ep_uv_conn *conn, size_t sent, const ep_send *mine)
{
    ep_send *returned = NULL;
    while (sent > 0 && conn->queue.head != NULL) {
        ep_send *head = conn->queue.head;
        size_t left = head->total_bytes - head->sent_bytes;
        if (sent < left) {
            head->sent_bytes += sent;
            break;
        }
        sent -= left;
        ep_send_queue_pop(&conn->queue);
        if (head == mine) {
            returned = head;
            continue;
        }
        if (conn->sent_last == NULL) {
            conn->sent_first = head;
        } else {
            conn->sent_last->next = head;
        }
        conn->sent_last = head;
    }
    return returned;
}

/*
 * A write failed for good. When the peer has ended, what it had sent before may still be unread:
 * then reading goes on, to the end that it finds. True: it does.
 */
static bool end_after_failure(ep_uv_conn *conn, int failed)
{
    pthread_mutex_lock(&conn->lock);
    bool reads = conn->started && (failed == EPIPE || failed == ECONNRESET);
    pthread_mutex_unlock(&conn->lock);
    if (!reads) {
        ep_error lost;
        ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "sending to %s failed: %s", conn->peer,
                     strerror(failed));
        ep_uv_conn_end(conn, &lost);
    }
    return reads;
}

/* One write. Lock held, dropped meanwhile. mine, on_worker: see write_queue. */
static void write_once(ep_uv_conn *conn, const ep_send **mine, bool on_worker)
{
    bool reads = false;
    struct iovec iovs[IOVS_MAX];
    size_t bytes;
    struct msghdr message = {.msg_iov = iovs, .msg_iovlen = gather(conn, on_worker, iovs, &bytes)};
    pthread_mutex_unlock(&conn->lock);
    ssize_t sent = sendmsg(conn->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    int failed = sent < 0 ? errno : 0;
    if (failed != 0 && failed != EAGAIN && failed != EINTR && failed != ENOBUFS) {
        reads = end_after_failure(conn, failed);
    }
    pthread_mutex_lock(&conn->lock);
    ep_send *whole = advance(conn, sent > 0 ? (size_t)sent : 0, *mine);
    conn->wait_writable =
        reads || failed == EAGAIN || failed == ENOBUFS || (failed == 0 && (size_t)sent < bytes);
    if (whole != NULL) {
        *mine = NULL; /* another send may get its memory */
        pthread_mutex_unlock(&conn->lock);
        whole->done(whole, EP_OK);
        pthread_mutex_lock(&conn->lock);
    }
}

/*
 * Writes what the socket takes. mine: the frame whose done() may run here, NULL none. on_worker:
 * this is its thread, patient frames too; a caller may find one that another thread queued while it
 * was inside the socket. Lock held on entry and return, nobody is writing. True: the job is to run.
 */
static bool write_queue(ep_uv_conn *conn, const ep_send *mine, bool on_worker)
{
    conn->writing = true;
    conn->wait_writable = false;
    for (int round = 0; conn->queue.head != NULL && !conn->wait_writable && !conn->closing;
         round++) {
        if (round == ROUNDS_MAX || (conn->queue.head->is_patient && !on_worker)) {
            conn->wait_writable = true;
            break;
        }
        write_once(conn, &mine, on_worker);
    }
    conn->writing = false;
    return conn->wait_writable || conn->closing || conn->sent_first != NULL;
}

ep_err ep_uv_conn_send(ep_conn *base, ep_send *send)
{
    ep_uv_conn *conn = (ep_uv_conn *)base;
    bool kick = false;
    ep_err err = ep_send_prepare(send, &conn->limits);
    if (err != EP_OK) {
        return err;
    }
    const ep_send *mine = send->done_inside ? send : NULL; /* send may be gone once it is queued */
    const bool is_patient = send->is_patient;
    pthread_mutex_lock(&conn->lock);
    if (conn->closing) {
        err = EP_ERR_CLOSED;
    } else {
        err = ep_send_queue_push(&conn->queue, send, conn->limits.send_queue_bytes_max);
    }
    if (err == EP_OK && !conn->writing && !conn->wait_writable) {
        conn->wait_writable = is_patient;
        kick = is_patient || write_queue(conn, mine, false);
    }
    if (kick) {
        ep_uv_conn_ref(conn); /* a done() may have released it */
    }
    pthread_mutex_unlock(&conn->lock);
    if (kick) {
        ep_uv_conn_kick(conn);
        ep_uv_conn_unref(conn);
    }
    return err;
}

void ep_uv_conn_writable(ep_uv_conn *conn)
{
    pthread_mutex_lock(&conn->lock);
    bool kick = !conn->writing && !conn->closing && write_queue(conn, NULL, true);
    pthread_mutex_unlock(&conn->lock);
    if (kick) {
        ep_uv_conn_kick(conn); /* reports, after this callback */
    }
}

void ep_uv_conn_report_sent(ep_uv_conn *conn)
{
    pthread_mutex_lock(&conn->lock);
    ep_send *sent = conn->sent_first;
    conn->sent_first = NULL;
    conn->sent_last = NULL;
    pthread_mutex_unlock(&conn->lock);
    while (sent != NULL) {
        ep_send *next = sent->next;
        sent->next = NULL;
        sent->done(sent, EP_OK);
        sent = next;
    }
}
