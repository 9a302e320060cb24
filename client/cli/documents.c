/* SPDX-License-Identifier: Apache-2.0 */
/* The command table as the generators want it. */
#include "documents.h"

#include <stdlib.h>

#include "command_table.h"
#include "connect.h"
#include "exit_code.h"
#include "expertd/client.h"
#include "settings.h"
#include "usage/usage.h"

static const ep_usage_section sections[] = {
    {"ENVIRONMENT", EP_CLI_SETTINGS_HELP
     "\n\nEXPERTCTL_OUTPUT stands for --output table|json only. A variable that belongs to no "
     "option is warned of."},
    {"FILES", "${XDG_CONFIG_HOME:-~/.config}/expertctl/contexts.yaml holds the contexts: one list "
              "of the flags of expertctl context add, "
              "with underscores. Tokens stay in the files that it names."},
    {"EXIT STATUS", EP_CLI_EXIT_HELP},
    {"SEE ALSO",
     "expertd(8), expertd-coordinator(8), and the manual in /usr/share/doc/expertd/manual"},
};

/* Fills out, unless it is NULL, with all commands, their verbs behind each, and help. Returns how
 * many there are. */
static size_t put_commands(ep_usage_command *out)
{
    static const ep_usage_command help = {"help", "all about a command: expertctl help generate",
                                          NULL, NULL};
    size_t count = 0;
    for (size_t i = 0; ep_cli_command_at(i) != NULL; i++) {
        const ep_cli_command *command = ep_cli_command_at(i);
        if (out != NULL) {
            out[count] = (ep_usage_command){command->name, command->help, command->argp, NULL};
        }
        count++;
        for (size_t v = 0; command->verb_at != NULL && command->verb_at(v) != NULL; v++) {
            const ep_cli_command *verb = command->verb_at(v);
            if (out != NULL) {
                out[count] = (ep_usage_command){verb->name, verb->help, verb->argp, command->name};
            }
            count++;
        }
    }
    if (out != NULL) {
        out[count] = help;
    }
    return count + 1;
}

static bool print(const char *shell, FILE *out)
{
    ep_usage usage = {
        .program = "expertctl",
        .version = ep_version(),
        .man_section = 1,
        .summary = "the operator's and the tester's command line of expertd",
        .sections = sections,
        .sections_count = sizeof(sections) / sizeof(sections[0]),
        .list_command = "expertctl context list --names 2>/dev/null",
    };
    usage.commands_count = put_commands(NULL);
    ep_usage_command *commands = calloc(usage.commands_count, sizeof(*commands));
    bool good = commands != NULL;
    usage.commands = commands;
    if (good) {
        put_commands(commands);
    }
    if (good && shell != NULL) {
        good = ep_usage_print_completion(&usage, shell, out);
    } else if (good) {
        ep_usage_print_man(&usage, out);
    }
    free(commands);
    return good;
}

bool ep_cli_print_man(FILE *out)
{
    return print(NULL, out);
}

bool ep_cli_print_completion(const char *shell, FILE *out)
{
    return print(shell, out);
}
