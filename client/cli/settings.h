/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Values of options that are not on the command line. Every long flag of the argp tables has a
 * variable:
 *
 *     --token-file FILE     EXPERTCTL_TOKEN_FILE=FILE
 *     --wait                EXPERTCTL_WAIT=true, or false
 *     --node URL, repeated  EXPERTCTL_NODE=URL,URL
 *
 * A flag overrides its variable, a variable the context in use (context_file.h), the context the
 * default. If a flag has two kinds of values (--output), the variable is of the kind of the first
 * command: table|json.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_SETTINGS_H
#define EP_CLI_SETTINGS_H

#include "command.h"

/* For --help and the man page. */
#define EP_CLI_SETTINGS_HELP                                                                       \
    "An option that is not on the command line is taken from its variable\n"                       \
    "(--token-file FILE: EXPERTCTL_TOKEN_FILE; true or false for an option without a\n"            \
    "value; commas between the values of one that may be repeated), else from the\n"               \
    "context in use (expertctl context). TIME has us, ms, s, m or h, else it is\n"                 \
    "seconds, or what the option's name says; SIZE has K, M, G or T, powers of 1024."

/*
 * Inserts the settings of variables and the context as flags after argv[0], so that the command's
 * parser reads them too. commands: all, NULL past the end. Warns on stderr of variables without a
 * flag. *argv is unchanged or a new array for free(), whose texts are never freed. False, with a
 * line on stderr: a value that no flag could have, an unknown context, a damaged file of contexts,
 * or no memory.
 */
bool ep_cli_settings_apply(const ep_cli_command *const *commands, const struct argp *argp,
                           int *argc, char ***argv);

#endif
