/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a window and of a run: combine, the result, and the error of a wait.
 *
 * out is written only on success. A decode run is combined straight into it once every row has
 * come. Prefill is combined token by token as rows arrive, into a scratch result that is copied at
 * the end; so memory is bounded by four windows' rows and one result, whatever T is. With on_tokens
 * both are combined as rows arrive, straight into out.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/path_count.h"
#include "call/call_steps.h"

static size_t out_row_bytes(const ep_batch *batch)
{
    return (size_t)batch->hidden * ep_dtype_bytes(batch->out_dtype);
}

static uint32_t out_rows_per_token(const ep_batch *batch)
{
    return batch->form == EP_RESULT_UNCOMBINED ? batch->top_k : 1;
}

/* With rows_nan_policy reject: a refused row becomes the call's error, and nothing is written. */
static bool has_refused_row(ep_call *call, uint32_t token_begin, uint32_t token_end)
{
    const ep_batch *batch = &call->spec.batch;
    ep_nonfinite found;
    if (call->result.error.code != EP_OK) {
        return true;
    }
    if (!ep_combine_find_nonfinite(batch, &call->at.layer->shape, call->rows, call->row_scales,
                                   token_begin, token_end, call->combine_scratch, &found)) {
        return false;
    }
    ep_error_set(&call->result.error, EP_ERR_OUT_OF_RANGE,
                 "the expert's row of token %" PRIu32 ", slot %" PRIu32 " is %g at element %" PRIu32
                 ": only finite values are allowed (rows_nan_policy reject)",
                 found.token, found.slot, (double)found.value, found.element);
    call->result.error.layer = (int32_t)call->spec.layer;
    return true;
}

/* Combines tokens into the scratch result or straight into out. */
static void combine(ep_call *call, uint32_t token_begin, uint32_t token_end)
{
    const ep_batch *batch = &call->spec.batch;
    const ep_layer_shape *shape = &call->at.layer->shape;
    ep_combine_out out = call->spec.out;
    if (call->flow.is_aside) {
        size_t row = out_row_bytes(batch);
        out = (ep_combine_out){.data = call->out_scratch,
                               .token_stride_bytes = (int64_t)(row * out_rows_per_token(batch)),
                               .slot_stride_bytes = (int64_t)row};
    }
    if (batch->rows_policy == EP_NAN_REJECT && has_refused_row(call, token_begin, token_end)) {
        return;
    }
    uint64_t begin_ns = call->spec.want_timing ? ep_clock_now_ns() : 0;
    ep_combine(batch, shape, call->rows, call->row_scales, token_begin, token_end,
               call->combine_scratch, &out);
    call->combine_ns += begin_ns != 0 ? ep_clock_now_ns() - begin_ns : 0;
}

/* Whether the slot's row came with this frame and not with another that has the slot too. With node
 * sums only one of two such frames counts, since they are sent again only as a whole. */
static bool has_row(const ep_call *call, const ep_call_frame *frame, uint32_t index)
{
    return call->spec.batch.node_sum ||
           call->rows[frame->slots[index]] == frame->rows + index * frame->layout.row_bytes;
}

void ep_call_combine_ready(ep_call *call, const ep_call_frame *frame)
{
    const uint32_t per_token = call->slots_per_token;
    uint32_t ready = 0;
    for (uint32_t i = 0; i < frame->slots_count; i++) {
        uint32_t *left = &call->rows_left[frame->slots[i] / per_token];
        if (!has_row(call, frame, i)) {
            continue; /* sent twice; the first row counts */
        }
        EP_ASSERT(*left > 0 && *left != EP_CALL_COMBINED);
        ready += --*left == 0;
    }
    bool is_traced = ready > 0 && call->trace.is_on && ep_call_trace_combine_begin(call, ready);
    for (uint32_t i = 0; i < frame->slots_count && ready > 0; i++) {
        uint32_t token = frame->slots[i] / per_token;
        if (call->rows_left[token] == 0) {
            combine(call, token, token + 1);
            call->rows_left[token] = EP_CALL_COMBINED;
        }
    }
    if (is_traced) {
        ep_call_trace_combine_end(call, ready);
    }
}

/* With is_piecewise: combines tokens without rows to wait for and, at the end of a run, with rows
 * missing. */
static void combine_rest(ep_call *call, uint32_t token_begin, uint32_t token_end)
{
    uint32_t rest = 0;
    for (uint32_t t = token_begin; t < token_end; t++) {
        rest += call->rows_left[t] != EP_CALL_COMBINED;
    }
    if (rest == 0) {
        return;
    }
    bool is_traced = call->trace.is_on && ep_call_trace_combine_begin(call, rest);
    for (uint32_t t = token_begin; t < token_end; t++) {
        if (call->rows_left[t] != EP_CALL_COMBINED) {
            combine(call, t, t + 1);
            call->rows_left[t] = EP_CALL_COMBINED;
        }
    }
    if (is_traced) {
        ep_call_trace_combine_end(call, rest);
    }
}

