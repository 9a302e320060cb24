/* SPDX-License-Identifier: Apache-2.0 */
/* The command table as the generators want it. */
#include "documents.h"

#include <stdlib.h>

#include "command_table.h"
#include "connect.h"
#include "exit_code.h"
#include "expertd/client.h"
#include "usage/usage.h"

static const ep_usage_section sections[] = {
    {"ENVIRONMENT", "  " EP_CLI_COORDINATOR_ENV "\n\nThe coordinator's URL when neither --coordinator nor --node is given; "
                    "without it, " EP_CLI_COORDINATOR_DEFAULT "."},
    {"EXIT STATUS", EP_CLI_EXIT_HELP},
    {"SEE ALSO", "expertd(8), expertd-coordinator(8)"},
};

/* commands[0 .. count): all verbs and help; NULL when there is no memory. */
static ep_usage_command *list_commands(size_t *out_count)
{
    size_t count = 0;
    while (ep_cli_command_at(count) != NULL) {
        count++;
    }
    ep_usage_command *commands = calloc(count + 1, sizeof(*commands));
    for (size_t i = 0; commands != NULL && i < count; i++) {
        const ep_cli_command *command = ep_cli_command_at(i);
        commands[i] = (ep_usage_command){command->name, command->help, command->argp};
    }
    if (commands != NULL) {
        commands[count] = (ep_usage_command){"help", "all about a command: expertctl help generate", NULL};
    }
    *out_count = count + 1;
    return commands;
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
    };
    ep_usage_command *commands = list_commands(&usage.commands_count);
    bool good = commands != NULL;
    usage.commands = commands;
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
