/* SPDX-License-Identifier: Apache-2.0 */
/* Answers: checked on the transport's thread, taken by the call's busy thread. Rows stay in the
 * reply's buffer. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "call/call_steps.h"
#include "cluster/silence.h"
#include "expert.pb-c.h"
#include "moe/node_sum.h"

#define WRONG(...) ep_error_set(out_error, EP_ERR_DATA_LOSS, __VA_ARGS__)

/* A reply that does not fit its request counts as damaged. */
static ep_err check_reply(ep_call_frame *frame, const ep_rpc_reply *reply, ep_error *out_error)
{
    const ep_batch *batch = &frame->call->spec.batch;
    const Expertd__V1__ForwardReply *header =
        (const Expertd__V1__ForwardReply *)(const void *)reply->header;
    uint32_t rows = batch->node_sum ? frame->rows_count : frame->slots_count;
    ep_reply_layout_make(rows, batch->hidden, batch->wire_dtype, batch->combine_quant,
                         &frame->layout);
    if (header == NULL) {
        return WRONG("the reply has no header");
    }
    if (header->slots != frame->slots_count) {
        return WRONG("the reply has %" PRIu32 " slots: %" PRIu32 " were asked for", header->slots,
                     frame->slots_count);
    }
    if (header->hidden != batch->hidden) {
        return WRONG("the reply has hidden %" PRIu32 ": %" PRIu32 " was asked for", header->hidden,
                     batch->hidden);
    }
    if (header->dtype != (uint32_t)batch->wire_dtype) {
        return WRONG("the reply has type %s (%" PRIu32 "): %s was asked for",
                     ep_dtype_name((ep_dtype)header->dtype), header->dtype,
                     ep_dtype_name(batch->wire_dtype));
    }
    if ((header->node_sum != 0) != batch->node_sum) {
        return WRONG("the reply has %s: %s were asked for", header->node_sum ? "node sums" : "rows",
                     batch->node_sum ? "node sums" : "rows");
    }
    if (reply->tensor_bytes != frame->layout.total_bytes) {
        return WRONG("the reply has %zu tensor bytes: %zu are needed", reply->tensor_bytes,
                     frame->layout.total_bytes);
    }
    if (frame->numerics[0] != 0 && strcmp(header->numerics, frame->numerics) != 0) {
        return WRONG("the reply was computed with numerics '%.95s': '%s' is pinned",
                     header->numerics, frame->numerics);
    }
    return EP_OK;
}

void ep_call_on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    ep_call_frame *frame = arg;
    ep_answer_times *times = &frame->link->times;
    bool draining = reply != NULL && reply->draining;
    frame->ok = false;
    if (error != NULL) {
        frame->error = *error;
        draining = draining || error->code == EP_ERR_DRAINING;
    } else if (check_reply(frame, reply, &frame->error) == EP_OK) {
        const Expertd__V1__ForwardReply *header =
            (const Expertd__V1__ForwardReply *)(const void *)reply->header;
        uint64_t took_ns = ep_clock_now_ns() - frame->sent_ns;
        frame->ok = true;
        frame->rows = reply->tensors;
        frame->reply = ep_buffer_ref(reply->frame);
        frame->timing = (ep_frame_timing){.wait_us = took_ns / EP_NS_PER_US,
                                          .queue_us = header->queue_us,
                                          .compute_us = header->compute_us,
                                          .service_us = header->service_us};
        ep_answer_times_add(times, frame->slots_count, took_ns);
        ep_answer_pass_add(frame->norm, header->pass_rows);
        if (!frame->is_relayed) { /* otherwise a neighbour may be the slow one */
            ep_answer_pace_add(times, frame->norm, frame->slots_count, took_ns,
                               frame->slowness == 1);
        }
    }
    if (error == NULL || draining) {
        ep_peer *peer = frame->link->peer;
        __atomic_store_n(&peer->heard_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
        if (draining) {
            __atomic_store_n(&peer->draining, true, __ATOMIC_RELAXED);
        }
    }
    ep_call_post(frame->call, frame, EP_CALL_FLAG_ANSWER);
}

static uint32_t node_of(const ep_call *call, const ep_peer *peer)
{
    for (uint32_t n = 0; n < call->at.view->table->nodes_count; n++) {
        if (call->at.view->peers[n] == peer) {
            return n;
        }
    }
    return UINT32_MAX; /* the node is not in the newer table in use */
}

/* Marks only the expert that the node says it does not hold; its other experts may be asked there
 * again. */
static bool mark_named(ep_call *call, const ep_call_frame *frame, const ep_error *error,
                       uint32_t node)
{
    for (uint32_t i = 0;
         error->code == EP_ERR_NOT_OWNER && error->expert >= 0 && i < frame->slots_count; i++) {
        if (ep_call_expert(call, frame->slots[i]) == (uint32_t)error->expert) {
            ep_call_state_mark_tried(&call->state, call->at.layer, (uint32_t)error->expert, node);
            return true;
        }
    }
    return false;
}

/* The node that failed: of a relayed frame the neighbour that the error names. */
static uint32_t failed_node(const ep_call *call, const ep_call_frame *frame, const ep_error *error)
{
    const ep_routing_table *table = call->at.view->table;
    for (uint32_t n = 0; frame->is_relayed && error->node[0] != 0 && n < table->nodes_count; n++) {
        if (strcmp(table->nodes[n].name, error->node) == 0) {
            return n;
        }
    }
    return node_of(call, frame->link->peer);
}

/* Whether the owner was probably never asked: a node that refuses to pass rows on at once may not
 * know it yet. A later failure means that the owner did not answer. */
