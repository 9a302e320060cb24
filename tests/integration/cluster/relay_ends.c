/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How requests end that a node passes on to a neighbour which does not answer: at the caller's deadline when the neighbour
 * is stopped, also while the connection to it is still being made; at once when it is killed, with its name; and a node
 * that is told to stop while it waits for a stopped neighbour stops.
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
static const char map[] =
    "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":[" DEVICE(0, 0, 1) "," DEVICE(
        1, 2, 3) "]}]}";
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

static ep_err run(ep_test_peer *peer, const char *name, const char *url, uint32_t timeout_ms, ep_error *out_error)
{
    relayed r;
    make(&r, name, url, timeout_ms);
    return ep_test_forward_run(peer, &r.forward, NULL, out_error);
}

/* The same, once node0 has heard of the neighbour with a heartbeat. */
static ep_err run_known(ep_test_peer *peer, const char *name, const char *url, uint32_t timeout_ms, ep_error *out_error)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    ep_err err;
    do {
        err = run(peer, name, url, timeout_ms, out_error);
    } while (err != EP_OK && strstr(out_error->text, "is not of this host in the newest table") != NULL &&
             ep_clock_now_ns() < end_ns);
    return err;
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

static int listen_silently(const char *name, char *out_url, size_t bytes)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok = listener >= 0 && bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 4) == 0 &&
              getsockname(listener, (struct sockaddr *)&address, &length) == 0;
    EP_TEST_CHECK(ok, "listen: %s", strerror(errno));
    snprintf(out_url, bytes, "tcp://127.0.0.1:%u", ntohs(address.sin_port));
    ep_test_cluster_register(&cluster, name, out_url, hosts[0]);
    return listener;
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

/* True: the request had ended before node0 gave the connection up. */
static bool ends_before_connection(ep_test_peer *peer)
{
    char url[64];
    ep_error error;
    int listener = listen_silently("silent", url, sizeof(url));
    ep_err err = run_known(peer, "silent", url, SHORT_MS, &error);
    EP_TEST_CHECK(err != EP_OK, "a neighbour that says nothing answered");
    int connection = accept(listener, NULL, NULL);
    EP_TEST_CHECK(connection >= 0, "accept: %s", strerror(errno));
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
    for (int i = 0; i < ATTEMPTS && !good; i++) { /* a machine that stands still for seconds spoils one */
        good = ends_before_connection(peer);
    }
    EP_TEST_CHECK(good, "a cancelled request waited for a neighbour's Hello until node0 gave it up");
}

/* ---- neighbours that are stopped or killed ---- */

static void stop_neighbour(void)
{
    EP_TEST_CHECK(ep_test_process_signal(&cluster.nodes[1], SIGSTOP), "node1 cannot be stopped");
}

static void expect_end_at_deadline(ep_test_peer *peer)
{
    ep_error error;
    const char *url = cluster.nodes[1].rpc_url;
    ep_err err = run_known(peer, "node1", url, LONG_MS, &error);
    EP_TEST_CHECK(err == EP_OK, "%s", error.text);
    stop_neighbour();
    err = run(peer, "node1", url, SHORT_MS, &error);
    EP_TEST_CHECK(err == EP_ERR_DEADLINE_EXCEEDED, "%s: %s", ep_err_name(err), error.text);
    wait_idle();
    kill(cluster.nodes[1].pid, SIGCONT);
    err = run(peer, "node1", url, LONG_MS, &error);
    EP_TEST_CHECK(err == EP_OK, "after it went on: %s", error.text);
}

static void expect_end_with_neighbour(ep_test_peer *peer)
{
    relayed r;
    ep_test_pending pending;
    ep_error error;
    stop_neighbour();
    make(&r, "node1", cluster.nodes[1].rpc_url, LONG_MS);
    EP_TEST_CHECK(ep_test_forward_begin(peer, &r.forward, NULL, &pending, &error) == EP_OK, "%s", error.text);
    ep_test_cluster_wait_in_flight(&cluster, 0);
    ep_test_process_stop(&cluster.nodes[1], SIGKILL, EP_TEST_PATIENCE_MS);
    ep_err err = ep_test_forward_wait(&pending, &error);
    EP_TEST_CHECK(err == EP_ERR_UNAVAILABLE && strcmp(error.node, "node1") == 0, "%s of '%s': %s", ep_err_name(err),
                  error.node, error.text);
    wait_idle();
}

static void expect_stop(ep_test_peer *peer)
{
    char url[64];
    relayed r;
    ep_test_pending pending;
    ep_error error;
    int listener = listen_silently("silent", url, sizeof(url));
    run_known(peer, "silent", url, SHORT_MS, &error);
    make(&r, "silent", url, LONG_MS);
    EP_TEST_CHECK(ep_test_forward_begin(peer, &r.forward, NULL, &pending, &error) == EP_OK, "%s", error.text);
    ep_test_cluster_wait_in_flight(&cluster, 0);
    int code = ep_test_process_stop(&cluster.nodes[0], SIGTERM, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 0, "node0 ended with %d", code);
    EP_TEST_CHECK(ep_test_forward_wait(&pending, &error) != EP_OK, "a neighbour that says nothing answered");
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
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){
                                        .nodes_count = NODES, .models = &model, .models_count = 1, .expert_map = map, .hosts = hosts});
    ep_client_destroy(ep_test_cluster_client(&cluster, NULL)); /* the nodes have loaded */
    EP_TEST_CHECK(ep_test_peer_open(&peer, cluster.nodes[0].rpc_url, &error) == EP_OK, "%s", error.text);
    expect_end_while_connecting(&peer);
    expect_end_at_deadline(&peer);
    expect_end_with_neighbour(&peer);
    expect_stop(&peer);
    ep_test_peer_close(&peer);
    ep_test_cluster_stop(&cluster);
    ep_test_dir_remove(model_path);
    printf("requests that a neighbour does not answer end\n");
    return 0;
}
