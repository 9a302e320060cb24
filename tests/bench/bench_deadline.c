/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How close to its deadline a call ends when the only owner of an expert stops answering (SIGSTOP)
 * or is killed (SIGKILL). The bar is 10 ms after the deadline; ending before it is an error.
 */
#include <math.h>
#include <signal.h>
#include <stdlib.h>

#include "bench/bench_service.h"
#include "support/checkpoint_fixture.h"

#define CALLS 30
#define DEADLINE_US 150000
#define HIDDEN 32
#define BAR_US 10000

static double call_us(ep_client *client, ep_err *out_code)
{
    static uint16_t x[HIDDEN], y[HIDDEN];
    static int32_t ids[2] = {0, 1};
    static float scales[2] = {0.5f, 0.5f};
    const bench_tokens of = {1, 2, HIDDEN, x, ids, scales};
    ep_moe_args args = bench_args(&of);
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
    ep_err code;
    double late[CALLS];
    bench_node_start(&(bench_node){.name = name, .checkpoint = checkpoint}, dir, &node);
    ep_client *client = bench_client_of(&node, 1, NULL);
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
    bench_report_value(report, bench_quantile(late, CALLS, 0.5), "us", BENCH_LOWER, NAN,
                       "%s of the sole owner: end after the deadline, p50", name);
    bench_report_value(report, bench_quantile(late, CALLS, 1.0), "us", BENCH_LOWER, BAR_US,
                       "%s of the sole owner: end after the deadline, worst of %d", name, CALLS);
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
