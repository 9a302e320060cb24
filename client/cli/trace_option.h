/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Option --traceparent of the commands that send token batches, and the trace id their calls share.
 * The probes of tracing are loaded when the command line has been read, unless EXPERTD_TRACING=off
 * is in the environment.
 */
#ifndef EP_CLI_TRACE_OPTION_H
#define EP_CLI_TRACE_OPTION_H

#include <argp.h>

#include "observe/trace.h"

#define EP_CLI_TRACING_ENV "EXPERTD_TRACING"

typedef struct ep_cli_trace {
    char traceparent[EP_TRACEPARENT_CHARS + 1]; /* for ep_moe_args; "" none */
    bool is_given;
} ep_cli_trace;

/* Its input is an ep_cli_trace, zeroed. */
extern const struct argp ep_cli_trace_argp;

/* For ep_moe_args.traceparent; NULL: neither given nor can anything be recorded. */
const char *ep_cli_trace_parent(const ep_cli_trace *trace);
/* One line with the trace id to stderr, when it was given or a session records this process. */
void ep_cli_trace_report(const ep_cli_trace *trace);

#endif
