/* SPDX-License-Identifier: Apache-2.0 */
/* All commands of expertctl. A new one is a file cmd_NAME.c and a line here and in the table; a
 * verb in a file of its own is a line here and in its command's list. */
#ifndef EP_CLI_COMMAND_TABLE_H
#define EP_CLI_COMMAND_TABLE_H

#include <stdio.h>

#include "command.h"

extern const ep_cli_command ep_cli_status;
extern const ep_cli_command ep_cli_table_command;
extern const ep_cli_command ep_cli_stats;
extern const ep_cli_command ep_cli_forward;
extern const ep_cli_command ep_cli_generate;
extern const ep_cli_command ep_cli_bench;
extern const ep_cli_command ep_cli_tune;
extern const ep_cli_command ep_cli_rpc;
extern const ep_cli_command ep_cli_completion;
extern const ep_cli_command ep_cli_frame_command;
extern const ep_cli_command ep_cli_trace_command;
extern const ep_cli_command ep_cli_drain;
extern const ep_cli_command ep_cli_plan;
extern const ep_cli_command ep_cli_model;
extern const ep_cli_command ep_cli_policy;
extern const ep_cli_command ep_cli_reload;
extern const ep_cli_command ep_cli_config;
extern const ep_cli_command ep_cli_context;
extern const ep_cli_command ep_cli_doctor;
extern const ep_cli_command ep_cli_top;

/* Verbs below `expertctl model` and `expertctl trace`; each is a command with its own --help. */
extern const ep_cli_command ep_cli_model_show_command;
extern const ep_cli_command ep_cli_trace_record_command;
extern const ep_cli_command ep_cli_trace_snapshot_command;
extern const ep_cli_command ep_cli_trace_report_command;
extern const ep_cli_command ep_cli_trace_export_command;

/* In the order of --help; NULL past the end. */
extern const ep_cli_command *const ep_cli_commands[];

/* cmd_completion.c. False: writing failed. */
bool ep_cli_print_man(const ep_cli_command *const *commands, FILE *out);

#endif
