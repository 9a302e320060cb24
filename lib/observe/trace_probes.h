/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The events for LTTng's generator, which includes this file several times: one class of fields,
 * and two instances per span of trace_spans.def.
 */
#undef LTTNG_UST_TRACEPOINT_PROVIDER
#define LTTNG_UST_TRACEPOINT_PROVIDER expertd

#undef LTTNG_UST_TRACEPOINT_INCLUDE
#define LTTNG_UST_TRACEPOINT_INCLUDE "observe/trace_probes.h"

#if !defined(EP_OBSERVE_TRACE_PROBES_H) || defined(LTTNG_UST_TRACEPOINT_HEADER_MULTI_READ)
#define EP_OBSERVE_TRACE_PROBES_H

#include <lttng/tracepoint.h>

#include "observe/trace.h"

/* babeltrace 2.0.4 shows an empty string as the field's value before, so none is written. */
#define EP_TRACE_TEXT(text) ((text)[0] != 0 ? (text) : "-")

LTTNG_UST_TRACEPOINT_EVENT_CLASS(
    expertd, span, LTTNG_UST_TP_ARGS(const ep_trace_fields *, fields),
    LTTNG_UST_TP_FIELDS(
        lttng_ust_field_integer_hex(uint64_t, trace_hi, fields->trace.high)
            lttng_ust_field_integer_hex(uint64_t, trace_lo, fields->trace.low)
                lttng_ust_field_integer_hex(uint64_t, call, fields->call)
                    lttng_ust_field_integer_hex(uint64_t, parent, fields->parent)
                        lttng_ust_field_integer(uint64_t, epoch, fields->epoch)
                            lttng_ust_field_integer(uint32_t, sub, fields->sub)
                                lttng_ust_field_integer(uint32_t, rows, fields->rows)
                                    lttng_ust_field_integer(int32_t, layer, fields->layer)
                                        lttng_ust_field_integer(int32_t, expert, fields->expert)
                                            lttng_ust_field_integer(int32_t, status, fields->status)
                                                lttng_ust_field_string(node,
                                                                       EP_TRACE_TEXT(fields->node))
                                                    lttng_ust_field_string(
                                                        peer, EP_TRACE_TEXT(fields->peer))))

#define EP_TRACE_SPAN(name, step, on, what)                                                        \
    LTTNG_UST_TRACEPOINT_EVENT_INSTANCE(expertd, span, expertd, name##_begin,                      \
                                        LTTNG_UST_TP_ARGS(const ep_trace_fields *, fields))        \
    LTTNG_UST_TRACEPOINT_EVENT_INSTANCE(expertd, span, expertd, name##_end,                        \
                                        LTTNG_UST_TP_ARGS(const ep_trace_fields *, fields))
#include "observe/trace_spans.def"
#undef EP_TRACE_SPAN

#endif

#include <lttng/tracepoint-event.h>
