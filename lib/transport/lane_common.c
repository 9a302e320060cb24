/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the lanes, and the choice of a lane by URL. */
#include "transport/lane_common.h"

#include <signal.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"

static const ep_lane_ops *const lanes[] = {&ep_nng_stream_lane, &ep_loopback_lane, &ep_shm_lane};
static const ep_lane_ops *registered; /* atomic */

void ep_lane_register(const ep_lane_ops *ops)
{
    __atomic_store_n(&registered, ops, __ATOMIC_RELEASE);
}

static bool serves(const ep_lane_ops *ops, const char *url)
{
    for (const char *const *scheme = ops->schemes; *scheme != NULL; scheme++) {
        if (ep_url_has_scheme(url, *scheme)) {
            return true;
        }
    }
    return false;
}

bool ep_url_has_scheme(const char *url, const char *scheme)
{
    size_t n = strlen(scheme);
    return strncmp(url, scheme, n) == 0 && strncmp(url + n, "://", 3) == 0;
}

const ep_lane_ops *ep_lane_for_url(const char *url)
{
    if (ep_url_has_scheme(url, "tcp") && !ep_stream_lane_is_nng()) {
        return &ep_uv_stream_lane;
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(lanes); i++) {
        if (serves(lanes[i], url)) {
            return lanes[i];
        }
    }
    const ep_lane_ops *more = __atomic_load_n(&registered, __ATOMIC_ACQUIRE);
    return more != NULL && serves(more, url) ? more : NULL;
}

void ep_transport_fini(void)
{
    ep_loopback_fini();
    ep_shm_fini();
    ep_uv_stream_fini();
    ep_nng_stream_fini();
}

ep_err ep_lane_limits_check(const ep_lane_limits *limits, bool for_listener, ep_error *out_error)
{
    if (limits->frame_bytes == NULL || limits->pool == NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "lane limits need frame_bytes and pool");
    }
    size_t prefix = ep_lane_prefix_bytes(limits);
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
    return EP_OK;
}

ep_err ep_lane_frame_check(const ep_lane_limits *limits, bool large_allowed, size_t frame_bytes,
                           const char *peer, ep_error *out_error)
{
    if (frame_bytes > limits->frame_bytes_max) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "frame of %zu bytes from %s, frame_bytes_max is %zu", frame_bytes, peer,
                            limits->frame_bytes_max);
    }
    if (!large_allowed && limits->first_frame_bytes_max != 0 &&
        frame_bytes > limits->first_frame_bytes_max) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "first frame of %zu bytes from %s, first_frame_bytes_max is %zu",
                            frame_bytes, peer, limits->first_frame_bytes_max);
    }
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

ep_err ep_send_prepare(ep_send *send, const ep_lane_limits *limits)
{
    if (send->done == NULL || send->parts_count > EP_SEND_PARTS_MAX) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    size_t total = 0;
    for (uint32_t i = 0; i < send->parts_count; i++) {
        if (send->parts[i].data == NULL && send->parts[i].bytes != 0) {
            return EP_ERR_INVALID_ARGUMENT;
        }
        if (!ep_add_size(total, send->parts[i].bytes, &total)) {
            return EP_ERR_INVALID_ARGUMENT;
        }
    }
    if (total < ep_lane_prefix_bytes(limits) || total > limits->frame_bytes_max) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    send->total_bytes = total;
    send->sent_bytes = 0;
    send->next = NULL;
    return EP_OK;
}

ep_err ep_send_queue_push(ep_send_queue *queue, ep_send *send, size_t bytes_max)
{
    EP_ASSERT(queue->bytes <= bytes_max);
    if (send->total_bytes > bytes_max - queue->bytes) {
        return EP_ERR_RESOURCE_EXHAUSTED;
    }
    queue->bytes += send->total_bytes;
    if (queue->tail == NULL) {
        queue->head = send;
    } else {
        queue->tail->next = send;
    }
    queue->tail = send;
    return EP_OK;
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

ep_err ep_lane_thread_create(const char *name, void *(*func)(void *), void *arg,
                             pthread_t *out_thread)
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* a new thread inherits the mask */
    int failed = pthread_create(out_thread, NULL, func, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0) {
        return EP_ERR_IO;
    }
    pthread_setname_np(*out_thread, name);
    return EP_OK;
}
