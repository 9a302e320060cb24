/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl reload: makes a program read its configuration again, as SIGHUP does. */
#include "command_table.h"
#include "control.h"

static void print_keys(const char *what, char *const *keys, size_t count)
{
    char line[EP_CLI_CELL_BYTES_MAX];
    size_t used = (size_t)snprintf(line, sizeof(line), "%s", what);
    for (size_t i = 0; i < count && used < sizeof(line); i++) {
        used +=
            (size_t)snprintf(line + used, sizeof(line) - used, "%s%s", i > 0 ? ", " : " ", keys[i]);
    }
    ep_cli_line(stdout, "%s%s", line, count == 0 ? " none" : "");
}

static json_t *keys_json(char *const *keys, size_t count)
{
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++) {
        json_array_append_new(list, ep_cli_json_text(keys[i]));
    }
    return list;
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ProtobufCMessage *message = NULL;
    ep_err err = ep_cli_admin_call_once(&ep_cli_peer, "Reload", NULL, &message, out_error);
    if (err != EP_OK) {
        return err;
    }
    const Expertd__V1__ReloadReply *reply = (const Expertd__V1__ReloadReply *)message;
    if (ep_cli_output_format == EP_CLI_JSON) {
        call->failed = !ep_cli_json_print(
            json_pack("{s:o, s:o}", "changed", keys_json(reply->changed, reply->n_changed),
                      "need_restart", keys_json(reply->need_restart, reply->n_need_restart)),
            stdout);
    } else {
        print_keys("changed:", reply->changed, reply->n_changed);
        print_keys("wait for a restart:", reply->need_restart, reply->n_need_restart);
    }
    protobuf_c_message_free_unpacked(message, NULL);
    return EP_OK;
}

const ep_cli_command ep_cli_reload = {
    .name = "reload",
    .help = "a program reads its configuration again",
    .doc = "A coordinator or node reads its configuration file and its tokens again, as on SIGHUP, "
           "and says which keys changed and which wait for a restart."
           "\vA wrong file changes nothing: exit code 1 and the reason.\n\n"
           "Examples:\n"
           "  expertctl reload --admin tcp://127.0.0.1:7422\n"
           "  expertctl reload --admin tcp://127.0.0.1:7412 \\\n"
           "      --admin-token-file /etc/expertd/admin.token\n\n" EP_CLI_EXIT_HELP,
    .uses = {&ep_cli_admin_options, &ep_cli_output_options},
    .run = run,
};
