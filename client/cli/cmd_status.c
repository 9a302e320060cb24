/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl status: is the service healthy, and what does it consist of. */
#include "arguments.h"
#include "command_table.h"
#include "exit_code.h"
#include "settings.h"
#include "status.h"

typedef struct status_options {
    ep_cli_connect connect;
    ep_cli_format format;
} status_options;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    status_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {
    {&ep_cli_connect_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    NULL,
    parse,
    NULL,
    "Prints epoch, placement policy, nodes and models, and what the coordinator "
    "finds wrong. Exit code 0 when that is nothing, 1 when it is something."
    "\vWith --node the nodes themselves are asked, and no coordinator.\n\n"
    "Examples:\n"
    "  expertctl status\n"
    "  expertctl status --coordinator tcp://10.0.0.1:7410 -o json\n"
    "  expertctl status --node tcp://127.0.0.1:7420\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static int finish(bool printed, const ep_cli_problems *problems)
{
    return printed && problems->count == 0 ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

static int run_cluster(const char *program, const status_options *options, ep_cli_control *control)
{
    static ep_cli_problems problems;
    const char *url = options->connect.coordinator_url;
    ProtobufCMessage *message = NULL;
    ep_routing_table *table = NULL;
    ep_error error;
    ep_err err = ep_cli_control_ask_one(control, url, "expertd.v1.Coordinator", "ClusterStatus",
                                        &message, &error);
    if (err != EP_OK) {
        return ep_cli_fail(program, &error);
    }
    const Expertd__V1__ClusterStatusReply *cluster =
        (const Expertd__V1__ClusterStatusReply *)message;
    /* Before the first epoch a watch would have nothing to say. */
    if (cluster->epoch != NULL && cluster->epoch->number > 0) {
        err = ep_cli_placement_read(control, &options->connect, &table, &error);
    }
    int code;
    if (err != EP_OK) {
        code = ep_cli_fail(program, &error);
    } else {
        ep_cli_cluster_check(cluster, &problems);
        code = finish(ep_cli_cluster_print(url, cluster, table, &problems, options->format, stdout),
                      &problems);
    }
    ep_routing_table_unref(table);
    protobuf_c_message_free_unpacked(message, NULL);
    return code;
}

/* Nobody answered: that is the error of the first one. */
static bool none_answered(const ep_cli_node_list *nodes)
{
    for (size_t i = 0; i < nodes->count; i++) {
        if (nodes->nodes[i].status != NULL) {
            return false;
        }
    }
    return true;
}

static int run_nodes(const char *program, const status_options *options, ep_cli_control *control)
{
    static ep_cli_problems problems;
    ep_cli_node_list nodes = {0};
    ep_error error;
    int code;
    ep_err err = ep_cli_node_list_read(control, &options->connect, &nodes, &error);
    if (err != EP_OK) {
        return ep_cli_fail(program, &error);
    }
    ep_cli_node_list_ask(control, &nodes, options->connect.timeout_us);
    if (none_answered(&nodes)) {
        code = ep_cli_fail(program, &nodes.nodes[0].error);
    } else {
        ep_cli_nodes_check(&nodes, &problems);
        code = finish(ep_cli_nodes_print(&nodes, &problems, options->format, stdout), &problems);
    }
    ep_cli_node_list_free(&nodes);
    return code;
}

static int run(int argc, char **argv)
{
    static status_options options;
    ep_cli_control *control = NULL;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    ep_cli_settings_say(argv[0], ep_cli_connect_url(&options.connect));
    if (ep_cli_control_open(&options.connect, &control, &error) != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    int code = options.connect.coordinator_url != NULL ? run_cluster(argv[0], &options, control)
                                                       : run_nodes(argv[0], &options, control);
    ep_cli_control_close(control);
    return code;
}

const ep_cli_command ep_cli_status = {"status", "is the service healthy: epoch, nodes, models",
                                      &argp, run, NULL};
