/* SPDX-License-Identifier: Apache-2.0 */
/* expertctl trace: finds the verb. */
#include "cmd_trace.h"

#include <stdio.h>
#include <string.h>

#include "exit_code.h"

#define NAME_BYTES 64

static const ep_cli_command *const verbs[] = {&ep_cli_trace_record_command, &ep_cli_trace_snapshot_command, &ep_cli_trace_report_command,
                                              &ep_cli_trace_export_command};

const ep_cli_command *ep_cli_trace_verb_at(size_t index)
{
    return index < sizeof(verbs) / sizeof(verbs[0]) ? verbs[index] : NULL;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    switch (key) {
    case ARGP_KEY_ARG:
        argp_error(state, "there is no verb '%s', allowed: record, snapshot, report, export", arg);
        return EINVAL;
    case ARGP_KEY_NO_ARGS:
        argp_error(state, "no verb given, allowed: record, snapshot, report, export");
        return EINVAL;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp argp = {
    NULL,
    parse,
    "record|snapshot|report|export [OPTION...]",
    "Follows token batches through client, coordinator and nodes.\v"
    "  record    records all processes of expertd on this host, for a time or while a command runs\n"
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
    static char name[NAME_BYTES];
    for (size_t i = 0; argc > 1 && ep_cli_trace_verb_at(i) != NULL; i++) {
        const ep_cli_command *verb = ep_cli_trace_verb_at(i);
        if (strcmp(argv[1], verb->name) == 0) {
            snprintf(name, sizeof(name), "%s %s", argv[0], verb->name);
            argv[1] = name;
            return verb->run(argc - 1, argv + 1);
        }
    }
    argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, NULL);
    return EP_CLI_EXIT_USAGE;
}

const ep_cli_command ep_cli_trace_command = {"trace", "record, report and export where the time of token batches goes", &argp,
                                     run};
