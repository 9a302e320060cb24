/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl frame: finds the verb; and frame list, the methods this program knows. */
#include "cmd_frame.h"

#include <stdio.h>
#include <string.h>

#include "arguments.h"
#include "exit_code.h"
#include "output.h"
#include "settings.h"

#define SERVICE_BYTES 128

static const ep_cli_command *const verbs[] = {
    &ep_cli_frame_encode_command, &ep_cli_frame_decode_command, &ep_cli_frame_list_command};

const ep_cli_command *ep_cli_frame_verb_at(size_t index)
{
    return index < sizeof(verbs) / sizeof(verbs[0]) ? verbs[index] : NULL;
}

const ep_rpc_method *ep_cli_frame_method(struct argp_state *state, const char *text)
{
    char service[SERVICE_BYTES];
    const char *slash = strchr(text, '/');
    const ep_rpc_method *method = NULL;
    if (slash != NULL && (size_t)(slash - text) < sizeof(service)) {
        snprintf(service, sizeof(service), "%.*s", (int)(slash - text), text);
        method = ep_rpc_method_by_name(service, slash + 1);
    }
    if (method == NULL) {
        argp_error(state, "%s is '%s', allowed: SERVICE/METHOD as in expertctl frame list",
                   ep_cli_setting_name("--method", text), text);
    }
    return method;
}

/* ---- list ---- */

static error_t parse_list(int key, char *arg, struct argp_state *state)
{
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->input;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child list_children[] = {{&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp list_argp = {
    NULL,
    parse_list,
    NULL,
    "Lists every method a frame may carry, with the messages it takes and gives.\v"
    "Nobody is asked: these are the methods this program was built with. What a running program "
    "serves says "
    "expertctl rpc list.\n\n"
    "Examples:\n"
    "  expertctl frame list\n\n" EP_CLI_EXIT_HELP,
    list_children,
    NULL,
    NULL};

static int run_list(int argc, char **argv)
{
    static ep_cli_format format;
    size_t count;
    argp_parse(&list_argp, argc, argv, 0, NULL, &format);
    const ep_rpc_method *methods = ep_rpc_methods(&count);
    json_t *list = json_array();
    ep_cli_table *table = ep_cli_table_create("METHOD|ID|REQUEST|REPLY|STREAM|ROLE");
    for (size_t i = 0; table != NULL && i < count; i++) {
        const ep_rpc_method *m = &methods[i];
        const char *role = ep_rpc_role_name(m->role);
        bool stream = m->stream == EP_RPC_SERVER_STREAM;
        json_array_append_new(
            list, json_pack("{s:o, s:I, s:s, s:s, s:b, s:s}", "method",
                            json_sprintf("%s/%s", m->service->name, m->method->name), "id",
                            (json_int_t)m->id, "request", m->method->input->name, "reply",
                            m->method->output->name, "stream", stream, "role", role));
        ep_cli_table_cell(table, "%s/%s", m->service->name, m->method->name);
        ep_cli_table_cell(table, "0x%04x", m->id);
        ep_cli_table_cell(table, "%s", m->method->input->short_name);
        ep_cli_table_cell(table, "%s", m->method->output->short_name);
        ep_cli_table_cell(table, "%s", stream ? "yes" : "no");
        ep_cli_table_cell(table, "%s", role);
    }
    bool good = format == EP_CLI_JSON ? ep_cli_json_print(json_incref(list), stdout)
                                      : ep_cli_table_print(table, stdout);
    json_decref(list);
    ep_cli_table_destroy(table);
    return good ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

const ep_cli_command ep_cli_frame_list_command = {"list", "methods a frame may carry", &list_argp,
                                                  run_list, NULL};

/* ---- the verbs ---- */

static error_t parse(int key, char *arg, struct argp_state *state)
{
    return ep_cli_arg_verb(state, key, arg, "encode, decode, list");
}

static const struct argp argp = {
    NULL,
    parse,
    "encode|decode|list [OPTION...]",
    "Makes request frames and reads reply frames, for clients that know nng but not expertd.\v"
    "  encode  writes a request frame to a file\n"
    "  decode  prints a frame as JSON and takes the tensors out of it\n"
    "  list    methods, with their messages\n\n"
    "Each has its own help: expertctl frame encode --help\n\n"
    "Examples:\n"
    "  expertctl frame encode --method expertd.v1.Health/Check -o request.bin\n"
    "  nngcat --req --dial tcp://127.0.0.1:7423 --file request.bin --raw >reply.bin\n"
    "  expertctl frame decode reply.bin\n\n" EP_CLI_EXIT_HELP,
    NULL,
    NULL,
    NULL};

static int run(int argc, char **argv)
{
    return ep_cli_run_verb(argc, argv, ep_cli_frame_verb_at, &argp);
}

const ep_cli_command ep_cli_frame_command = {
    "frame", "makes and reads the frames of the open door (door_listen)", &argp, run,
    ep_cli_frame_verb_at};
