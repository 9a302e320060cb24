/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of lib/transport/transport.h, run over each lane (CONTRACT_SCHEME). */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "lane_fixture.h"

static lane_world world;
static side client;
static side server;

static void open_world(void)
{
    world_open(&world, CONTRACT_SCHEME);
}

static void close_world(void)
{
    world_close(&world);
}

TestSuite(transport, .init = open_world, .fini = close_world, .timeout = 300);

static void open_pair(void)
{
    world_listen(&world);
    pair_open(&world, &client, &server);
}

static void start_pair(void)
{
    world_listen(&world);
    pair_start(&world, &client, &server);
}

/* As on_closed: the test releases the connection itself, since it still calls it after the end. */
static void keep_handle(side *s)
{
    (void)s;
}

/* Sends as soon as the queue has room: waits for an earlier frame to be done when it is full. */
static void send_when_room(side *from, uint64_t sequence, size_t bytes)
{
    for (;;) {
        pthread_mutex_lock(&from->lock);
        uint64_t done = from->done_ok;
        pthread_mutex_unlock(&from->lock);
        ep_err err = send_and_forget(from, sequence, bytes);
        if (err == EP_OK) {
            return;
        }
        cr_assert_eq(err, EP_ERR_RESOURCE_EXHAUSTED);
        pthread_mutex_lock(&from->lock);
        while (from->done_ok == done) {
            pthread_cond_wait(&from->changed, &from->lock);
        }
        pthread_mutex_unlock(&from->lock);
    }
}

Test(transport, carries_frames_both_ways)
{
    start_pair();
    for (uint64_t i = 0; i < 10; i++) {
        cr_assert_eq(send_and_forget(&client, i, 100 + i), EP_OK);
        cr_assert_eq(send_and_forget(&server, i, 5000 + i), EP_OK);
    }
    side_wait_frames(&server, 10);
    side_wait_frames(&client, 10);
    pair_close(&client, &server);
    cr_assert_eq(client.done_ok, 10u);
    cr_assert_eq(client.end.code, EP_ERR_CLOSED);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST, "%s", server.end.text);
}

Test(transport, carries_frames_of_every_size)
{
    const size_t sizes[] = {64,
                            65,
                            127,
                            128,
                            4095,
                            4096,
                            16383,
                            16384,
                            16385,
                            32768,
                            (1 << 20) - 1,
                            1 << 20,
                            (1 << 20) + 1,
                            FRAME_BYTES_MAX - 1,
                            FRAME_BYTES_MAX};
    start_pair();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        cr_assert_eq(send_and_forget(&client, i, sizes[i]), EP_OK);
    }
    side_wait_frames(&server, sizeof(sizes) / sizeof(sizes[0]));
    pair_close(&client, &server);
}

