/* SPDX-License-Identifier: Apache-2.0 */
/* SP's REP over the stream lane: connections, slots, the queue of waiting requests. */
#include "transport/nng_rep_door.h"

#include <endian.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/thread.h"
#include "transport/lane_accept.h"

#define SP_PROTOCOL_REQ 0x30
#define SP_PROTOCOL_REP 0x31
#define SP_PREFIX_BYTES 8
#define SP_IDS_BYTES_MAX 64 /* request id and up to 15 hops */
#define SP_ID_BYTES 4
/* how much longer than frame_bytes_max a message may be to still get an answer */
#define OVERSIZE_BYTES 4096
#define WAITING_PER_SLOT 4
#define LOOK_MS 500u /* how often all connections are checked */
#define SLOW_LOOKS_MAX 4u
/* clients dial at their start, but send a request only when they have one */
#define FIRST_REQUEST_MS 30000u
#define IDLE_MS 300000u
#define LAST_SEND_WAIT_NS (250 * EP_NS_PER_MS) /* for replies being sent when the door closes */

static const uint8_t sp_request_hello[SP_PREFIX_BYTES] = {0, 'S', 'P', 0, 0, SP_PROTOCOL_REQ, 0, 0};
static const uint8_t sp_reply_hello[SP_PREFIX_BYTES] = {0, 'S', 'P', 0, 0, SP_PROTOCOL_REP, 0, 0};

typedef struct rep_conn {
    ep_nng_rep_door *door;
    ep_conn *conn;
    char peer[EP_ADDRESS_BYTES];
    bool hello_done; /* written by its lane thread; atomic for the door's thread */
    uint64_t accepted_ns;
    uint64_t request_ns; /* atomic: when the last request arrived; 0: none has */
    ep_send hello_send;
    /* the fields below are under door->lock */
    uint32_t refs; /* those of the lane, of each slot with a request of it, and of each send */
    uint32_t waiting;
    uint32_t slow_looks; /* how many checks in a row found its message too slow */
    bool turned_away;
    bool closed;
    struct rep_conn *next;
    struct rep_conn *previous;
} rep_conn;

/* A request as received, until it is answered. */
typedef struct rep_request {
    rep_conn *from;
    uint8_t ids[SP_IDS_BYTES_MAX];
    size_t ids_bytes;
    ep_buffer *bytes; /* NULL: given to the handler, or error is the reason */
    ep_error error;
    struct rep_request *next;
} rep_request;

typedef struct rep_slot {
    rep_request *request; /* NULL: free */
    ep_nng_rep_ticket ticket;
} rep_slot;

typedef struct rep_send {
    ep_send send;
    rep_conn *to;
    uint8_t head[SP_PREFIX_BYTES + SP_IDS_BYTES_MAX];
    ep_nng_rep_reply reply;
} rep_send;

struct ep_nng_rep_door {
    ep_nng_rep_limits limits;
    ep_lane_limits lane_limits;
    uint32_t places; /* the limit of connections that are not being closed */
    ep_nng_rep_handler handler;
    ep_listener *listener;
    /* starts waiting requests, and closes connections that use their place for nothing */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work; /* wakes the thread */
    pthread_cond_t idle; /* signalled when something ended */
    rep_slot *slots;
    uint32_t slots_used;
    ep_nng_rep_ticket last_ticket;
    rep_request *first;
    rep_request *last;
    size_t waiting_bytes;
    rep_conn *conns;
    uint32_t notices; /* callbacks running for requests without a slot */
    bool stopping;
    ep_nng_rep_stats stats;
};

/* ---- SP ---- */

static ep_err sp_frame_bytes(const uint8_t *prefix, size_t *out_frame_bytes, ep_error *out_error)
{
    uint64_t length;
    /* read as a length this would be 23 petabytes */
    if (memcmp(prefix, sp_request_hello, 4) == 0) {
        *out_frame_bytes = SP_PREFIX_BYTES;
        return EP_OK;
    }
    memcpy(&length, prefix, sizeof(length));
    length = be64toh(length);
    if (length < SP_ID_BYTES || length > SIZE_MAX / 2) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "SP message of %llu bytes, allowed at least %d",
                            (unsigned long long)length, SP_ID_BYTES);
    }
    *out_frame_bytes = SP_PREFIX_BYTES + (size_t)length;
    return EP_OK;
}

