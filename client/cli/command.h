/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A command: texts for --help, options as rows of a table (arguments.h), and a function that runs
 * it. Variables and contexts, parsing, the error line and the exit code are handled for all
 * commands.
 */
#ifndef EP_CLI_COMMAND_H
#define EP_CLI_COMMAND_H

#include "arguments.h"
#include "base/error.h"
#include "output.h"

typedef enum ep_cli_exit {
    EP_CLI_EXIT_OK = 0,
    EP_CLI_EXIT_FAILED = 1,      /* the service or a file refused, or something is not healthy */
    EP_CLI_EXIT_USAGE = 2,       /* the command line is wrong */
    EP_CLI_EXIT_UNREACHABLE = 3, /* the service cannot be reached */
    EP_CLI_EXIT_DEADLINE = 4     /* no answer within --timeout */
} ep_cli_exit;

/* Lines for --help. */
#define EP_CLI_EXIT_HELP                                                                           \
    "Exit codes: 0 done; 1 the service or a file refused, or something is\nnot healthy; 2 wrong "  \
    "command "                                                                                     \
    "line; "                                                                                       \
    "3 the service cannot be reached;\n4 no answer within --timeout."

ep_cli_exit ep_cli_exit_of(ep_err err);

/* Writes "program: text" to stderr and returns the exit code of error->code. program is "expertctl
 * VERB". */
int ep_cli_fail(const char *program, const ep_error *error);

/* Input and output of a command's run, besides its error. Option values are where the rows put
 * them. */
typedef struct ep_cli_call {
    const char *program; /* "expertctl trace record": the prefix of lines on stderr */
    int argc;
    char **argv;
    const struct argp *argp;                      /* the command's own */
    const struct ep_cli_command *const *commands; /* all, NULL past the end */
    bool failed;                                  /* exit code 1 without an error */
    int exit_code;                                /* overrides the others; 0: not set */
} ep_cli_call;

typedef struct ep_cli_command {
    const char *name;
    const char *help;       /* one line */
    const char *args;       /* text for the arguments; NULL: there are none */
    const char *doc;        /* texts before and after the list of options; ends with examples */
    ep_cli_options options; /* its own */
    const ep_cli_options *uses[EP_CLI_USES_MAX]; /* options shared with other commands */
    bool in_order;                               /* options end where arguments begin */
    bool sets_context; /* ignores variables and contexts: it makes one of the command line */
    /* Called for each argument; ends the program if it is not allowed. NULL: no arguments are
     * allowed. */
    void (*take_argument)(struct argp_state *state, char *text);
    const char *missing; /* the error without any argument; NULL: that is allowed */
    /* Its error is printed and gives the exit code. */
    ep_err (*run)(ep_cli_call *call, ep_error *out_error);
    const struct ep_cli_command *const *verbs; /* instead of run; NULL past the end */
} ep_cli_command;

/* Makes a command's argp, whose input is the command; never freed. */
const struct argp *ep_cli_command_argp(const ep_cli_command *command);

/* The command of this name; NULL: there is none. */
const ep_cli_command *ep_cli_command_find(const ep_cli_command *const *commands, const char *name);

/* Option -o, --output, and its value. */
extern const ep_cli_options ep_cli_output_options;
extern ep_cli_format ep_cli_output_format;
/* Prints the one of the two that is wanted, to stdout; frees both. */
bool ep_cli_output_print(ep_cli_table *taken_table, json_t *taken_json);

#endif
