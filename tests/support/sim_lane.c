/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated lane: listeners, dials and connections. Each connection has one event, which does
 * one thing per run: end, take a packet that has arrived, or put the next frame on its link.
 * Packets on their way are in the receiver's list.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "support/sim_network.h"

/* most bytes on the way or unread; one frame is always allowed */
#define WINDOW_BYTES ((size_t)256 << 10)
#define RETRANSMIT_MIN_NS (200 * EP_NS_PER_MS)
#define RETRANSMIT_MAX_NS (2 * EP_NS_PER_S)
#define GIVE_UP_NS (60 * EP_NS_PER_S)
#define DIAL_RETRY_NS (100 * EP_NS_PER_MS)
#define DIAL_GIVE_UP_NS (5 * EP_NS_PER_S)
#define MEMORY_RETRY_NS (5 * EP_NS_PER_MS)

typedef enum packet_kind {
    PACKET_FRAME,
    PACKET_CUT_SHORT, /* the connection breaks inside this frame */
    PACKET_END
} packet_kind;

typedef struct packet {
    packet_kind kind;
    bool repeated; /* not counted in the window */
    uint64_t sent_ns;
    uint64_t due_ns;
    uint64_t retransmit_ns;
    size_t bytes;
    struct packet *next;
    uint8_t data[];
} packet;

struct sim_listener {
    ep_lane_listener lane;
    ep_sim_host_id host;
    bool accepting;
    sim_listener *next;
};

typedef struct sim_dial {
    ep_lane_dial lane;
    ep_sim *sim;
    ep_sim_event event; /* with the lane's reference */
    ep_sim_host_id host;
    uint64_t begin_ns;
} sim_dial;

struct sim_conn {
    ep_lane_conn lane; /* its lock is the network's */
    ep_sim *sim;
    ep_sim_event event; /* posted with a reference */
    ep_sim_host_id host;
    sim_conn *peer;          /* a reference; NULL once finished */
    packet *arriving;        /* by due_ns */
    size_t on_the_way_bytes; /* sent, and not yet taken by the peer */
    uint64_t link_free_ns;   /* rate limit */
    uint64_t memory_ns;      /* retry time after a lack of memory; 0: none */
    bool end_told;           /* this end told the peer, or the peer told it */
    bool in_run;
    sim_conn *next;
    sim_conn *previous;
};

/* ---- connection: references, list, event ---- */

static void lock(ep_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
}

static void unlock(ep_sim *sim)
{
    pthread_mutex_unlock(&sim->lock);
}

static void list_add(sim_conn *conn)
{
    ep_sim *sim = conn->sim;
    conn->previous = sim->conns_tail;
    *(sim->conns_tail != NULL ? &sim->conns_tail->next : &sim->conns) = conn;
    sim->conns_tail = conn;
}

static void list_remove(sim_conn *conn)
{
    ep_sim *sim = conn->sim;
    *(conn->previous != NULL ? &conn->previous->next : &sim->conns) = conn->next;
    *(conn->next != NULL ? &conn->next->previous : &sim->conns_tail) = conn->previous;
    conn->next = NULL;
    conn->previous = NULL;
}

static bool may_transmit(const sim_conn *conn)
{
    const ep_send *send = conn->lane.queue.head;
    return send != NULL && (conn->on_the_way_bytes == 0 ||
                            conn->on_the_way_bytes + send->total_bytes <= WINDOW_BYTES);
}

static uint64_t next_due_ns(const sim_conn *conn)
{
    uint64_t due_ns = EP_TIME_NEVER;
    if (conn->peer == NULL) {
        return EP_TIME_NEVER;
    }
    if (conn->lane.closing) {
        return conn->lane.started || conn->lane.released || conn->lane.queue.head != NULL
                   ? conn->sim->now_ns
                   : EP_TIME_NEVER;
    }
    if (conn->arriving != NULL && (conn->lane.started || conn->arriving->kind == PACKET_END)) {
        due_ns =
            conn->arriving->due_ns > conn->memory_ns ? conn->arriving->due_ns : conn->memory_ns;
    }
    if (may_transmit(conn) && conn->link_free_ns < due_ns) {
        due_ns = conn->link_free_ns;
    }
    return due_ns;
}

