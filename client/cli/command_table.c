/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs, in the order of --help. */
#include "command_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exit_code.h"
#include "settings.h"

#define NAME_BYTES 64

static const ep_cli_command *const commands[] = {
    &ep_cli_status,        &ep_cli_table_command, &ep_cli_stats,   &ep_cli_forward,
    &ep_cli_generate,      &ep_cli_bench,         &ep_cli_tune,    &ep_cli_rpc,
    &ep_cli_frame_command, &ep_cli_trace_command, &ep_cli_doctor,  &ep_cli_top,
    &ep_cli_plan,          &ep_cli_drain,         &ep_cli_model,   &ep_cli_policy,
    &ep_cli_reload,        &ep_cli_config,        &ep_cli_context, &ep_cli_completion,
};

const ep_cli_command *ep_cli_command_at(size_t index)
{
    return index < sizeof(commands) / sizeof(commands[0]) ? commands[index] : NULL;
}

const ep_cli_command *ep_cli_command_find(const char *name)
{
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(commands[i]->name, name) == 0) {
            return commands[i];
        }
    }
    return NULL;
}

int ep_cli_command_run(const ep_cli_command *command, int argc, char **argv)
{
    char **whole = argv;
    /* A command of verbs has no options of its own. */
    if (command->verb_at == NULL && !ep_cli_settings_apply(command->argp, &argc, &whole)) {
        return EP_CLI_EXIT_USAGE;
    }
    int code = command->run(argc, whole);
    if (whole != argv) {
        free(whole);
    }
    return code;
}

int ep_cli_run_verb(int argc, char **argv, const ep_cli_command *(*verb_at)(size_t index),
                    const struct argp *argp)
{
    static char name[NAME_BYTES];
    const ep_cli_command *verb;
    for (size_t i = 0; argc > 1 && (verb = verb_at(i)) != NULL; i++) {
        if (strcmp(argv[1], verb->name) == 0) {
            snprintf(name, sizeof(name), "%s %s", argv[0], verb->name);
            argv[1] = name;
            return ep_cli_command_run(verb, argc - 1, argv + 1);
        }
    }
    argp_parse(argp, argc, argv, ARGP_IN_ORDER, NULL, NULL);
    return EP_CLI_EXIT_USAGE;
}
