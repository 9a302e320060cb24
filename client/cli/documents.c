/* SPDX-License-Identifier: Apache-2.0 */
/* The command table as the generators want it. */
#include "documents.h"

#include "base/check.h"
#include "expertd/client.h"
#include "settings.h"
#include "usage/usage.h"

#define COMMANDS_MAX 64
#define VERBS_MAX 8 /* of a command */

static const ep_usage_section sections[] = {
    {"ENVIRONMENT",
     EP_CLI_SETTINGS_HELP "\n\nEXPERTCTL_OUTPUT stands for --output table|json only. A variable "
                          "that belongs to no option is warned of."},
    {"FILES",
     "${XDG_CONFIG_HOME:-~/.config}/expertctl/contexts.yaml holds the contexts: one list of the "
     "flags of expertctl context add, with underscores. Tokens stay in the files that it names."},
    {"EXIT STATUS", EP_CLI_EXIT_HELP},
    {"SEE ALSO",
     "expertd(8), expertd-coordinator(8), and the manual in /usr/share/doc/expertd/manual"},
};

static ep_usage_command usage_of(const ep_cli_command *command, const char *parent)
{
    return (ep_usage_command){command->name, command->help, ep_cli_command_argp(command), parent};
}

/* All commands, their verbs behind each, and help. Returns how many there are. */
static size_t put_commands(const ep_cli_command *const *commands,
                           ep_usage_command out[COMMANDS_MAX])
{
    size_t count = 0;
    for (; *commands != NULL; commands++) {
        const ep_cli_command *const *verb = (*commands)->verbs;
        out[count++] = usage_of(*commands, NULL);
        for (; verb != NULL && *verb != NULL; verb++) {
            out[count++] = usage_of(*verb, (*commands)->name);
        }
        EP_ASSERT(count < COMMANDS_MAX - VERBS_MAX);
    }
    out[count++] =
        (ep_usage_command){"help", "all about a command: expertctl help generate", NULL, NULL};
    return count;
}

static bool print(const ep_cli_command *const *commands, const char *shell, FILE *out)
{
    ep_usage_command list[COMMANDS_MAX];
    const ep_usage usage = {
        .program = "expertctl",
        .version = ep_version(),
        .man_section = 1,
        .summary = "the operator's and the tester's command line of expertd",
        .commands = list,
        .commands_count = put_commands(commands, list),
        .sections = sections,
        .sections_count = sizeof(sections) / sizeof(sections[0]),
        .list_command = "expertctl context list --names 2>/dev/null",
    };
    if (shell != NULL) {
        return ep_usage_print_completion(&usage, shell, out);
    }
    ep_usage_print_man(&usage, out);
    return true;
}

bool ep_cli_print_man(const ep_cli_command *const *commands, FILE *out)
{
    return print(commands, NULL, out);
}

bool ep_cli_print_completion(const ep_cli_command *const *commands, const char *shell, FILE *out)
{
    return print(commands, shell, out);
}