/* Posts the connection's event for its next action. */
static void arm(sim_conn *conn)
{
    if (conn->in_run) {
        return; /* it is posted at the end of the run */
    }
    bool was_posted = ep_sim_cancel_event(conn->sim, &conn->event);
    uint64_t due_ns = next_due_ns(conn);
    if (due_ns != EP_TIME_NEVER) {
        EP_ASSERT(ep_sim_post_event(conn->sim, &conn->event, conn->host, due_ns) == EP_OK);
        if (!was_posted) {
            ep_lane_conn_ref(&conn->lane);
        }
    } else if (was_posted) {
        ep_lane_conn_unref(&conn->lane);
    }
}

/* ---- the wire ---- */

static ep_sim_link *link_of(const sim_conn *from)
{
    return &from->sim->links[from->host][from->peer->host];
}

/* Whether the way from one host to the other is blocked now. */
static bool is_blocked(const ep_sim *sim, ep_sim_host_id from, ep_sim_host_id to)
{
    return sim->links[from][to].cut || sim->hosts[from].state == EP_SIM_STOPPED ||
           sim->hosts[to].state == EP_SIM_STOPPED;
}

static void insert(sim_conn *to, packet *p)
{
    packet **at = &to->arriving;
    while (*at != NULL && (*at)->due_ns <= p->due_ns) {
        at = &(*at)->next;
    }
    p->next = *at;
    *at = p;
    arm(to);
}

static uint64_t last_due_ns(const sim_conn *to)
{
    uint64_t due_ns = 0;
    for (const packet *p = to->arriving; p != NULL; p = p->next) {
        due_ns = p->due_ns;
    }
    return due_ns;
}

static uint64_t travel_ns(ep_sim *sim, const ep_sim_link *link)
{
    return link->delay_ns + ep_sim_random_below(sim, link->jitter_ns + 1);
}

/* NULL: no memory; the frame then counts as lost. */
static packet *packet_make(sim_conn *from, packet_kind kind, size_t bytes)
{
    packet *p = calloc(1, sizeof(*p) + bytes);
    if (p != NULL) {
        p->kind = kind;
        p->bytes = bytes;
        p->sent_ns = from->sim->now_ns;
        p->due_ns = from->sim->now_ns + travel_ns(from->sim, link_of(from));
        p->retransmit_ns = RETRANSMIT_MIN_NS;
    }
    return p;
}

static bool is_ending(const sim_conn *conn)
{
    return conn->peer == NULL || conn->lane.closing;
}

/* Sends the end of the stream behind the packets on their way. It is never lost, since it would be
 * repeated until received. */
static void send_end(sim_conn *from)
{
    sim_conn *to = from->peer;
    packet *p = is_ending(to) ? NULL : packet_make(from, PACKET_END, 0);
    if (p != NULL) {
        uint64_t last_ns = last_due_ns(to);
        p->due_ns = p->due_ns < last_ns ? last_ns : p->due_ns;
        insert(to, p);
    }
}

/* Lock held. The lane was started, is closing, or was released. */
static void wake(ep_lane_conn *lane)
{
    sim_conn *conn = (sim_conn *)lane;
    if (lane->closing && !conn->end_told) {
        conn->end_told = true;
        send_end(conn);
    }
    arm(conn);
}

/* Ends this end and tells the peer. The first reason stays. */
static void end_both(sim_conn *conn, ep_err code, const char *text)
{
    ep_error error;
    ep_error_set(&error, code, "%s", text);
    if (ep_lane_conn_begin_end(&conn->lane, &error)) {
        wake(&conn->lane);
    }
}

/* Ends this end only: the peer knows, or cannot be told. */
static void begin_end(sim_conn *conn, ep_err code, const char *text)
{
    conn->end_told = true;
    end_both(conn, code, text);
}

