/* SPDX-License-Identifier: Apache-2.0 */
/* One connection: reference counts, frames in and out, ping, goodbye. */
#include "rpc/rpc_link.h"

#include "base/check.h"
#include "base/clock.h"
#include "rpc/rpc_hello.h"

void ep_rpc_link_ref(ep_rpc_link *link)
{
    uint32_t before = __atomic_fetch_add(&link->refs, 1, __ATOMIC_RELAXED);
    EP_ASSERT(before > 0);
}

bool ep_rpc_link_try_ref(ep_rpc_link *link)
{
    uint32_t refs = __atomic_load_n(&link->refs, __ATOMIC_RELAXED);
    while (refs > 0) {
        if (__atomic_compare_exchange_n(&link->refs, &refs, refs + 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
            return true;
        }
    }
    return false;
}

void ep_rpc_link_unref(ep_rpc_link *link)
{
    uint32_t before = __atomic_fetch_sub(&link->refs, 1, __ATOMIC_ACQ_REL);
    EP_ASSERT(before > 0);
    if (before == 1) {
        ep_conn_release(link->conn);
        pthread_mutex_destroy(&link->lock);
        link->ops->on_free(link);
    }
}

static void set_why_locked(ep_rpc_link *link, const ep_error *why)
{
    if (!link->has_why && why != NULL) {
        link->why = *why;
        link->has_why = true;
    }
}

void ep_rpc_link_close(ep_rpc_link *link, const ep_error *why)
{
    pthread_mutex_lock(&link->lock);
    set_why_locked(link, why);
    bool close = !link->close_asked;
    link->close_asked = true;
    if (link->phase < EP_LINK_CLOSING) {
        link->phase = EP_LINK_CLOSING;
    }
    pthread_mutex_unlock(&link->lock);
    if (close) {
        ep_conn_close(link->conn);
    }
}

/* ---- the timer: Hello timeout when new, ping when live, limit of the last frame when closing
 * ---- */

/* Moves the timer to due_ns. The timer has one reference, whether armed or running. Errors:
 * NO_MEMORY (nothing changed). */
static ep_err arm_locked(ep_rpc_link *link, uint64_t due_ns)
{
    bool running = link->timer_held && !ep_timer_cancel(link->common->timers, &link->timer);
    if (running) {
        return EP_OK; /* its callback waits for the lock and then reads the phase */
    }
    ep_err err = ep_timer_arm(link->common->timers, &link->timer, due_ns);
    if (err == EP_OK && !link->timer_held) {
        ep_rpc_link_ref(link);
        link->timer_held = true;
    }
    return err;
}

static void close_without_timer(ep_rpc_link *link)
{
    ep_error why;
    ep_error_set(&why, EP_ERR_NO_MEMORY, "no memory for the connection's timer");
    ep_rpc_link_close(link, &why);
}

static void disarm(ep_rpc_link *link)
{
    pthread_mutex_lock(&link->lock);
    bool drop = link->timer_held && ep_timer_cancel(link->common->timers, &link->timer);
    if (drop) {
        link->timer_held = false;
    }
    pthread_mutex_unlock(&link->lock);
    if (drop) {
        ep_rpc_link_unref(link);
    }
}

/* Waiting for memory excuses a silent peer up to this time: attackers that hold the memory lose
 * their connections sooner. */
#define MEMORY_EXCUSE_MS 30000u

/* False: the peer sends its frame so slowly that it must be disconnected. */
static bool frame_comes_locked(ep_rpc_link *link, ep_conn_receiving *receiving, uint64_t now_ns,
                               ep_error *out_why)
{
    const ep_rpc_limits *limits = &link->common->limits;
    link->memory_looks = receiving->waits_for_memory ? link->memory_looks + 1 : 0;
    receiving->waits_for_memory =
        receiving->waits_for_memory && link->memory_looks * limits->ping_ms < MEMORY_EXCUSE_MS;
    bool slow = !receiving->waits_for_memory && ep_conn_receiving_is_slow(receiving, now_ns);
    link->slow_looks = slow ? link->slow_looks + 1 : 0;
    if (link->slow_looks <= limits->ping_dead_count) {
        return true;
    }
    link->too_slow = true;
    ep_error_set(out_why, EP_ERR_RESOURCE_EXHAUSTED,
                 "peer sent %llu bytes of a frame in %llu ms, at least %llu a second are wanted",
                 (unsigned long long)receiving->begun_bytes,
                 (unsigned long long)((now_ns - receiving->begun_ns) / EP_NS_PER_MS),
                 (unsigned long long)EP_FRAME_RATE_MIN);
    return false;
}

/* When to check again; 0: never. *out_ping: send a ping now. */
static uint64_t ping_step_locked(ep_rpc_link *link, bool *out_ping, ep_error *out_why)
{
    const ep_rpc_limits *limits = &link->common->limits;
    uint64_t now_ns = ep_clock_now_ns();
    uint64_t period_ns = limits->ping_ms * EP_NS_PER_MS;
    uint64_t received_ns = __atomic_load_n(&link->received_ns, __ATOMIC_RELAXED);
    if (period_ns == 0) {
        return 0;
    }
    ep_conn_receiving receiving;
    ep_conn_read_receiving(link->conn, &receiving);
    if (!frame_comes_locked(link, &receiving, now_ns, out_why)) {
        return 0;
    }
    /* Part of a frame is a sign of life too, and nothing can arrive while our lane waits for
     * memory. We go on sending pings: they show the peer that we live, while its own are behind
     * what we do not read. */
    if (received_ns >= link->pinged_ns || receiving.heard_ns >= link->pinged_ns ||
        receiving.waits_for_memory) {
        link->pings_missed = 0;
    }
    if (received_ns + period_ns > now_ns) {
        return received_ns + period_ns;
    }
    if (link->pings_missed >= limits->ping_dead_count) {
        ep_error_set(out_why, EP_ERR_CONNECTION_LOST,
                     "peer answered none of %u pings, silent for %llu ms", limits->ping_dead_count,
                     (unsigned long long)((now_ns - received_ns) / EP_NS_PER_MS));
        return 0;
    }
    link->pings_missed++;
    link->pinged_ns = now_ns;
    *out_ping = true;
    return now_ns + period_ns;
}

uint64_t ep_rpc_link_heard_ns(ep_rpc_link *link)
{
    ep_conn_receiving receiving;
    ep_conn_read_receiving(link->conn, &receiving);
    uint64_t received_ns = __atomic_load_n(&link->received_ns, __ATOMIC_RELAXED);
    uint64_t heard_ns = receiving.heard_ns > received_ns ? receiving.heard_ns : received_ns;
    return receiving.waits_for_memory ? ep_clock_now_ns() : heard_ns;
}

static void ping_sent(ep_send *send, ep_err result)
{
    ep_rpc_link *link = send->arg;
    if (result == EP_OK &&
        ep_rpc_link_heard_ns(link) >= __atomic_load_n(&link->ping_left_ns, __ATOMIC_RELAXED)) {
        __atomic_store_n(&link->ping_left_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    }
    pthread_mutex_lock(&link->lock);
    link->ping_busy = false;
    pthread_mutex_unlock(&link->lock);
    ep_rpc_link_unref(link);
}

/* The ping has memory of its own, because it must be sent even when the pool has none. One in the
 * queue is enough. */
void ep_rpc_link_ping(ep_rpc_link *link)
{
    pthread_mutex_lock(&link->lock);
    bool send = link->phase == EP_LINK_LIVE && !link->ping_busy;
    if (send) {
        link->ping_busy = true;
        link->ping_asked_ns = ep_clock_now_ns();
    }
    pthread_mutex_unlock(&link->lock);
    if (!send) {
        return;
    }
    ep_frame frame = {.kind = EP_FRAME_PING, .tensor_offset = ep_frame_tensor_offset(0)};
    ep_frame_encode(&frame, link->ping_bytes);
    link->ping = (ep_send){.parts_count = 1, .done = ping_sent, .arg = link};
    link->ping.parts[0] =
        (ep_send_part){.data = link->ping_bytes, .bytes = sizeof(link->ping_bytes)};
    ep_rpc_link_ref(link);
    if (ep_conn_send(link->conn, &link->ping) != EP_OK) {
        ping_sent(&link->ping, EP_ERR_CLOSED);
    }
}

uint64_t ep_rpc_link_blocked_ns(ep_rpc_link *link)
{
    uint64_t left_ns = __atomic_load_n(&link->left_ns, __ATOMIC_RELAXED);
    pthread_mutex_lock(&link->lock);
    uint64_t asked_ns = link->ping_busy ? link->ping_asked_ns : 0;
    pthread_mutex_unlock(&link->lock);
    return asked_ns != 0 && left_ns > asked_ns ? left_ns : asked_ns;
}

static void link_timer(ep_timer *timer, void *arg)
{
    ep_rpc_link *link = arg;
    ep_error why = {.code = EP_OK};
    bool ping = false;
    uint64_t next_ns = 0;
    (void)timer;
    pthread_mutex_lock(&link->lock);
    switch (link->phase) {
    case EP_LINK_NEW:
        /* not DEADLINE_EXCEEDED, which would mean that of calls that wait for this connection */
        ep_error_set(&why, EP_ERR_UNAVAILABLE, "no Hello within %u ms%s", link->hello_wait_ms,
                     link->hello_wait_ms < link->common->limits.hello_timeout_ms
                         ? "; the next dial waits longer"
                         : "");
        break;
    case EP_LINK_LIVE:
        next_ns = ping_step_locked(link, &ping, &why);
        break;
    case EP_LINK_CLOSING:
        if (ep_clock_now_ns() < link->last_until_ns) {
            next_ns = link->last_until_ns; /* it fired for something else, just before */
        } else {
            ep_error_set(&why, EP_ERR_CLOSED, "the last frame was not taken within %d ms",
                         EP_LINK_LAST_FRAME_MS);
        }
        break;
    case EP_LINK_CLOSED:
        break;
    }
    if (next_ns != 0 && ep_timer_arm(link->common->timers, &link->timer, next_ns) == EP_OK) {
        /* the reference of this callback, dropped below; the armed timer keeps its own */
        ep_rpc_link_ref(link);
    } else {
        if (next_ns != 0) {
            ep_error_set(&why, EP_ERR_NO_MEMORY, "no memory for the connection's timer");
        }
        link->timer_held = false;
    }
    pthread_mutex_unlock(&link->lock);
    if (ping) {
        ep_rpc_link_ping(link);
    }
    if (why.code != EP_OK) {
        ep_rpc_link_close(link, &why);
    }
    ep_rpc_link_unref(link);
}

/* ---- spans of frames, only of those that begin or end a call: ping, credit and the like are not
 * worth an event ---- */

/* False when this frame gets no span. */
static bool frame_fields(const ep_rpc_link *link, const ep_frame *frame,
                         ep_trace_fields *out_fields)
{
    bool is_request = frame->kind == EP_FRAME_REQUEST;
    if ((!is_request && frame->kind != EP_FRAME_REPLY && frame->kind != EP_FRAME_REPLY_MORE) ||
        frame->method_id == EP_RPC_HELLO_METHOD) {
        return false;
    }
    *out_fields = (ep_trace_fields){.call = frame->call_id,
                                    .node = link->common->node,
                                    .peer = link->peer_name,
                                    .sub = is_request ? 0 : 1,
                                    .layer = -1,
                                    .expert = -1,
                                    .rows = (uint32_t)(frame->tensor_offset + frame->tensor_bytes)};
    return true;
}

static void trace_send_begin(const ep_rpc_link *link, ep_rpc_out *out)
{
    ep_trace_fields fields;
    out->is_traced = frame_fields(link, &out->frame, &fields);
    if (out->is_traced) {
        fields.trace = out->trace;
        EP_TRACE(send_begin, &fields);
    }
}

static void trace_send_end(const ep_rpc_link *link, const ep_rpc_out *out, ep_err status)
{
    ep_trace_fields fields;
    if (frame_fields(link, &out->frame, &fields)) {
        fields.trace = out->trace;
        fields.status = (int32_t)status;
        EP_TRACE(send_end, &fields);
    }
}

static void link_begin(void *arg, ep_conn *conn, const uint8_t prefix[EP_FRAME_PREFIX_BYTES])
{
    ep_rpc_link *link = arg;
    (void)conn;
    if (!EP_TRACE_SPAN_ON(receive)) {
        return;
    }
    const ep_frame frame = ep_frame_read(prefix);
    if (frame_fields(link, &frame, &link->receiving)) {
        link->receive_traced = true;
        EP_TRACE(receive_begin, &link->receiving);
    }
}

static void trace_receive_end(ep_rpc_link *link, ep_err status)
{
    link->receive_traced = false;
    link->receiving.status = (int32_t)status;
    EP_TRACE(receive_end, &link->receiving);
}

/* ---- sending ---- */

static void link_sent(ep_send *send, ep_err result)
{
    ep_rpc_link *link = send->arg;
    ep_rpc_out *out = (ep_rpc_out *)(void *)send; /* send is its first member */
    bool last = out->last;
    if (out->is_traced) {
        trace_send_end(link, out, result);
    }
    if (result == EP_OK) {
        __atomic_fetch_add(&link->bytes_sent, out->frame_bytes, __ATOMIC_RELAXED);
        __atomic_store_n(&link->left_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    }
    ep_rpc_out_destroy(out);
    __atomic_fetch_sub(&link->sends_in_flight, 1, __ATOMIC_SEQ_CST);
    if (last) {
        ep_rpc_link_close(link, NULL);
    }
    if (link->ops->on_sent != NULL) {
        link->ops->on_sent(link);
    }
    ep_rpc_link_unref(link);
}

ep_err ep_rpc_link_send(ep_rpc_link *link, ep_rpc_out *out)
{
    pthread_mutex_lock(&link->lock);
    bool open = link->phase < EP_LINK_CLOSING || out->last;
    bool payload_crc = link->payload_crc;
    pthread_mutex_unlock(&link->lock);
    if (!open) {
        return EP_ERR_CLOSED;
    }
    if (__atomic_add_fetch(&link->sends_in_flight, 1, __ATOMIC_SEQ_CST) > link->sends_max &&
        !out->last) {
        __atomic_fetch_sub(&link->sends_in_flight, 1, __ATOMIC_SEQ_CST);
        return EP_ERR_RESOURCE_EXHAUSTED;
    }
    ep_rpc_out_seal(out, payload_crc);
    out->send.done = link_sent;
    out->send.arg = link;
    out->send.done_inside = true; /* link_sent takes no lock that a sender may hold */
    ep_rpc_link_ref(link);
    out->is_traced = false;
    if (EP_TRACE_SPAN_ON(send)) {
        trace_send_begin(link, out);
    }
    ep_err err = ep_conn_send(link->conn, &out->send);
    if (err != EP_OK) {
        if (out->is_traced) {
            trace_send_end(link, out, err);
        }
        __atomic_fetch_sub(&link->sends_in_flight, 1, __ATOMIC_SEQ_CST);
        ep_rpc_link_unref(link);
    }
    return err;
}

uint32_t ep_rpc_link_sends_in_flight(ep_rpc_link *link)
{
    return __atomic_load_n(&link->sends_in_flight, __ATOMIC_SEQ_CST);
}

void ep_rpc_link_send_reply(ep_rpc_link *link, ep_rpc_out *taken_out)
{
    ep_err err = ep_rpc_link_send(link, taken_out);
    if (err == EP_OK) {
        return;
    }
    ep_rpc_out_destroy(taken_out);
    if (err != EP_ERR_CLOSED) {
        ep_error why;
        ep_error_set(
            &why, err,
            "peer does not take its replies: send queue full (send_queue_bytes_max %zu, frames %u)",
            link->common->limits.send_queue_bytes_max, link->sends_max);
        ep_rpc_link_close(link, &why);
    }
}

void ep_rpc_link_send_bare(ep_rpc_link *link, const ep_frame *frame)
{
    ep_rpc_out *out;
    if (ep_rpc_out_create(link->common->pool, 0, NULL, &out) != EP_OK) {
        return;
    }
    out->frame = *frame;
    out->frame.tensor_offset = ep_frame_tensor_offset(0);
    if (ep_rpc_link_send(link, out) != EP_OK) {
        ep_rpc_out_destroy(out);
    }
}

void ep_rpc_link_send_last(ep_rpc_link *link, ep_rpc_out *taken_out, const ep_error *why)
{
    pthread_mutex_lock(&link->lock);
    set_why_locked(link, why);
    bool first = link->phase < EP_LINK_CLOSING;
    bool bounded = false;
    if (first) {
        link->phase = EP_LINK_CLOSING;
        link->last_until_ns = ep_clock_now_ns() + EP_LINK_LAST_FRAME_MS * EP_NS_PER_MS;
        bounded = arm_locked(link, link->last_until_ns) == EP_OK;
    }
    pthread_mutex_unlock(&link->lock);
    if (taken_out != NULL && bounded) {
        taken_out->last = true;
        if (ep_rpc_link_send(link, taken_out) == EP_OK) {
            return;
        }
    }
    ep_rpc_out_destroy(taken_out);
    if (first) {
        ep_rpc_link_close(link, why);
    }
}

void ep_rpc_link_goodbye(ep_rpc_link *link, ep_err code, const char *text)
{
    ep_error why;
    ep_rpc_status_fields fields;
    ep_rpc_out *out = NULL;
    ep_error_set(&why, code, "%s", text);
    ep_rpc_status_fill(code, &why, &fields);
    if (ep_rpc_out_create_message(link->common->pool, &fields.status.base, NULL, &out) == EP_OK) {
        out->frame.kind = EP_FRAME_GOODBYE;
        out->frame.status = ep_err_grpc_code(code);
    }
    ep_rpc_link_send_last(link, out, &why);
}

/* ---- receiving ---- */

/* is_live: both sides know whether payloads have a CRC. */
static void peer_said_goodbye(ep_rpc_link *link, const ep_frame *frame, const ep_buffer *buffer,
                              bool is_live)
{
    ep_error why;
    ep_error_clear(&why);
    if (!is_live || ep_rpc_payload_check(frame, buffer->data, link->payload_crc, &why) == EP_OK) {
        ep_rpc_status_read(link->common->pool, frame->status, buffer->data + EP_FRAME_FIXED_BYTES,
                           frame->header_bytes, &why);
        ep_error_prefix(&why, why.code, "peer said goodbye");
        why.code = EP_ERR_UNAVAILABLE;
    }
    ep_rpc_link_close(link, &why);
}

static void link_frame(void *arg, ep_conn *conn, ep_buffer *taken_frame)
{
    ep_rpc_link *link = arg;
    ep_error why;
    (void)conn;
    if (link->receive_traced) {
        trace_receive_end(link, EP_OK);
    }
    __atomic_store_n(&link->received_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    __atomic_fetch_add(&link->bytes_received, taken_frame->bytes, __ATOMIC_RELAXED);
    pthread_mutex_lock(&link->lock);
    ep_rpc_link_phase phase = link->phase;
    pthread_mutex_unlock(&link->lock);
    if (phase >= EP_LINK_CLOSING) {
        ep_buffer_unref(taken_frame);
        return;
    }
    /* The lane got the length from ep_frame_read_bytes, which has checked all but the header's
     * limit. */
    EP_ASSERT(taken_frame->bytes >= EP_FRAME_FIXED_BYTES);
    const ep_frame frame = ep_frame_read(taken_frame->data);
    if (ep_frame_check_header_bytes(&frame, link->common->limits.header_bytes_max, &why) != EP_OK) {
        ep_rpc_link_close(link, &why);
        ep_buffer_unref(taken_frame);
        return;
    }
    const bool is_live = phase == EP_LINK_LIVE;
    if (frame.kind == EP_FRAME_GOODBYE) {
        peer_said_goodbye(link, &frame, taken_frame, is_live);
    } else if (is_live && frame.kind == EP_FRAME_PING) {
        ep_rpc_link_send_bare(link, &(ep_frame){.kind = EP_FRAME_PONG, .call_id = frame.call_id});
    } else if (!is_live || frame.kind != EP_FRAME_PONG) {
        link->ops->on_frame(link, &frame, taken_frame);
        return;
    }
    ep_buffer_unref(taken_frame);
}

static void link_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    ep_rpc_link *link = arg;
    (void)conn;
    if (link->receive_traced) {
        trace_receive_end(link, error->code);
    }
    pthread_mutex_lock(&link->lock);
    link->phase = EP_LINK_CLOSED;
    link->close_asked = true;
    set_why_locked(link, error);
    ep_error why = link->why;
    pthread_mutex_unlock(&link->lock);
    disarm(link);
    link->ops->on_closed(link, &why);
    ep_rpc_link_unref(link);
}

/* ---- life ---- */

void ep_rpc_link_init(ep_rpc_link *link, const ep_rpc_link_ops *ops, const ep_rpc_common *common,
                      ep_conn *taken_conn)
{
    *link = (ep_rpc_link){.ops = ops,
                          .common = common,
                          .conn = taken_conn,
                          .refs = 1,
                          .phase = EP_LINK_NEW,
                          .peer_name = ""};
    /* besides the lane's limit in bytes: each send holds a pool buffer of at least 4 KiB */
    link->sends_max = 2 * common->limits.calls_per_connection_max + 64;
    link->handler = (ep_conn_handler){
        .on_begin = link_begin, .on_frame = link_frame, .on_closed = link_closed, .arg = link};
    link->received_ns = ep_clock_now_ns();
    link->hello_wait_ms = common->limits.hello_timeout_ms;
    pthread_mutex_init(&link->lock, NULL);
    ep_timer_init(&link->timer, link_timer, link);
}

void ep_rpc_link_start(ep_rpc_link *link)
{
    ep_rpc_link_ref(link); /* the open connection's reference, dropped in link_closed */
    pthread_mutex_lock(&link->lock);
    ep_err err = arm_locked(link, ep_clock_now_ns() + link->hello_wait_ms * EP_NS_PER_MS);
    pthread_mutex_unlock(&link->lock);
    ep_conn_start(link->conn, &link->handler);
    if (err != EP_OK) {
        close_without_timer(link);
    }
}

void ep_rpc_link_set_crc(ep_rpc_link *link, bool payload_crc)
{
    pthread_mutex_lock(&link->lock);
    link->payload_crc = payload_crc;
    pthread_mutex_unlock(&link->lock);
}

void ep_rpc_link_go_live(ep_rpc_link *link, const char *peer_name, ep_buffer_pool *pool)
{
    pthread_mutex_lock(&link->lock);
    bool live = link->phase == EP_LINK_NEW;
    ep_err err = EP_OK;
    if (live) {
        link->peer_name = peer_name;
        link->phase = EP_LINK_LIVE;
        ep_conn_allow_large(link->conn, pool);
        if (link->common->limits.ping_ms != 0) {
            err = arm_locked(link, ep_clock_now_ns() + link->common->limits.ping_ms * EP_NS_PER_MS);
        }
    }
    pthread_mutex_unlock(&link->lock);
    if (err != EP_OK) {
        close_without_timer(link);
    }
    if (live && link->common->limits.ping_ms == 0) {
        disarm(link);
    }
}
