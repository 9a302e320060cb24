/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl completion: a script that teaches a shell our verbs and options. */
#include "arguments.h"
#include "command_table.h"
#include "documents.h"
#include "exit_code.h"

static const char *const shell_words[] = {"bash", "zsh", "fish", NULL};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    const char **shell = state->input;
    switch (key) {
    case ARGP_KEY_ARG:
        if (*shell != NULL) {
            return ep_cli_arg_unexpected(state, arg);
        }
        *shell = shell_words[ep_cli_arg_word(state, "the shell", arg, shell_words)];
        return 0;
    case ARGP_KEY_END:
        ep_cli_arg_required(state, "the shell (bash, zsh or fish)", *shell);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp argp = {
    NULL,
    parse,
    "bash|zsh|fish",
    "Prints a script that completes verbs, options and their words."
    "\vThe packages install it for all three shells.\n\n"
    "Examples:\n"
    "  source <(expertctl completion bash)\n"
    "  expertctl completion zsh >~/.zfunc/_expertctl\n"
    "  expertctl completion fish >~/.config/fish/completions/expertctl.fish\n\n" EP_CLI_EXIT_HELP,
    NULL,
    NULL,
    NULL};

static int run(int argc, char **argv)
{
    const char *shell = NULL;
    argp_parse(&argp, argc, argv, 0, NULL, &shell);
    return ep_cli_print_completion(shell, stdout) ? EP_CLI_EXIT_OK : EP_CLI_EXIT_FAILED;
}

const ep_cli_command ep_cli_completion = {
    "completion", "prints shell completion for bash, zsh or fish", &argp, run, NULL};