/* End of the tokens from first on that wait for no row. */
static uint32_t finished_end(const ep_call *call, uint32_t first)
{
    uint32_t end = first;
    uint32_t limit =
        call->state.phase == EP_CALL_RUNNING ? call->tokens_sent : call->spec.batch.tokens;
    while (end < limit && (call->rows_left[end] == 0 || call->rows_left[end] == EP_CALL_COMBINED)) {
        end++;
    }
    return end;
}

void ep_call_tell_tokens(ep_call *call)
{
    ep_moe_result *result = &call->result;
    if (result->error.code != EP_OK) {
        return;
    }
    uint32_t first = result->tokens_delivered;
    uint32_t end = finished_end(call, first);
    if (end > first) {
        combine_rest(call, first, end); /* tokens without rows to wait for */
        if (result->error.code != EP_OK) {
            return; /* a row was refused */
        }
        result->tokens_delivered = end;
        call->spec.on_tokens(call->spec.on_tokens_arg, call, first, end - first);
    }
}

static void copy_scratch_to_out(ep_call *call)
{
    const ep_batch *batch = &call->spec.batch;
    const ep_combine_out *out = &call->spec.out;
    size_t row = out_row_bytes(batch);
    uint32_t per_token = out_rows_per_token(batch);
    const uint8_t *from = call->out_scratch;
    ep_path_count(EP_PATH_SCRATCH, (uint64_t)batch->tokens * per_token * row);
    for (uint32_t t = 0; t < batch->tokens; t++) {
        for (uint32_t k = 0; k < per_token; k++, from += row) {
            memcpy((uint8_t *)out->data + (int64_t)t * out->token_stride_bytes +
                       (int64_t)k * out->slot_stride_bytes,
                   from, row);
        }
    }
}

static void give_back_room(ep_call *call)
{
    __atomic_fetch_sub(&call->client->window_bytes, call->kept_bytes, __ATOMIC_RELAXED);
    call->kept_bytes = 0;
}

void ep_call_end_window(ep_call *call, uint32_t window)
{
    ep_call_window *ended = &call->windows[window];
    EP_ASSERT(call->flow.is_piecewise); /* otherwise the only window ends with the run */
    combine_rest(call, ended->begin, ended->end);
    for (uint32_t i = 0; i < call->state.parcels_count; i++) {
        const ep_parcel *parcel = &call->state.parcels[i];
        if ((parcel->phase == EP_PARCEL_ARRIVED || parcel->phase == EP_PARCEL_SPENT) &&
            parcel->window == window) {
            ep_call_clear_frame(call->frames[i]);
        }
    }
    ep_call_state_release_window(&call->state, window);
    call->kept_bytes += ended->bytes;
    ended->bytes = 0;
    /* kept until the last window is sent: other calls could leave this one without room halfway */
    if (call->tokens_sent == call->spec.batch.tokens) {
        give_back_room(call);
    }
}

/* With allow_missing: lists slots whose rows have not come, in windows under way and never sent. */
static void count_missing(ep_call *call)
{
    const uint32_t per_token = call->slots_per_token;
    size_t sent_end = (size_t)call->tokens_sent * per_token;
    size_t end = (size_t)call->spec.batch.tokens * per_token;
    memset(call->rows + sent_end, 0, (end - sent_end) * sizeof(*call->rows));
    /* rows of combined windows are freed, but their pointers are not NULL */
    for (size_t s = 0; s < end; s++) {
        uint32_t expert;
        ep_slot_kind kind = ep_call_slot(call, (uint32_t)s, &expert);
        if ((kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED) && call->rows[s] == NULL) {
            if (call->result.missing_count == 0) {
                call->result.missing_first_slot = (uint32_t)s;
            }
            if (call->result.missing_count < call->spec.missing_slots_max) {
                call->spec.missing_slots[call->result.missing_count] = (uint32_t)s;
            }
            call->result.missing_count++;
        }
    }
}

static void write_out(ep_call *call)
{
    if (call->spec.allow_missing) {
        count_missing(call);
    }
    const uint32_t tokens = call->spec.batch.tokens;
    if (call->flow.is_piecewise) {
        memset(call->rows_left + call->tokens_sent, 0,
               (tokens - call->tokens_sent) * sizeof(*call->rows_left));
        combine_rest(call, 0, tokens);
        if (call->flow.is_aside && call->result.error.code == EP_OK) {
            copy_scratch_to_out(call);
        }
    } else if (tokens > 0) {
        bool is_traced = call->trace.is_on && ep_call_trace_combine_begin(call, tokens);
        combine(call, 0, tokens);
        if (is_traced) {
            ep_call_trace_combine_end(call, tokens);
        }
    }
}

