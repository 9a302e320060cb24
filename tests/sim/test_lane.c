/* SPDX-License-Identifier: Apache-2.0 */
/* What the layer above sees of each fault of the simulated network. One thread, virtual time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "support/check.h"
#include "support/sim_lane.h"

#define FRAMES 50
#define BYTES 200

typedef struct end {
    ep_conn *conn;
    uint32_t got[4 * FRAMES]; /* numbers of the frames, in the order they came */
    uint32_t got_count;
    uint32_t damaged;
    uint32_t closed;
    ep_err code;
} end;

static ep_sim *sim;
static ep_buffer_pool *pool;
static ep_listener *listener;
static end client;
static end server;
static ep_error dial_error;
static uint8_t frames[FRAMES][BYTES];
static ep_send sends[FRAMES];
static uint32_t sends_done;

static ep_err frame_bytes(const uint8_t prefix[EP_FRAME_PREFIX_BYTES], size_t *out_bytes,
                          ep_error *out_error)
{
    (void)prefix;
    (void)out_error;
    *out_bytes = BYTES;
    return EP_OK;
}

static void on_frame(void *arg, ep_conn *conn, ep_buffer *frame)
{
    end *e = arg;
    uint32_t number = frame->data[0];
    (void)conn;
    if (number >= FRAMES || memcmp(frame->data, frames[number], BYTES) != 0) {
        e->damaged++;
    } else {
        e->got[e->got_count++] = number;
    }
    ep_buffer_unref(frame);
}

static void on_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    end *e = arg;
    e->closed++;
    e->code = error->code;
    ep_conn_release(conn);
}

static void start(end *e, ep_conn *conn)
{
    e->conn = conn;
    ep_conn_start(conn, &(ep_conn_handler){.on_frame = on_frame, .on_closed = on_closed, .arg = e});
}

static void on_accept(void *arg, ep_conn *conn)
{
    (void)arg;
    start(&server, conn);
}

static void on_dial(void *arg, ep_conn *conn, const ep_error *error)
{
    (void)arg;
    if (conn != NULL) {
        start(&client, conn);
    } else {
        dial_error = *error;
    }
}

static void on_done(ep_send *send, ep_err result)
{
    (void)send;
    (void)result;
    sends_done++;
}

static ep_lane_limits limits(void)
{
    return (ep_lane_limits){.frame_bytes = frame_bytes,
                            .pool = pool,
                            .frame_bytes_max = BYTES,
                            .send_queue_bytes_max = FRAMES * BYTES,
                            .connections_max = 8};
}

static ep_sim_host_id host_of_client(void)
{
    return ep_sim_host(sim, "client");
}

static ep_sim_host_id host_of_server(void)
{
    return ep_sim_host(sim, "sim://server");
}

static void dial(void)
{
    ep_dial *d = NULL;
    ep_error error;
    ep_lane_limits l = limits();
    ep_error_clear(&dial_error);
    CHECK(ep_lane_dial_begin(&ep_sim_lane, &(ep_lane_address){.url = "sim://server"}, &l, on_dial,
                             NULL, &d, &error) == EP_OK);
    ep_sim_run_until(sim, ep_sim_now_ns(sim) + 6 * EP_NS_PER_S);
    ep_dial_release(d);
}

static void open_world(uint64_t seed)
{
    ep_error error;
    memset(&client, 0, sizeof(client));
    memset(&server, 0, sizeof(server));
    sends_done = 0;
    CHECK(ep_sim_create(seed, EP_NS_PER_S, &sim) == EP_OK);
    CHECK(ep_buffer_pool_create(0, 0, &pool) == EP_OK);
    ep_lane_limits l = limits();
    CHECK(ep_lane_listen(&ep_sim_lane, &(ep_lane_address){.url = "sim://server"}, &l, on_accept,
                         NULL, &listener, &error) == EP_OK);
    ep_sim_enter(sim, host_of_client());
    dial();
    CHECK(client.conn != NULL && server.conn != NULL);
}

static void send_all(void)
{
    for (uint32_t i = 0; i < FRAMES; i++) {
        memset(frames[i], (int)(i * 7), BYTES);
        frames[i][0] = (uint8_t)i;
        sends[i] = (ep_send){.parts = {{frames[i], BYTES}}, .parts_count = 1, .done = on_done};
        CHECK(ep_conn_send(client.conn, &sends[i]) == EP_OK);
    }
}

static void run(uint64_t ns)
{
    ep_sim_run_until(sim, ep_sim_now_ns(sim) + ns);
}

static bool in_order(void)
{
    for (uint32_t i = 0; i < server.got_count; i++) {
        if (server.got[i] != i) {
            return false;
        }
    }
    return true;
}

static uint64_t close_world(void)
{
    if (client.closed == 0) {
        ep_conn_close(client.conn);
    }
    ep_listener_close(listener);
    while (ep_sim_run_one(sim)) {
    }
    CHECK(client.closed == 1 && server.closed == 1);
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(pool, &stats);
    CHECK(stats.lent_bytes == 0);
    uint64_t hash = ep_sim_trace_hash(sim);
    ep_sim_destroy(sim);
    ep_buffer_pool_destroy(pool);
    return hash;
}

