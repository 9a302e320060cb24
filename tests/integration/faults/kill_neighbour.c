/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two hosts of two nodes, two copies of each expert, one frame per host (comm_alg hierarchy): a
 * node that passes rows on and gets them passed on is killed, or stopped (SIGSTOP), in the middle.
 * No call fails, and no bit is wrong; with sums at nodes each row is one of the two sums it can be,
 * so nothing was added twice or left out. kill_neighbour kill|stop rows|sums
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "fault_fixture.h"

enum { STOPS_MAX = 20 };

static ep_test_load *start_load(fault_fixture *f, bool sums)
{
    return ep_test_load_start(
        &(ep_test_load_config){.client = f->client,
                               .batches = f->all,
                               .batches_count = FAULT_LAYERS * FAULT_BATCHES,
                               .calls_in_flight = 64,
                               .comm_alg = EP_MOE_COMM_HIERARCHY,
                               .combine_at = sums ? EP_MOE_COMBINE_NODE_SUM : EP_MOE_COMBINE_ROWS});
}

static void begin_fault(ep_test_process *victim, bool stop)
{
    if (stop) {
        EP_TEST_CHECK(ep_test_process_signal(victim, SIGSTOP), "the victim cannot be stopped");
        return;
    }
    int code = ep_test_process_stop(victim, SIGKILL, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 128 + SIGKILL, "the victim ended with %d", code);
}

/* A frame that a copy had been sent already, for being late, needs no sending again. */
static bool has_noticed(const ep_test_load_counts *before, const ep_test_load_counts *after)
{
    return after->rerouted_frames + after->hedged_frames >
           before->rerouted_frames + before->hedged_frames;
}

int main(int argc, char **argv)
{
    static fault_fixture f;
    static const char *const hosts[] = {"left", "left", "right", "right"};
    char fault[64];
    ep_test_load_counts before;
    ep_test_load_counts after;
    EP_TEST_CHECK(argc == 3, "usage: %s kill|stop rows|sums", argv[0]);
    bool stop = strcmp(argv[1], "stop") == 0;
    fault_fixture_init_options(
        &f, &(ep_test_cluster_options){.nodes_count = 4, .copies = 2, .hosts = hosts});
    ep_test_process *victim = &f.cluster.nodes[FAULT_VICTIM];
    ep_test_load *load = start_load(&f, strcmp(argv[2], "sums") == 0);
    ep_test_load_wait_succeeded(load, 200);

    uint64_t victim_in_flight;
    uint32_t faults = 0;
    /* a stop just after its last answer, before the next request, is no fault: it is stopped
     * again */
    do {
        victim_in_flight = ep_test_cluster_wait_in_flight(&f.cluster, FAULT_VICTIM);
        ep_test_load_read(load, &before);
        begin_fault(victim, stop);
        ep_test_load_wait_succeeded(load, FAULT_FINISHED_AFTER_MIN);
        if (stop) {
            EP_TEST_CHECK(ep_test_process_signal(victim, SIGCONT), "the victim cannot go on");
        }
        ep_test_load_read(load, &after);
    } while (stop && !has_noticed(&before, &after) && ++faults < STOPS_MAX);

    ep_test_load_stop(load, &after);
    snprintf(fault, sizeof(fault), "SIG%s of a neighbour, %s", stop ? "STOP" : "KILL", argv[2]);
    fault_report(fault, before.in_flight, victim_in_flight, after.succeeded - before.succeeded);
    printf("%llu calls failed, %llu frames were sent again, straight to an owner\n",
           (unsigned long long)after.failed,
           (unsigned long long)(after.rerouted_frames - before.rerouted_frames));
    EP_TEST_CHECK(after.failed == 0, "%llu calls failed", (unsigned long long)after.failed);
    EP_TEST_CHECK(has_noticed(&before, &after), "no call noticed: the victim held none of them");
    fault_fixture_fini(&f);
    return 0;
}
