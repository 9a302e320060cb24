/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl trace: finds the verb. */
#include "cmd_trace.h"

#include "arguments.h"
#include "exit_code.h"

static const ep_cli_command *const verbs[] = {
    &ep_cli_trace_record_command, &ep_cli_trace_snapshot_command, &ep_cli_trace_report_command,
    &ep_cli_trace_export_command};

const ep_cli_command *ep_cli_trace_verb_at(size_t index)
{
    return index < sizeof(verbs) / sizeof(verbs[0]) ? verbs[index] : NULL;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    return ep_cli_arg_verb(state, key, arg, "record, snapshot, report, export");
}

static const struct argp argp = {
    NULL,
    parse,
    "record|snapshot|report|export [OPTION...]",
    "Follows token batches through client, coordinator and nodes.\v"
    "  record    records all processes of expertd on this host, for a time or while a command "
    "runs\n"
    "  snapshot  a flight recorder: start once, take what happened last at any time\n"
    "  report    where the time went: stages, peers, slowest requests, experts\n"
    "  export    for Perfetto, as one HTML page, or as Chrome's JSON\n\n"
    "Each has its own help: expertctl trace record --help\n\n"
    "Examples:\n"
    "  expertctl trace record -d 5s -o /tmp/rec\n"
    "  expertctl trace report /tmp/rec\n"
    "  expertctl trace export /tmp/rec --format html -o /tmp/rec.html\n\n" EP_CLI_EXIT_HELP,
    NULL,
    NULL,
    NULL};

static int run(int argc, char **argv)
{
    return ep_cli_run_verb(argc, argv, ep_cli_trace_verb_at, &argp);
}

const ep_cli_command ep_cli_trace_command = {
    "trace", "record, report and export where the time of token batches goes", &argp, run,
    ep_cli_trace_verb_at};