/* Bytes of ids at the beginning of a message, including the request id; 0 if there is none. */
static size_t sp_ids_bytes(const uint8_t *body, size_t bytes)
{
    for (size_t at = 0; at + SP_ID_BYTES <= bytes && at < SP_IDS_BYTES_MAX; at += SP_ID_BYTES) {
        if ((body[at] & 0x80) != 0) {
            return at + SP_ID_BYTES;
        }
    }
    return 0;
}

/* ---- connections ---- */

/* Lock held, released on return. */
static void conn_unref_and_unlock(rep_conn *conn)
{
    ep_nng_rep_door *door = conn->door;
    bool last = --conn->refs == 0;
    if (last) {
        *(conn->previous != NULL ? &conn->previous->next : &door->conns) = conn->next;
        if (conn->next != NULL) {
            conn->next->previous = conn->previous;
        }
        door->stats.connections--;
        ep_conn *taken = conn->conn;
        door->notices++; /* the door waits until the connection is released */
        pthread_mutex_unlock(&door->lock);
        ep_conn_release(taken);
        free(conn);
        pthread_mutex_lock(&door->lock);
        door->notices--;
    }
    pthread_cond_broadcast(&door->idle);
    pthread_mutex_unlock(&door->lock);
}

static void request_free(rep_request *request)
{
    ep_buffer_unref(request->bytes);
    free(request);
}

/* Lock held: removes *at from the waiting requests. */
static rep_request *take_waiting_locked(ep_nng_rep_door *door, rep_request **at)
{
    rep_request *request = *at;
    *at = request->next;
    door->stats.requests_waiting--;
    door->waiting_bytes -= request->bytes != NULL ? request->bytes->bytes : 0;
    request->from->waiting--;
    return request;
}

/* Lock held. Removes the waiting requests of conn (NULL: all). */
static void drop_waiting_locked(ep_nng_rep_door *door, const rep_conn *conn)
{
    rep_request **at = &door->first;
    door->last = NULL;
    while (*at != NULL) {
        if (conn != NULL && (*at)->from != conn) {
            door->last = *at;
            at = &(*at)->next;
        } else {
            request_free(take_waiting_locked(door, at));
        }
    }
}

static void conn_closed(void *arg, ep_conn *lane_conn, const ep_error *error)
{
    rep_conn *conn = arg;
    ep_nng_rep_door *door = conn->door;
    (void)lane_conn;
    (void)error;
    pthread_mutex_lock(&door->lock);
    conn->closed = true;
    drop_waiting_locked(door, conn);
    for (uint32_t i = 0; i < door->limits.slots; i++) {
        ep_nng_rep_ticket ticket = door->slots[i].ticket;
        if (door->slots[i].request != NULL && door->slots[i].request->from == conn) {
            pthread_mutex_unlock(&door->lock);
            door->handler.on_gone(door->handler.arg, i, ticket);
            pthread_mutex_lock(&door->lock);
        }
    }
    conn_unref_and_unlock(conn);
}

/* Lock held. Why the connection should be closed; NULL: keep it. refs of 1 means that no slot has
 * its request and no reply is being sent. */
static const char *judge_locked(rep_conn *conn, uint64_t now_ns)
{
    const ep_nng_rep_limits *limits = &conn->door->limits;
    ep_conn_receiving receiving = {0};
    if (conn->closed || conn->turned_away) {
        return NULL;
    }
    if (!__atomic_load_n(&conn->hello_done, __ATOMIC_ACQUIRE)) {
        return now_ns - conn->accepted_ns > limits->hello_timeout_ms * EP_NS_PER_MS
                   ? "no SP hello in time"
                   : NULL;
    }
    ep_conn_read_receiving(conn->conn, &receiving);
    conn->slow_looks = ep_conn_receiving_is_slow(&receiving, now_ns) ? conn->slow_looks + 1 : 0;
    if (conn->slow_looks >= SLOW_LOOKS_MAX) {
        return "its message comes too slowly";
    }
    uint64_t request_ns = __atomic_load_n(&conn->request_ns, __ATOMIC_RELAXED);
    uint64_t patience_ms = request_ns == 0 ? FIRST_REQUEST_MS : IDLE_MS;
    uint64_t since_ns = request_ns == 0 ? conn->accepted_ns : request_ns;
    bool idle = conn->refs == 1 && conn->waiting == 0 && receiving.begun_ns == 0;
    if (idle && now_ns > since_ns && now_ns - since_ns > patience_ms * EP_NS_PER_MS) {
        /* nng's clients dial again by themselves */
        return request_ns == 0 ? "no request in time" : "no request for long";
    }
    return NULL;
}

