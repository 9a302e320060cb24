/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How requests end that a node passes on to a neighbour which does not answer: at the caller's
 * deadline when the neighbour is stopped, also while the connection to it is still being made; with
 * its name, so that the caller asks a copy, when it is killed or answers no Hello; and a node that
 * is told to stop while it waits for a stopped neighbour stops.
 */
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "support/cluster.h"
#include "support/forward_call.h"

enum { HIDDEN = 64, NODES = 2, SHORT_MS = 300, LONG_MS = 300000, ATTEMPTS = 3 };

#define DEVICE(id, ...) "{\"device_id\":" #id ",\"device_expert\":[" #__VA_ARGS__ "]}"
static const char map[] = "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":"
                          "2,\"device_list\":[" DEVICE(0, 0, 1) "," DEVICE(1, 2, 3) "]}]}";
static const char *const hosts[NODES] = {"left", "left"};

static ep_test_cluster cluster;
static uint16_t x[HIDDEN];

/* One slot for node0, one for a neighbour. */
typedef struct relayed {
    ep_wire_slot slots[2];
    Expertd__V1__RelayPart parts[2];
    Expertd__V1__RelayPart *list[2];
    ep_test_forward forward;
} relayed;

static void make(relayed *r, const char *name, const char *url, uint32_t timeout_ms)
{
    *r = (relayed){.slots = {{0, 0}, {0, 2}}};
    for (uint32_t i = 0; i < 2; i++) {
        expertd__v1__relay_part__init(&r->parts[i]);
        r->parts[i].node = (char *)(uintptr_t)(i == 0 ? "node0" : name);
        r->parts[i].url = (char *)(uintptr_t)(i == 0 ? "" : url);
        r->parts[i].slots_begin = i;
        r->parts[i].slots_count = 1;
        r->list[i] = &r->parts[i];
    }
    r->forward = (ep_test_forward){.rows = 1,
                                   .slots = 2,
                                   .hidden = HIDDEN,
                                   .x_dtype = EP_DTYPE_BF16,
                                   .reply_dtype = EP_DTYPE_BF16,
                                   .x = x,
                                   .wire_slots = r->slots,
                                   .relay = r->list,
                                   .relay_count = 2,
                                   .timeout_ms = timeout_ms};
}

static ep_err run(ep_test_peer *peer, const char *name, const char *url, uint32_t timeout_ms,
                  ep_error *out_error)
{
    relayed r;
    make(&r, name, url, timeout_ms);
    return ep_test_forward_run(peer, &r.forward, NULL, out_error);
}

/* The same, once node0 has heard of node1 with a heartbeat and is connected to it. */
static void expect_answer(ep_test_peer *peer)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    ep_error error;
    ep_err err;
    do {
        err = run(peer, "node1", cluster.nodes[1].rpc_url, LONG_MS, &error);
    } while (err == EP_ERR_UNAVAILABLE && ep_clock_now_ns() < end_ns);
    EP_TEST_CHECK(err == EP_OK, "%s", error.text);
}

static uint64_t in_flight(void)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&cluster, 0);
    uint64_t count = status->requests_in_flight;
    protobuf_c_message_free_unpacked(&status->base, NULL);
    return count;
}

static void wait_idle(void)
{
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    while (in_flight() != 0) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "node0 still has requests");
    }
}

/* ---- a neighbour that accepts and says nothing ---- */

static int listen_silently(char *out_url, size_t bytes)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool ok = listener >= 0 && bind(listener, (struct sockaddr *)&address, length) == 0 &&
              listen(listener, 4) == 0 &&
              getsockname(listener, (struct sockaddr *)&address, &length) == 0;
    EP_TEST_CHECK(ok, "listen: %s", strerror(errno));
    snprintf(out_url, bytes, "tcp://127.0.0.1:%u", ntohs(address.sin_port));
    return listener;
}

/* For each try: it sends no heartbeats, and leaves the table after a while. */
static void register_silent(const char *url)
{
    ep_test_cluster_register(&cluster, "silent", url, hosts[0]);
}

/* The other side has not given up yet. */
static bool is_open(int connection)
{
    char bytes[4096];
    ssize_t n;
    do {
        n = recv(connection, bytes, sizeof(bytes), MSG_DONTWAIT);
    } while (n > 0);
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

/* node0's connection to the neighbour, after a request that waited for it. */
static int accept_silently(ep_test_peer *peer, int listener, const char *url)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    ep_error error;
    int connection;
    do { /* a request can also end before node0 has heard of the neighbour */
        register_silent(url);
        ep_err err = run(peer, "silent", url, SHORT_MS, &error);
        EP_TEST_CHECK(err != EP_OK, "a neighbour that says nothing answered");
        connection = accept(listener, NULL, NULL);
    } while (connection < 0 && ep_clock_now_ns() < end_ns);
    EP_TEST_CHECK(connection >= 0, "accept: %s", strerror(errno));
    return connection;
}

/* True: the request had ended before node0 gave the connection up. */
static bool ends_before_connection(ep_test_peer *peer)
{
    char url[64];
    int listener = listen_silently(url, sizeof(url));
    int connection = accept_silently(peer, listener, url);
    bool open = true;
    while (in_flight() != 0) {
        open = is_open(connection);
    }
    open = open && is_open(connection);
    close(connection);
    close(listener);
    return open;
}

