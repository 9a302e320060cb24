/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl's man page and shell completion, made from the command table. */
#ifndef EP_CLI_DOCUMENTS_H
#define EP_CLI_DOCUMENTS_H

#include <stdbool.h>
#include <stdio.h>

/* False: out of memory. */
bool ep_cli_print_man(FILE *out);
/* False: no such shell, or out of memory. */
bool ep_cli_print_completion(const char *shell, FILE *out);

#endif
