/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_common.h. */
#include "transport/lane_common.h"

#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/host.h"
#include "transport/lane_fork.h"

static struct {
    pthread_mutex_t lock;
    pthread_cond_t dropped; /* the last object was dropped */
    uint64_t held;
} holds = {.lock = PTHREAD_MUTEX_INITIALIZER, .dropped = PTHREAD_COND_INITIALIZER};

void ep_lane_holds_forget(void)
{
    pthread_mutex_init(&holds.lock, NULL);
    pthread_cond_init(&holds.dropped, NULL);
    holds.held = 0;
}

void ep_lane_hold(void)
{
    ep_lane_fork_watch();
    pthread_mutex_lock(&holds.lock);
    holds.held++;
    pthread_mutex_unlock(&holds.lock);
}

void ep_lane_drop(void)
{
    pthread_mutex_lock(&holds.lock);
    EP_ASSERT(holds.held > 0);
    if (--holds.held == 0) {
        pthread_cond_broadcast(&holds.dropped);
    }
    pthread_mutex_unlock(&holds.lock);
}

bool ep_lane_wait_dropped(uint32_t wait_ms)
{
    uint64_t until_ns = ep_clock_now_ns() + wait_ms * EP_NS_PER_MS;
    pthread_mutex_lock(&holds.lock);
    while (holds.held > 0 && ep_clock_wait(&holds.dropped, &holds.lock, until_ns)) {
    }
    bool dropped = holds.held == 0;
    pthread_mutex_unlock(&holds.lock);
    return dropped;
}

ep_err ep_lane_limits_take(const ep_lane_limits *limits, bool for_listener,
                           ep_lane_limits *out_limits, ep_error *out_error)
{
    if (limits->frame_bytes == NULL || limits->pool == NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "lane limits need frame_bytes and pool");
    }
    size_t prefix = limits->prefix_bytes != 0 ? limits->prefix_bytes : EP_FRAME_PREFIX_BYTES;
    if (prefix > EP_FRAME_PREFIX_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "prefix_bytes is %zu, allowed up to %d", prefix, EP_FRAME_PREFIX_BYTES);
    }
    if (limits->frame_bytes_max < prefix) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "frame_bytes_max is %zu, must be at least %zu", limits->frame_bytes_max,
                            prefix);
    }
    if (limits->first_frame_bytes_max != 0 && limits->first_frame_bytes_max < prefix) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "first_frame_bytes_max is %zu, must be 0 or at least %zu",
                            limits->first_frame_bytes_max, prefix);
    }
    if (limits->send_queue_bytes_max < limits->frame_bytes_max) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "send_queue_bytes_max is %zu, must be at least frame_bytes_max %zu",
                            limits->send_queue_bytes_max, limits->frame_bytes_max);
    }
    if (for_listener && limits->connections_max == 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "connections_max is 0, must be at least 1");
    }
    *out_limits = *limits;
    out_limits->prefix_bytes = prefix;
    return EP_OK;
}

ep_err ep_lane_frame_length(const ep_lane_limits *limits, bool large_allowed,
                            const uint8_t prefix[EP_FRAME_PREFIX_BYTES], const char *peer,
                            size_t *out_bytes, ep_error *out_error)
{
    size_t bytes = 0;
    ep_err err = limits->frame_bytes(prefix, &bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (bytes > limits->frame_bytes_max) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "frame of %zu bytes from %s, frame_bytes_max is %zu", bytes, peer,
                            limits->frame_bytes_max);
    }
    if (!large_allowed && limits->first_frame_bytes_max != 0 &&
        bytes > limits->first_frame_bytes_max) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "first frame of %zu bytes from %s, first_frame_bytes_max is %zu", bytes,
                            peer, limits->first_frame_bytes_max);
    }
    if (bytes < limits->prefix_bytes) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "frame of %zu bytes from %s, must be at least %zu", bytes, peer,
                            limits->prefix_bytes);
    }
    *out_bytes = bytes;
    return EP_OK;
}

bool ep_conn_receiving_is_slow(const ep_conn_receiving *receiving, uint64_t now_ns)
{
    uint64_t grace_ns = EP_FRAME_GRACE_MS * EP_NS_PER_MS;
    if (receiving->begun_ns == 0 || now_ns < receiving->begun_ns + grace_ns) {
        return false;
    }
    uint64_t ms = (now_ns - receiving->begun_ns - grace_ns) / EP_NS_PER_MS;
    return receiving->begun_bytes < ms * EP_FRAME_RATE_MIN / 1000;
}

void ep_send_queue_append(ep_send_queue *queue, ep_send *send)
{
    queue->bytes += send->total_bytes;
    *(queue->tail != NULL ? &queue->tail->next : &queue->head) = send;
    queue->tail = send;
}

ep_send *ep_send_queue_pop(ep_send_queue *queue)
{
    ep_send *send = queue->head;
    if (send != NULL) {
        queue->bytes -= send->total_bytes;
        queue->head = send->next;
        if (queue->head == NULL) {
            queue->tail = NULL;
        }
        send->next = NULL;
    }
    return send;
}

unsigned ep_send_queue_gather(const ep_send_queue *queue, bool patient, unsigned iovs_max,
                              struct iovec *out_iovs, size_t *out_bytes)
{
    unsigned count = 0;
    *out_bytes = 0;
    for (const ep_send *send = queue->head; send != NULL && (patient || !send->is_patient);
         send = send->next) {
        size_t skip = send->sent_bytes;
        for (uint32_t i = 0; i < send->parts_count; i++) {
            const ep_send_part *part = &send->parts[i];
            if (skip >= part->bytes) {
                skip -= part->bytes;
                continue;
            }
            if (count == iovs_max) {
                return count;
            }
            /* senders only read, but iovec has no const */
            out_iovs[count++] = (struct iovec){.iov_base = (uint8_t *)(uintptr_t)part->data + skip,
                                               .iov_len = part->bytes - skip};
            *out_bytes += part->bytes - skip;
            skip = 0;
        }
    }
    return count;
}

size_t ep_send_copy(const ep_send *send, size_t offset, uint8_t *out, size_t bytes)
{
    size_t copied = 0;
    for (uint32_t i = 0; i < send->parts_count && copied < bytes; i++) {
        const ep_send_part *part = &send->parts[i];
        if (offset >= part->bytes) {
            offset -= part->bytes;
            continue;
        }
        size_t piece = part->bytes - offset;
        if (piece > bytes - copied) {
            piece = bytes - copied;
        }
        memcpy(out + copied, (const uint8_t *)part->data + offset, piece);
        copied += piece;
        offset = 0;
    }
    return copied;
}

uint32_t ep_lane_threads_count(void)
{
    return ep_host_cpus() >= 4 * EP_LANE_THREADS_MAX ? EP_LANE_THREADS_MAX : 2;
}
