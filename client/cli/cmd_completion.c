/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl completion: a script that teaches a shell our verbs and options. */
#include "command_table.h"
#include "documents.h"

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
    call->failed = !ep_cli_print_completion(call->commands, shell, stdout);
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
