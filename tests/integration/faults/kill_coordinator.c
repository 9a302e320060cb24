/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SIGKILL of the coordinator under load: the data path goes on. A coordinator started again on the
 * same port is joined by the nodes and by the client that is running, with a newer epoch, and
 * serves new clients; no call notices.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "coordinator.pb-c.h"
#include "fault_fixture.h"

typedef struct epoch {
    uint64_t term;
    uint64_t number;
} epoch;

static epoch client_epoch(ep_client *client)
{
    epoch e;
    EP_TEST_CHECK(ep_client_epoch(client, &e.term, &e.number) == EP_OK, "no epoch");
    return e;
}

static bool is_newer(epoch a, epoch b)
{
    return a.term > b.term || (a.term == b.term && a.number > b.number);
}

/* Every node is there and serves, and has loaded what the new table says. */
static void expect_members(fault_fixture *f, uint64_t term)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    Expertd__V1__ClusterStatusReply *status =
        (Expertd__V1__ClusterStatusReply *)ep_test_cluster_call(
            &f->cluster, f->cluster.coordinator.rpc_url, "expertd.v1.Coordinator", "ClusterStatus",
            &empty.base);
    EP_TEST_CHECK(status->n_nodes == FAULT_NODES, "the coordinator knows %zu nodes",
                  status->n_nodes);
    EP_TEST_CHECK(status->epoch->term == term, "the coordinator's term is %llu",
                  (unsigned long long)status->epoch->term);
    for (size_t n = 0; n < status->n_nodes; n++) {
        EP_TEST_CHECK(strcmp(status->nodes[n]->state, "serving") == 0, "%s is %s",
                      status->nodes[n]->name, status->nodes[n]->state);
    }
    protobuf_c_message_free_unpacked(&status->base, NULL);
}

int main(void)
{
    static fault_fixture f;
    ep_test_load_counts before;
    ep_test_load_counts after;
    ep_test_load_counts end;
    ep_moe_result result;
    fault_fixture_init(&f, NULL, 2);
    ep_test_load *load = fault_load(&f, f.all, 64, 0, NULL, NULL);
    ep_test_load_wait_succeeded(load, 200);
    epoch old = client_epoch(f.client);

    uint64_t victim_in_flight = ep_test_cluster_wait_in_flight(
        &f.cluster, FAULT_VICTIM); /* a node's: the coordinator holds no call */
    ep_test_load_read(load, &before);
    int code = ep_test_process_stop(&f.cluster.coordinator, SIGKILL, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 128 + SIGKILL, "the coordinator ended with %d", code);
    ep_test_load_wait_succeeded(load, FAULT_FINISHED_AFTER_MIN);
    ep_test_load_read(load, &after);
    fault_report("SIGKILL of the coordinator", before.in_flight, victim_in_flight,
                 after.succeeded - before.succeeded);

    ep_test_cluster_restart_coordinator(&f.cluster);
    /* ready: all nodes have joined again */
    ep_client *second = ep_test_cluster_client(&f.cluster, NULL);
    epoch renewed = client_epoch(second);
    EP_TEST_CHECK(is_newer(renewed, old), "epoch %llu/%llu after %llu/%llu",
                  (unsigned long long)renewed.term, (unsigned long long)renewed.number,
                  (unsigned long long)old.term, (unsigned long long)old.number);
    EP_TEST_CHECK(ep_test_batch_call(&f.all[0], second, 0, &result), "a new client: %s",
                  result.error.text);
    uint64_t rounds = 0;
    while (is_newer(renewed,
                    /* the client that was there all the time; its calls are the clock */
                    client_epoch(f.client))) {
        ep_test_load_wait_succeeded(load, 16);
        EP_TEST_CHECK(++rounds < 100000, "the old client still has epoch %llu/%llu",
                      (unsigned long long)client_epoch(f.client).term,
                      (unsigned long long)client_epoch(f.client).number);
    }
    expect_members(&f, client_epoch(f.client).term);
    ep_test_load_wait_succeeded(load, 200);
    ep_test_load_stop(load, &end);
    printf("epoch %llu/%llu became %llu/%llu; %llu calls in all, %llu failed\n",
           (unsigned long long)old.term, (unsigned long long)old.number,
           (unsigned long long)renewed.term, (unsigned long long)renewed.number,
           (unsigned long long)end.succeeded, (unsigned long long)end.failed);
    EP_TEST_CHECK(end.failed == 0, "%llu calls failed", (unsigned long long)end.failed);
    ep_client_destroy(second);
    fault_fixture_fini(&f);
    return 0;
}
