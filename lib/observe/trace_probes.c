/* SPDX-License-Identifier: Apache-2.0 */
/* libexpertd-trace.so: the only file that uses LTTng-UST. Definitions, probes, trace.c's table. */
#define LTTNG_UST_TRACEPOINT_CREATE_PROBES
#define LTTNG_UST_TRACEPOINT_DEFINE
#define LTTNG_UST_TRACEPOINT_HIDDEN_DEFINITION
#define LTTNG_UST_TRACEPOINT_PROVIDER_HIDDEN_DEFINITION
#include "observe/trace_probes.h"

#include "observe/trace_provider.h"

#define EP_TRACE_SPAN(name, step, on, what)                                                        \
    static void emit_##name##_begin(const ep_trace_fields *fields)                                 \
    {                                                                                              \
        lttng_ust_do_tracepoint(expertd, name##_begin, fields);                                    \
    }                                                                                              \
    static void emit_##name##_end(const ep_trace_fields *fields)                                   \
    {                                                                                              \
        lttng_ust_do_tracepoint(expertd, name##_end, fields);                                      \
    }
#include "observe/trace_spans.def"
#undef EP_TRACE_SPAN

static const ep_trace_provider provider = {
    .fields_bytes = sizeof(ep_trace_fields),
    .spans = ep_trace_spans_text,
    .states =
        {
#define EP_TRACE_SPAN(name, step, on, what)                                                        \
    [EP_TRACE_EVENT_##name##_begin] = &lttng_ust_tracepoint_expertd___##name##_begin.state,        \
    [EP_TRACE_EVENT_##name##_end] = &lttng_ust_tracepoint_expertd___##name##_end.state,
#include "observe/trace_spans.def"
#undef EP_TRACE_SPAN
        },
    .emit =
        {
#define EP_TRACE_SPAN(name, step, on, what)                                                        \
    [EP_TRACE_EVENT_##name##_begin] = emit_##name##_begin,                                         \
    [EP_TRACE_EVENT_##name##_end] = emit_##name##_end,
#include "observe/trace_spans.def"
#undef EP_TRACE_SPAN
        },
};

__attribute__((visibility("default"))) const ep_trace_provider *const ep_trace_provider_table =
    &provider;
