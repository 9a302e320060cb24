/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One of three nodes answers slowly, for its replies are held up, while every expert has a copy on
 * another node. Calls go to the others, but for a probe now and then; none fails, and few are
 * hedged. Once it is quick again it gets its part.
 */
#include <stdio.h>

#include "chaos_fixture.h"
#include "moe/routing_plan.h"

/* Below what makes a node silent (client/cluster/silence.h): a ping's answer waits behind a reply.
 */
enum { REPLY_MS = 80, CALLS_IN_FLIGHT = 4, STEP = 250, STEPS_SLOW_MAX = 10, STEPS_MAX = 200 };

static chaos_fixture f;

static uint64_t requests_of(uint32_t node)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.faults.cluster, node);
    uint64_t count = status->requests_served;
    protobuf_c_message_free_unpacked(&status->base, NULL);
    return count;
}

/* Of requests that come while the load makes a step. */
static double share_of_victim(ep_test_load *load)
{
    uint64_t before[FAULT_NODES];
    uint64_t all = 0;
    uint64_t victims = 0;
    for (uint32_t n = 0; n < FAULT_NODES; n++) {
        before[n] = requests_of(n);
    }
    ep_test_load_wait_succeeded(load, STEP);
    for (uint32_t n = 0; n < FAULT_NODES; n++) {
        uint64_t more = requests_of(n) - before[n];
        all += more;
        victims += n == FAULT_VICTIM ? more : 0;
    }
    return (double)victims / (double)all;
}

/* Steps until the share is below (or above) the bound. */
static void wait_share(ep_test_load *load, bool is_below, double bound)
{
    const int steps_max = is_below ? STEPS_SLOW_MAX : STEPS_MAX;
    double share = -1;
    int step = 0;
    for (; share < 0 || (is_below ? share >= bound : share <= bound); step++) {
        EP_TEST_CHECK(step < steps_max, "after %d calls the node still has %.3f of the requests",
                      step * STEP, share);
        share = share_of_victim(load);
    }
    printf("after %d calls the node has %.3f of the requests\n", step * STEP, share);
}

int main(void)
{
    static const ep_chaos_rule slow = {EP_CHAOS_DELAY,         EP_CHAOS_TO_CLIENT,
                                       1u << EP_FRAME_REPLY,   .rate = 10000,
                                       .amount_min = REPLY_MS, .amount_max = REPLY_MS};
    ep_client_stats before = {.struct_bytes = sizeof(before)}, after = before;
    ep_test_load_counts counts;
    chaos_fixture_init(&f);
    ep_test_load *load = fault_load(&f.faults, f.faults.all, CALLS_IN_FLIGHT, 0, NULL, NULL);
    wait_share(load, false, 0.2);

    ep_client_read_stats(f.faults.client, &before);
    ep_chaos_proxy_set_rules(f.proxies[FAULT_VICTIM], &slow, 1);
    wait_share(load, true, 0.03);
    ep_test_load_wait_succeeded(load, 4 * EP_COPY_PROBE_OF);
    ep_client_read_stats(f.faults.client, &after);
    uint64_t hedges = after.hedged_frames - before.hedged_frames;
    double hedged = (double)hedges / (double)(after.frames_sent - before.frames_sent);
    printf("%.3f of the frames were hedges\n", hedged);
    EP_TEST_CHECK(hedged <= 0.1, "%.3f of the frames were hedges", hedged);

    ep_chaos_proxy_set_rules(f.proxies[FAULT_VICTIM], NULL, 0);
    wait_share(load, false, 0.2);
    ep_test_load_stop(load, &counts);
    EP_TEST_CHECK(counts.failed == 0, "%llu calls failed", (unsigned long long)counts.failed);
    chaos_fixture_fini(&f);
    return 0;
}