/* Lock held. Only starts closing; the connection ends in its own callbacks. */
static void turn_one_away_locked(rep_conn *conn, const char *why)
{
    conn->turned_away = true;
    ep_conn_close(conn->conn);
    conn->door->handler.on_turned_away(conn->door->handler.arg, conn->peer, why);
}

/* Lock held. Closes the connections that are too slow or idle. */
static void turn_away_locked(ep_nng_rep_door *door, uint64_t now_ns)
{
    for (rep_conn *conn = door->conns; conn != NULL; conn = conn->next) {
        const char *why = judge_locked(conn, now_ns);
        if (why != NULL) {
            turn_one_away_locked(conn, why);
        }
    }
}

/* ---- sending ---- */

static void hello_sent(ep_send *send, ep_err result)
{
    rep_conn *conn = send->arg;
    (void)result;
    pthread_mutex_lock(&conn->door->lock);
    conn_unref_and_unlock(conn);
}

static void reply_sent(ep_send *send, ep_err result)
{
    rep_send *out = send->arg;
    rep_conn *to = out->to;
    ep_nng_rep_door *door = to->door;
    size_t bytes = send->total_bytes;
    out->reply.done(out->reply.arg);
    free(out);
    pthread_mutex_lock(&door->lock);
    door->stats.sends_queued--;
    door->stats.bytes_sent += result == EP_OK ? bytes : 0;
    door->stats.replies_dropped += result == EP_OK ? 0 : 1;
    conn_unref_and_unlock(to);
}

/* Takes a reference of request->from. */
static void send_reply(const rep_request *request, const ep_nng_rep_reply *reply)
{
    rep_conn *to = request->from;
    ep_nng_rep_door *door = to->door;
    rep_send *out = calloc(1, sizeof(*out));
    ep_err err = out != NULL ? EP_OK : EP_ERR_NO_MEMORY;
    if (err == EP_OK) {
        uint64_t length = request->ids_bytes;
        EP_ASSERT(reply->parts_count < EP_SEND_PARTS_MAX);
        for (size_t i = 0; i < reply->parts_count; i++) {
            length += reply->parts[i].bytes;
            out->send.parts[i + 1] = reply->parts[i];
        }
        length = htobe64(length);
        memcpy(out->head, &length, sizeof(length));
        memcpy(out->head + SP_PREFIX_BYTES, request->ids, request->ids_bytes);
        out->send.parts[0] =
            (ep_send_part){.data = out->head, .bytes = SP_PREFIX_BYTES + request->ids_bytes};
        out->send.parts_count = (uint32_t)reply->parts_count + 1;
        out->send.done = reply_sent;
        out->send.arg = out;
        out->to = to;
        out->reply = *reply;
        pthread_mutex_lock(&door->lock);
        door->stats.sends_queued++;
        pthread_mutex_unlock(&door->lock);
        err = ep_conn_send(to->conn, &out->send);
    }
    if (err == EP_OK) {
        return;
    }
    reply->done(reply->arg);
    ep_conn_close(to->conn); /* its caller waits for a reply that cannot come, or does not read */
    pthread_mutex_lock(&door->lock);
    door->stats.sends_queued -= out != NULL ? 1 : 0;
    door->stats.replies_dropped++;
    free(out);
    conn_unref_and_unlock(to);
}

/* ---- requests ---- */

/* Lock held, released on return: starts the request in a free slot. */
static void start_and_unlock(ep_nng_rep_door *door, rep_request *taken_request)
{
    uint32_t index = 0;
    ep_nng_rep_ticket ticket = ++door->last_ticket;
    ep_buffer *bytes = taken_request->bytes;
    while (door->slots[index].request != NULL) {
        index++;
    }
    door->slots[index] = (rep_slot){.request = taken_request, .ticket = ticket};
    taken_request->bytes = NULL;
    taken_request->from->refs++;
    door->slots_used++;
    pthread_mutex_unlock(&door->lock);
    door->handler.on_request(door->handler.arg, index, ticket, bytes,
                             bytes == NULL ? &taken_request->error : NULL);
}