/* ---- errors ---- */

/* The last node that held an expert without a copy in the table; NULL: it has one, or no node is
 * known. */
static ep_peer *former_owner(const ep_call *call, uint32_t expert)
{
    const ep_routing_layer *layer = call->at.layer;
    if (layer->offsets[expert] < layer->offsets[expert + 1]) {
        return NULL;
    }
    uint32_t node = ep_view_former_owner(call->at.view,
                                         (uint32_t)(layer - call->at.view->table->layers), expert);
    return node == UINT32_MAX ? NULL : call->at.view->peers[node];
}

/* "n1: not connected ...; n2: ..." for the copies of an expert. */
static void describe_copies(const ep_call *call, uint32_t expert, uint64_t now_ns, char *out_text,
                            size_t bytes)
{
    size_t used = 0;
    const ep_routing_layer *layer = call->at.layer;
    ep_peer *former = former_owner(call, expert);
    snprintf(out_text, bytes, "the table lists no copy of it");
    if (former != NULL) {
        char state[180];
        ep_peer_link_describe(&former->links[EP_PEER_DECODE], now_ns, state, sizeof(state));
        snprintf(out_text, bytes,
                 "the table lists no copy of it any more; last report of node %.60s: %s",
                 ep_peer_label(former), state);
    }
    for (uint32_t i = layer->offsets[expert]; i < layer->offsets[expert + 1] && used + 1 < bytes;
         i++) {
        char state[256];
        uint32_t node = layer->copies[i];
        ep_peer *peer = call->at.view->peers[node];
        ep_peer_link_describe(&peer->links[call->class_index], now_ns, state, sizeof(state));
        int n = snprintf(out_text + used, bytes - used, "%snode %s: %s%s", used == 0 ? "" : "; ",
                         ep_peer_label(peer), state,
                         ep_view_allows(call->at.view, call->at.model_index, node) ? ""
                         : call->at.view->pins[call->at.model_index][0] == 0
                             ? " (no numerics id chosen yet)"
                             : " (other numerics)");
        used += n > 0 ? (size_t)n : 0;
    }
}

static const ep_peer *blamed_peer(const ep_call *call, uint32_t expert)
{
    const ep_routing_layer *layer = call->at.layer;
    if (layer->offsets[expert] < layer->offsets[expert + 1]) {
        return call->at.view->peers[layer->copies[layer->offsets[expert]]];
    }
    return former_owner(call, expert);
}

static void write_last_report(const ep_call *call, uint64_t now_ns, char *out_text, size_t bytes)
{
    const ep_error *last = &call->state.last_error;
    out_text[0] = 0;
    if (last->code != EP_OK) {
        snprintf(out_text, bytes, "; last report: %s from %s %.1f s ago: %.140s",
                 ep_err_name(last->code), last->node[0] != 0 ? last->node : "this process",
                 (double)(now_ns - call->state.last_error_ns) / 1e9, last->text);
    }
}

/* The error when a connected node did not answer, or slots found no live copy. */
static void explain_wait(ep_call *call, const ep_call_frame *frame, uint64_t now_ns,
                         ep_error *error)
{
    const ep_routing_model *model = &call->at.view->table->models[call->at.model_index];
    const ep_error *report = &call->state.last_error;
    const uint32_t expert = ep_call_expert(call, frame->slots[0]);
    const uint64_t waited_us = (now_ns - call->state.begin_ns) / EP_NS_PER_US;
    const ep_err code = call->state.code;
    const ep_peer *blamed = frame->link != NULL ? frame->link->peer : blamed_peer(call, expert);
    const char *label = blamed != NULL ? ep_peer_label(blamed) : "";
    char node[EP_NODE_NAME_BYTES];
    char last[256];
    if (frame->link == NULL && report->code != EP_OK && report->node[0] != 0) {
        label = report->node;
    }
    snprintf(node, sizeof(node), "%.*s", (int)sizeof(node) - 1, label);
    write_last_report(call, now_ns, last, sizeof(last));
    if (frame->link != NULL) {
        char state[256];
        ep_peer_link_describe(frame->link, now_ns, state, sizeof(state));
        ep_error_set(error, code,
                     "layer %" PRIu32 ", expert %" PRIu32
                     " of model %.60s:%s: no reply from node %s within %" PRIu64
                     " us; last report: %.200s%s",
                     call->spec.layer, expert, model->name, model->version, node, waited_us, state,
                     code == EP_ERR_DEADLINE_EXCEEDED ? "" : last);
    } else {
        char copies[320];
        describe_copies(call, expert, now_ns, copies, sizeof(copies));
        ep_error_set(error, code,
                     "layer %" PRIu32 ", expert %" PRIu32
                     " of model %.60s:%s: no live copy within %" PRIu64 " us (%s)%s",
                     call->spec.layer, expert, model->name, model->version, waited_us, copies,
                     last);
    }
    error->expert = (int32_t)expert;
    snprintf(error->node, sizeof(error->node), "%s", node);
}

