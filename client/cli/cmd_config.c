/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl config: the options in force in a running program, and the origin of each. */
#include <string.h>

#include "command_table.h"
#include "control.h"

static bool only_changed;

static const ep_cli_option rows[] = {
    {"changed", 0, NULL, "Only what a file, the environment or a flag sets", 1,
     .flag = &only_changed},
};

static bool is_shown(const Expertd__V1__ConfigEntry *entry)
{
    return !only_changed ||
           (strcmp(entry->origin, "default") != 0 && strcmp(entry->origin, "not set") != 0);
}

static bool print(const Expertd__V1__ConfigReply *reply)
{
    ep_cli_table *table = ep_cli_table_create("KEY|VALUE|2ORIGIN|1RELOAD");
    json_t *entries = json_array();
    for (size_t i = 0; i < reply->n_entries; i++) {
        const Expertd__V1__ConfigEntry *entry = reply->entries[i];
        if (!is_shown(entry)) {
            continue;
        }
        json_array_append_new(entries,
                              json_pack("{s:o, s:o, s:o, s:b}", "key", ep_cli_json_text(entry->key),
                                        "value", ep_cli_json_text(entry->value), "origin",
                                        ep_cli_json_text(entry->origin), "reloadable",
                                        (int)entry->reloadable));
        ep_cli_table_cell(table, "%s", entry->key);
        ep_cli_table_cell(table, "%s", entry->value[0] != '\0' ? entry->value : "-");
        /* A terminal gets a short origin; the key tells which flag or variable it is. */
        ep_cli_table_brief(table, entry->origin,
                           strncmp(entry->origin, "flag ", 5) == 0           ? "flag"
                           : strncmp(entry->origin, "environment ", 12) == 0 ? "environment"
                                                                             : entry->origin);
        ep_cli_table_cell(table, "%s", entry->reloadable ? "yes" : "no");
    }
    if (ep_cli_output_format == EP_CLI_TABLE) {
        ep_cli_line(stdout, "%s, %s", reply->program, reply->software);
        putchar('\n');
    }
    return ep_cli_output_print(
        table, json_pack("{s:o, s:o, s:o}", "program", ep_cli_json_text(reply->program), "software",
                         ep_cli_json_text(reply->software), "entries", entries));
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    ProtobufCMessage *message = NULL;
    ep_err err = ep_cli_admin_call_once(&ep_cli_peer, "GetConfig", NULL, &message, out_error);
    if (err != EP_OK) {
        return err;
    }
    call->failed = !print((const Expertd__V1__ConfigReply *)message);
    protobuf_c_message_free_unpacked(message, NULL);
    return EP_OK;
}

const ep_cli_command ep_cli_config = {
    .name = "config",
    .help = "the options in force in a program, and where they come from",
    .doc = "Prints every option that is in force in a running coordinator or node: value, where it "
           "comes from, and whether a reload can change it."
           "\vOf files with tokens and keys only the paths are shown. A changed value that waits "
           "for a restart is not in force and not shown.\n\n"
           "Examples:\n"
           "  expertctl config --admin tcp://127.0.0.1:7422\n"
           "  expertctl config --changed -o json --admin tcp://127.0.0.1:7412 \\\n"
           "      --admin-token-file /etc/expertd/admin.token\n\n" EP_CLI_EXIT_HELP,
    .options = {.rows = rows, .count = EP_ARRAY_COUNT(rows)},
    .uses = {&ep_cli_admin_options, &ep_cli_output_options},
    .run = run,
};
