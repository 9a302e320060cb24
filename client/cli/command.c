/* SPDX-License-Identifier: Apache-2.0 */
#include "command.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"

#define VERBS_BYTES 128

ep_cli_format ep_cli_output_format;

static const ep_cli_option output_rows[] = {
    {"output", 'o', "table|json",
     "Form of the result (default: table, on a terminal cut to its width)", 1,
     .word = &ep_cli_output_format},
};

const ep_cli_options ep_cli_output_options = {.rows = output_rows, .count = 1};

bool ep_cli_output_print(ep_cli_table *taken_table, json_t *taken_json)
{
    if (ep_cli_output_format == EP_CLI_JSON) {
        ep_cli_table_destroy(taken_table);
        return ep_cli_json_print(taken_json, stdout);
    }
    json_decref(taken_json);
    return ep_cli_table_print(taken_table, stdout);
}

const ep_cli_command *ep_cli_command_find(const ep_cli_command *const *commands, const char *name)
{
    while (*commands != NULL && strcmp((*commands)->name, name) != 0) {
        commands++;
    }
    return *commands;
}

static void refuse_verb(struct argp_state *state, const ep_cli_command *command, const char *text)
{
    char allowed[VERBS_BYTES];
    size_t used = 0;
    for (size_t i = 0; command->verbs[i] != NULL && used < sizeof(allowed); i++) {
        used += (size_t)snprintf(allowed + used, sizeof(allowed) - used, "%s%s", i > 0 ? ", " : "",
                                 command->verbs[i]->name);
    }
    if (text != NULL) {
        argp_error(state, "there is no verb '%s', allowed: %s", text, allowed);
    } else {
        argp_error(state, "no verb given, allowed: %s", allowed);
    }
}

static void take_argument(struct argp_state *state, const ep_cli_command *command, char *text)
{
    if (command->verbs != NULL) {
        refuse_verb(state, command, text);
    } else if (command->take_argument != NULL) {
        command->take_argument(state, text);
    } else {
        argp_error(state, "unexpected argument '%s', allowed: options only", text);
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    const ep_cli_command *command = state->input;
    if (key == ARGP_KEY_INIT) {
        for (size_t i = 0; i < EP_CLI_USES_MAX && command->uses[i] != NULL; i++) {
            state->child_inputs[i] = (void *)(uintptr_t)command->uses[i];
        }
    } else if (key == ARGP_KEY_ARG) {
        take_argument(state, command, arg);
        return 0;
    } else if (key == ARGP_KEY_NO_ARGS && command->verbs != NULL) {
        refuse_verb(state, command, NULL);
    } else if (key == ARGP_KEY_NO_ARGS && command->missing != NULL) {
        argp_error(state, "%s", command->missing);
    }
    return ep_cli_options_parse(&command->options, key, arg, state);
}

const struct argp *ep_cli_command_argp(const ep_cli_command *command)
{
    const struct argp root = {.parser = parse, .args_doc = command->args, .doc = command->doc};
    return ep_cli_options_argp(&command->options, command->uses, &root);
}

ep_cli_exit ep_cli_exit_of(ep_err err)
{
    switch (err) {
    case EP_ERR_OK:
        return EP_CLI_EXIT_OK;
    case EP_ERR_UNAVAILABLE:
    case EP_ERR_CONNECTION_LOST:
    case EP_ERR_CLOSED:
        return EP_CLI_EXIT_UNREACHABLE;
    case EP_ERR_DEADLINE_EXCEEDED:
        return EP_CLI_EXIT_DEADLINE;
    default:
        return EP_CLI_EXIT_FAILED;
    }
}

int ep_cli_fail(const char *program, const ep_error *error)
{
    ep_cli_line(stderr, "%s: %s", program,
                error->text[0] != '\0' ? error->text : ep_err_text(error->code));
    return ep_cli_exit_of(error->code);
}