static void explain(ep_call *call, uint64_t now_ns, ep_error *error)
{
    const ep_call_frame *frame =
        call->state.blame < call->frames_count ? call->frames[call->state.blame] : NULL;
    bool at_deadline = now_ns >= call->state.deadline_ns && call->state.code != EP_ERR_CANCELLED;
    if (at_deadline && frame != NULL && /* NULL: another cause, whatever the time */
        (call->state.code == EP_ERR_UNAVAILABLE || call->state.code == EP_ERR_DEADLINE_EXCEEDED ||
         call->state.code == EP_ERR_RESOURCE_EXHAUSTED)) {
        explain_wait(call, frame, now_ns, error);
    } else if (frame == NULL && call->state.code == EP_ERR_DEADLINE_EXCEEDED) {
        ep_error_set(error, EP_ERR_DEADLINE_EXCEEDED,
                     "the deadline of %" PRIu64
                     " us passed before the service was asked for all tokens",
                     (uint64_t)((call->state.deadline_ns - call->state.begin_ns) / EP_NS_PER_US));
    } else {
        *error = call->state.last_error;
        if (frame != NULL && error->node[0] != 0) {
            ep_error_prefix(error, error->code, "node %s", error->node);
        }
    }
    error->layer = (int32_t)call->spec.layer;
    error->waited_us = (int64_t)((now_ns - call->state.begin_ns) / EP_NS_PER_US);
}

/* ---- end of a run ---- */

void ep_call_cancel_zombies(ep_call *call, uint64_t now_ns)
{
    bool is_short = call->state.code == EP_OK && call->result.missing_count > 0;
    /* EP_OK: other copies have answered */
    ep_err why = is_short ? EP_ERR_DEADLINE_EXCEEDED : call->state.code;
    for (uint32_t i = 0; i < call->state.parcels_count; i++) {
        ep_call_frame *frame = call->frames[i];
        if (call->state.parcels[i].phase == EP_PARCEL_ZOMBIE && frame->rpc_id != 0) {
            ep_answer_times *times = &frame->link->times;
            uint64_t waited_ns = now_ns > frame->sent_ns ? now_ns - frame->sent_ns : 0;
            ep_answer_times_add_lost(times, frame->slots_count, waited_ns);
            /* not for hedges, which were sent later */
            if (why == EP_OK && call->state.parcels[i].hedge_of == UINT32_MAX) {
                ep_answer_pace_add_lost(times);
            }
            if (frame->trace.exchange_open) {
                ep_call_trace_exchange_drop(frame, why);
            }
            (why == EP_OK ? ep_rpc_call_cancel_answered : ep_rpc_call_cancel)(frame->channel,
                                                                              frame->rpc_id);
            frame->rpc_id = 0;
        }
    }
}

void ep_call_end_run(ep_call *call, uint64_t now_ns)
{
    ep_moe_result *result = &call->result;
    if (call->state.code == EP_OK) {
        write_out(call);
    } else {
        explain(call, now_ns, &result->error);
    }
    if (result->error.code != EP_OK) {
        ep_count(&call->client->counters.calls_failed, 1);
    }
    for (uint32_t w = 0; w < EP_CALL_WINDOWS; w++) {
        ep_call_state_release_window(&call->state, w);
        call->kept_bytes += call->windows[w].bytes;
        call->windows[w].bytes = 0;
    }
    ep_call_cancel_zombies(call, now_ns);
    for (uint32_t i = 0; i < call->state.parcels_count; i++) {
        if (call->state.parcels[i].phase == EP_PARCEL_FREE) {
            ep_call_clear_frame(call->frames[i]);
        }
    }
    give_back_room(call); /* after the buffers are released */
    result->total_us = (ep_clock_now_ns() - call->state.begin_ns) / EP_NS_PER_US;
    result->pack_us = call->pack_ns / EP_NS_PER_US;
    result->combine_us = call->combine_ns / EP_NS_PER_US;
    result->epoch_term = call->at.view->table->epoch.term;
    result->epoch_number = call->at.view->table->epoch.number;
    snprintf(result->numerics, sizeof(result->numerics), "%s",
             call->at.view->pins[call->at.model_index]);
    if (call->trace.forward_open) {
        ep_call_trace_end(call, result->error.code);
    }
    if (call->knows_hosts) {
        ep_call_learn_hosts(call);
    }
    ep_call_drop_view(call);
}
