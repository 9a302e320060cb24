/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl completion: a script for a shell's completion; and the man page, which is made of the
 * same table. */
#include "base/check.h"
#include "command_table.h"
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

/* Lists all commands, each followed by its verbs, and help. Returns their number. */
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

static const char *shell;

static void take_shell(struct argp_state *state, char *text)
{
    if (shell != NULL) {
        argp_error(state, "unexpected argument '%s', allowed: options only", text);
    }
    ep_cli_arg_word(state, "the shell", text, "bash|zsh|fish");
    shell = text;
}

static void check(struct argp_state *state)
{
    ep_cli_arg_required(state, "the shell (bash, zsh or fish)", shell);
}

static ep_err run(ep_cli_call *call, ep_error *out_error)
{
    (void)out_error;
    call->failed = !print(call->commands, shell, stdout);
    return EP_OK;
}

const ep_cli_command ep_cli_completion = {
    .name = "completion",
    .help = "prints shell completion for bash, zsh or fish",
    .args = "bash|zsh|fish",
    .doc = "Prints a script that completes verbs, options and their words."
           "\vThe packages install it for all three shells.\n\n"
           "Examples:\n"
           "  source <(expertctl completion bash)\n"
           "  expertctl completion zsh >~/.zfunc/_expertctl\n"
           "  expertctl completion fish "
           ">~/.config/fish/completions/expertctl.fish\n\n" EP_CLI_EXIT_HELP,
    .options = {.check = check},
    .take_argument = take_shell,
    .run = run,
};
