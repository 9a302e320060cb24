/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Option --traceparent of commands that send token batches, and the trace id of their calls. The
 * trace probes are loaded after the command line was read, unless EXPERTD_TRACING=off is set.
 */
#ifndef EP_CLI_TRACE_OPTION_H
#define EP_CLI_TRACE_OPTION_H

#include "arguments.h"

#define EP_CLI_TRACING_ENV "EXPERTD_TRACING"

extern const ep_cli_options ep_cli_trace_options;

/* For ep_moe_args.traceparent; NULL: not given, and no recording is possible. */
const char *ep_cli_trace_parent(void);
/* Prints the trace id to stderr if it was given or a session records this process. */
void ep_cli_trace_report(void);

#endif