static void flip_bit(sim_conn *from, packet *p)
{
    uint64_t bit = ep_sim_random_below(from->sim, p->bytes * 8);
    p->data[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    from->sim->stats.corrupted++;
}

/* Delivers as TCP does: losses cost time, the order stays. */
static void deliver_in_order(sim_conn *from, packet *p)
{
    ep_sim *sim = from->sim;
    const ep_sim_link *link = link_of(from);
    for (uint64_t again_ns = RETRANSMIT_MIN_NS; ep_sim_chance(sim, link->loss_ppm); again_ns *= 2) {
        sim->stats.lost++;
        p->due_ns += again_ns > RETRANSMIT_MAX_NS ? RETRANSMIT_MAX_NS : again_ns;
    }
    if (ep_sim_chance(sim, link->truncate_ppm)) {
        p->kind = PACKET_CUT_SHORT;
        sim->stats.truncated++;
    }
    uint64_t last_ns = last_due_ns(from->peer);
    p->due_ns = p->due_ns < last_ns ? last_ns : p->due_ns;
    insert(from->peer, p);
}

static void deliver_hostile(sim_conn *from, packet *p)
{
    ep_sim *sim = from->sim;
    const ep_sim_link *link = link_of(from);
    if (ep_sim_chance(sim, link->duplicate_ppm)) {
        packet *twin = packet_make(from, PACKET_FRAME, p->bytes);
        if (twin != NULL) {
            memcpy(twin->data, p->data, p->bytes);
            twin->repeated = true;
            twin->due_ns += ep_sim_random_below(sim, 20 * link->delay_ns + 1);
            sim->stats.duplicated++;
            insert(from->peer, twin);
        }
    }
    if (ep_sim_chance(sim, link->reorder_ppm)) {
        sim->stats.reordered++;
        p->due_ns += ep_sim_random_below(sim, 10 * link->delay_ns + 1);
    }
    if (link->cut || ep_sim_chance(sim, link->loss_ppm)) {
        sim->stats.lost++;
        from->on_the_way_bytes -= p->bytes;
        free(p);
        return;
    }
    insert(from->peer, p);
}

static void transmit(sim_conn *conn)
{
    ep_sim *sim = conn->sim;
    const ep_send *send = conn->lane.queue.head;
    const ep_sim_link *link = link_of(conn);
    if (link->bytes_per_s != 0) {
        conn->link_free_ns =
            sim->now_ns + (uint64_t)send->total_bytes * EP_NS_PER_S / link->bytes_per_s;
    }
    packet *p = is_ending(conn->peer) ? NULL : packet_make(conn, PACKET_FRAME, send->total_bytes);
    if (p != NULL) {
        ep_send_copy(send, 0, p->data, p->bytes);
        ep_sim_trace_words(sim, 's', conn->host, conn->peer->host, p->bytes);
        ep_sim_trace_bytes(sim, p->data, p->bytes);
        conn->on_the_way_bytes += p->bytes;
        if (ep_sim_chance(sim, link->corrupt_ppm)) {
            flip_bit(conn, p);
        }
        if (link->hostile) {
            deliver_hostile(conn, p);
        } else {
            deliver_in_order(conn, p);
        }
    }
    ep_lane_conn_advance(&conn->lane, send->total_bytes, NULL);
    unlock(sim);
    ep_lane_conn_report_sent(&conn->lane);
    lock(sim);
}

/* Delays a packet that meets a cut or a stopped host; after a minute the sender gives up. */
static bool waits_for_link(sim_conn *conn, packet *p)
{
    ep_sim *sim = conn->sim;
    const sim_conn *from = conn->peer;
    if (!is_blocked(sim, from->host, conn->host)) {
        return false;
    }
    sim->stats.cut_waits++;
    if (sim->links[from->host][conn->host].hostile && p->kind == PACKET_FRAME) {
        return false; /* it was already on its way */
    }
    if (sim->now_ns - p->sent_ns > GIVE_UP_NS) {
        begin_end(conn->peer, EP_ERR_CONNECTION_LOST, "the peer acknowledged nothing for a minute");
        begin_end(conn, EP_ERR_CONNECTION_LOST, "the connection was reset");
        return true;
    }
    p->due_ns = sim->now_ns + p->retransmit_ns;
    p->retransmit_ns =
        p->retransmit_ns * 2 > RETRANSMIT_MAX_NS ? RETRANSMIT_MAX_NS : p->retransmit_ns * 2;
    for (packet *after = p->next; after != NULL; after = after->next) {
        after->due_ns = after->due_ns < p->due_ns ? p->due_ns : after->due_ns; /* keeps the order */
    }
    return true;
}

static void drop_packet(sim_conn *conn, packet *p)
{
    packet **at = &conn->arriving;
    while (*at != p) {
        at = &(*at)->next;
    }
    *at = p->next;
    if (p->kind != PACKET_END && !p->repeated && conn->peer != NULL) {
        conn->peer->on_the_way_bytes -= p->bytes;
        arm(conn->peer);
    }
    free(p);
}

/* Checks a frame as a lane does before it takes one. Errors: NO_MEMORY, try again later. */
static ep_err take_frame(sim_conn *conn, const packet *p, ep_buffer **out_frame,
                         ep_error *out_error)
{
    size_t frame_bytes = 0;
    bool large_allowed = __atomic_load_n(&conn->lane.large_allowed, __ATOMIC_ACQUIRE);
    ep_err err = ep_lane_frame_length(&conn->lane.limits, large_allowed, p->data, "simulated peer",
                                      &frame_bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (frame_bytes != p->bytes) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "frame announces %zu bytes and has %zu",
                            frame_bytes, p->bytes);
    }
    if (ep_buffer_acquire(conn->lane.limits.pool, frame_bytes, out_frame) != EP_OK) {
        return EP_ERR_NO_MEMORY;
    }
    memcpy((*out_frame)->data, p->data, p->bytes);
    return EP_OK;
}

