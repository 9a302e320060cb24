/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs, in the order of --help. */
#include "command_table.h"

#include <string.h>

static const ep_cli_command *const commands[] = {
    &ep_cli_status, &ep_cli_table_command, &ep_cli_stats, &ep_cli_forward, &ep_cli_generate, &ep_cli_bench, &ep_cli_rpc,
    &ep_cli_trace_command,
    &ep_cli_drain, &ep_cli_reload, &ep_cli_config,
    &ep_cli_completion,
};

const ep_cli_command *ep_cli_command_at(size_t index)
{
    return index < sizeof(commands) / sizeof(commands[0]) ? commands[index] : NULL;
}

const ep_cli_command *ep_cli_command_find(const char *name)
{
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(commands[i]->name, name) == 0) {
            return commands[i];
        }
    }
    return NULL;
}
