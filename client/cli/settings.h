/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What sets an option that is not on the command line. Every long flag of the argp tables has a
 * variable:
 *
 *     --token-file FILE     EXPERTCTL_TOKEN_FILE=FILE
 *     --wait                EXPERTCTL_WAIT=true, or false
 *     --node URL, repeated  EXPERTCTL_NODE=URL,URL
 *
 * A flag beats its variable, that the context in use (context_file.h), that the default. Where a
 * name has values of two kinds (--output) the variable stands for the kind of the command table's
 * first command: table|json.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_SETTINGS_H
#define EP_CLI_SETTINGS_H

#include <argp.h>
#include <stdbool.h>
#include <stddef.h>

/* For --help and the man page. */
#define EP_CLI_SETTINGS_HELP                                                                       \
    "An option that is not on the command line is taken from its variable\n"                       \
    "(--token-file FILE: EXPERTCTL_TOKEN_FILE; true or false for an option without a\n"            \
    "value; commas between the values of one that may be repeated), else from the\n"               \
    "context in use (expertctl context). TIME has us, ms, s, m or h, else it is\n"                 \
    "seconds, or what the option's name says; SIZE has K, M, G or T, powers of 1024."

#define EP_CLI_ROWS_MAX 192 /* long flags of all commands together */
#define EP_CLI_VALUE_BYTES_MAX 65536

/* The long flags of a command, and what a command line says of each. */
typedef struct ep_cli_given {
    const struct argp_option *rows[EP_CLI_ROWS_MAX];
    /* NULL: not given; "true" of one without a value; of one given twice both with "," between, or
     * the last. */
    char *texts[EP_CLI_ROWS_MAX];
    size_t count;
} ep_cli_given;

/* Adds the flags of argp that are not yet there, --help left out. */
void ep_cli_given_add(ep_cli_given *given, const struct argp *argp);
/* Errors of the command line are not its business: argp tells of them. False: no memory. */
bool ep_cli_given_read(const struct argp *argp, int argc, char **argv, ep_cli_given *out_given);
void ep_cli_given_fini(ep_cli_given *given);
/* NULL: no such flag. */
const struct argp_option *ep_cli_given_row(const ep_cli_given *given, const char *flag);
/* NULL: not given, or no such flag. */
const char *ep_cli_given_text(const ep_cli_given *given, const char *flag);

/* "token-file" as a key of files and, in upper case, of variables: "token_file". */
void ep_cli_key_of(const char *flag, char *out, size_t bytes);

/*
 * Puts what variables and the context set behind argv[0], as flags, so that the command's parser
 * reads all of it. Warns on stderr of variables that belong to no flag. *argv is a new one for
 * free(), or as it was; its texts last as long as the program. False, with a line on stderr: a
 * value that no flag could have, no such context, a damaged file of contexts, or no memory.
 */
bool ep_cli_settings_apply(const struct argp *argp, int *argc, char ***argv);

/* What a message about an option's argument calls the option: where arg is from if that is not the
 * command line, else option itself. */
const char *ep_cli_setting_name(const char *option, const char *arg);

/* The context in use; NULL: none. */
const char *ep_cli_settings_context(void);
/* With a context, a line on stderr: which, who is spoken to, and which variables beat it. An
 * operator of two clusters is to see it. */
void ep_cli_settings_say(const char *program, const char *url);

#endif
