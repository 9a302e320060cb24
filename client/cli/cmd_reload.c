/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl reload: a program reads its configuration again, as on SIGHUP. */
#include "admin_call.h"
#include "arguments.h"
#include "command_table.h"
#include "exit_code.h"
#include "output.h"

typedef struct reload_options {
    ep_cli_connect connect;
    ep_cli_format format;
} reload_options;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    reload_options *options = state->input;
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
    {&ep_cli_admin_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    NULL,
    parse,
    NULL,
    "A coordinator or node reads its configuration file and its tokens again, as on SIGHUP, and "
    "says which keys changed and which "
    "wait for a restart."
    "\vA wrong file changes nothing: exit code 1 and the reason.\n\n"
    "Examples:\n"
    "  expertctl reload --admin tcp://127.0.0.1:7422\n"
    "  expertctl reload --admin tcp://127.0.0.1:7412 \\\n"
    "      --admin-token-file /etc/expertd/admin.token\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

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

static int run(int argc, char **argv)
{
    static reload_options options;
    ProtobufCMessage *message = NULL;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    if (ep_cli_admin_call_once(&options.connect, "Reload", NULL, &message, &error) != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    const Expertd__V1__ReloadReply *reply = (const Expertd__V1__ReloadReply *)message;
    bool good = true;
    if (options.format == EP_CLI_JSON) {
        good = ep_cli_json_print(
            json_pack("{s:o, s:o}", "changed", keys_json(reply->changed, reply->n_changed),
                      "need_restart", keys_json(reply->need_restart, reply->n_need_restart)),
            stdout);
    } else {
        print_keys("changed:", reply->changed, reply->n_changed);
        print_keys("wait for a restart:", reply->need_restart, reply->n_need_restart);
    }
    protobuf_c_message_free_unpacked(message, NULL);
    return good ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

const ep_cli_command ep_cli_reload = {"reload", "a program reads its configuration again", &argp,
                                      run, NULL};