static void receive(sim_conn *conn)
{
    ep_sim *sim = conn->sim;
    packet *p = conn->arriving;
    ep_error error;
    ep_buffer *frame = NULL;
    if (waits_for_link(conn, p)) {
        return;
    }
    if (p->kind != PACKET_FRAME) {
        bool both = p->kind == PACKET_CUT_SHORT;
        drop_packet(conn, p);
        if (both) {
            end_both(conn, EP_ERR_CONNECTION_LOST, "the connection broke in the middle of a frame");
        } else {
            begin_end(conn, EP_ERR_CONNECTION_LOST, "the peer closed the connection");
        }
        return;
    }
    ep_err err = take_frame(conn, p, &frame, &error);
    conn->memory_ns = err == EP_ERR_NO_MEMORY ? sim->now_ns + MEMORY_RETRY_NS : 0;
    __atomic_store_n(&conn->lane.memory_wait, err == EP_ERR_NO_MEMORY, __ATOMIC_RELAXED);
    if (err == EP_ERR_NO_MEMORY) {
        return;
    }
    ep_sim_trace_words(sim, 'r', conn->peer->host, conn->host, p->bytes);
    drop_packet(conn, p);
    if (err != EP_OK) {
        end_both(conn, err, error.text);
        return;
    }
    sim->stats.frames++;
    __atomic_store_n(&conn->lane.heard_ns, sim->now_ns, __ATOMIC_RELAXED);
    unlock(sim);
    conn->lane.handler.on_frame(conn->lane.handler.arg, &conn->lane.base, frame);
    lock(sim);
}

/* Lock held, dropped meanwhile. */
static void finish(sim_conn *conn)
{
    ep_sim *sim = conn->sim;
    unlock(sim);
    ep_lane_conn_let_go(&conn->lane);
    conn->lane.count = NULL;
    lock(sim);
    if (conn->peer == NULL || (!conn->lane.started && !conn->lane.released)) {
        return; /* no handler yet: on_closed waits for start or release */
    }
    while (conn->arriving != NULL) {
        drop_packet(conn, conn->arriving);
    }
    ep_sim_trace_words(sim, 'e', conn->host, conn->peer->host, conn->lane.end.code);
    sim_conn *peer = conn->peer;
    conn->peer = NULL;
    list_remove(conn);
    unlock(sim);
    ep_lane_conn_finish(&conn->lane);
    ep_lane_conn_unref(&peer->lane);
    lock(sim);
    pthread_cond_broadcast(&sim->changed);
}

static void conn_run(ep_sim_event *event, void *arg)
{
    sim_conn *conn = arg;
    ep_sim *sim = conn->sim;
    (void)event;
    lock(sim);
    conn->in_run = true;
    const packet *p = conn->arriving;
    if (conn->peer == NULL) {
        /* nothing is left to do */
    } else if (conn->lane.closing) {
        finish(conn);
    } else if (p != NULL && (conn->lane.started || p->kind == PACKET_END) &&
               p->due_ns <= sim->now_ns && conn->memory_ns <= sim->now_ns) {
        receive(conn);
    } else if (may_transmit(conn) && conn->link_free_ns <= sim->now_ns) {
        transmit(conn);
    }
    conn->in_run = false;
    arm(conn);
    unlock(sim);
    ep_lane_conn_unref(&conn->lane);
}

/* Lock held. b EP_SIM_HOSTS_MAX: all hosts. */
static void break_links(ep_sim *sim, ep_sim_host_id a, ep_sim_host_id b)
{
    for (sim_conn *conn = sim->conns; conn != NULL; conn = conn->next) {
        bool all = b == EP_SIM_HOSTS_MAX;
        if (conn->host == a && (all || conn->peer->host == b)) {
            end_both(conn, EP_ERR_CONNECTION_LOST, "the connection was reset");
        }
    }
}

