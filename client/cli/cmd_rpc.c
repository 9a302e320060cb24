/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl rpc list: the services and methods a program offers. */
#include <string.h>

#include "arguments.h"
#include "command_table.h"
#include "control.h"
#include "exit_code.h"
#include "health.pb-c.h"
#include "output.h"

typedef struct rpc_options {
    ep_cli_connect connect;
    ep_cli_format format;
    const char *verb;
} rpc_options;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    rpc_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        return 0;
    case ARGP_KEY_ARG:
        if (options->verb != NULL || strcmp(arg, "list") != 0) {
            argp_error(state, "unexpected argument '%s', allowed: list", arg);
        }
        options->verb = arg;
        return 0;
    case ARGP_KEY_END:
        if (options->verb == NULL) {
            argp_error(state, "an argument is missing, allowed: list");
        }
        if (options->connect.node_urls_count > 1) {
            argp_error(state, "--node is given %zu times, allowed here: once",
                       options->connect.node_urls_count);
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {
    {&ep_cli_connect_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    NULL,
    parse,
    "list",
    "Lists the services and methods of a coordinator or a node, by its own account."
    "\vA method's id is what travels on the wire; role is the least role that may call it; an "
    "idempotent "
    "method may be sent "
    "again after a connection loss.\n\n"
    "Examples:\n"
    "  expertctl rpc list\n"
    "  expertctl rpc list --node tcp://127.0.0.1:7420 -o json\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static bool print_json(const char *url, const Expertd__V1__ListServicesReply *reply)
{
    json_t *services = json_array();
    for (size_t s = 0; s < reply->n_services; s++) {
        const Expertd__V1__ServiceInfo *service = reply->services[s];
        json_t *methods = json_array();
        for (size_t m = 0; m < service->n_methods; m++) {
            const Expertd__V1__MethodInfo *method = service->methods[m];
            json_array_append_new(
                methods,
                json_pack("{s:o, s:I, s:o, s:o, s:b, s:o, s:b}", "name",
                          ep_cli_json_text(method->name), "id", (json_int_t)method->id, "input",
                          ep_cli_json_text(method->input), "output",
                          ep_cli_json_text(method->output), "stream", method->server_stream, "role",
                          ep_cli_json_text(method->role), "idempotent", method->idempotent));
        }
        json_array_append_new(
            services,
            json_pack("{s:o, s:o}", "name", ep_cli_json_text(service->name), "methods", methods));
    }
    return ep_cli_json_print(
        json_pack("{s:o, s:o}", "url", ep_cli_json_text(url), "services", services), stdout);
}

static bool print_table(const Expertd__V1__ListServicesReply *reply)
{
    ep_cli_table *table = ep_cli_table_create("SERVICE|METHOD|ID|REPLY|ROLE|IDEMPOTENT");
    for (size_t s = 0; table != NULL && s < reply->n_services; s++) {
        const Expertd__V1__ServiceInfo *service = reply->services[s];
        for (size_t m = 0; m < service->n_methods; m++) {
            const Expertd__V1__MethodInfo *method = service->methods[m];
            ep_cli_table_cell(table, "%s", service->name);
            ep_cli_table_cell(table, "%s", method->name);
            ep_cli_table_cell(table, "0x%04x", method->id);
            ep_cli_table_cell(table, "%s", method->server_stream ? "stream" : "unary");
            ep_cli_table_cell(table, "%s", method->role);
            ep_cli_table_cell(table, "%s", method->idempotent ? "yes" : "no");
        }
    }
    bool good = ep_cli_table_print(table, stdout);
    ep_cli_table_destroy(table);
    return good;
}

static int run(int argc, char **argv)
{
    static rpc_options options;
    ep_cli_control *control = NULL;
    ProtobufCMessage *message = NULL;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    const char *url = ep_cli_connect_url(&options.connect);
    ep_err err = ep_cli_control_open(&options.connect, &control, &error);
    err = err != EP_OK ? err
                       : ep_cli_control_ask_one(control, url, "expertd.v1.Reflection",
                                                "ListServices", &message, &error);
    ep_cli_control_close(control);
    if (err != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    const Expertd__V1__ListServicesReply *reply = (const Expertd__V1__ListServicesReply *)message;
    bool good = options.format == EP_CLI_JSON ? print_json(url, reply) : print_table(reply);
    protobuf_c_message_free_unpacked(message, NULL);
    return good ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

const ep_cli_command ep_cli_rpc = {"rpc", "list: services and methods of a coordinator or node",
                                   &argp, run, NULL};
