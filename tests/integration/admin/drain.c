/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node that holds the only copies of its experts is drained under load, by name and by its own
 * wish, and taken back: no call fails, and in the end it holds nothing. With too few other nodes a
 * drain says so.
 */
#include <signal.h>
#include <stdio.h>

#include "admin_ctl.h"

static void drain_under_load(void)
{
    static const char *const node_args[] = {"--drop-grace-ms=200", NULL};
    static fault_fixture f;
    ep_test_load_counts counts;
    const ep_test_cluster_options options = {
        .nodes_count = FAULT_NODES, .copies = 1, .node_args = node_args};
    fault_fixture_init_options(&f, &options);
    const char *coordinator = f.cluster.coordinator.admin_url;
    const char *own = f.cluster.nodes[FAULT_VICTIM].admin_url;
    /* a failed call fails the test */
    ep_test_load *load = fault_load(&f, f.all, 32, 0, NULL, NULL);
    ep_test_load_wait_succeeded(load, 200);
    admin_wait_node(&f.cluster, FAULT_VICTIM, "serving", true);

    ADMIN_CTL(&f.cluster, 0, "node node1 is drained, 0 copies to move", "drain", "node1", "--wait",
              "--timeout", "60s", "--admin", coordinator);
    admin_wait_node(&f.cluster, FAULT_VICTIM, "drained", false);
    ep_test_load_wait_succeeded(load, 200);
    ADMIN_CTL(&f.cluster, 0, "serving", "drain", "node1", "--undo", "--admin", coordinator);
    admin_wait_node(&f.cluster, FAULT_VICTIM, "serving", true);
    ep_test_load_wait_succeeded(load, 200);

    ADMIN_CTL(&f.cluster, 0, "is drained, 0 copies to move", "drain", "--wait", "--timeout", "100s",
              "--admin", own);
    admin_wait_node(&f.cluster, FAULT_VICTIM, "drained", false);
    ADMIN_CTL(&f.cluster, 0, "itself asks to be emptied", "drain", "node1", "--undo", "--admin",
              coordinator);
    admin_wait_node(&f.cluster, FAULT_VICTIM, "drained", false);
    ADMIN_CTL(&f.cluster, 0, "node node1 is serving", "drain", "--undo", "--admin", own);
    admin_wait_node(&f.cluster, FAULT_VICTIM, "serving", true);
    ep_test_load_wait_succeeded(load, 200);
    ADMIN_CTL(&f.cluster, 0, "is drained, 0 copies to move", "drain", "node1", "--wait",
              "--timeout", "60s", "--admin", own);
    int code = ep_test_process_stop(&f.cluster.nodes[FAULT_VICTIM], SIGTERM, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 0, "the drained node ended with %d", code);
    ep_test_load_wait_succeeded(load, 200);

    ep_test_load_stop(load, &counts);
    printf("%llu calls, %llu failed, %llu frames sent again to another copy\n",
           (unsigned long long)counts.succeeded, (unsigned long long)counts.failed,
           (unsigned long long)counts.rerouted_frames);
    EP_TEST_CHECK(counts.failed == 0, "%llu calls failed", (unsigned long long)counts.failed);
    fault_fixture_fini(&f);
}

/* Two nodes, two copies: one can go, with fewer copies left; the second one has to stay. */
static void drain_without_room(void)
{
    static fault_fixture f;
    const ep_test_cluster_options options = {.nodes_count = 2, .copies = 2};
    fault_fixture_init_options(&f, &options);
    const char *coordinator = f.cluster.coordinator.admin_url;
    ep_test_load_counts counts;
    ep_test_load *load = fault_load(&f, f.all, 32, 0, NULL, NULL);
    ADMIN_CTL(&f.cluster, 1,
              "node node0 is drained, 0 copies to move; 16 experts have fewer than 2 copies: ",
              "drain", "node0", "--wait", "--timeout", "60s", "--admin", coordinator);
    ADMIN_CTL(&f.cluster, 4, "16 copies still to move after 5 s: model demo", "drain", "--wait",
              "--timeout", "5s", "--admin", f.cluster.nodes[1].admin_url);
    ADMIN_CTL(&f.cluster, 0, "no node that can load it is left but drained ones", "drain", "node1",
              "--admin", coordinator);
    ep_test_load_wait_succeeded(load, 200);
    ep_test_load_stop(load, &counts);
    EP_TEST_CHECK(counts.failed == 0, "%llu calls failed", (unsigned long long)counts.failed);
    ADMIN_CTL(&f.cluster, 1, "no node 'node7'; known: node", "drain", "node7", "--admin",
              coordinator);
    fault_fixture_fini(&f);
}

int main(void)
{
    drain_under_load();
    drain_without_room();
    return 0;
}
