/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl status: whether the service is healthy, and its parts. */
#include "command_table.h"
#include "origin.h"
#include "status.h"

static ep_err run_cluster(ep_cli_call *call, ep_cli_control *control, ep_error *out_error)
{
    static ep_cli_problems problems;
    const char *url = ep_cli_peer.coordinator_url;
    ProtobufCMessage *message = NULL;
    ep_routing_table *table = NULL;
    ep_err err = ep_cli_control_ask_one(control, url, "expertd.v1.Coordinator", "ClusterStatus",
                                        NULL, &message, out_error);
    if (err != EP_OK) {
        return err;
    }
    const Expertd__V1__ClusterStatusReply *cluster =
        (const Expertd__V1__ClusterStatusReply *)message;
    /* Before the first epoch there is no table to read. */
    if (cluster->epoch != NULL && cluster->epoch->number > 0) {
        err = ep_cli_placement_read(control, &ep_cli_peer, &table, out_error);
    }
    if (err == EP_OK) {
        ep_cli_cluster_check(cluster, &problems);
        call->failed =
            !ep_cli_cluster_print(url, cluster, table, &problems, ep_cli_output_format, stdout) ||
            problems.count > 0;
    }
    ep_routing_table_unref(table);
    protobuf_c_message_free_unpacked(message, NULL);
    return err;
}

/* Whether no node has answered; the command then fails with the first one's error. */
static bool none_answered(const ep_cli_node_list *nodes)
{
    for (size_t i = 0; i < nodes->count; i++) {
        if (nodes->nodes[i].status != NULL) {
            return false;
        }
    }
    return true;
}

static ep_err run_nodes(ep_cli_call *call, ep_cli_control *control, ep_error *out_error)
{
    static ep_cli_problems problems;
    ep_cli_node_list nodes = {0};
    ep_err err = ep_cli_node_list_read(control, &ep_cli_peer, &nodes, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_cli_node_list_ask(control, &nodes, ep_cli_peer.timeout_us);
    if (none_answered(&nodes)) {
        *out_error = nodes.nodes[0].error;
        err = out_error->code;
    } else {
        ep_cli_nodes_check(&nodes, &problems);
        call->failed = !ep_cli_nodes_print(&nodes, &problems, ep_cli_output_format, stdout) ||
                       problems.count > 0;
    }
    ep_cli_node_list_free(&nodes);
    return err;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_cli_control *control = NULL;
    ep_cli_settings_say(call->program, ep_cli_connect_url(&ep_cli_peer));
    ep_err err = ep_cli_control_open(&ep_cli_peer, &control, out_error);
    if (err == EP_OK) {
        err = ep_cli_peer.coordinator_url != NULL ? run_cluster(call, control, out_error)
                                                  : run_nodes(call, control, out_error);
    }
    ep_cli_control_close(control);
    return err;
}

const ep_cli_command ep_cli_status = {
    .name = "status",
    .help = "is the service healthy: epoch, nodes, models",
    .doc = "Prints epoch, placement policy, nodes and models, and what the coordinator finds "
           "wrong. Exit code 0 when that is nothing, 1 when it is something."
           "\vWith --node the nodes themselves are asked, and no coordinator.\n\n"
           "Examples:\n"
           "  expertctl status\n"
           "  expertctl status --coordinator tcp://10.0.0.1:7410 -o json\n"
           "  expertctl status --node tcp://127.0.0.1:7420\n\n" EP_CLI_EXIT_HELP,
    .uses = {&ep_cli_connect_options, &ep_cli_output_options},
    .run = run,
};
