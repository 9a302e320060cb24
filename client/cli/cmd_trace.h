/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs below `expertctl trace`; each is a command of its own, with its own --help. */
#ifndef EP_CLI_CMD_TRACE_H
#define EP_CLI_CMD_TRACE_H

#include "command.h"

extern const ep_cli_command ep_cli_trace_record_command;
extern const ep_cli_command ep_cli_trace_snapshot_command;
extern const ep_cli_command ep_cli_trace_report_command;
extern const ep_cli_command ep_cli_trace_export_command;

#endif
