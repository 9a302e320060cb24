/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two hosts of two nodes, two copies of each expert, one frame per host (comm_alg hierarchy): SIGKILL of a node that
 * passes rows on and gets them passed on. No call fails, no bit is wrong.
 */
#include <signal.h>
#include <stdio.h>

#include "fault_fixture.h"

static ep_test_load *start_load(fault_fixture *f)
{
    return ep_test_load_start(&(ep_test_load_config){.client = f->client,
                                                     .batches = f->all,
                                                     .batches_count = FAULT_LAYERS * FAULT_BATCHES,
                                                     .calls_in_flight = 64,
                                                     .comm_alg = EP_MOE_COMM_HIERARCHY});
}

int main(void)
{
    static fault_fixture f;
    static const char *const hosts[] = {"left", "left", "right", "right"};
    ep_test_load_counts before;
    ep_test_load_counts after;
    fault_fixture_init_options(&f, &(ep_test_cluster_options){.nodes_count = 4, .copies = 2, .hosts = hosts});
    ep_test_load *load = start_load(&f);
    ep_test_load_wait_succeeded(load, 200);

    uint64_t victim_in_flight = ep_test_cluster_wait_in_flight(&f.cluster, FAULT_VICTIM);
    ep_test_load_read(load, &before);
    int code = ep_test_process_stop(&f.cluster.nodes[FAULT_VICTIM], SIGKILL, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 128 + SIGKILL, "the victim ended with %d", code);
    ep_test_load_wait_succeeded(load, FAULT_FINISHED_AFTER_MIN);

    ep_test_load_stop(load, &after);
    fault_report("SIGKILL of a neighbour", before.in_flight, victim_in_flight, after.succeeded - before.succeeded);
    printf("%llu calls failed, %llu frames were sent again, straight to an owner\n", (unsigned long long)after.failed,
           (unsigned long long)(after.rerouted_frames - before.rerouted_frames));
    EP_TEST_CHECK(after.failed == 0, "%llu calls failed", (unsigned long long)after.failed);
    /* A frame that a copy had been sent already, for being late, needs no sending again. */
    EP_TEST_CHECK(after.rerouted_frames + after.hedged_frames > before.rerouted_frames + before.hedged_frames,
                  "no call noticed: the victim held none of them");
    fault_fixture_fini(&f);
    return 0;
}
