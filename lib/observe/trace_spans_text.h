/* SPDX-License-Identifier: Apache-2.0 */
/* The names of all spans in one string: it differs in a library of another version. */
#ifndef EP_OBSERVE_TRACE_SPANS_TEXT_H
#define EP_OBSERVE_TRACE_SPANS_TEXT_H

#define EP_TRACE_SPAN(name, step, on, what) #name " "
static const char ep_trace_spans_text[] =
#include "observe/trace_spans.def"
    ;
#undef EP_TRACE_SPAN

#endif
