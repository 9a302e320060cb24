/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How close to its deadline a call ends when the only owner of an expert stops answering (SIGSTOP)
 * or is killed (SIGKILL). The bar is 10 ms after the deadline; ending before it is an error.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/bench_report.h"
#include "expertd/client.h"
#include "support/checkpoint_fixture.h"
#include "support/process.h"

#define CALLS 30
#define DEADLINE_US 150000
#define HIDDEN 32
#define BAR_US 10000

static double call_us(ep_client *client, ep_err *out_code)
{
    static uint16_t x[HIDDEN], y[HIDDEN];
    static int32_t ids[2] = {0, 1};
    static float scales[2] = {0.5f, 0.5f};
    ep_moe_args args;
    ep_moe_args_init(&args);
    args.model = "bench";
    args.layer = 0;
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, 1, HIDDEN);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, 1, 2);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, 1, 2);
    args.deadline_us = DEADLINE_US;
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, 1, HIDDEN);
    double begin = bench_now_us();
    *out_code = ep_moe_forward(client, &args, &out, NULL);
    return bench_now_us() - begin;
}

static void bench_signal(bench_report *report, const char *dir, const char *checkpoint,
                         int signal_number, const char *name)
{
    ep_test_process node = {0};
    ep_client_config config;
    ep_client *client;
    ep_error error;
    ep_err code;
    char model[EP_FIXTURE_PATH_BYTES + 32];
    double late[CALLS];
    snprintf(model, sizeof(model), "--model=bench=%s", checkpoint);
    const char *args[] = {"--listen=tcp://127.0.0.1:0",
                          "--probe-address=", "--admin-listen=", model, NULL};
    if (!ep_test_process_start(&node, dir, name, EP_EXPERTD_PROGRAM, args, NULL, true) ||
        !ep_test_process_wait_ports(&node, 60000)) {
        bench_fail("expertd did not start", NULL);
    }
    const char *urls[] = {node.rpc_url};
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = 1;
    if (ep_client_create(&config, &client, &error) != EP_OK ||
        ep_client_wait_ready(client, 60000000, &error) != EP_OK) {
        bench_fail("client", error.text);
    }
    do { /* until the node has loaded */
        call_us(client, &code);
    } while (code != EP_OK);
    ep_test_process_signal(&node, signal_number);
    for (int i = 0; i < CALLS; i++) {
        late[i] = call_us(client, &code) - DEADLINE_US;
        if (code != EP_ERR_UNAVAILABLE && code != EP_ERR_DEADLINE_EXCEEDED) {
            bench_fail("a call without an owner ended with another code", NULL);
        }
        if (late[i] < 0) {
            bench_fail("a call ended before its deadline", NULL);
        }
    }
    bench_row row = bench_value(NAN, "us", BENCH_LOWER, NAN);
    row.value = bench_quantile(late, CALLS, 0.5);
    bench_report_add(report, &row, "%s of the sole owner: end after the deadline, p50", name);
    row.value = bench_quantile(late, CALLS, 1.0);
    row.bar = BAR_US;
    bench_report_add(report, &row, "%s of the sole owner: end after the deadline, worst of %d",
                     name, CALLS);
    ep_client_destroy(client);
    ep_test_process_signal(&node, SIGCONT);
    ep_test_process_destroy(&node);
}

int main(int argc, char **argv)
{
    char dir[EP_TEST_PATH_BYTES], checkpoint[EP_FIXTURE_PATH_BYTES];
    ep_error error;
    ep_fixture_config fixture = ep_fixture_default();
    fixture.hidden = HIDDEN;
    ep_fixture_temp_dir(checkpoint);
    if (!ep_test_dir_create(dir) || ep_fixture_write(&fixture, checkpoint, &error) != EP_OK) {
        bench_fail("checkpoint", error.text);
    }
    bench_report *report =
        bench_report_create("A call whose expert has no live copy ends at its deadline");
    bench_signal(report, dir, checkpoint, SIGSTOP, "SIGSTOP");
    bench_signal(report, dir, checkpoint, SIGKILL, "SIGKILL");
    ep_fixture_remove(checkpoint);
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
