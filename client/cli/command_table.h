/* SPDX-License-Identifier: Apache-2.0 */
/* What expertctl can do. A new verb is a file cmd_<verb>.c and one line in command_table.c. */
#ifndef EP_CLI_COMMAND_TABLE_H
#define EP_CLI_COMMAND_TABLE_H

#include <argp.h>
#include <stddef.h>

typedef struct ep_cli_command {
    const char *name;
    const char *help;        /* one line */
    const struct argp *argp; /* its doc ends with examples */
    /* argv[0] is "expertctl <name>". Prints its own error line; returns an ep_cli_exit. */
    int (*run)(int argc, char **argv);
    /* its verbs, NULL past the end; NULL: it has none */
    const struct ep_cli_command *(*verb_at)(size_t index);
} ep_cli_command;

extern const ep_cli_command ep_cli_status;
extern const ep_cli_command ep_cli_table_command;
extern const ep_cli_command ep_cli_stats;
extern const ep_cli_command ep_cli_forward;
extern const ep_cli_command ep_cli_generate;
extern const ep_cli_command ep_cli_bench;
extern const ep_cli_command ep_cli_tune;
extern const ep_cli_command ep_cli_rpc;
extern const ep_cli_command ep_cli_completion;
extern const ep_cli_command ep_cli_frame_command;
extern const ep_cli_command ep_cli_trace_command;
extern const ep_cli_command ep_cli_drain;
extern const ep_cli_command ep_cli_plan;
extern const ep_cli_command ep_cli_model;
extern const ep_cli_command ep_cli_policy;
extern const ep_cli_command ep_cli_reload;
extern const ep_cli_command ep_cli_config;
extern const ep_cli_command ep_cli_context;
extern const ep_cli_command ep_cli_doctor;
extern const ep_cli_command ep_cli_top;

/* NULL past the end. */
const ep_cli_command *ep_cli_command_at(size_t index);
/* NULL when there is none of this name. */
const ep_cli_command *ep_cli_command_find(const char *name);

/* With the options that variables and the context set (settings.h). argv[0]: "expertctl <name>". */
int ep_cli_command_run(const ep_cli_command *command, int argc, char **argv);

/*
 * For a command of verbs ("trace record"): runs the one that argv[1] names, with "expertctl trace
 * record" as its argv[0]. Without such a verb argp, the command's own, says so or gives help.
 * verb_at: NULL past the end.
 */
int ep_cli_run_verb(int argc, char **argv, const ep_cli_command *(*verb_at)(size_t index),
                    const struct argp *argp);

#endif
