/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where options are from that are not on the command line: settings.h notes it, messages say it.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_ORIGIN_H
#define EP_CLI_ORIGIN_H

#include <stdbool.h>
#include <stddef.h>

#include "given.h"

#define EP_CLI_CONTEXT_NONE "none" /* --context none: without any */
#define EP_CLI_CONTEXT_NAME_MAX 63

typedef struct ep_cli_origins {
    struct {
        char *flag; /* "--timeout=5s" */
        char *name; /* "EXPERTCTL_TIMEOUT", "timeout of context staging (file PATH:7)" */
    } flags[320];   /* --node alone may be 256 */
    size_t count;
    const char *given[EP_CLI_ROWS_MAX]; /* "timeout": what the command line itself has */
    size_t given_count;
    char context[EP_CLI_CONTEXT_NAME_MAX + 1]; /* in use; "" none */
    /* "--admin, EXPERTCTL_TOKEN_FILE": what else says how the service is reached */
    char others[512];
} ep_cli_origins;

extern ep_cli_origins ep_cli_origins_noted;

/* What a message about an option's argument calls the option: where arg is from if that is not the
 * command line, else option itself. */
const char *ep_cli_setting_name(const char *option, const char *arg);

/* Is a long flag, "timeout", on the command line itself? */
bool ep_cli_setting_is_given(const char *flag);

/* The context in use; NULL: none. */
const char *ep_cli_settings_context(void);
/* With a context, a line on stderr: which, who is spoken to, and which variables beat it. An
 * operator of two clusters is to see it. */
void ep_cli_settings_say(const char *program, const char *url);

#endif
