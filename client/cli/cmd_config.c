/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl config: the options that are in force in a running program, and where each comes
 * from. */
#include <string.h>

#include "admin_call.h"
#include "arguments.h"
#include "command_table.h"
#include "exit_code.h"
#include "output.h"

#define KEY_CHANGED 0x200

typedef struct config_options {
    ep_cli_connect connect;
    ep_cli_format format;
    bool changed;
} config_options;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    config_options *options = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->connect;
        state->child_inputs[1] = &options->format;
        return 0;
    case KEY_CHANGED:
        options->changed = true;
        return 0;
    case ARGP_KEY_ARG:
        return ep_cli_arg_unexpected(state, arg);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    {"changed", KEY_CHANGED, NULL, 0, "Only what a file, the environment or a flag sets", 1},
    {0},
};
static const struct argp_child children[] = {
    {&ep_cli_admin_argp, 0, NULL, 0}, {&ep_cli_output_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    option_list,
    parse,
    NULL,
    "Prints every option that is in force in a running coordinator or node: value, where it comes "
    "from, and whether a reload "
    "can change it."
    "\vOf files with tokens and keys only the paths are shown. A changed value that waits for a "
    "restart is not in force and not "
    "shown.\n\n"
    "Examples:\n"
    "  expertctl config --admin tcp://127.0.0.1:7422\n"
    "  expertctl config --changed -o json --admin tcp://127.0.0.1:7412 \\\n"
    "      --admin-token-file /etc/expertd/admin.token\n\n" EP_CLI_EXIT_HELP,
    children,
    NULL,
    NULL};

static bool is_shown(const config_options *options, const Expertd__V1__ConfigEntry *entry)
{
    return !options->changed ||
           (strcmp(entry->origin, "default") != 0 && strcmp(entry->origin, "not set") != 0);
}

static bool print_json(const config_options *options, const Expertd__V1__ConfigReply *reply)
{
    json_t *entries = json_array();
    for (size_t i = 0; i < reply->n_entries; i++) {
        const Expertd__V1__ConfigEntry *entry = reply->entries[i];
        if (is_shown(options, entry)) {
            json_array_append_new(entries, json_pack("{s:o, s:o, s:o, s:b}", "key",
                                                     ep_cli_json_text(entry->key), "value",
                                                     ep_cli_json_text(entry->value), "origin",
                                                     ep_cli_json_text(entry->origin), "reloadable",
                                                     (int)entry->reloadable));
        }
    }
    return ep_cli_json_print(json_pack("{s:o, s:o, s:o}", "program",
                                       ep_cli_json_text(reply->program), "software",
                                       ep_cli_json_text(reply->software), "entries", entries),
                             stdout);
}

static bool print_table(const config_options *options, const Expertd__V1__ConfigReply *reply)
{
    ep_cli_table *table = ep_cli_table_create("KEY|VALUE|2ORIGIN|1RELOAD");
    ep_cli_line(stdout, "%s, %s", reply->program, reply->software);
    putchar('\n');
    for (size_t i = 0; table != NULL && i < reply->n_entries; i++) {
        const Expertd__V1__ConfigEntry *entry = reply->entries[i];
        if (is_shown(options, entry)) {
            ep_cli_table_cell(table, "%s", entry->key);
            ep_cli_table_cell(table, "%s", entry->value[0] != '\0' ? entry->value : "-");
            /* Which flag or variable says the key. */
            ep_cli_table_brief(table, entry->origin,
                               strncmp(entry->origin, "flag ", 5) == 0           ? "flag"
                               : strncmp(entry->origin, "environment ", 12) == 0 ? "environment"
                                                                                 : entry->origin);
            ep_cli_table_cell(table, "%s", entry->reloadable ? "yes" : "no");
        }
    }
    bool good = ep_cli_table_print(table, stdout);
    ep_cli_table_destroy(table);
    return good;
}

static int run(int argc, char **argv)
{
    static config_options options;
    ProtobufCMessage *message = NULL;
    ep_error error;
    ep_cli_connect_init(&options.connect);
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    if (ep_cli_admin_call_once(&options.connect, "GetConfig", NULL, &message, &error) != EP_OK) {
        return ep_cli_fail(argv[0], &error);
    }
    const Expertd__V1__ConfigReply *reply = (const Expertd__V1__ConfigReply *)message;
    bool good =
        options.format == EP_CLI_JSON ? print_json(&options, reply) : print_table(&options, reply);
    protobuf_c_message_free_unpacked(message, NULL);
    return good ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

const ep_cli_command ep_cli_config = {
    "config", "the options in force in a program, and where they come from", &argp, run, NULL};
