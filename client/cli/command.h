/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A command: its words for --help, its options as rows of a table (arguments.h), and its body. All
 * else is done for it: variables and contexts, parsing, the error line, the exit code.
 */
#ifndef EP_CLI_COMMAND_H
#define EP_CLI_COMMAND_H

#include "arguments.h"
#include "exit_code.h"
#include "output.h"

/* What a body gets, and says besides its error. Values of options are where the rows put them. */
typedef struct ep_cli_call {
    const char *program; /* "expertctl trace record": begins each line on stderr */
    int argc;
    char **argv;
    const struct argp *argp;                      /* the command's own */
    const struct ep_cli_command *const *commands; /* all, NULL past the end */
    bool failed;                                  /* exit code 1 although there is no error */
    int exit_code;                                /* beats the others; 0: none */
} ep_cli_call;

typedef struct ep_cli_command {
    const char *name;
    const char *help;       /* one line */
    const char *args;       /* what stands after the options; NULL: nothing */
    const char *doc;        /* before and after the list of options; ends with examples */
    ep_cli_options options; /* its own */
    const ep_cli_options *uses[EP_CLI_USES_MAX]; /* those of several commands */
    bool in_order;                               /* options end where arguments begin */
    bool sets_context; /* what makes a context is the command line alone */
    /* For each argument; ends the program when it takes none such. NULL: takes none at all. */
    void (*take_argument)(struct argp_state *state, char *text);
    const char *missing; /* said when there is no argument; NULL: there may be none */
    /* An error is printed, and is the exit code. */
    ep_err (*run)(ep_cli_call *call, ep_error *out_error);
    const struct ep_cli_command *const *verbs; /* instead of run; NULL past the end */
} ep_cli_command;

/* Made anew at each call; stays. Its input is the command. */
const struct argp *ep_cli_command_argp(const ep_cli_command *command);

/* The one of this name; NULL: there is none. */
const ep_cli_command *ep_cli_command_find(const ep_cli_command *const *commands, const char *name);

/* Option -o, --output, and what it says. */
extern const ep_cli_options ep_cli_output_options;
extern ep_cli_format ep_cli_output_format;

#endif
