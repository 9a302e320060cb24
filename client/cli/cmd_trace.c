/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl trace, whose verbs are in other files. */
#include "command_table.h"

static const ep_cli_command *const verbs[] = {
    &ep_cli_trace_record_command, &ep_cli_trace_snapshot_command, &ep_cli_trace_report_command,
    &ep_cli_trace_export_command, NULL};

const ep_cli_command ep_cli_trace_command = {
    .name = "trace",
    .help = "record, report and export where the time of token batches goes",
    .args = "record|snapshot|report|export [OPTION...]",
    .doc = "Follows token batches through client, coordinator and nodes.\v  record    records all "
           "processes of expertd on this host, for a time or while a command runs\n"
           "  snapshot  a flight recorder: start once, take what happened last at any time\n"
           "  report    where the time went: stages, peers, slowest requests, experts\n"
           "  export    for Perfetto, or as one HTML page\n\n"
           "Each has its own help: expertctl trace record --help\n\n"
           "Examples:\n"
           "  expertctl trace record -d 5s -o /tmp/rec\n"
           "  expertctl trace report /tmp/rec\n"
           "  expertctl trace export /tmp/rec --format html -o /tmp/rec.html\n\n" EP_CLI_EXIT_HELP,
    .verbs = verbs,
};