Test(transport, refuses_to_send_what_is_no_frame)
{
    start_pair();
    message *m = message_create(&client, 0, FRAME_BYTES_MAX + 1);
    cr_assert_eq(message_send(m), EP_ERR_INVALID_ARGUMENT);
    m->send.parts[0].bytes = 63;
    cr_assert_eq(message_send(m), EP_ERR_INVALID_ARGUMENT);
    m->send.parts_count = 0;
    cr_assert_eq(message_send(m), EP_ERR_INVALID_ARGUMENT);
    m->send.parts_count = EP_SEND_PARTS_MAX + 1;
    cr_assert_eq(message_send(m), EP_ERR_INVALID_ARGUMENT);
    m->send.parts_count = 2;
    m->send.parts[1] = (ep_send_part){.data = NULL, .bytes = 64};
    cr_assert_eq(message_send(m), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(m->done_calls, 0u);
    message_free(m);
    pair_close(&client, &server);
}

Test(transport, closes_on_a_frame_above_the_receivers_limit)
{
    world.limits.frame_bytes_max = 1 << 16;
    world_listen(&world);
    world.limits.frame_bytes_max = FRAME_BYTES_MAX;
    pair_start(&world, &client, &server);
    cr_assert_eq(send_and_forget(&client, 0, 1 << 16), EP_OK);
    cr_assert_eq(send_and_forget(&client, 1, (1 << 16) + 1), EP_OK);
    pair_wait_closed(&client, &server);
    cr_assert_eq(server.frames, 1u);
    cr_assert_eq(server.end.code, EP_ERR_RESOURCE_EXHAUSTED, "%s", server.end.text);
    cr_assert_not_null(strstr(server.end.text, "65536"), "%s", server.end.text);
    cr_assert_eq(client.end.code, EP_ERR_CONNECTION_LOST, "%s", client.end.text);
    cr_assert_eq(client.done_ok + client.done_failed, 2u);
}

static void allow_large_then_keep_count(side *s, ep_buffer *frame)
{
    ep_conn_allow_large(s->conn, NULL);
    pthread_mutex_lock(&s->lock);
    s->fault = s->fault != NULL ? s->fault : fixture_verify(frame, s->frames);
    s->frames++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    ep_buffer_unref(frame);
}

Test(transport, a_large_first_frame_closes_and_takes_no_memory)
{
    ep_buffer_pool *own;
    ep_buffer_pool_stats stats;
    cr_assert_eq(ep_buffer_pool_create(0, 0, &own), EP_OK);
    ep_buffer_pool *shared = world.limits.pool;
    world.limits.first_frame_bytes_max = 4096;
    world.limits.pool = own;
    world_listen(&world);
    world.limits.first_frame_bytes_max = 0;
    world.limits.pool = shared;
    pair_start(&world, &client, &server);
    cr_assert_eq(send_and_forget(&client, 0, 4096), EP_OK);
    cr_assert_eq(send_and_forget(&client, 1, 1 << 20), EP_OK);
    pair_wait_closed(&client, &server);
    cr_assert_eq(server.frames, 1u);
    cr_assert_eq(server.end.code, EP_ERR_RESOURCE_EXHAUSTED, "%s", server.end.text);
    cr_assert_not_null(strstr(server.end.text, "first_frame_bytes_max is 4096"), "%s",
                       server.end.text);
    ep_buffer_pool_read_stats(own, &stats);
    cr_assert_leq(stats.lent_bytes_peak, 8192u);
    ep_buffer_pool_destroy(own);
}

Test(transport, takes_large_frames_once_they_are_allowed)
{
    world.limits.first_frame_bytes_max = 64;
    open_pair();
    server.on_frame = allow_large_then_keep_count;
    side_start(&client);
    side_start(&server);
    cr_assert_eq(send_and_forget(&client, 0, 64), EP_OK);
    cr_assert_eq(send_and_forget(&client, 1, 1 << 20), EP_OK); /* the very next one */
    side_wait_frames(&server, 2);
    ep_conn_receiving receiving;
    ep_conn_read_receiving(server.conn, &receiving);
    cr_assert(receiving.heard_ns > 0 && !receiving.waits_for_memory);
    pair_close(&client, &server);
}

Test(transport, closes_on_a_prefix_that_is_garbage)
{
    start_pair();
    message *m = message_create(&client, 0, 4096);
    memset(m->bytes, 0xa5, 64);
    cr_assert_eq(message_send(m), EP_OK);
    pair_wait_closed(&client, &server);
    message_wait(m);
    cr_assert_eq(m->done_calls, 1u);
    message_free(m);
    cr_assert_eq(server.end.code, EP_ERR_PROTOCOL, "%s", server.end.text);
    cr_assert_eq(server.frames, 0u);
    cr_assert_eq(client.end.code, EP_ERR_CONNECTION_LOST, "%s", client.end.text);
}

static void send_in_parts(uint64_t *sequence, size_t bytes)
{
    for (uint32_t parts = 1; parts <= EP_SEND_PARTS_MAX; parts++) {
        message *m = message_create(&client, (*sequence)++, bytes);
        m->on_done = message_free;
        message_split(m, parts);
        cr_assert_eq(message_send(m), EP_OK);
    }
}

Test(transport, gathers_lists_of_up_to_64_parts_some_of_them_empty)
{
    uint64_t sequence = 0;
    start_pair();
    send_in_parts(&sequence, 200);
    send_in_parts(&sequence, 30000);
    send_in_parts(&sequence, 400001);
    side_wait_frames(&server, sequence);
    pair_close(&client, &server);
    cr_assert_eq(client.done_ok, sequence);
}

Test(transport, gathers_small_and_large_parts_mixed)
{
    start_pair();
    for (uint64_t sequence = 0; sequence < 8; sequence++) {
        const size_t bytes = (1 << 20) + 777;
        message *m = message_create(&client, sequence, bytes);
        m->on_done = message_free;
        size_t at = 0;
        uint32_t parts = 0;
        while (at < bytes) {
            size_t piece = parts == 63      ? bytes - at
                           : parts % 2 == 0 ? 64 + parts
                                            : 17000 + sequence * 1000;
            piece = piece < bytes - at ? piece : bytes - at;
            m->send.parts[parts++] = (ep_send_part){.data = m->bytes + at, .bytes = piece};
            at += piece;
        }
        m->send.parts_count = parts;
        cr_assert_eq(message_send(m), EP_OK);
    }
    side_wait_frames(&server, 8);
    pair_close(&client, &server);
}

Test(transport, carries_a_frame_whose_tensor_has_no_bytes)
{
    start_pair();
    message *m = message_create(&client, 0, 64);
    m->send.parts[1] = (ep_send_part){.data = NULL, .bytes = 0};
    m->send.parts[2] = (ep_send_part){.data = m->bytes, .bytes = 0};
    m->send.parts_count = 3;
    cr_assert_eq(message_send(m), EP_OK);
    side_wait_frames(&server, 1);
    message_wait(m);
    cr_assert_eq(m->result, EP_OK);
    pair_close(&client, &server);
    message_free(m);
}

Test(transport, keeps_the_order_of_10000_frames)
{
    start_pair();
    for (uint64_t i = 0; i < 10000; i++) {
        send_when_room(&client, i, 64 + (i * 37) % 3000);
    }
    side_wait_frames(&server, 10000);
    pair_close(&client, &server);
    cr_assert_eq(client.done_ok, 10000u);
    cr_assert_eq(client.done_failed, 0u);
}

Test(transport, keeps_large_frames_apart_when_they_are_taken_in_pieces)
{
    start_pair();
    /* far above any socket buffer, so each leaves in many partial writes */
    for (uint64_t i = 0; i < 6; i++) {
        cr_assert_eq(send_and_forget(&client, 2 * i, FRAME_BYTES_MAX - i), EP_OK);
        cr_assert_eq(send_and_forget(&client, 2 * i + 1, 70), EP_OK);
        cr_assert_eq(send_and_forget(&server, 2 * i, FRAME_BYTES_MAX - 3 * i), EP_OK);
        cr_assert_eq(send_and_forget(&server, 2 * i + 1, 700), EP_OK);
    }
    side_wait_frames(&server, 12);
    side_wait_frames(&client, 12);
    pair_close(&client, &server);
}

Test(transport, pushes_back_on_a_peer_that_does_not_read_and_loses_nothing)
{
    world.limits.send_queue_bytes_max = FRAME_BYTES_MAX;
    open_pair();
    side_start(&client);
    uint64_t sent = 0;
    ep_err err;
    while ((err = send_and_forget(&client, sent, 256 << 10)) == EP_OK) {
        sent++;
        cr_assert_lt(sent, 10000u, "no back-pressure");
    }
    cr_assert_eq(err, EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_geq(sent, 16u);
    side_start(&server);
    side_wait_frames(&server, sent);
    send_when_room(&client, sent, 100);
    side_wait_frames(&server, sent + 1);
    pair_close(&client, &server);
    cr_assert_eq(client.done_ok, sent + 1);
}

static ep_buffer *kept[64];
static unsigned kept_count;

static void keep_frame(side *s, ep_buffer *frame)
{
    pthread_mutex_lock(&s->lock);
    kept[kept_count++] = frame;
    pthread_mutex_unlock(&s->lock);
}

static void wait_kept(side *s, unsigned count)
{
    pthread_mutex_lock(&s->lock);
    while (kept_count < count) {
        pthread_cond_wait(&s->changed, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
}

Test(transport, waits_for_memory_and_drops_nothing)
{
    ep_buffer_pool *small;
    cr_assert_eq(ep_buffer_pool_create(4 * 65536, 0, &small), EP_OK);
    world.limits.pool = small;
    open_pair();
    server.on_frame = keep_frame;
    side_start(&client);
    side_start(&server);
    for (uint64_t i = 0; i < 12; i++) {
        cr_assert_eq(send_and_forget(&client, i, 60000), EP_OK);
    }
    for (unsigned round = 0; round < 3; round++) {
        wait_kept(&server, 4 * (round + 1));
        ep_buffer_pool_stats stats;
        /* until the lane has been refused, which is certain to come while frames are waiting */
        do {
            ep_buffer_pool_read_stats(small, &stats);
        } while (round < 2 && stats.refusals <= round);
        for (unsigned i = 0; i < 4; i++) {
            cr_assert_null(fixture_verify(kept[4 * round + i], 4 * round + i));
            ep_buffer_unref(kept[4 * round + i]);
        }
    }
    pair_close(&client, &server);
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(small, &stats);
    cr_assert_eq(stats.lent_bytes, 0u);
    ep_buffer_pool_destroy(small);
}

Test(transport, closes_while_it_waits_for_memory)
{
    ep_buffer_pool *small;
    cr_assert_eq(ep_buffer_pool_create(65536, 0, &small), EP_OK);
    world.limits.pool = small;
    open_pair();
    server.on_frame = keep_frame;
    side_start(&client);
    side_start(&server);
    for (uint64_t i = 0; i < 3; i++) {
        cr_assert_eq(send_and_forget(&client, i, 60000), EP_OK);
    }
    ep_conn_receiving receiving;
    do { /* it says that it waits */
        ep_conn_read_receiving(server.conn, &receiving);
    } while (!receiving.waits_for_memory);
    side_close(&server);
    pair_wait_closed(&client, &server);
    ep_buffer_unref(kept[0]);
    ep_buffer_pool_destroy(small);
}

Test(transport, fails_what_is_queued_when_this_side_closes)
{
    open_pair();
    side_start(&client);
    for (uint64_t i = 0; i < 12; i++) {
        cr_assert_eq(send_and_forget(&client, i, FRAME_BYTES_MAX), EP_OK);
    }
    side_close(&client);
    side_wait_closed(&client);
    cr_assert_eq(client.done_ok + client.done_failed, 12u);
    cr_assert_gt(client.done_failed, 0u);
    ep_conn_release(server.conn); /* never started */
}

Test(transport, refuses_to_send_once_closed)
{
    open_pair();
    client.on_closed = keep_handle;
    side_start(&client);
    side_start(&server);
    message *m = message_create(&client, 0, 64);
    side_close(&client);
    side_close(&client); /* again is harmless */
    cr_assert_eq(message_send(m), EP_ERR_CLOSED);
    pair_wait_closed(&client, &server);
    cr_assert_eq(message_send(m), EP_ERR_CLOSED);
    cr_assert_eq(m->done_calls, 0u);
    message_free(m);
    ep_conn_release(client.conn);
}

Test(transport, keeps_the_handle_until_it_is_released)
{
    open_pair();
    client.on_closed = keep_handle;
    side_start(&client);
    side_start(&server);
    side_close(&server);
    pair_wait_closed(&client, &server);
    cr_assert_eq(client.end.code, EP_ERR_CONNECTION_LOST);
    message *m = message_create(&client, 0, 64);
    cr_assert_eq(message_send(m), EP_ERR_CLOSED);
    cr_assert_eq(m->done_calls, 0u);
    message_free(m);
    ep_conn_close(client.conn);
    ep_conn_release(client.conn);
}

Test(transport, calls_on_closed_after_an_early_release)
{
    open_pair();
    client.on_closed = keep_handle;
    side_start(&client);
    side_start(&server);
    cr_assert_eq(send_and_forget(&client, 0, 1 << 20), EP_OK);
    inside_lane_call = true;
    ep_conn_release(client.conn);
    inside_lane_call = false;
    pair_wait_closed(&client, &server);
    cr_assert_eq(client.end.code, EP_ERR_CLOSED);
    cr_assert_eq(client.done_ok + client.done_failed, 1u);
}

Test(transport, tells_a_connection_started_after_its_end)
{
    open_pair();
    side_start(&client);
    side_close(&client);
    side_wait_closed(&client);
    side_start(&server);
    side_wait_closed(&server);
    cr_assert_eq(server.end.code, EP_ERR_CONNECTION_LOST);
    pair_open(&world, &client, &server);
    side_close(&server); /* closed before it was started */
    side_start(&server);
    side_start(&client);
    pair_wait_closed(&client, &server);
    cr_assert_eq(server.end.code, EP_ERR_CLOSED);
}

static void close_in_frame(side *s, ep_buffer *frame)
{
    ep_buffer_unref(frame);
    ep_conn_close(s->conn);
    ep_conn_close(s->conn);
}

Test(transport, may_be_closed_inside_on_frame)
{
    open_pair();
    server.on_frame = close_in_frame;
    client.on_closed = keep_handle;
    server.on_closed = keep_handle;
    side_start(&client);
    side_start(&server);
    for (uint64_t i = 0; i < 100; i++) {
        if (send_and_forget(&client, i, 20000) != EP_OK) {
            break;
        }
    }
    pair_wait_closed(&client, &server);
    cr_assert_eq(server.end.code, EP_ERR_CLOSED);
    ep_conn_release(client.conn);
    ep_conn_release(server.conn);
}

static void release_in_frame(side *s, ep_buffer *frame)
{
    ep_buffer_unref(frame);
    if (s->arg == NULL) {
        s->arg = s;
        ep_conn_release(s->conn);
    }
}

Test(transport, may_be_released_inside_on_frame)
{
    open_pair();
    server.on_frame = release_in_frame;
    server.on_closed = keep_handle;
    side_start(&client);
    side_start(&server);
    cr_assert_eq(send_and_forget(&client, 0, 20000), EP_OK);
    pair_wait_closed(&client, &server);
}

static void close_in_done(message *m)
{
    ep_conn_close(m->from->conn);
    message_free(m);
}

Test(transport, may_be_closed_inside_done)
{
    open_pair();
    client.on_closed = keep_handle;
    side_start(&client);
    side_start(&server);
    message *m = message_create(&client, 0, 5000);
    m->on_done = close_in_done;
    cr_assert_eq(message_send(m), EP_OK);
    for (uint64_t i = 1; i < 50; i++) {
        if (send_and_forget(&client, i, 5000) != EP_OK) {
            break;
        }
    }
    pair_wait_closed(&client, &server);
    cr_assert_eq(client.end.code, EP_ERR_CLOSED);
    ep_conn_release(client.conn);
}

static void send_next(message *m)
{
    side *s = m->from;
    uint64_t next = s->done_ok; /* all earlier ones */
    message_free(m);
    if (next < 200) {
        message *n = message_create(s, next, 64 + next * 100);
        n->on_done = send_next;
        if (ep_conn_send(s->conn, &n->send) != EP_OK) {
            message_free(n);
        }
    }
}

Test(transport, may_send_inside_done)
{
    start_pair();
    message *m = message_create(&client, 0, 64);
    m->on_done = send_next;
    cr_assert_eq(message_send(m), EP_OK);
    side_wait_frames(&server, 200);
    pair_close(&client, &server);
}

/* Among others. The fixture fails a done() inside of ep_conn_send: there the caller would have done
 * the writing. */
Test(transport, patient_frames_keep_their_place_and_are_not_written_by_the_caller)
{
    start_pair();
    for (uint64_t i = 0; i < 300; i++) {
        message *m = message_create(&client, i, 64 + (i * 991) % 40000);
        m->send.is_patient = i % 3 != 0;
        m->send.done_inside = m->send.is_patient;
        cr_assert_eq(message_send(m), EP_OK);
        message_wait(m);
        message_free(m);
        if (i % 10 == 0) {
            side_wait_frames(&server, i + 1);
        }
    }
    side_wait_frames(&server, 300);
    pair_close(&client, &server);
}

/* Until the connection is closed under it. Returns how many were taken. */
static void *send_done_inside(void *arg)
{
    static const size_t sizes[] = {64, 300, 5000, 40000, 300000};
    side *s = arg;
    ep_err err = EP_OK;
    uint64_t taken = 0;
    while (err == EP_OK || err == EP_ERR_RESOURCE_EXHAUSTED) {
        message *m = message_create(s, taken, sizes[taken % 5]);
        m->send.done_inside = true;
        m->on_done = message_free;
        err = message_send(m);
        if (err == EP_OK) {
            taken++;
        } else {
            message_free(m);
            sched_yield();
        }
    }
    return (void *)(uintptr_t)taken;
}

/* The fixture sees whether a done() comes twice or after on_closed. */
Test(transport, runs_done_once_also_inside_the_send_while_the_connection_closes)
{
    world_listen(&world);
    for (uint64_t round = 0; round < 20; round++) {
        void *taken;
        pthread_t sender;
        pair_open(&world, &client, &server);
        client.on_closed = keep_handle;
        side_start(&client);
        side_start(&server);
        cr_assert_eq(pthread_create(&sender, NULL, send_done_inside, &client), 0);
        side_wait_frames(&server, 1 + round * 10);
        ep_conn_close(round % 2 == 0 ? client.conn : server.conn);
        pthread_join(sender, &taken);
        pair_wait_closed(&client, &server);
        cr_assert_eq(client.done_ok + client.done_failed, (uint64_t)(uintptr_t)taken);
        ep_conn_release(client.conn);
    }
}

static void echo_frame(side *s, ep_buffer *frame)
{
    uint64_t sequence = fixture_sequence(frame);
    size_t bytes = frame->bytes;
    const char *wrong = fixture_verify(frame, s->frames);
    ep_buffer_unref(frame);
    message *m = message_create(s, sequence, bytes);
    m->on_done = message_free;
    if (wrong != NULL || ep_conn_send(s->conn, &m->send) != EP_OK) {
        message_free(m);
        ep_conn_close(s->conn);
        return;
    }
    pthread_mutex_lock(&s->lock);
    s->frames++;
    pthread_mutex_unlock(&s->lock);
}

Test(transport, may_send_inside_on_frame)
{
    open_pair();
    server.on_frame = echo_frame;
    side_start(&client);
    side_start(&server);
    for (uint64_t i = 0; i < 1000; i++) {
        send_when_room(&client, i, 64 + (i * 991) % 40000);
    }
    side_wait_frames(&client, 1000);
    pair_close(&client, &server);
}

Test(transport, sends_before_it_is_started)
{
    open_pair();
    cr_assert_eq(send_and_forget(&client, 0, 300), EP_OK);
    side_start(&server);
    if (world_is(&world, "tls+tcp")) {
        side_start(&client); /* the handshake needs both directions */
    }
    side_wait_frames(&server, 1);
    if (!world_is(&world, "tls+tcp")) {
        side_start(&client);
    }
    pair_close(&client, &server);
}

Test(transport, refuses_a_dial_nobody_listens_for)
{
    ep_error error;
    start_pair();
    ep_listener_close(world.listener);
    world.listener = NULL;
    cr_assert_null(world_dial(&world, &error));
    cr_assert_eq(error.code, EP_ERR_UNAVAILABLE, "%s", error.text);
    cr_assert_eq(send_and_forget(&client, 0, 1000), EP_OK); /* accepted connections live on */
    side_wait_frames(&server, 1);
    pair_close(&client, &server);
}

static unsigned dial_calls;
static ep_conn *dial_conn;
static ep_err dial_code;

static void count_dial(void *arg, ep_conn *conn, const ep_error *error)
{
    (void)arg;
    dial_code = error != NULL ? error->code : EP_OK;
    dial_conn = conn;
    __atomic_add_fetch(&dial_calls, 1, __ATOMIC_ACQ_REL);
}

static void release_accepted(void *arg, ep_conn *conn)
{
    (void)arg;
    ep_conn_release(conn);
}

/* Before the thread that serves it begins, while it opens the listener, and just after: the moment
 * is not known, so 100 are tried. */
Test(transport, closes_a_listener_at_once)
{
    ep_lane_address address;
    ep_error error;
    world_address(&world, true, &address);
    for (unsigned i = 0; i < 1000; i++) {
        ep_listener *listener;
        cr_assert_eq(ep_lane_listen(world.ops, &address, &world.limits, release_accepted, NULL,
                                    &listener, &error),
                     EP_OK, "%s", error.text);
        const uint64_t until_ns = ep_clock_now_ns() + i % 100 * 1000;
        while (ep_clock_now_ns() < until_ns) {
        }
        ep_listener_close(listener);
    }
}

/* *out_dial: where to dial. */
static void listen_and_release(ep_lane_address *out_dial)
{
    ep_lane_address address;
    ep_error error;
    world_address(&world, true, &address);
    cr_assert_eq(ep_lane_listen(world.ops, &address, &world.limits, release_accepted, NULL,
                                &world.listener, &error),
                 EP_OK, "%s", error.text);
    ep_listener_url(world.listener, world.dial_url, sizeof(world.dial_url));
    world_address(&world, false, out_dial);
}

/* Before the lane has begun the dial, meanwhile and after: the moment is not known, so many are
 * tried. */
Test(transport, reports_a_cancelled_dial_once)
{
    ep_lane_address address;
    ep_error error;
    unsigned cancelled = 0;
    listen_and_release(&address);
    for (unsigned i = 0; i < 4000; i++) {
        ep_dial *dial;
        cr_assert_eq(
            ep_lane_dial_begin(world.ops, &address, &world.limits, count_dial, NULL, &dial, &error),
            EP_OK, "%s", error.text);
        const uint64_t until_ns = ep_clock_now_ns() + i % 100 * 500;
        while (ep_clock_now_ns() < until_ns) {
        }
        ep_dial_release(dial);
        cr_assert_eq(__atomic_load_n(&dial_calls, __ATOMIC_ACQUIRE), i + 1);
        cr_assert((dial_conn == NULL) == (dial_code == EP_ERR_CANCELLED));
        cancelled += dial_conn == NULL;
        if (dial_conn != NULL) {
            ep_conn_release(dial_conn);
        }
    }
    cr_assert_gt(cancelled, 0u);
}

#define CHILDREN 60
#define FDS_MAX 1024

static bool dialing_ends; /* atomic */

static void *dial_on(void *arg)
{
    const ep_lane_address *address = arg;
    while (!__atomic_load_n(&dialing_ends, __ATOMIC_ACQUIRE)) {
        ep_dial *dial;
        ep_error error;
        const unsigned before = __atomic_load_n(&dial_calls, __ATOMIC_ACQUIRE);
        cr_assert_eq(
            ep_lane_dial_begin(world.ops, address, &world.limits, count_dial, NULL, &dial, &error),
            EP_OK, "%s", error.text);
        while (__atomic_load_n(&dial_calls, __ATOMIC_ACQUIRE) == before) {
            sched_yield();
        }
        ep_dial_release(dial);
        if (dial_conn != NULL) {
            ep_conn_release(dial_conn);
        }
    }
    return NULL;
}

/* Sockets that this process has, or had when `before` was filled. Only calls of a forked child. */
static unsigned find_sockets(bool before[FDS_MAX], bool fills)
{
    unsigned found = 0;
    for (int fd = 0; fd < FDS_MAX; fd++) {
        int family;
        socklen_t bytes = sizeof(family);
        bool is = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &bytes) == 0;
        found += is && !before[fd];
        before[fd] = fills ? is : before[fd];
    }
    return found;
}

/* Whenever it was forked: a socket that is just being made or accepted is one too. nng tells nobody
 * which are its own. */
Test(transport, a_child_of_a_process_that_connects_has_none_of_its_sockets)
{
    static bool before[FDS_MAX];
    ep_lane_address address;
    pthread_t dialer;
    unsigned holders = 0;
    if (world.ops == &ep_nng_stream_lane) {
        return;
    }
    find_sockets(before, true);
    listen_and_release(&address);
    cr_assert_eq(pthread_create(&dialer, NULL, dial_on, &address), 0);
    for (int i = 0; i < CHILDREN; i++) {
        int status;
        pid_t child = fork();
        cr_assert_geq(child, 0);
        if (child == 0) {
            _exit(find_sockets(before, false) > 0);
        }
        cr_assert_eq(waitpid(child, &status, 0), child);
        holders += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    __atomic_store_n(&dialing_ends, true, __ATOMIC_RELEASE);
    pthread_join(dialer, NULL);
    cr_assert_eq(holders, 0u,
                 "%u of %d children held a socket of the lane: EP_LANE_FD makes it known", holders,
                 CHILDREN);
}

/* The threads that would end them are the parent's, so there is nothing to wait for. */
Test(transport, a_forked_child_that_closes_its_copies_returns)
{
    start_pair();
    pid_t child = fork_child();
    if (child == 0) {
        alarm(30);
        message *m = message_create(&client, 0, 64);
        bool is_refused = message_send(m) == EP_ERR_CLOSED && ep_conn_unacked(client.conn) == 0;
        ep_conn_close(client.conn);
        ep_conn_release(client.conn);
        ep_conn_release(server.conn);
        ep_listener_close(world.listener);
        ep_transport_fini();
        _exit(is_refused ? 0 : 1);
    }
    expect_child_exits(child);
    cr_assert_eq(send_and_forget(&client, 0, 5000), EP_OK);
    side_wait_frames(&server, 1);
    pair_close(&client, &server);
}

static sem_t dial_begun;
static sem_t dial_goes_on;

static void hold_dial(void *arg, ep_conn *conn, const ep_error *error)
{
    sem_post(&dial_begun);
    while (sem_wait(&dial_goes_on) != 0) {
    }
    count_dial(arg, conn, error);
}

/* on_dial runs in the parent: a child that waited for it would do so for ever. */
Test(transport, a_forked_child_that_releases_its_copy_of_a_dial_returns)
{
    ep_lane_address address;
    ep_error error;
    ep_dial *dial;
    sem_init(&dial_begun, 0, 0);
    sem_init(&dial_goes_on, 0, 0);
    world_listen(&world);
    world_address(&world, false, &address);
    cr_assert_eq(
        ep_lane_dial_begin(world.ops, &address, &world.limits, hold_dial, NULL, &dial, &error),
        EP_OK, "%s", error.text);
    while (sem_wait(&dial_begun) != 0) {
    }
    pid_t child = fork_child();
    if (child == 0) {
        alarm(30);
        ep_dial_release(dial);
        _exit(0);
    }
    expect_child_exits(child);
    sem_post(&dial_goes_on);
    ep_dial_release(dial);
    cr_assert_eq(dial_code, EP_OK);
    ep_conn_release(dial_conn);
    ep_conn_release(world_take_accepted(&world));
}

/* What serves the parent's objects is not there; the lane begins anew. */
Test(transport, a_forked_child_may_open_the_lane_again)
{
    if (world.ops == &ep_nng_stream_lane || world_is(&world, "sim")) {
        return; /* check_fork says so; the simulated network is the parent's */
    }
    start_pair();
    pid_t child = fork_child();
    if (child == 0) {
        alarm(30);
        side near;
        side far;
        strcat(world.url, world.folder[0] != '\0' ? "2" : "");
        world_listen(&world);
        pair_start(&world, &near, &far);
        pair_close(&near, &far);
        ep_listener_close(world.listener);
        ep_transport_fini();
        _exit(0);
    }
    expect_child_exits(child);
    cr_assert_eq(send_and_forget(&client, 0, 5000), EP_OK);
    side_wait_frames(&server, 1);
    pair_close(&client, &server);
}

Test(transport, refuses_wrong_arguments_by_name)
{
    ep_error error;
    ep_listener stale_listener; /* what the pointers held before: never left in them */
    ep_dial stale_dial;
    ep_listener *listener = &stale_listener;
    ep_dial *dial = &stale_dial;
    ep_lane_address address;
    world_listen(&world);
    world_address(&world, false, &address);
    ep_lane_limits limits = world.limits;
    limits.send_queue_bytes_max = limits.frame_bytes_max - 1;
    cr_assert_eq(ep_lane_dial_begin(world.ops, &address, &limits, count_dial, NULL, &dial, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_not_null(strstr(error.text, "send_queue_bytes_max"), "%s", error.text);
    cr_assert_null(dial);
    limits = world.limits;
    limits.connections_max = 0;
    world_address(&world, true, &address);
    cr_assert_eq(
        ep_lane_listen(world.ops, &address, &limits, release_accepted, NULL, &listener, &error),
        EP_ERR_INVALID_ARGUMENT);
    cr_assert_not_null(strstr(error.text, "connections_max"), "%s", error.text);
    cr_assert_null(listener);
    address.url = world.dial_url;
    cr_assert_eq(ep_lane_listen(world.ops, &address, &world.limits, release_accepted, NULL,
                                &listener, &error),
                 EP_ERR_UNAVAILABLE, "%s", error.text);
    address.url = "ftp://127.0.0.1:1";
    cr_assert_eq(
        ep_lane_dial_begin(world.ops, &address, &world.limits, count_dial, NULL, &dial, &error),
        EP_ERR_INVALID_ARGUMENT);
    cr_assert_null(ep_lane_for_url("ftp://127.0.0.1:1"));
    cr_assert_null(ep_lane_for_url(""));
}

Test(transport, refuses_connections_above_connections_max)
{
    world.limits.connections_max = 2;
    world_listen(&world);
    side others[2];
    pair_open(&world, &client, &server);
    pair_open(&world, &others[0], &others[1]);
    ep_error error;
    side extra;
    side_init(&extra);
    extra.conn = world_dial(&world, &error);
    if (extra.conn != NULL) { /* a network lane may tell only afterwards */
        side_start(&extra);
        side_wait_closed(&extra);
        cr_assert_eq(extra.end.code, EP_ERR_CONNECTION_LOST);
    } else {
        cr_assert_eq(error.code, EP_ERR_RESOURCE_EXHAUSTED, "%s", error.text);
    }
    cr_assert_eq(world.accepts, 2u);
    side_start(&client);
    side_start(&server);
    side_start(&others[0]);
    side_start(&others[1]);
    pair_close(&client, &server);
    pair_start(&world, &client, &server); /* the place is free again */
    pair_close(&client, &server);
    pair_close(&others[0], &others[1]);
}

Test(transport, says_who_the_peer_is_and_whether_to_trust_the_bytes)
{
    char peer[EP_ADDRESS_BYTES];
    start_pair();
    ep_conn_peer(client.conn, peer, sizeof(peer));
    if (world.kind->is_named) {
        cr_assert_str_eq(peer, world.dial_url);
    } else {
        cr_assert_not_null(strstr(world.dial_url, strrchr(peer, ':')), "%s %s", peer,
                           world.dial_url);
    }
    cr_assert_eq(ep_conn_is_trusted(client.conn), world.kind->is_trusted);
    pair_close(&client, &server);
}

#define MANY 1000

static bool raise_descriptors(rlim_t want)
{
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < want) {
        limit.rlim_cur = limit.rlim_max < want ? limit.rlim_max : want;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    return limit.rlim_cur >= want;
}

Test(transport, holds_1000_connections)
{
    if (!raise_descriptors(2 * MANY + 200)) {
        cr_skip_test("not enough descriptors allowed");
    }
    side *clients = calloc(MANY, sizeof(*clients));
    side *servers = calloc(MANY, sizeof(*servers));
    unsigned count = world_is(&world, "tls+tcp") ? 100 : MANY; /* a handshake costs milliseconds */
    world_listen(&world);
    for (unsigned i = 0; i < count; i++) {
        pair_open(&world, &clients[i], &servers[i]);
        servers[i].on_frame = echo_frame;
        side_start(&clients[i]);
        side_start(&servers[i]);
    }
    for (uint64_t round = 0; round < 3; round++) {
        for (unsigned i = 0; i < count; i++) {
            cr_assert_eq(send_and_forget(&clients[i], round, 200 + i), EP_OK);
        }
        for (unsigned i = 0; i < count; i++) {
            side_wait_frames(&clients[i], round + 1);
        }
    }
    for (unsigned i = 0; i < count; i++) {
        side_close(i % 2 == 0 ? &clients[i] : &servers[i]);
    }
    for (unsigned i = 0; i < count; i++) {
        pair_wait_closed(&clients[i], &servers[i]);
    }
    free(clients);
    free(servers);
}