static void to_server(ep_sim_link link)
{
    link.delay_ns = link.delay_ns != 0 ? link.delay_ns : EP_NS_PER_MS;
    ep_sim_set_link(sim, host_of_client(), host_of_server(), &link);
}

static void losses_cost_time_and_keep_order(void)
{
    open_world(1);
    to_server((ep_sim_link){.loss_ppm = 300000, .jitter_ns = 3 * EP_NS_PER_MS});
    send_all();
    CHECK(server.got_count == 0); /* nothing happens inside a call */
    run(5 * EP_NS_PER_MS);
    CHECK(server.got_count < FRAMES);
    run(120 * EP_NS_PER_S);
    CHECK(server.got_count == FRAMES && in_order() && sends_done == FRAMES);
    close_world();
}

static void damage_reaches_the_receiver(void)
{
    open_world(2);
    to_server((ep_sim_link){.corrupt_ppm = 500000});
    send_all();
    run(EP_NS_PER_S);
    ep_sim_stats stats;
    ep_sim_read_stats(sim, &stats);
    CHECK(stats.corrupted > 10 && server.damaged == stats.corrupted &&
          server.got_count + server.damaged == FRAMES);
    close_world();
}

static void a_frame_cut_short_ends_the_connection(void)
{
    open_world(3);
    to_server((ep_sim_link){.truncate_ppm = 100000});
    send_all();
    run(EP_NS_PER_S);
    CHECK(client.closed == 1 && client.code == EP_ERR_CONNECTION_LOST);
    CHECK(server.closed == 1 && server.code == EP_ERR_CONNECTION_LOST);
    CHECK(server.got_count < FRAMES && in_order() && sends_done == FRAMES);
    close_world();
}

static void a_cut_delays_and_a_long_one_breaks(void)
{
    open_world(4);
    to_server((ep_sim_link){.cut = true});
    send_all();
    run(10 * EP_NS_PER_S);
    CHECK(server.got_count == 0 && client.closed == 0);
    to_server((ep_sim_link){.cut = false});
    run(3 * EP_NS_PER_S);
    CHECK(server.got_count == FRAMES && in_order());
    to_server((ep_sim_link){.cut = true});
    send_all();
    run(70 * EP_NS_PER_S);
    CHECK(client.closed == 1 && client.code == EP_ERR_CONNECTION_LOST &&
          server.got_count == FRAMES);
    close_world();
}

static void a_stopped_host_is_silent_and_goes_on(void)
{
    open_world(5);
    ep_sim_set_host_state(sim, host_of_server(), EP_SIM_STOPPED);
    send_all();
    run(10 * EP_NS_PER_S);
    CHECK(server.got_count == 0 && client.closed == 0);
    ep_sim_set_host_state(sim, host_of_server(), EP_SIM_UP);
    run(5 * EP_NS_PER_S);
    CHECK(server.got_count == FRAMES && in_order());
    close_world();
}

static void a_dead_host_is_seen_and_refuses(void)
{
    open_world(6);
    ep_sim_set_host_state(sim, host_of_server(), EP_SIM_DEAD);
    run(EP_NS_PER_S);
    CHECK(client.closed == 1 && client.code == EP_ERR_CONNECTION_LOST);
    dial();
    CHECK(dial_error.code == EP_ERR_UNAVAILABLE);
    close_world();
}

static void a_dial_into_a_cut_times_out(void)
{
    open_world(7);
    to_server((ep_sim_link){.cut = true});
    uint64_t begin_ns = ep_sim_now_ns(sim);
    dial();
    CHECK(dial_error.code == EP_ERR_UNAVAILABLE &&
          ep_sim_now_ns(sim) - begin_ns >= 5 * EP_NS_PER_S);
    to_server((ep_sim_link){.cut = false});
    close_world();
}

static void a_rate_is_kept(void)
{
    open_world(8);
    to_server((ep_sim_link){.bytes_per_s = BYTES * 10}); /* ten frames a second */
    send_all();
    run(2 * EP_NS_PER_S + 50 * EP_NS_PER_MS);
    CHECK(server.got_count >= 20 && server.got_count <= 21);
    run(10 * EP_NS_PER_S);
    CHECK(server.got_count == FRAMES && in_order());
    close_world();
}

static uint64_t hostile(uint64_t seed)
{
    open_world(seed);
    to_server((ep_sim_link){
        .hostile = true, .loss_ppm = 200000, .duplicate_ppm = 300000, .reorder_ppm = 300000});
    send_all();
    run(EP_NS_PER_S);
    ep_sim_stats stats;
    ep_sim_read_stats(sim, &stats);
    CHECK(stats.lost > 0 && stats.duplicated > 0 && stats.reordered > 0);
    CHECK(server.got_count == FRAMES - stats.lost + stats.duplicated && !in_order());
    return close_world();
}

int main(void)
{
    losses_cost_time_and_keep_order();
    damage_reaches_the_receiver();
    a_frame_cut_short_ends_the_connection();
    a_cut_delays_and_a_long_one_breaks();
    a_stopped_host_is_silent_and_goes_on();
    a_dead_host_is_seen_and_refuses();
    a_dial_into_a_cut_times_out();
    a_rate_is_kept();
    CHECK(hostile(9) == hostile(9));
    CHECK(hostile(9) != hostile(10));
    return 0;
}
