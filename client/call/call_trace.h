/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The spans of a call (observe/trace_spans.def): forward, plan, pack, exchange, combine. Callers
 * check first that the call is traced (is_on) and, for an end, that its begin was recorded
 * (..._open), so an untraced call enters none of these functions. For the call's busy thread.
 */
#ifndef EP_CLIENT_CALL_TRACE_H
#define EP_CLIENT_CALL_TRACE_H

#include "observe/trace.h"

typedef struct ep_call ep_call;
typedef struct ep_call_frame ep_call_frame;

/* Of one run. */
typedef struct ep_call_trace {
    bool is_on;             /* the call has an id; without one its inner spans are left out too */
    ep_trace_fields fields; /* call: C */
    char traceparent[EP_TRACEPARENT_CHARS + 1]; /* sent in frames; "": none */
    uint32_t frames;                            /* numbered so far */
    bool forward_open;
    bool plan_open;
    ep_trace_fields plan; /* of the open plan span */
} ep_call_trace;

/* Of one frame, since its call may be in another run when the answer comes. */
typedef struct ep_frame_trace {
    ep_trace_fields fields; /* call: R, parent: C */
    bool pack_open;
    bool is_on; /* the exchange is to be recorded */
    bool exchange_open;
    bool is_dropped; /* its answer is not wanted any more */
    ep_err dropped_as;
} ep_frame_trace;

/* Begins a run's trace: that of the caller or, when tracing is on, a new one. call->trace must be
 * zero apart from the caller's. */
void ep_call_trace_begin(ep_call *call, uint64_t epoch);
void ep_call_trace_end(ep_call *call, ep_err status);

void ep_call_trace_plan_begin(ep_call *call, uint32_t token_begin, uint32_t token_end);
void ep_call_trace_plan_end(ep_call *call);

/* Numbers the frame, whose trace must be zero; call it for each new frame. */
void ep_call_trace_pack_begin(ep_call *call, ep_call_frame *frame);
void ep_call_trace_pack_end(ep_call_frame *frame);
/* rpc_id: of the request that is about to be started. */
void ep_call_trace_exchange_begin(ep_call_frame *frame, uint64_t rpc_id);
/* The frame's answer is not wanted any more. why: EP_OK when other copies have answered, else how
 * the call ended. Only the first drop counts. */
void ep_call_trace_exchange_drop(ep_call_frame *frame, ep_err why);
/* status: of the answer. The exchange of a dropped frame ends with no rows and, if it was answered
 * or cancelled, with the reason of the drop. */
void ep_call_trace_exchange_end(ep_call_frame *frame, ep_err status);

/* Returns whether the begin was recorded. */
bool ep_call_trace_combine_begin(const ep_call *call, uint32_t tokens);
void ep_call_trace_combine_end(const ep_call *call, uint32_t tokens);

#endif