void ep_sim_break(ep_sim *sim, ep_sim_host_id a, ep_sim_host_id b)
{
    lock(sim);
    ep_sim_trace_words(sim, 'b', a, b, 0);
    break_links(sim, a, b);
    unlock(sim);
}

void ep_sim_set_host_state(ep_sim *sim, ep_sim_host_id host, ep_sim_host_state state)
{
    lock(sim);
    if (state == EP_SIM_DEAD) {
        break_links(sim, host, EP_SIM_HOSTS_MAX);
    }
    ep_sim_network_set_host_state(sim, host, state);
    unlock(sim);
}

/* ---- connection: its making, and sending ---- */

static sim_conn *conn_create(const ep_lane_ops *lane, ep_sim *sim, ep_sim_host_id host,
                             const ep_lane_limits *limits, ep_accept_count *taken_count,
                             const char *peer_url)
{
    sim_conn *conn = calloc(1, sizeof(*conn));
    EP_ASSERT(conn != NULL);
    ep_lane_conn_init(&conn->lane, lane, limits, taken_count, wake);
    ep_lane_conn_ref(&conn->lane); /* the peer's reference */
    conn->lane.lock = &sim->lock;
    conn->sim = sim;
    conn->host = host;
    conn->event = (ep_sim_event){.run = conn_run, .arg = conn};
    snprintf(conn->lane.peer, sizeof(conn->lane.peer), "%s", peer_url);
    list_add(conn);
    return conn;
}

static ep_err sim_conn_send(ep_conn *base, ep_send *send)
{
    sim_conn *conn = (sim_conn *)base;
    lock(conn->sim);
    ep_err err = ep_lane_conn_queue(&conn->lane, send);
    if (err == EP_OK) {
        arm(conn);
    }
    unlock(conn->sim);
    return err;
}

/* ---- listener ---- */

static sim_listener *find_listener(const ep_sim *sim, const char *url)
{
    for (sim_listener *listener = sim->listeners; listener != NULL; listener = listener->next) {
        if (strcmp(listener->lane.url, url) == 0) {
            return listener;
        }
    }
    return NULL;
}

static ep_err check_url(const char *url, ep_error *out_error)
{
    size_t n = strlen(url);
    if (ep_sim_current == NULL || !ep_url_has_scheme(url, "sim") || n == strlen("sim://") ||
        n >= EP_ADDRESS_BYTES) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "address '%.64s' must be sim://name, up to %d characters, in a simulated network", url,
            EP_ADDRESS_BYTES - 1);
    }
    return EP_OK;
}

static ep_err sim_listen(ep_listener *base, const ep_lane_address *address, ep_error *out_error)
{
    sim_listener *listener = (sim_listener *)base;
    ep_err err = check_url(address->url, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_sim *sim = ep_sim_current;
    lock(sim);
    if (find_listener(sim, address->url) != NULL) {
        err = ep_error_set(out_error, EP_ERR_UNAVAILABLE, "address %s is in use", address->url);
    } else {
        listener->host = ep_sim_find_host(sim, address->url);
        listener->next = sim->listeners;
        sim->listeners = listener;
    }
    unlock(sim);
    return err;
}

static void sim_listener_close(ep_listener *base)
{
    sim_listener *listener = (sim_listener *)base;
    ep_sim *sim = ep_sim_current;
    lock(sim);
    for (sim_listener **at = &sim->listeners; *at != NULL; at = &(*at)->next) {
        if (*at == listener) {
            *at = listener->next;
            break;
        }
    }
    EP_ASSERT(!listener->accepting || !ep_sim_on_runner(sim));
    while (listener->accepting) {
        pthread_cond_wait(&sim->changed, &sim->lock);
    }
    unlock(sim);
    ep_lane_listener_free(&listener->lane);
}

/* ---- dial ---- */

/* Makes the connection and passes an end to on_accept. Lock held; dropped for on_accept. */
static ep_err connect_to_listener(sim_dial *dial, sim_conn **out_dialed, ep_error *out_error)
{
    ep_sim *sim = dial->sim;
    sim_listener *listener = find_listener(sim, dial->lane.url);
    if (listener == NULL || sim->hosts[listener->host].state == EP_SIM_DEAD) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "nobody listens on %s", dial->lane.url);
    }
    if (!ep_accept_count_add(listener->lane.count, listener->lane.limits.connections_max)) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "%s has connections_max %u connections", dial->lane.url,
                            listener->lane.limits.connections_max);
    }
    const ep_lane_ops *ops = dial->lane.base.ops;
    sim_conn *dialed = conn_create(ops, sim, dial->host, &dial->lane.limits, NULL, dial->lane.url);
    sim_conn *accepted = conn_create(ops, sim, listener->host, &listener->lane.limits,
                                     listener->lane.count, sim->hosts[dial->host].name);
    dialed->peer = accepted;
    accepted->peer = dialed;
    *out_dialed = dialed;
    ep_sim_host_id host = sim->host;
    sim->host = listener->host;
    listener->accepting = true; /* keeps it alive: close waits for this */
    unlock(sim);
    listener->lane.on_accept(listener->lane.arg, &accepted->lane.base);
    lock(sim);
    listener->accepting = false;
    sim->host = host;
    pthread_cond_broadcast(&sim->changed);
    return EP_OK;
}

