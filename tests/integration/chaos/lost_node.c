/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One of three nodes is killed, stopped and resumed, or cut off in one direction, in the middle of
 * decode and of prefill in several windows, while every expert has a copy on another node: no call
 * fails, no bit is wrong, and afterwards nobody holds anything for calls. lost_node
 * kill|stop|cut_requests|cut_replies
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "chaos_fixture.h"

enum { DECODE_CALLS = 40, PREFILL_CALLS = 24, AFTER_RETURN = 200, LOOKS_MAX = 2000 };
/* Each connection keeps the Hello of its peer: two to each node, one to the coordinator. */
#define HELLO_BYTES ((2 * FAULT_NODES + 1) * 4096ull)

static chaos_fixture f;
static ep_test_load *loads[2];

static void several_windows(ep_client_config *config)
{
    config->coordinator_url = ep_chaos_proxy_url(f.proxies[CHAOS_COORDINATOR]);
    config->prefill_window_tokens = 16;
    config->lanes = "stream"; /* shared memory would pass the proxies by */
}

static ep_test_load *start(ep_moe_mode mode, uint32_t calls)
{
    return ep_test_load_start(&(ep_test_load_config){.client = f.faults.client,
                                                     .batches = f.faults.all,
                                                     .batches_count = FAULT_LAYERS * FAULT_BATCHES,
                                                     .calls_in_flight = calls,
                                                     .mode = mode});
}

static ep_test_load_counts read_loads(void)
{
    ep_test_load_counts sum = {0};
    for (int i = 0; i < 2; i++) {
        ep_test_load_counts one;
        ep_test_load_read(loads[i], &one);
        sum.succeeded += one.succeeded;
        sum.in_flight += one.in_flight;
    }
    return sum;
}

/* Frames sent again for a connection that ended or a node that is silent. Second sends of late ones
 * do not count. A busy machine brings a few of these without any fault, so this alone does not show
 * that the fault was noticed. */
static uint64_t sent_again(void)
{
    ep_client_stats stats = {.struct_bytes = sizeof(stats)};
    ep_client_read_stats(f.faults.client, &stats);
    return stats.frames_rerouted;
}

/* Calls one after the other are the clock: silence takes a quarter of a second to be noticed. */
static void expect_sent_again(uint64_t before)
{
    for (int look = 0; sent_again() == before; look++) {
        ep_moe_result result;
        EP_TEST_CHECK(look < LOOKS_MAX, "no call noticed: the victim held none of them");
        EP_TEST_CHECK(ep_test_batch_call(&f.faults.all[0], f.faults.client, 0, &result), "%s",
                      result.error.text);
    }
}

static void wait_both(uint64_t more)
{
    ep_test_load_wait_succeeded(loads[0], more);
    ep_test_load_wait_succeeded(loads[1], more);
}

static void cut(uint32_t direction)
{
    const ep_chaos_rule rule = {.fault = EP_CHAOS_CUT,
                                .directions = direction,
                                .kinds = 1u << EP_FRAME_REQUEST | 1u << EP_FRAME_REPLY,
                                .rate = 10000};
    ep_chaos_proxy_set_rules(f.proxies[FAULT_VICTIM], &rule, 1);
}

static void begin_fault(const char *fault)
{
    ep_test_process *victim = &f.faults.cluster.nodes[FAULT_VICTIM];
    if (strcmp(fault, "kill") == 0) {
        EP_TEST_CHECK(ep_test_process_stop(victim, SIGKILL, EP_TEST_PATIENCE_MS) == 128 + SIGKILL,
                      "not killed");
    } else if (strcmp(fault, "stop") == 0) {
        EP_TEST_CHECK(ep_test_process_signal(victim, SIGSTOP), "not stopped");
    } else {
        cut(strcmp(fault, "cut_requests") == 0 ? EP_CHAOS_TO_SERVER : EP_CHAOS_TO_CLIENT);
    }
}

/* Until the node has calls again, where it lives. */
static void end_fault(const char *fault)
{
    if (strcmp(fault, "kill") == 0) {
        return;
    }
    if (strcmp(fault, "stop") == 0) {
        EP_TEST_CHECK(ep_test_process_signal(&f.faults.cluster.nodes[FAULT_VICTIM], SIGCONT),
                      "not resumed");
    }
    ep_chaos_proxy_set_rules(f.proxies[FAULT_VICTIM], NULL, 0);
    ep_test_cluster_wait_in_flight(&f.faults.cluster, FAULT_VICTIM);
    wait_both(AFTER_RETURN);
}

static uint64_t lent_bytes(void)
{
    ep_client_stats stats = {.struct_bytes = sizeof(stats)};
    ep_client_read_stats(f.faults.client, &stats);
    return stats.buffer_bytes_lent;
}

/* No calls go on. Calls one after the other are the clock: a CANCEL or a late answer takes a
 * moment. */
static void expect_nothing_held(void)
{
    for (uint32_t n = 0; n < FAULT_NODES; n++) {
        for (int look = 0; f.faults.cluster.nodes[n].pid != 0 && chaos_held_by(&f, n) != 0;
             look++) {
            ep_moe_result result;
            EP_TEST_CHECK(look < LOOKS_MAX, "node%u still holds calls", n);
            EP_TEST_CHECK(ep_test_batch_call(&f.faults.all[0], f.faults.client, 0, &result), "%s",
                          result.error.text);
        }
    }
    for (int look = 0; lent_bytes() > HELLO_BYTES; look++) {
        ep_moe_result result;
        EP_TEST_CHECK(look < LOOKS_MAX, "the client still holds %llu bytes",
                      (unsigned long long)lent_bytes());
        EP_TEST_CHECK(ep_test_batch_call(&f.faults.all[0], f.faults.client, 0, &result), "%s",
                      result.error.text);
    }
}

int main(int argc, char **argv)
{
    const char *fault = argc > 1 ? argv[1] : "kill";
    ep_client_stats stats = {.struct_bytes = sizeof(stats)};
    setvbuf(stdout, NULL, _IOLBF, 0);
    chaos_fixture_init(&f);
    ep_client_destroy(f.faults.client);
    f.faults.client = ep_test_cluster_client(&f.faults.cluster, several_windows);
    loads[0] = start(EP_MOE_DECODE, DECODE_CALLS);
    loads[1] = start(EP_MOE_PREFILL, PREFILL_CALLS);
    wait_both(100);

    uint64_t victim_in_flight = ep_test_cluster_wait_in_flight(&f.faults.cluster, FAULT_VICTIM);
    ep_test_load_counts before = read_loads();
    uint64_t sent_again_before = sent_again();
    begin_fault(fault);
    wait_both(FAULT_FINISHED_AFTER_MIN / 2);
    ep_test_load_counts after = read_loads();
    expect_sent_again(sent_again_before);
    end_fault(fault);
    for (int i = 0; i < 2; i++) {
        ep_test_load_counts counts;
        ep_test_load_stop(loads[i], &counts);
        EP_TEST_CHECK(counts.failed == 0, "%llu calls failed", (unsigned long long)counts.failed);
    }
    expect_nothing_held();
    ep_client_read_stats(f.faults.client, &stats);
    fault_report(fault, before.in_flight, victim_in_flight, after.succeeded - before.succeeded);
    printf("frames %llu, of them sent again %llu, hedged %llu; late replies %llu\n",
           (unsigned long long)stats.frames_sent, (unsigned long long)stats.frames_rerouted,
           (unsigned long long)stats.hedged_frames, (unsigned long long)stats.late_replies);
    chaos_fixture_fini(&f);
    return 0;
}
