/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What libexpertd-trace.so provides: for each event the address of its state, and the function that
 * records it. trace.c finds it by name.
 */
#ifndef EP_OBSERVE_TRACE_PROVIDER_H
#define EP_OBSERVE_TRACE_PROVIDER_H

#include "observe/trace.h"

typedef struct ep_trace_provider {
    uint32_t fields_bytes; /* sizeof(ep_trace_fields) */
    /* ep_trace_spans_text: must equal that of the program, otherwise nothing is traced */
    const char *spans;
    const int *states[EP_TRACE_EVENTS];
    void (*emit[EP_TRACE_EVENTS])(const ep_trace_fields *fields);
} ep_trace_provider;

/* The names of all spans in one string: it differs in a library of another version. */
#define EP_TRACE_SPAN(name, step, on, what) #name " "
static const char ep_trace_spans_text[] =
#include "observe/trace_spans.def"
    ;
#undef EP_TRACE_SPAN

#define EP_TRACE_PROVIDER_NAME "ep_trace_provider_table"
extern const ep_trace_provider *const ep_trace_provider_table;

#endif
