/* SPDX-License-Identifier: Apache-2.0 */
/* Fills in the fields of a call's spans. */
#include "call/call.h"

void ep_call_trace_begin(ep_call *call, uint64_t epoch)
{
    ep_call_trace *trace = &call->trace;
    ep_trace_id id;
    uint64_t parent = 0;
    bool is_on = EP_TRACE_ON(forward_begin);
    bool is_given = call->spec.traceparent[0] != 0 &&
                    ep_traceparent_parse(call->spec.traceparent, &id, &parent);
    if (!is_on && !is_given) {
        return;
    }
    trace->is_on = true;
    trace->fields = (ep_trace_fields){.trace = is_given ? id : ep_trace_new_trace(),
                                      .call = ep_trace_new_id(),
                                      .parent = parent,
                                      .epoch = epoch,
                                      .node = ep_trace_process(),
                                      .peer = "",
                                      .layer = (int32_t)call->spec.layer,
                                      .expert = -1,
                                      .rows = call->spec.batch.tokens};
    ep_traceparent_format(trace->fields.trace, trace->fields.call, trace->traceparent);
    if (EP_TRACE_SPAN_ON(forward)) {
        trace->forward_open = true;
        EP_TRACE(forward_begin, &trace->fields);
    }
}

void ep_call_trace_end(ep_call *call, ep_err status)
{
    ep_trace_fields fields = call->trace.fields;
    call->trace.forward_open = false;
    fields.status = (int32_t)status;
    EP_TRACE(forward_end, &fields);
}

/* Fields of a span inside the call. */
static ep_trace_fields inner(const ep_call *call, uint32_t sub, uint32_t rows)
{
    ep_trace_fields fields = call->trace.fields;
    fields.parent = 0;
    fields.sub = sub;
    fields.rows = rows;
    return fields;
}

/* Number of the newest window. */
static uint32_t window_of(const ep_call *call)
{
    return call->tokens_sent > 0 && call->flow.window_tokens > 0
               ? (call->tokens_sent - 1) / call->flow.window_tokens
               : 0;
}

void ep_call_trace_plan_begin(ep_call *call, uint32_t token_begin, uint32_t token_end)
{
    if (EP_TRACE_SPAN_ON(plan)) {
        uint32_t window = call->flow.window_tokens > 0 ? token_begin / call->flow.window_tokens : 0;
        call->trace.plan = inner(call, window, token_end - token_begin);
        call->trace.plan_open = true;
        EP_TRACE(plan_begin, &call->trace.plan);
    }
}

void ep_call_trace_plan_end(ep_call *call)
{
    call->trace.plan_open = false;
    EP_TRACE(plan_end, &call->trace.plan);
}

void ep_call_trace_pack_begin(ep_call *call, ep_call_frame *frame)
{
    uint32_t number = call->trace.frames++;
    frame->trace.pack_open = EP_TRACE_SPAN_ON(pack);
    frame->trace.is_on = EP_TRACE_SPAN_ON(exchange);
    if (frame->trace.pack_open || frame->trace.is_on) {
        frame->trace.fields = inner(call, number, frame->slots_count);
        frame->trace.fields.peer = ep_peer_label(frame->link->peer);
    }
    if (frame->trace.pack_open) {
        EP_TRACE(pack_begin, &frame->trace.fields);
    }
}

void ep_call_trace_pack_end(ep_call_frame *frame)
{
    EP_TRACE(pack_end, &frame->trace.fields);
}

void ep_call_trace_exchange_begin(ep_call_frame *frame, uint64_t rpc_id)
{
    frame->trace.fields.parent = frame->trace.fields.call;
    frame->trace.fields.call = rpc_id;
    frame->trace.exchange_open = true;
    EP_TRACE(exchange_begin, &frame->trace.fields);
}

void ep_call_trace_exchange_drop(ep_call_frame *frame, ep_err why)
{
    if (!frame->trace.is_dropped) {
        frame->trace.is_dropped = true;
        frame->trace.dropped_as = why;
    }
}

void ep_call_trace_exchange_end(ep_call_frame *frame, ep_err status)
{
    ep_frame_trace *trace = &frame->trace;
    trace->exchange_open = false;
    if (trace->is_dropped && (status == EP_OK || status == EP_ERR_CANCELLED)) {
        status = trace->dropped_as;
    }
    trace->fields.rows = trace->is_dropped || status != EP_OK ? 0 : trace->fields.rows;
    trace->fields.status = (int32_t)status;
    EP_TRACE(exchange_end, &trace->fields);
}

bool ep_call_trace_combine_begin(const ep_call *call, uint32_t tokens)
{
    if (!EP_TRACE_SPAN_ON(combine)) {
        return false;
    }
    ep_trace_fields fields = inner(call, window_of(call), tokens);
    EP_TRACE(combine_begin, &fields);
    return true;
}

void ep_call_trace_combine_end(const ep_call *call, uint32_t tokens)
{
    ep_trace_fields fields = inner(call, window_of(call), tokens);
    EP_TRACE(combine_end, &fields);
}