/* Lock held. False when too many wait. */
static bool enqueue_locked(ep_nng_rep_door *door, rep_request *request)
{
    size_t bytes = request->bytes != NULL ? request->bytes->bytes : 0;
    if (door->stats.requests_waiting >= (uint64_t)door->limits.slots * WAITING_PER_SLOT ||
        request->from->waiting >= door->limits.slots ||
        door->waiting_bytes + bytes > 4 * door->limits.frame_bytes_max) {
        return false;
    }
    *(door->last != NULL ? &door->last->next : &door->first) = request;
    door->last = request;
    door->waiting_bytes += bytes;
    door->stats.requests_waiting++;
    request->from->waiting++;
    return true;
}

/* Lock held, released on return. */
static void refuse_and_unlock(ep_nng_rep_door *door, rep_request *taken_request)
{
    ep_nng_rep_reply reply;
    rep_conn *from = taken_request->from;
    from->refs++;
    pthread_mutex_unlock(&door->lock);
    if (door->handler.on_overload(door->handler.arg, taken_request->bytes, &reply)) {
        send_reply(taken_request, &reply);
    } else {
        pthread_mutex_lock(&door->lock);
        conn_unref_and_unlock(from);
    }
    request_free(taken_request);
}

static void take_request(rep_conn *conn, const uint8_t *body, size_t bytes, size_t ids_bytes)
{
    ep_nng_rep_door *door = conn->door;
    rep_request *request = calloc(1, sizeof(*request));
    if (request == NULL) {
        ep_conn_close(conn->conn);
        return;
    }
    request->from = conn;
    request->ids_bytes = ids_bytes;
    memcpy(request->ids, body, ids_bytes);
    size_t count = bytes - ids_bytes;
    ep_err err = ep_buffer_acquire(door->limits.pool, count > 0 ? count : 1, &request->bytes);
    if (err == EP_OK) { /* The ids in front left the body unaligned, so it is copied, once. */
        memcpy(request->bytes->data, body + ids_bytes, count);
        request->bytes->bytes = count;
    } else {
        ep_error_set(&request->error, err, "no buffer for a request of %zu bytes; try again later",
                     count);
    }
    __atomic_store_n(&conn->request_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    pthread_mutex_lock(&door->lock);
    door->stats.bytes_received += bytes;
    if (door->stopping) {
        pthread_mutex_unlock(&door->lock);
        request_free(request);
    } else if (door->slots_used < door->limits.slots && door->first == NULL) {
        start_and_unlock(door, request);
    } else if (enqueue_locked(door, request)) {
        pthread_cond_signal(&door->work);
        pthread_mutex_unlock(&door->lock);
    } else {
        refuse_and_unlock(door, request);
    }
}

static void conn_frame(void *arg, ep_conn *lane_conn, ep_buffer *taken_frame)
{
    rep_conn *conn = arg;
    const uint8_t *body = taken_frame->data + SP_PREFIX_BYTES;
    size_t bytes = taken_frame->bytes - SP_PREFIX_BYTES;
    if (!conn->hello_done) {
        bool good = bytes == 0 && memcmp(taken_frame->data, sp_request_hello, SP_PREFIX_BYTES) == 0;
        __atomic_store_n(&conn->hello_done, good, __ATOMIC_RELEASE);
        if (good) {
            ep_conn_allow_large(lane_conn, NULL);
        } else {
            ep_conn_close(lane_conn);
        }
    } else {
        size_t ids_bytes = sp_ids_bytes(body, bytes);
        if (ids_bytes == 0) {
            ep_conn_close(lane_conn);
        } else {
            take_request(conn, body, bytes, ids_bytes);
        }
    }
    ep_buffer_unref(taken_frame);
}

/* Waiting requests start on this thread, since one that frees a slot may hold a handler's locks. */
static void *door_main(void *arg)
{
    ep_nng_rep_door *door = arg;
    uint64_t look_ns = 0;
    pthread_mutex_lock(&door->lock);
    while (!door->stopping) {
        uint64_t now_ns = ep_clock_now_ns();
        if (now_ns >= look_ns) {
            look_ns = now_ns + LOOK_MS * EP_NS_PER_MS;
            turn_away_locked(door, now_ns);
        }
        if (door->first == NULL || door->slots_used == door->limits.slots) {
            ep_clock_wait(&door->work, &door->lock, look_ns);
            continue;
        }
        rep_request *request = take_waiting_locked(door, &door->first);
        door->last = door->first != NULL ? door->last : NULL;
        start_and_unlock(door, request);
        pthread_mutex_lock(&door->lock);
    }
    pthread_mutex_unlock(&door->lock);
    return NULL;
}

void ep_nng_rep_door_reply(ep_nng_rep_door *door, uint32_t index, const ep_nng_rep_reply *reply)
{
    pthread_mutex_lock(&door->lock);
    rep_request *request = door->slots[index].request;
    EP_ASSERT(request != NULL); /* each request is answered once */
    door->slots[index].request = NULL;
    door->slots_used--;
    door->notices++; /* keeps the door in use until the reply is queued */
    pthread_cond_signal(&door->work);
    if (reply == NULL) {
        conn_unref_and_unlock(request->from);
    } else {
        pthread_mutex_unlock(&door->lock);
        send_reply(request, reply);
    }
    request_free(request);
    pthread_mutex_lock(&door->lock);
    door->notices--;
    pthread_cond_broadcast(&door->idle);
    pthread_mutex_unlock(&door->lock);
}

/* ---- life ---- */

/* Lock held. False: there is no place for it. */
static bool admit_locked(ep_nng_rep_door *door, const rep_conn *newcomer)
{
    ep_accept_pick pick = {.newcomer = newcomer->peer};
    bool room;
    for (rep_conn *conn = door->conns; conn != NULL; conn = conn->next) {
        if (!conn->closed && !conn->turned_away) {
            ep_accept_pick_see(&pick, conn, conn->peer,
                               __atomic_load_n(&conn->request_ns, __ATOMIC_RELAXED) == 0);
        }
    }
    rep_conn *gone = ep_accept_pick_choose(&pick, door->places, &room);
    if (gone != NULL) {
        turn_one_away_locked(
            gone, "its place is wanted: it sent no request, and too many others have not either");
    }
    return room;
}

static void accepted(void *arg, ep_conn *taken_conn)
{
    ep_nng_rep_door *door = arg;
    rep_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL) {
        ep_conn_release(taken_conn);
        return;
    }
    ep_conn_peer(taken_conn, conn->peer, sizeof(conn->peer));
    conn->door = door;
    conn->conn = taken_conn;
    conn->refs = 2; /* those of the lane and of the greeting's send */
    conn->accepted_ns = ep_clock_now_ns();
    pthread_mutex_lock(&door->lock);
    bool room = admit_locked(door, conn);
    if (room) {
        conn->next = door->conns;
        if (conn->next != NULL) {
            conn->next->previous = conn;
        }
        door->conns = conn;
        door->stats.connections++;
    }
    pthread_mutex_unlock(&door->lock);
    if (!room) {
        free(conn);
        ep_conn_release(taken_conn);
        return;
    }
    conn->hello_send.parts[0] =
        (ep_send_part){.data = sp_reply_hello, .bytes = sizeof(sp_reply_hello)};
    conn->hello_send.parts_count = 1;
    conn->hello_send.done = hello_sent;
    conn->hello_send.arg = conn;
    const ep_conn_handler handler = {.on_frame = conn_frame, .on_closed = conn_closed, .arg = conn};
    ep_conn_start(taken_conn, &handler); /* the greeting's reference keeps conn alive */
    if (ep_conn_send(taken_conn, &conn->hello_send) != EP_OK) {
        ep_conn_close(taken_conn);
        hello_sent(&conn->hello_send, EP_ERR_CLOSED);
    }
}

