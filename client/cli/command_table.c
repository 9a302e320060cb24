/* SPDX-License-Identifier: Apache-2.0 */
#include "command_table.h"

const ep_cli_command *const ep_cli_commands[] = {
    &ep_cli_status,        &ep_cli_table_command, &ep_cli_stats,
    &ep_cli_forward,       &ep_cli_generate,      &ep_cli_bench,
    &ep_cli_tune,          &ep_cli_rpc,           &ep_cli_frame_command,
    &ep_cli_trace_command, &ep_cli_doctor,        &ep_cli_top,
    &ep_cli_plan,          &ep_cli_drain,         &ep_cli_model,
    &ep_cli_policy,        &ep_cli_reload,        &ep_cli_config,
    &ep_cli_context,       &ep_cli_completion,    NULL,
};
