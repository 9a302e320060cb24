/* SPDX-License-Identifier: Apache-2.0 */
/* The text of each long flag of a command line, for code that stores it or fills in missing
 * ones. */
#ifndef EP_CLI_GIVEN_H
#define EP_CLI_GIVEN_H

#include <argp.h>
#include <stdbool.h>
#include <stddef.h>

#define EP_CLI_ROWS_MAX 192 /* long flags of all commands together */
#define EP_CLI_VALUE_BYTES_MAX 65536

/* The long flags of a command with their texts in a command line. */
typedef struct ep_cli_given {
    const struct argp_option *rows[EP_CLI_ROWS_MAX];
    /* NULL: not given; "true" for a flag without a value; of repeated values all, separated by ",",
     * or the last. */
    char *texts[EP_CLI_ROWS_MAX];
    size_t count;
} ep_cli_given;

/* Whether the flag may be repeated, by its help. */
bool ep_cli_may_be_repeated(const struct argp_option *row);

/* Adds the flags of argp that are not there yet, without --help. */
void ep_cli_given_add(ep_cli_given *given, const struct argp *argp);
/* Ignores errors of the command line, which argp reports. False: no memory. */
bool ep_cli_given_read(const struct argp *argp, int argc, char **argv, ep_cli_given *out_given);
void ep_cli_given_fini(ep_cli_given *given);
/* The index of its row; count: no such flag. */
size_t ep_cli_given_find(const ep_cli_given *given, const char *flag);
/* NULL: no such flag. */
const struct argp_option *ep_cli_given_row(const ep_cli_given *given, const char *flag);
/* NULL: not given, or no such flag. */
const char *ep_cli_given_text(const ep_cli_given *given, const char *flag);

/* "token-file" as a key of files and, in upper case, of variables: "token_file". */
void ep_cli_key_of(const char *flag, char *out, size_t bytes);

#endif