static void expect_end_while_connecting(ep_test_peer *peer)
{
    bool good = false;
    /* a machine that stands still for seconds spoils one */
    for (int i = 0; i < ATTEMPTS && !good; i++) {
        good = ends_before_connection(peer);
    }
    EP_TEST_CHECK(good,
                  "a cancelled request waited for a neighbour's Hello until node0 gave it up");
}

/* Not at the caller's deadline: that would end the call, and another copy may help. */
static void expect_end_without_hello(ep_test_peer *peer)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    char url[64];
    ep_error error;
    int listener = listen_silently(url, sizeof(url));
    do { /* a request can also end before node0 has heard of the neighbour */
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "%s", error.text);
        register_silent(url);
        ep_err err = run(peer, "silent", url, LONG_MS, &error);
        EP_TEST_CHECK(err == EP_ERR_UNAVAILABLE && strcmp(error.node, "silent") == 0,
                      "%s of '%s': %s", ep_err_name(err), error.node, error.text);
    } while (strstr(error.text, "no Hello") == NULL);
    close(listener);
}

/* ---- neighbours that are stopped or killed ---- */

/* Until node0 has the request in work. False: it has ended, node0 had given the neighbour up. */
static bool wait_in_work(ep_test_pending *pending)
{
    bool in_work = false;
    while (!in_work && !ep_test_forward_is_done(pending)) {
        in_work = in_flight() > 0;
    }
    return in_work;
}

static void stop_neighbour(void)
{
    EP_TEST_CHECK(ep_test_process_signal(&cluster.nodes[1], SIGSTOP), "node1 cannot be stopped");
}

static void expect_end_at_deadline(ep_test_peer *peer)
{
    ep_error error;
    const char *url = cluster.nodes[1].rpc_url;
    expect_answer(peer);
    stop_neighbour();
    ep_err err = run(peer, "node1", url, SHORT_MS, &error);
    EP_TEST_CHECK(err == EP_ERR_DEADLINE_EXCEEDED, "%s: %s", ep_err_name(err), error.text);
    wait_idle();
    kill(cluster.nodes[1].pid, SIGCONT);
    expect_answer(peer); /* also when node0 had given it up */
}

static void expect_end_with_neighbour(ep_test_peer *peer)
{
    relayed r;
    ep_test_pending pending;
    ep_error error;
    stop_neighbour();
    make(&r, "node1", cluster.nodes[1].rpc_url, LONG_MS);
    EP_TEST_CHECK(ep_test_forward_begin(peer, &r.forward, NULL, &pending, &error) == EP_OK, "%s",
                  error.text);
    wait_in_work(&pending);
    ep_test_process_stop(&cluster.nodes[1], SIGKILL, EP_TEST_PATIENCE_MS);
    ep_err err = ep_test_forward_wait(&pending, &error);
    EP_TEST_CHECK(err == EP_ERR_UNAVAILABLE && strcmp(error.node, "node1") == 0, "%s of '%s': %s",
                  ep_err_name(err), error.node, error.text);
    wait_idle();
}

static void expect_stop(ep_test_peer *peer)
{
    char url[64];
    relayed r;
    ep_test_pending pending;
    ep_error error;
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    int listener = -1;
    int connection = -1;
    bool in_work = false;
    /* again at another address where node0 has given the connection up in between */
    while (!in_work) {
        if (listener >= 0) {
            EP_TEST_CHECK(ep_test_forward_wait(&pending, &error) != EP_OK,
                          "a silent neighbour answered");
            EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "the request never waited: %s", error.text);
            close(connection);
            close(listener);
        }
        listener = listen_silently(url, sizeof(url));
        connection = accept_silently(peer, listener, url);
        wait_idle();
        make(&r, "silent", url, LONG_MS);
        ep_err err = ep_test_forward_begin(peer, &r.forward, NULL, &pending, &error);
        EP_TEST_CHECK(err == EP_OK, "%s", error.text);
        in_work = wait_in_work(&pending);
    }
    int code = ep_test_process_stop(&cluster.nodes[0], SIGTERM, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 0, "node0 ended with %d", code);
    EP_TEST_CHECK(ep_test_forward_wait(&pending, &error) != EP_OK,
                  "a neighbour that says nothing answered");
    close(connection);
    close(listener);
}

int main(void)
{
    char model_path[EP_TEST_PATH_BYTES];
    ep_test_peer peer;
    ep_error error;
    ep_fixture_config config = ep_fixture_default();
    config.hidden = HIDDEN;
    config.inner = 32;
    config.experts = 4;
    config.layers = 1;
    ep_test_checkpoint_new(&config, model_path);
    ep_test_fill_rows(7, EP_DTYPE_BF16, HIDDEN, x);
    const ep_test_model model = {"demo", model_path};
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){.nodes_count = NODES,
                                                               .models = &model,
                                                               .models_count = 1,
                                                               .expert_map = map,
                                                               .hosts = hosts});
    ep_client_destroy(ep_test_cluster_client(&cluster, NULL)); /* the nodes have loaded */
    EP_TEST_CHECK(ep_test_peer_open(&peer, cluster.nodes[0].rpc_url, &error) == EP_OK, "%s",
                  error.text);
    expect_end_while_connecting(&peer);
    expect_end_without_hello(&peer);
    expect_end_at_deadline(&peer);
    expect_end_with_neighbour(&peer);
    expect_stop(&peer);
    ep_test_peer_close(&peer);
    ep_test_cluster_stop(&cluster);
    ep_test_dir_remove(model_path);
    printf("requests that a neighbour does not answer end\n");
    return 0;
}
