/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl's man page and shell completion, made from the table of commands. */
#ifndef EP_CLI_DOCUMENTS_H
#define EP_CLI_DOCUMENTS_H

#include <stdio.h>

#include "command.h"

/* False: out of memory. */
bool ep_cli_print_man(const ep_cli_command *const *commands, FILE *out);
/* False: no such shell, or out of memory. */
bool ep_cli_print_completion(const ep_cli_command *const *commands, const char *shell, FILE *out);

#endif
