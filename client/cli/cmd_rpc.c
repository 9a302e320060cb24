/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl rpc list: the services and methods that a program offers. */
#include <string.h>

#include "command_table.h"
#include "control.h"
#include "health.pb-c.h"

static bool is_list;

static void take_verb(struct argp_state *state, char *text)
{
    if (is_list || strcmp(text, "list") != 0) {
        argp_error(state, "unexpected argument '%s', allowed: list", text);
    }
    is_list = true;
}

static void check(struct argp_state *state)
{
    if (!is_list) {
        argp_error(state, "an argument is missing, allowed: list");
    }
    if (ep_cli_peer.node_urls_count > 1) {
        argp_error(state, "--node is given %zu times, allowed here: once",
                   ep_cli_peer.node_urls_count);
    }
}

static bool print(const char *url, const Expertd__V1__ListServicesReply *reply)
{
    ep_cli_table *table = ep_cli_table_create("SERVICE|METHOD|ID|REPLY|ROLE|IDEMPOTENT");
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
            ep_cli_table_cell(table, "%s", service->name);
            ep_cli_table_cell(table, "%s", method->name);
            ep_cli_table_cell(table, "0x%04x", method->id);
            ep_cli_table_cell(table, "%s", method->server_stream ? "stream" : "unary");
            ep_cli_table_cell(table, "%s", method->role);
            ep_cli_table_cell(table, "%s", method->idempotent ? "yes" : "no");
        }
        json_array_append_new(
            services,
            json_pack("{s:o, s:o}", "name", ep_cli_json_text(service->name), "methods", methods));
    }
    return ep_cli_output_print(
        table, json_pack("{s:o, s:o}", "url", ep_cli_json_text(url), "services", services));
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ep_cli_control *control = NULL;
    ProtobufCMessage *message = NULL;
    const char *url = ep_cli_connect_url(&ep_cli_peer);
    ep_err err = ep_cli_control_open(&ep_cli_peer, &control, out_error);
    err = err != EP_OK ? err
                       : ep_cli_control_ask_one(control, url, "expertd.v1.Reflection",
                                                "ListServices", NULL, &message, out_error);
    ep_cli_control_close(control);
    if (err != EP_OK) {
        return err;
    }
    call->failed = !print(url, (const Expertd__V1__ListServicesReply *)message);
    protobuf_c_message_free_unpacked(message, NULL);
    return EP_OK;
}

const ep_cli_command ep_cli_rpc = {
    .name = "rpc",
    .help = "list: services and methods of a coordinator or node",
    .args = "list",
    .doc = "Lists the services and methods of a coordinator or a node, by its own account."
           "\vA method's id is what travels on the wire; role is the least role that may call it; "
           "an idempotent method may be sent again after a connection loss.\n\n"
           "Examples:\n"
           "  expertctl rpc list\n"
           "  expertctl rpc list --node tcp://127.0.0.1:7420 -o json\n\n" EP_CLI_EXIT_HELP,
    .options = {.check = check},
    .uses = {&ep_cli_connect_options, &ep_cli_output_options},
    .take_argument = take_verb,
    .run = run,
};
