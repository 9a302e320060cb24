/* SPDX-License-Identifier: Apache-2.0 */
/* SIGKILL of a node under load while every expert has two copies: no call fails, no bit is
 * wrong. */
#include <signal.h>
#include <stdio.h>

#include "fault_fixture.h"

int main(void)
{
    static fault_fixture f;
    ep_test_load_counts before;
    ep_test_load_counts after;
    ep_layer_desc layer = {.struct_bytes = sizeof(layer)};
    fault_fixture_init(&f, NULL, 2);
    EP_TEST_CHECK(ep_client_layer(f.client, "demo", NULL, 0, &layer) == EP_OK &&
                      layer.copies_min == 2,
                  "%u copies", layer.copies_min);
    ep_test_load *load = fault_load(&f, f.all, 64, 0, NULL, NULL);
    ep_test_load_wait_succeeded(load, 200);

    uint64_t victim_in_flight = ep_test_cluster_wait_in_flight(&f.cluster, FAULT_VICTIM);
    ep_test_load_read(load, &before);
    int code = ep_test_process_stop(&f.cluster.nodes[FAULT_VICTIM], SIGKILL, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 128 + SIGKILL, "the victim ended with %d", code);
    ep_test_load_wait_succeeded(load, FAULT_FINISHED_AFTER_MIN);

    ep_test_load_stop(load, &after);
    fault_report("SIGKILL of one of two copies", before.in_flight, victim_in_flight,
                 after.succeeded - before.succeeded);
    printf("%llu calls failed, %llu frames were sent again to another copy\n",
           (unsigned long long)after.failed,
           (unsigned long long)(after.rerouted_frames - before.rerouted_frames));
    EP_TEST_CHECK(after.failed == 0, "%llu calls failed", (unsigned long long)after.failed);
    /* A frame that a copy had been sent already, for being late, needs no sending again. */
    EP_TEST_CHECK(after.rerouted_frames + after.hedged_frames >
                      before.rerouted_frames + before.hedged_frames,
                  "no call noticed: the victim held none of them");
    fault_fixture_fini(&f);
    return 0;
}