static void door_free(ep_nng_rep_door *door)
{
    pthread_cond_destroy(&door->idle);
    pthread_cond_destroy(&door->work);
    pthread_mutex_destroy(&door->lock);
    free(door->slots);
    free(door);
}

static void stop_thread(ep_nng_rep_door *door)
{
    pthread_mutex_lock(&door->lock);
    door->stopping = true;
    drop_waiting_locked(door, NULL);
    pthread_cond_signal(&door->work);
    pthread_mutex_unlock(&door->lock);
    pthread_join(door->thread, NULL);
}

ep_err ep_nng_rep_door_open(const ep_lane_address *address, const ep_nng_rep_limits *limits,
                            const ep_nng_rep_handler *handler, ep_nng_rep_door **out_door,
                            ep_error *out_error)
{
    EP_ASSERT(limits->slots > 0);
    ep_nng_rep_door *door = calloc(1, sizeof(*door));
    rep_slot *slots = calloc(limits->slots, sizeof(*slots));
    if (door == NULL || slots == NULL) {
        free(door);
        free(slots);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a door of %u contexts",
                            limits->slots);
    }
    door->limits = *limits;
    door->handler = *handler;
    door->slots = slots;
    size_t message_max = limits->frame_bytes_max + OVERSIZE_BYTES;
    door->lane_limits = (ep_lane_limits){.frame_bytes = sp_frame_bytes,
                                         .prefix_bytes = SP_PREFIX_BYTES,
                                         .pool = limits->pool,
                                         .frame_bytes_max = message_max,
                                         .first_frame_bytes_max = SP_PREFIX_BYTES,
                                         .send_queue_bytes_max = 4 * message_max,
                                         .connections_max = limits->connections_max};
    door->places = ep_accept_places(&door->lane_limits, address->url);
    pthread_mutex_init(&door->lock, NULL);
    pthread_cond_init(&door->work, NULL);
    pthread_cond_init(&door->idle, NULL);
    ep_err err = ep_thread_start("ep-door", door_main, door, &door->thread);
    if (err != EP_OK) {
        door_free(door);
        return ep_error_set(out_error, err, "cannot start the door's thread");
    }
    err = ep_lane_listen(&ep_nng_stream_lane, address, &door->lane_limits, accepted, door,
                         &door->listener, out_error);
    if (err != EP_OK) {
        stop_thread(door);
        door_free(door);
        return err;
    }
    *out_door = door;
    return EP_OK;
}