/* Lets a dial that meets a cut or a stopped host try again until it times out. */
static bool dial_waits(sim_dial *dial)
{
    ep_sim *sim = dial->sim;
    ep_sim_host_id to = ep_sim_find_host(sim, dial->lane.url);
    bool blocked = is_blocked(sim, dial->host, to) || is_blocked(sim, to, dial->host);
    if (!blocked || sim->now_ns - dial->begin_ns >= DIAL_GIVE_UP_NS) {
        return false;
    }
    sim->stats.cut_waits++;
    return ep_sim_post_event(sim, &dial->event, dial->host, sim->now_ns + DIAL_RETRY_NS) == EP_OK;
}

static void dial_run(ep_sim_event *event, void *arg)
{
    sim_dial *dial = arg;
    ep_sim *sim = dial->sim;
    sim_conn *conn = NULL;
    ep_error error;
    ep_err err;
    bool cancelled = ep_lane_dial_is_cancelled(&dial->lane);
    (void)event;
    lock(sim);
    if (!cancelled && dial_waits(dial)) {
        unlock(sim);
        return;
    }
    if (cancelled) {
        err = EP_ERR_CANCELLED;
    } else if (sim->now_ns - dial->begin_ns >= DIAL_GIVE_UP_NS) {
        err = ep_error_set(&error, EP_ERR_UNAVAILABLE, "no answer from %s within 5 s",
                           dial->lane.url);
    } else {
        err = connect_to_listener(dial, &conn, &error);
    }
    ep_sim_trace_words(sim, 'd', dial->host, err, 0);
    unlock(sim);
    ep_lane_dial_report(&dial->lane, conn != NULL ? &conn->lane.base : NULL, &error);
    ep_lane_dial_over(&dial->lane);
}

static void dial_cancel(ep_lane_dial *base)
{
    sim_dial *dial = (sim_dial *)base;
    if (ep_sim_cancel(dial->sim, &dial->event)) {
        ep_lane_dial_over(base);
    }
}

static ep_err sim_dial_begin(ep_dial *base, const ep_lane_address *address, ep_error *out_error)
{
    sim_dial *dial = (sim_dial *)base;
    ep_err err = check_url(address->url, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_sim *sim = ep_sim_current;
    dial->lane.cancel = dial_cancel;
    dial->sim = sim;
    dial->event = (ep_sim_event){.run = dial_run, .arg = dial};
    lock(sim);
    dial->host = sim->host;
    dial->begin_ns = sim->now_ns;
    const ep_sim_link *link = &sim->links[dial->host][ep_sim_find_host(sim, address->url)];
    err = ep_sim_post_event(sim, &dial->event, dial->host, sim->now_ns + 2 * travel_ns(sim, link));
    unlock(sim);
    return err == EP_OK ? EP_OK : ep_error_set(out_error, err, "no memory for a dial");
}

static const char *const schemes[] = {"sim", NULL};

const ep_lane_ops ep_sim_lane = {
    .name = "sim",
    .schemes = schemes,
    .listener_bytes = sizeof(sim_listener),
    .dial_bytes = sizeof(sim_dial),
    .listen = sim_listen,
    .listener_close = sim_listener_close,
    .dial = sim_dial_begin,
    .conn_send = sim_conn_send,
};
