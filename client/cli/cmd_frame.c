/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl frame, and its verb list: the methods that this program knows. */
#include "cmd_frame.h"

/* ---- list ---- */

static ep_err run_list(ep_cli_call *call, ep_error *out_error)
{
    size_t count;
    (void)out_error;
    const ep_rpc_method *methods = ep_rpc_methods(&count);
    json_t *list = json_array();
    ep_cli_table *table = ep_cli_table_create("METHOD|ID|REQUEST|REPLY|STREAM|ROLE");
    for (size_t i = 0; i < count; i++) {
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
    call->failed = !ep_cli_output_print(table, list);
    return EP_OK;
}

static const ep_cli_command list_command = {
    .name = "list",
    .help = "methods a frame may carry",
    .doc = "Lists every method a frame may carry, with the messages it takes and gives.\vNobody is "
           "asked: these are the methods this program was built with. What a running program "
           "serves says expertctl rpc list.\n\n"
           "Examples:\n"
           "  expertctl frame list\n\n" EP_CLI_EXIT_HELP,
    .uses = {&ep_cli_output_options},
    .run = run_list,
};

static const ep_cli_command *const verbs[] = {&ep_cli_frame_encode_command,
                                              &ep_cli_frame_decode_command, &list_command, NULL};
const ep_cli_command ep_cli_frame_command = {
    .name = "frame",
    .help = "makes and reads the frames of the open door (door_listen)",
    .args = "encode|decode|list [OPTION...]",
    .doc = "Makes request frames and reads reply frames, for clients that know nng but not "
           "expertd.\v  encode  writes a request frame to a file\n"
           "  decode  prints a frame as JSON and takes the tensors out of it\n"
           "  list    methods, with their messages\n\n"
           "Each has its own help: expertctl frame encode --help\n\n"
           "Examples:\n"
           "  expertctl frame encode --method expertd.v1.Health/Check -o request.bin\n"
           "  nngcat --req --dial tcp://127.0.0.1:7423 --file request.bin --raw >reply.bin\n"
           "  expertctl frame decode reply.bin\n\n" EP_CLI_EXIT_HELP,
    .verbs = verbs,
};
