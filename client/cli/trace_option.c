/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_option.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "observe/trace.h"
#include "origin.h"

static struct {
    char traceparent[EP_TRACEPARENT_CHARS + 1]; /* "" none */
    bool is_given;
} trace;

static void take_given(struct argp_state *state, const char *option, char *text)
{
    ep_trace_id id;
    uint64_t span;
    if (!ep_traceparent_parse(text, &id, &span)) {
        argp_error(state,
                   "%s is '%.80s', allowed: 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, "
                   "lower case, no id of zeros",
                   ep_cli_setting_name(option, text), text);
    }
    ep_traceparent_format(id, span, trace.traceparent);
    trace.is_given = true;
}

static void start(struct argp_state *state)
{
    const char *wish = getenv(EP_CLI_TRACING_ENV);
    bool is_off = wish != NULL && strcmp(wish, "off") == 0;
    if (wish != NULL && wish[0] != '\0' && !is_off && strcmp(wish, "auto") != 0) {
        argp_error(state, EP_CLI_TRACING_ENV " is '%.40s', allowed: auto, off", wish);
    }
    bool is_loaded = !is_off && ep_trace_load(NULL);
    if (is_loaded && !trace.is_given) {
        ep_traceparent_format(ep_trace_new_trace(), ep_trace_new_id(), trace.traceparent);
    }
}

static const ep_cli_option rows[] = {
    {"traceparent", 0, "TP",
     "W3C trace context the calls join (default: a trace of their own when LTTng records)", 8,
     .take = take_given},
};

const ep_cli_options ep_cli_trace_options = {.rows = rows, .count = 1, .success = start};

const char *ep_cli_trace_parent(void)
{
    return trace.traceparent[0] != '\0' ? trace.traceparent : NULL;
}

void ep_cli_trace_report(void)
{
    if (trace.is_given || EP_TRACE_ON(forward_begin)) {
        fprintf(stderr, "trace id %.32s\n", trace.traceparent + strlen("00-"));
    }
}
