/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole node and its caller in one process, with each allocation failing once while a connection is made and a Forward runs. Every
 * call ends, with the right rows or an error; the next connection and call work; no buffer stays lent.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc_fail.h"
#include "base/clock.h"
#include "common/process_setup.h"
#include "expertd/node.h"
#include "expertd/node_private.h"
#include "support/checkpoint_fixture.h"
#include "support/forward_call.h"

#define URL "loopback://torture-node"
#define H 32
#define PATIENCE_NS (60 * EP_NS_PER_S)

static ep_node *node;
static ep_test_peer lasting; /* connected before any failure */
static uint16_t x[4 * H], wanted[5 * H];
static const ep_wire_slot slots[] = {{0, 0}, {1, 0}, {2, 3}, {3, 6}, {0, 7}};

static ep_test_forward request(bool prefill)
{
    return (ep_test_forward){.layer = 1, .rows = 4, .slots = 5, .hidden = H, .x_dtype = EP_DTYPE_BF16,
                             .reply_dtype = EP_DTYPE_BF16, .prefill = prefill, .x = x, .wire_slots = slots};
}

/* Its result, and that rows given as right are right. */
static ep_err call(ep_test_peer *peer, bool prefill, ep_error *out_error)
{
    uint16_t rows[5 * H];
    ep_test_forward f = request(prefill);
    ep_err err = ep_test_forward_run(peer, &f, rows, out_error);
    if (err == EP_OK && memcmp(rows, wanted, sizeof(rows)) != 0) {
        torture_broken("a call without enough memory gave wrong rows");
    }
    return err;
}

/* On the connection there is; a lost one comes back by itself. */
static void attempt_call(void *arg)
{
    ep_error error;
    call(&lasting, arg != NULL, &error);
}

static void attempt_connect(void *arg)
{
    ep_test_peer peer;
    ep_error error;
    (void)arg;
    if (ep_test_peer_open(&peer, URL, &error) == EP_OK) {
        call(&peer, false, &error);
        ep_test_peer_close(&peer);
    }
}

/* The failed allocation may have cost the connection, and that may show only now: the call that meets its end fails, the one on the next
 * connection must work. */
static void recover(void *arg)
{
    ep_error error = {0};
    ep_err err = call(&lasting, arg != NULL, &error);
    if (err == EP_ERR_UNAVAILABLE || err == EP_ERR_CONNECTION_LOST) {
        err = ep_rpc_channel_wait_ready(lasting.channel, ep_clock_now_ns() + PATIENCE_NS, &error);
        if (err == EP_OK) {
            err = call(&lasting, arg != NULL, &error);
        }
    }
    if (err != EP_OK) {
        torture_broken("the next call fails: %s", error.text);
    }
}

static void *drive(void *arg)
{
    ep_error error = {0};
    uint64_t *failures = arg;
    while (call(&lasting, false, &error) != EP_OK) {
        if (node->has_started) {
            torture_broken("the first call fails: %s", error.text);
        }
    }
    *failures += alloc_fail_sweep("a decode call", attempt_call, recover, NULL);
    *failures += alloc_fail_sweep("a prefill call", attempt_call, recover, failures);
    *failures += alloc_fail_sweep("a connection", attempt_connect, recover, NULL);
    ep_test_peer_close(&lasting);
    ep_forward_stats stats;
    ep_forward_handler_read_stats(node->handler, &stats);
    if (stats.in_flight != 0) {
        torture_broken("%llu calls are still in work", (unsigned long long)stats.in_flight);
    }
    kill(getpid(), SIGTERM);
    return NULL;
}

static int run(const ep_options *options)
{
    ep_node_config config;
    ep_node_source source = {.options = options};
    ep_error error = {0};
    ep_lane_address address = {.url = URL};
    pthread_t driver;
    uint64_t failures = 0;
    if (ep_node_config_load(options, &config, &error) != EP_OK || ep_node_create(&config, &source, &node, &error) != EP_OK ||
        ep_rpc_server_listen(node->server, &address, EP_ROLES_MAIN, &error) != EP_OK ||
        ep_test_peer_open(&lasting, URL, &error) != EP_OK) {
        torture_broken("%s", error.text);
    }
    pthread_create(&driver, NULL, drive, &failures);
    ep_node_run(node);
    pthread_join(driver, NULL);
    ep_node_destroy(node);
    ep_node_config_fini(&config);
    return failures > 10 ? 0 : 1;
}

int main(void)
{
    ep_fixture_config checkpoint = ep_fixture_default();
    char model_path[EP_FIXTURE_PATH_BYTES], model_flag[EP_FIXTURE_PATH_BYTES + 32];
    ep_options *options = NULL;
    ep_error error = {0};
    ep_process_setup();
    ep_fixture_temp_dir(model_path);
    snprintf(model_flag, sizeof(model_flag), "--model=demo=%s", model_path);
    static const char *const flags[] = {"--listen=tcp://127.0.0.1:0", "--admin-listen=", "--probe-address=", "--threads=2",
                                        "--log-level=error"};
    char *argv[8] = {(char *)(uintptr_t) "torture", model_flag};
    for (int i = 0; i < 5; i++) {
        argv[2 + i] = (char *)(uintptr_t)flags[i];
    }
    ep_test_forward f = request(false);
    ep_test_fill_rows(1, EP_DTYPE_BF16, 4 * H, x);
    if (ep_fixture_write(&checkpoint, model_path, &error) != EP_OK ||
        ep_test_expected_rows(model_path, &f, wanted, &error) != EP_OK ||
        ep_options_load(&ep_node_options, 7, argv, NULL, &options, &error) != EP_OK) {
        torture_broken("%s", error.text);
    }
    int code = run(options);
    ep_options_free(options);
    ep_fixture_remove(model_path);
    ep_transport_fini();
    return code;
}