void ep_nng_rep_door_url(const ep_nng_rep_door *door, char *out_url, size_t bytes)
{
    ep_listener_url(door->listener, out_url, bytes);
}

ep_err ep_nng_rep_door_renew_tls(ep_nng_rep_door *door, ep_error *out_error)
{
    return ep_nng_stream_lane.listener_renew_tls(door->listener, out_error);
}

void ep_nng_rep_door_peer(ep_nng_rep_door *door, uint32_t slot, char *out_address, size_t bytes)
{
    /* both stay until the answer */
    ep_conn_peer(door->slots[slot].request->from->conn, out_address, bytes);
}

void ep_nng_rep_door_read_stats(ep_nng_rep_door *door, ep_nng_rep_stats *out_stats)
{
    pthread_mutex_lock(&door->lock);
    *out_stats = door->stats;
    out_stats->requests_held = door->slots_used;
    pthread_mutex_unlock(&door->lock);
}

void ep_nng_rep_door_stop(ep_nng_rep_door *door)
{
    ep_listener_close(door->listener);
    stop_thread(door);
}

void ep_nng_rep_door_close(ep_nng_rep_door *door)
{
    if (door == NULL) {
        return;
    }
    pthread_mutex_lock(&door->lock);
    while (door->slots_used > 0 || door->notices > 0) {
        pthread_cond_wait(&door->idle, &door->lock);
    }
    const uint64_t until_ns = ep_clock_now_ns() + LAST_SEND_WAIT_NS;
    while (door->stats.sends_queued > 0 && ep_clock_wait(&door->idle, &door->lock, until_ns)) {
    }
    for (rep_conn *conn = door->conns; conn != NULL; conn = conn->next) {
        ep_conn_close(conn->conn); /* its callbacks come later, from other threads */
    }
    while (door->conns != NULL || door->notices > 0) {
        pthread_cond_wait(&door->idle, &door->lock);
    }
    pthread_mutex_unlock(&door->lock);
    door_free(door);
}
