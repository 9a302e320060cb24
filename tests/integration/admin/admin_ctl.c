/* SPDX-License-Identifier: Apache-2.0 */
#include "admin_ctl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "coordinator.pb-c.h"

void admin_ctl(ep_test_cluster *cluster, int code, const char *text, const char *const *args)
{
    char *output = NULL;
    int got = ep_test_process_run(cluster->dir, "expertctl", ep_test_expertctl, args, NULL,
                                  EP_TEST_PATIENCE_MS, &output);
    printf("---- expertctl %s %s: %d\n%s", args[0], args[1] != NULL ? args[1] : "", got,
           output != NULL ? output : "");
    EP_TEST_CHECK(got == code, "expertctl %s ended with %d, not %d: %s", args[0], got, code,
                  output);
    EP_TEST_CHECK(text == NULL || strstr(output, text) != NULL,
                  "expertctl %s does not say '%s': %s", args[0], text, output);
    free(output);
}

static bool is_so(ep_test_cluster *cluster, uint32_t index, const char *state, bool has_experts)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    Expertd__V1__NodeStatusReply *node = ep_test_cluster_node_status(cluster, index);
    Expertd__V1__ClusterStatusReply *status =
        (Expertd__V1__ClusterStatusReply *)ep_test_cluster_call(
            cluster, cluster->coordinator.rpc_url, "expertd.v1.Coordinator", "ClusterStatus",
            &empty.base);
    uint32_t experts = 0;
    bool found = false;
    for (size_t l = 0; l < node->n_layers; l++) {
        experts += node->layers[l]->experts_resident;
    }
    for (size_t i = 0; i < status->n_nodes; i++) {
        found |= strcmp(status->nodes[i]->name, node->node) == 0 &&
                 strcmp(status->nodes[i]->state, state) == 0;
    }
    protobuf_c_message_free_unpacked(&node->base, NULL);
    protobuf_c_message_free_unpacked(&status->base, NULL);
    return found && (experts > 0) == has_experts;
}

void admin_wait_node(ep_test_cluster *cluster, uint32_t node, const char *state, bool has_experts)
{
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    while (!is_so(cluster, node, state, has_experts)) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "node%u never became %s %s experts", node, state,
                      has_experts ? "with" : "without");
        usleep(20000);
    }
}