static bool is_owner_unasked(const ep_call *call, const ep_call_frame *frame, const ep_error *error,
                             uint32_t node)
{
    ep_peer *const owner = call->at.view->peers[node];
    return frame->is_relayed && error->code == EP_ERR_UNAVAILABLE && owner != frame->link->peer &&
           ep_peer_link_is_ready(&owner->links[call->class_index]) &&
           ep_clock_now_ns() < frame->sent_ns + EP_SILENCE_PING_NS;
}

void ep_call_mark_frame(ep_call *call, ep_call_frame *frame, ep_error *error)
{
    if (frame->link == NULL) {
        return; /* it failed before a peer was set */
    }
    uint32_t node = failed_node(call, frame, error);
    if (error->node[0] == 0) {
        snprintf(error->node, sizeof(error->node), "%.*s", (int)sizeof(error->node) - 1,
                 ep_peer_label(frame->link->peer));
    }
    const bool has_no_room = error->code == EP_ERR_RESOURCE_EXHAUSTED &&
                             !ep_call_state_is_too_late(&call->state, ep_clock_now_ns(), error);
    if (node == UINT32_MAX || has_no_room || mark_named(call, frame, error, node) ||
        is_owner_unasked(call, frame, error, node)) {
        return;
    }
    if (ep_peer_link_lost_only_shm(frame->link, frame->channel)) {
        return; /* only shared memory was lost: the node may be tried over its stream */
    }
    uint32_t last = EP_NO_EXPERT;
    for (uint32_t i = 0; i < frame->slots_count; i++) { /* slots are sorted by expert */
        uint32_t expert = ep_call_expert(call, frame->slots[i]);
        if (expert != last) {
            ep_call_state_mark_tried(&call->state, call->at.layer, expert, node);
            last = expert;
        }
    }
}

static void place_rows(ep_call *call, const ep_call_frame *frame)
{
    const ep_batch *batch = &call->spec.batch;
    const ep_reply_layout *layout = &frame->layout;
    bool has_scales = call->row_scales != NULL;
    const uint8_t *scales = frame->rows + layout->scales_offset;
    if (batch->node_sum) {
        const uint32_t per_token = call->slots_per_token;
        ep_partials_place(frame->slots, frame->slots_count, per_token, frame->rows,
                          layout->row_bytes, call->rows);
        if (has_scales) {
            ep_partials_place(frame->slots, frame->slots_count, per_token, scales,
                              layout->scale_row_bytes, call->row_scales);
        }
    }
    for (uint32_t i = 0; !batch->node_sum && i < frame->slots_count; i++) {
        uint32_t slot = frame->slots[i];
        if (call->rows[slot] != NULL) {
            continue; /* a slot that was sent twice keeps its first row */
        }
        call->rows[slot] = frame->rows + i * layout->row_bytes;
        if (has_scales) {
            call->row_scales[slot] = scales + i * layout->scale_row_bytes;
        }
    }
    call->result.bytes_received += frame->reply->bytes;
    ep_count(&call->client->counters.bytes_received, frame->reply->bytes);
}

/* Keeps the times of the slowest frame for the result. */
static void count_times(ep_call *call, const ep_call_frame *frame)
{
    const ep_frame_timing *timing = &frame->timing;
    ep_peer_timing_add(&frame->link->peer->timing, timing);
    if (timing->wait_us >= call->slowest_wait_us) {
        call->slowest_wait_us = timing->wait_us;
        call->result.wire_us = ep_timing_wire_us(timing);
        call->result.queue_us = timing->queue_us;
        call->result.compute_us = timing->compute_us;
    }
}

void ep_call_take_answer(ep_call *call, ep_call_frame *frame, uint64_t now_ns,
                         ep_call_actions *actions)
{
    ep_parcel_phase phase = call->state.parcels[frame->index].phase;
    bool live = call->state.phase == EP_CALL_RUNNING &&
                (phase == EP_PARCEL_IN_FLIGHT || phase == EP_PARCEL_HEDGE);
    ep_call_event event = {.kind = frame->ok ? EP_EVENT_ROWS : EP_EVENT_FAILED,
                           .parcel = frame->index,
                           .error = &frame->error};
    frame->rpc_id = 0;
    if (frame->given_up && !frame->ok && frame->error.code == EP_ERR_CANCELLED) {
        ep_error_set(
            &frame->error, EP_ERR_UNAVAILABLE,
            "given up: the node sends nothing, and a ping got no answer or could not be sent");
    }
    if (live && frame->ok) {
        place_rows(call, frame);
        if (call->knows_hosts) {
            ep_call_note_answer(call, frame, now_ns);
        }
        if (call->spec.want_timing) {
            count_times(call, frame);
        }
        if (call->flow.is_piecewise) {
            ep_call_combine_ready(call, frame);
        }
    } else if (live) {
        if (call->knows_hosts) {
            ep_call_note_refusal(call, frame, now_ns);
        }
        ep_call_mark_frame(call, frame, &frame->error);
    }
    ep_call_state_step(&call->state, now_ns, &event, actions);
    EP_ASSERT(actions->late == !live);
    if (frame->trace.exchange_open) {
        if (!live) {
            ep_call_trace_exchange_drop(frame, call->state.code);
        }
        ep_call_trace_exchange_end(frame, frame->ok ? EP_OK : frame->error.code);
    }
    if (!live) {
        if (frame->ok) {
            ep_count(&call->client->counters.late_replies, 1);
        }
        ep_call_clear_frame(frame);
    }
    ep_call_unuse(call);
}
