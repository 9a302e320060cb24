/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Option --traceparent of the commands that send token batches, and the trace id their calls share.
 * The probes of tracing are loaded when the command line has been read, unless EXPERTD_TRACING=off
 * is in the environment.
 */
#ifndef EP_CLI_TRACE_OPTION_H
#define EP_CLI_TRACE_OPTION_H

#include "arguments.h"

#define EP_CLI_TRACING_ENV "EXPERTD_TRACING"

extern const ep_cli_options ep_cli_trace_options;

/* For ep_moe_args.traceparent; NULL: neither given nor can anything be recorded. */
const char *ep_cli_trace_parent(void);
/* One line with the trace id to stderr, when it was given or a session records this process. */
void ep_cli_trace_report(void);

#endif
