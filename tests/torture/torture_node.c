/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole node and its caller in one process, with each allocation failing once while a connection
 * is made and a Forward runs. Every call ends, with the right rows or an error; the next connection
 * and call work; no buffer stays lent.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc_fail.h"
#include "base/check.h"
#include "base/clock.h"
#include "common/process_setup.h"
#include "expertd/node.h"
#include "expertd/node_private.h"
#include "support/checkpoint_fixture.h"
#include "support/forward_call.h"

#define URL "loopback://torture-node"
#define H 32
#define PATIENCE_NS (60 * EP_NS_PER_S)

#define ROWS 4
#define SLOTS 5

/* What differs between the calls that are tried. */
typedef struct call_form {
    const char *name;
    bool prefill;
    bool node_sum;
    bool in_group; /* of a step whose other rank never comes: a timer lets it go */
    ep_combine_quant quant;
    size_t reply_bytes;
    uint16_t wanted[SLOTS * H];
} call_form;

static call_form forms[] = {
    {.name = "a decode call"},
    {.name = "a prefill call", .prefill = true},
    {.name = "a call with quantised rows", .quant = EP_COMBINE_INT8},
    {.name = "a call for sums", .node_sum = true},
    {.name = "a call for quantised sums", .node_sum = true, .quant = EP_COMBINE_INT8},
    {.name = "a call of a step group", .in_group = true},
};

static ep_node *node;
static ep_test_peer lasting; /* connected before any failure */
static uint16_t x[ROWS * H];
static const ep_wire_slot slots[SLOTS] = {{0, 0}, {1, 0}, {2, 3}, {3, 6}, {0, 7}};
static const float slot_scales[SLOTS] = {0.5f, 1.0f, -2.0f, 0.25f, 1.5f};
static const uint16_t slot_places[SLOTS] = {1, 0, 3, 2, 0};

static ep_test_forward request(const call_form *form)
{
    static uint64_t groups; /* one thread calls */
    groups += form->in_group;
    return (ep_test_forward){.layer = 1,
                             .rows = ROWS,
                             .slots = SLOTS,
                             .hidden = H,
                             .x_dtype = EP_DTYPE_BF16,
                             .reply_dtype = EP_DTYPE_BF16,
                             .prefill = form->prefill,
                             .x = x,
                             .wire_slots = slots,
                             .node_sum = form->node_sum,
                             .slot_scales = slot_scales,
                             .slot_places = slot_places,
                             .reply_quant = form->quant,
                             .step_group = form->in_group ? groups : 0,
                             .step_group_size = 2};
}

/* Its result, and that rows given as right are right. */
static ep_err call(ep_test_peer *peer, const call_form *form, ep_error *out_error)
{
    uint16_t rows[SLOTS * H];
    ep_test_forward f = request(form);
    ep_err err = ep_test_forward_run(peer, &f, rows, out_error);
    if (err == EP_OK && memcmp(rows, form->wanted, form->reply_bytes) != 0) {
        torture_broken("a call without enough memory gave wrong rows");
    }
    return err;
}

/* On the connection there is; a lost one comes back by itself. */
static void attempt_call(void *arg)
{
    ep_error error;
    call(&lasting, arg, &error);
}

static void attempt_connect(void *arg)
{
    ep_test_peer peer;
    ep_error error;
    if (ep_test_peer_open(&peer, URL, &error) == EP_OK) {
        call(&peer, arg, &error);
        ep_test_peer_close(&peer);
    }
}

/* The failed allocation may have cost the connection, and that may show only now: the call that
 * meets its end fails, the one on the next connection must work. */
static void recover(void *arg)
{
    ep_error error = {0};
    ep_err err = call(&lasting, arg, &error);
    if (err == EP_ERR_UNAVAILABLE || err == EP_ERR_CONNECTION_LOST) {
        err = ep_rpc_channel_wait_ready(lasting.channel, ep_clock_now_ns() + PATIENCE_NS, &error);
        if (err == EP_OK) {
            err = call(&lasting, arg, &error);
        }
    }
    if (err != EP_OK) {
        torture_broken("the next call fails: %s", error.text);
    }
}

/* A call leaves the handler after its reply is out, and may do so only when its caller has long
 * gone on. */
static void wait_idle(void)
{
    ep_forward_stats stats;
    uint64_t end_ns = ep_clock_now_ns() + PATIENCE_NS;
    do {
        usleep(1000);
        ep_forward_handler_read_stats(node->handler, &stats);
    } while (stats.in_flight != 0 && ep_clock_now_ns() < end_ns);
    if (stats.in_flight != 0) {
        torture_broken("%llu calls are still in work", (unsigned long long)stats.in_flight);
    }
}

static void *drive(void *arg)
{
    ep_error error = {0};
    uint64_t *failures = arg;
    /* before the call: it may start while that fails */
    bool had_started = atomic_load(&node->has_started);
    while (call(&lasting, &forms[0], &error) != EP_OK) {
        if (had_started) {
            torture_broken("the first call fails: %s", error.text);
        }
        had_started = atomic_load(&node->has_started);
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(forms); i++) {
        *failures += alloc_fail_sweep(forms[i].name, attempt_call, recover, &forms[i]);
    }
    *failures += alloc_fail_sweep("a connection", attempt_connect, recover, &forms[0]);
    ep_test_peer_close(&lasting);
    wait_idle();
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
    if (ep_node_config_load(options, &config, &error) != EP_OK ||
        ep_node_create(&config, &source, &node, &error) != EP_OK ||
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
    static const char *const flags[] = {
        "--listen=tcp://127.0.0.1:0",      "--admin-listen=",  "--probe-address=", "--threads=2",
        "--door-listen=tcp://127.0.0.1:0", "--log-level=error"};
    char *argv[8] = {(char *)(uintptr_t) "torture", model_flag};
    for (int i = 0; i < 6; i++) {
        argv[2 + i] = (char *)(uintptr_t)flags[i];
    }
    uint16_t plain[SLOTS * H];
    ep_test_forward f = request(&forms[0]);
    ep_test_fill_rows(1, EP_DTYPE_BF16, 4 * H, x);
    if (ep_fixture_write(&checkpoint, model_path, &error) != EP_OK ||
        ep_test_expected_rows(model_path, &f, plain, &error) != EP_OK ||
        ep_options_load(&ep_node_options, 8, argv, NULL, &options, &error) != EP_OK) {
        torture_broken("%s", error.text);
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(forms); i++) {
        f = request(&forms[i]);
        forms[i].reply_bytes = ep_test_expected_reply(&f, plain, forms[i].wanted);
    }
    int code = run(options);
    ep_options_free(options);
    ep_fixture_remove(model_path);
    ep_transport_fini();
    return code;
}
