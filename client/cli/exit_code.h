/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl's exit codes, and the function by which commands report failures. */
#ifndef EP_CLI_EXIT_CODE_H
#define EP_CLI_EXIT_CODE_H

#include "base/error.h"

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

#endif
