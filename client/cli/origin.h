/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Origins of options that are not on the command line; settings.h notes them for messages.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_ORIGIN_H
#define EP_CLI_ORIGIN_H

#include <stdbool.h>
#include <stddef.h>

#include "given.h"

#define EP_CLI_CONTEXT_NONE "none" /* --context none: use none */
#define EP_CLI_CONTEXT_NAME_MAX 63

typedef struct ep_cli_origins {
    struct {
        char *flag; /* "--timeout=5s" */
        char *name; /* "EXPERTCTL_TIMEOUT", "timeout of context staging (file PATH:7)" */
    } flags[320];   /* --node alone may be 256 */
    size_t count;
    const char *given[EP_CLI_ROWS_MAX]; /* "timeout": flags on the command line itself */
    size_t given_count;
    char context[EP_CLI_CONTEXT_NAME_MAX + 1]; /* in use; "": none */
    /* "--admin, EXPERTCTL_TOKEN_FILE": other settings of how to reach the service */
    char others[512];
} ep_cli_origins;

extern ep_cli_origins ep_cli_origins_noted;

/* The name of an option in a message about its argument: the origin of arg, or option itself if
 * that is the command line. */
const char *ep_cli_setting_name(const char *option, const char *arg);

/* Whether a long flag such as "timeout" is on the command line itself. */
bool ep_cli_setting_is_given(const char *flag);

/* The context in use; NULL: none. */
const char *ep_cli_settings_context(void);
/* With a context, prints a line on stderr with its name, the address and the variables that
 * override it, so that an operator of two clusters sees which one is meant. */
void ep_cli_settings_say(const char *program, const char *url);

#endif
