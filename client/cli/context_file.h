/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operator's file of contexts, ${XDG_CONFIG_HOME:-~/.config}/expertctl/contexts.yaml: named
 * connection settings, and the current one. Keys are the flags of ep_cli_context_uses with
 * underscores. Tokens are not in it but in files that it names.
 *
 *     current: production
 *     contexts:
 *       - name: production
 *         coordinator: tls+tcp://10.0.0.10:7410
 *         token_file: /etc/expertd/client.token
 *
 * An invalid file is refused with its line, and never overwritten.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_CONTEXT_FILE_H
#define EP_CLI_CONTEXT_FILE_H

#include "base/error.h"
#include "given.h"
#include "origin.h"

#define EP_CLI_CONTEXT_NAMES                                                                       \
    "1..63 letters, digits, '.', '_' and '-', no '-' at first, and not " EP_CLI_CONTEXT_NONE

typedef struct ep_cli_contexts ep_cli_contexts;

/*
 * A missing file has no contexts. for_change: for _write; makes the folder and locks it until
 * _close. Errors: BAD_CONFIG naming file and line, IO, NOT_FOUND (neither HOME nor XDG_CONFIG_HOME
 * is set, for_change), NO_MEMORY.
 */
ep_err ep_cli_contexts_open(bool for_change, ep_cli_contexts **out_contexts, ep_error *out_error);
void ep_cli_contexts_close(ep_cli_contexts *contexts);

/* "": none. Texts live until _close. */
const char *ep_cli_contexts_current(const ep_cli_contexts *contexts);
size_t ep_cli_contexts_count(const ep_cli_contexts *contexts);
const char *ep_cli_contexts_name(const ep_cli_contexts *contexts, size_t index);
/* Errors: NOT_FOUND, listing the contexts. */
ep_err ep_cli_contexts_find(const ep_cli_contexts *contexts, const char *name, size_t *out_index,
                            ep_error *out_error);
/* A context's value of a flag of ep_cli_context_rows; "": not set. *out_origin: "file PATH:LINE";
 * may be NULL. */
const char *ep_cli_contexts_value(const ep_cli_contexts *contexts, size_t index, const char *flag,
                                  const char **out_origin);
bool ep_cli_context_name_is_good(const char *name);

/* The flags that a context may have, without values. */
const ep_cli_given *ep_cli_context_rows(void);

/*
 * Replaces the file: sets current, leaves out the context removed (SIZE_MAX: none) and adds context
 * name with the values of added (NULL: none). Errors: BAD_CONFIG (a value that cannot be in a
 * file), IO, NO_MEMORY; the file is then unchanged.
 */
ep_err ep_cli_contexts_write(const ep_cli_contexts *contexts, const char *current, size_t removed,
                             const char *name, const ep_cli_given *added, ep_error *out_error);

#endif
