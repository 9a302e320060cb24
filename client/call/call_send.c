/* SPDX-License-Identifier: Apache-2.0 */
/* From slots to frames: the newest table, a copy for each expert, a plan, and one request per
 * frame. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "call/call_steps.h"
#include "expert.pb-c.h"
#include "wire/forward_codec.h"
#include "cluster/silence.h"
#include "wire/frame.h"

/* No answer counts as late before this: a second frame costs about as much as it could save. */
#define EP_HEDGE_DELAY_MIN_NS (500 * EP_NS_PER_US)

/* Slot numbers that are routed together: a list, or every needed slot of the window. */
typedef struct slot_list {
    uint32_t *numbers;
    uint32_t count;
    /* code RESOURCE_EXHAUSTED: from the node that has no room for them before the deadline */
    ep_error late;
} slot_list;

static void fail(ep_call *call, const ep_error *error, ep_call_actions *actions)
{
    ep_call_state_step(&call->state, ep_clock_now_ns(),
                       &(ep_call_event){.kind = EP_EVENT_FATAL, .error = error}, actions);
}

static void fail_memory(ep_call *call, ep_call_actions *actions)
{
    ep_error error;
    ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory to route a call");
    fail(call, &error, actions);
}

/* Memory for a frame's slot numbers: from the window's array while that lasts, else its own. */
static ep_err give_slots(ep_call *call, ep_call_frame *frame, uint32_t count)
{
    uint32_t window_index = call->state.parcels[frame->index].window;
    ep_call_window *window = &call->windows[window_index];
    size_t part = call->window_part;
    frame->slots_count = count;
    if (window->slots_used + count <= part) {
        frame->slots = call->window_slots + window_index * part + window->slots_used;
        frame->slots_owned = false;
        window->slots_used += count;
        return EP_OK;
    }
    frame->slots = malloc(count * sizeof(*frame->slots));
    frame->slots_owned = true;
    return frame->slots != NULL ? EP_OK : EP_ERR_NO_MEMORY;
}

/* ---- the table ---- */

/*
 * Takes the newest table for this round, unless it lacks the layer or has another shape for it. The
 * nodes of the old table serve until its last user is gone; else the call ends with their reports.
 */
void ep_call_refresh_view(ep_call *call)
{
    ep_view *view = ep_cluster_acquire_view(call->client->cluster);
    ep_view_layer at;
    if (view == call->at.view || view == NULL) {
        ep_view_unref(view);
        return;
    }
    const ep_layer_shape *old = &call->at.layer->shape;
    /* The version that the call began with, even if the default has changed: rows of two must not
     * mix. */
    const char *version = call->at.view->table->models[call->at.model_index].version;
    if (ep_view_find(view, call->spec.model, version, call->spec.layer, &at, NULL) == EP_OK &&
        at.layer->shape.hidden == old->hidden && at.layer->shape.experts == old->experts &&
        at.layer->shape.shared_experts == old->shared_experts) {
        (void)ep_call_use_view(call, &at); /* without memory the old one stays in use */
    }
    ep_view_unref(view);
}

void ep_call_choose(ep_call *call, const uint32_t *slots, const ep_peer *avoid, bool tried_too)
{
    const ep_view *view = call->at.view;
    const uint32_t nodes = view->table->nodes_count;
    const uint8_t *allowed = &view->allowed[(size_t)call->at.model_index * nodes];
    for (uint32_t n = 0; n < nodes; n++) {
        ep_peer *peer = view->peers[n];
        ep_peer_link *link = &peer->links[call->class_index];
        bool can_serve = allowed[n] != 0 && ep_peer_link_is_ready(link);
        bool is_poor = can_serve && (__atomic_load_n(&peer->draining, __ATOMIC_RELAXED) ||
                                     ep_peer_link_is_suspected(link));
        if (avoid != NULL && (peer == avoid || is_poor)) {
            can_serve = false;
        }
        call->usable[n] = !can_serve ? 0 : is_poor ? 2 : 1;
        call->room_bytes[n] = ep_flow_room_bytes(
            &call->flow, __atomic_load_n(&peer->frame_bytes_max, __ATOMIC_RELAXED));
        call->slowness[n] = (float)__atomic_load_n(&link->times.pace, __ATOMIC_RELAXED);
    }
    call->has_slow = ep_answer_slowness(call->slowness, call->usable, nodes);
    const uint32_t pass = __atomic_load_n(&call->norm->pass, __ATOMIC_RELAXED);
    const ep_copy_choice choice = {.nodes_count = nodes,
                                   .usable = call->usable,
                                   .tried = tried_too ? NULL : call->state.tried,
                                   .slowness = call->has_slow ? call->slowness : NULL,
                                   .slots = slots,
                                   .pass_slots = pass != 0 ? (float)pass / 16 : EP_COPY_PASS_SLOTS,
                                   .spread = call->spread + call->state.attempt,
                                   .order = call->choice_order,
                                   .busy = call->slowness + call->nodes_capacity};
    ep_choose_copies(call->at.layer, &choice, call->chosen);
}

/* ---- one frame ---- */

static void fill_header(const ep_call *call, Expertd__V1__ForwardRequest *header,
                        Expertd__V1__Epoch *epoch)
{
    const ep_routing_table *table = call->at.view->table;
    const ep_routing_model *model = &table->models[call->at.model_index];
    /* message fields are char *; packing only reads them */
    header->model = (char *)(uintptr_t)model->name;
    header->version = (char *)(uintptr_t)model->version;
    header->numerics = (char *)(uintptr_t)call->at.view->pins[call->at.model_index];
    header->layer = call->spec.layer;
    header->prefill = call->flow.prefill;
    header->step_group = call->spec.step_group;
    header->step_group_size = call->spec.step_group_size;
    header->step_member = call->step_member;
    header->want_timing = call->spec.want_timing;
    if (table->epoch.term != 0) { /* a local table has no epoch that nodes know */
        epoch->term = table->epoch.term;
        epoch->number = table->epoch.number;
        header->epoch = epoch;
    }
}

/* Starts the frame's request; from here on its answer may come. */
static ep_err start_request(ep_call *call, ep_call_frame *frame,
                            const Expertd__V1__ForwardRequest *header, ep_buffer *tensors,
                            ep_error *out_error)
{
    ep_rpc_metadata metadata[2];
    size_t metadata_count = 0;
    if (call->trace.traceparent[0] != 0) {
        metadata[metadata_count++] = (ep_rpc_metadata){"traceparent", call->trace.traceparent};
    }
    if (call->spec.tenant[0] != 0) {
        metadata[metadata_count++] = (ep_rpc_metadata){"tenant", call->spec.tenant};
    }
    ep_rpc_request request = {
        .id = ep_rpc_call_id_next(),
        .trace = call->trace.fields.trace,
        .method = call->client->forward_method,
        .header = &header->base,
        .tensors = tensors,
        .deadline_ns = call->state.deadline_ns,
        .attempt = (uint16_t)(call->state.attempt > UINT16_MAX ? UINT16_MAX : call->state.attempt),
        .metadata = metadata,
        .metadata_count = metadata_count};
    ep_call_use(call);
    frame->sent_ns = ep_clock_now_ns();
    if (frame->trace.is_on) {
        ep_call_trace_exchange_begin(frame, request.id);
    }
    ep_err err = ep_peer_link_call(frame->link, &request, ep_call_on_reply, frame, &frame->channel,
                                   &frame->rpc_id, out_error);
    if (err != EP_OK) {
        if (frame->trace.exchange_open) {
            ep_call_trace_exchange_end(frame, err);
        }
        frame->rpc_id = 0;
        ep_call_unuse(call);
    }
    return err;
}

/* Counts a frame; a node counts once, however many frames it gets. */
static void count_sent(ep_call *call, const ep_peer *peer, uint64_t bytes, ep_send_reason reason)
{
    ep_client *client = call->client;
    ep_moe_result *result = &call->result;
    result->frames++;
    result->bytes_sent += bytes;
    ep_count(&client->counters.frames_sent, 1);
    ep_count(&client->counters.bytes_sent, bytes);
    switch (reason) {
    case EP_SEND_FIRST:
        ep_retry_budget_earn(&client->budget, 1);
        break;
    case EP_SEND_AGAIN:
    case EP_SEND_SILENT:
        result->rerouted_frames++;
        ep_count(&client->counters.frames_rerouted, 1);
        break;
    case EP_SEND_LATE:
        result->hedged_frames++;
        ep_count(&client->counters.frames_hedged, 1);
        break;
    }
    for (uint32_t i = 0; i < result->nodes; i++) {
        if (call->served[i] == peer) {
            return;
        }
    }
    /* without memory the count stays too low */
    if (result->nodes < call->served_capacity ||
        ep_call_reserve_served(call, result->nodes + 1) == EP_OK) {
        call->served[result->nodes++] = peer;
    }
}

/* Packs a chunk of the plan and sends it as this frame. */
static ep_err send_frame(ep_call *call, ep_call_frame *frame, uint32_t chunk_index,
                         ep_send_reason reason, ep_error *out_error)
{
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    ep_call_relay relay = {.count = 0};
    ep_buffer *tensors = NULL;
    if (call->is_by_host) { /* also sets the chunk's node */
        ep_call_split_chunk(call, chunk_index, &relay);
    }
    const ep_plan_chunk *chunk = &call->plan.chunks[chunk_index];
    if (give_slots(call, frame, chunk->slots_count) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a frame of %u slots",
                            chunk->slots_count);
    }
    for (uint32_t i = 0; i < chunk->slots_count; i++) {
        frame->slots[i] = call->plan.slots[chunk->slots_begin + i].slot_number;
    }
    frame->rows_count = chunk->rows_count;
    frame->link = &ep_peer_ref(call->at.view->peers[chunk->node])->links[call->class_index];
    frame->is_relayed = relay.count > 0;
    frame->slowness = call->has_slow ? call->slowness[chunk->node] : 1;
    frame->norm = call->norm;
    frame->numerics = call->at.view->pins[call->at.model_index];
    frame->trace = (ep_frame_trace){.is_on = false};
    if (call->trace.is_on) {
        ep_call_trace_pack_begin(call, frame);
    }
    uint64_t begin_ns = call->spec.want_timing ? ep_clock_now_ns() : 0;
    ep_err err = ep_forward_pack(&call->spec.batch, &call->plan, chunk_index, call->slots_per_token,
                                 call->client->pool, &header, &tensors);
    call->pack_ns += begin_ns != 0 ? ep_clock_now_ns() - begin_ns : 0;
    if (frame->trace.pack_open) {
        ep_call_trace_pack_end(frame);
    }
    if (err != EP_OK) {
        return ep_error_set(out_error, err,
                            "a frame of %u slots cannot be packed: %s (buffer_bytes_max %llu)",
                            frame->slots_count, ep_err_text(err),
                            (unsigned long long)call->client->config.buffer_bytes_max);
    }
    fill_header(call, &header, &epoch);
    if (relay.count > 0) {
        ep_call_fill_relay(call, &relay, &header);
    }
    frame->host = call->at.view->groups[chunk->node];
    frame->bytes = tensors->bytes + EP_FRAME_FIXED_BYTES;
    err = start_request(call, frame, &header, tensors, out_error);
    ep_buffer_unref(tensors);
    if (err == EP_OK) {
        count_sent(call, frame->link->peer, frame->bytes, reason);
        if (call->knows_hosts) {
            ep_call_note_sent(call, frame);
        }
    }
    return err;
}

/* Sets when the frame is late and when to check its node. Hedges are not hedged again, but one to a
 * silent node is given up. For a slow node a frame is late when it would be for a quick one, so
 * that trying the slow node costs a call little. */
static void watch(ep_call *call, const ep_call_frame *frame, bool as_hedge)
{
    uint64_t late_ns = ep_answer_times_late_ns(&frame->link->times, frame->slots_count);
    if (frame->slowness >= EP_COPY_SLOW && late_ns != EP_ANSWER_TIMES_UNKNOWN) {
        late_ns = (uint64_t)((float)late_ns / frame->slowness);
    }
    late_ns = late_ns < EP_HEDGE_DELAY_MIN_NS ? EP_HEDGE_DELAY_MIN_NS : late_ns;
    ep_call_state_watch(&call->state, frame->index,
                        as_hedge || late_ns == EP_ANSWER_TIMES_UNKNOWN ? EP_TIME_NEVER
                                                                       : frame->sent_ns + late_ns,
                        frame->sent_ns + EP_SILENCE_PING_NS);
}

/* A failure to send becomes an event. */
void ep_call_send_plan(ep_call *call, uint32_t window, ep_send_reason reason, uint32_t hedge_of,
                       ep_call_actions *actions)
{
    const bool is_hedge = reason == EP_SEND_LATE || reason == EP_SEND_SILENT;
    if (call->trace.plan_open) {
        ep_call_trace_plan_end(call);
    }
    for (uint32_t c = 0; c < call->plan.chunks_count && !actions->complete; c++) {
        ep_error error;
        uint32_t parcel = 0;
        ep_err err = ep_call_reserve_frames(call, call->state.parcels_count + 1);
        if (err == EP_OK) {
            err = is_hedge ? ep_call_state_add_hedge(&call->state, hedge_of, &parcel)
                           : ep_call_state_add(&call->state, window, &parcel);
        }
        if (err != EP_OK) {
            fail_memory(call, actions);
            return;
        }
        ep_call_frame *frame = call->frames[parcel];
        if (send_frame(call, frame, c, reason, &error) == EP_OK) {
            watch(call, frame, is_hedge);
            continue;
        }
        ep_call_mark_frame(call, frame, &error);
        ep_call_state_step(
            &call->state, ep_clock_now_ns(),
            &(ep_call_event){.kind = EP_EVENT_REFUSED, .parcel = parcel, .error = &error}, actions);
    }
}

/* ---- a round ---- */

ep_err ep_call_build_plan(ep_call *call, const ep_call_window *window, const uint32_t *numbers,
                          uint32_t numbers_count, ep_error *out_error)
{
    const ep_batch *batch = &call->spec.batch;
    ep_plan_cut cut = call->flow.cut;
    cut.room_bytes = call->room_bytes;
    if (window == NULL) {
        ep_err err = ep_routing_plan_list(&call->plan, batch, &call->at.layer->shape, 0, 0, numbers,
                                          numbers_count, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    call->is_by_host = window != NULL && call->comm_alg != EP_MOE_COMM_FULLMESH &&
                       ep_call_choose_hosts(call, window->begin, window->end);
    if (call->is_by_host) {
        ep_call_group_hosts(call);
    }
    return ep_routing_plan_build(&call->plan, batch, call->at.layer,
                                 call->at.view->table->nodes_count,
                                 call->is_by_host ? call->grouped : call->chosen, &cut, out_error);
}

/* Keeps slots without a copy as a parcel, stuck or late. */
static ep_err keep(ep_call *call, uint32_t window, const uint32_t *numbers, uint32_t count,
                   bool is_late)
{
    uint32_t parcel = 0;
    ep_err err = ep_call_reserve_frames(call, call->state.parcels_count + 1);
    if (err == EP_OK) {
        err = is_late ? ep_call_state_add_late(&call->state, window, &parcel)
                      : ep_call_state_add_stuck(&call->state, window, ep_clock_now_ns(), &parcel);
    }
    if (err == EP_OK) {
        err = give_slots(call, call->frames[parcel], count);
    }
    if (err == EP_OK) {
        memcpy(call->frames[parcel]->slots, numbers, count * sizeof(*numbers));
    }
    return err;
}

/* Moves slots without a copy behind the others; both parts stay ascending. */
static ep_err split_list(const ep_call *call, slot_list *list, uint32_t *out_with_copy)
{
    uint32_t *without = malloc((size_t)list->count * sizeof(*without));
    uint32_t with_count = 0;
    uint32_t without_count = 0;
    if (without == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < list->count; i++) {
        uint32_t number = list->numbers[i];
        if (call->chosen[ep_call_expert(call, number)] == EP_NO_EXPERT) {
            without[without_count++] = number;
        } else {
            list->numbers[with_count++] = number;
        }
    }
    memcpy(list->numbers + with_count, without, without_count * sizeof(*without));
    free(without);
    *out_with_copy = with_count;
    return EP_OK;
}

/* After copies are chosen: sends slots with a copy, keeps those without. */
static void route_list(ep_call *call, uint32_t window, slot_list *list, bool again,
                       ep_call_actions *actions)
{
    uint32_t with_copy = 0;
    ep_error error = list->late;
    const bool is_late = error.code != EP_OK;
    ep_err err = split_list(call, list, &with_copy);
    if (err == EP_OK && with_copy < list->count && is_late && !call->state.allow_missing) {
        ep_error_prefix(&error, error.code, "node %s", error.node);
        fail(call, &error, actions); /* work of other nodes would be in vain */
        return;
    }
    if (err == EP_OK && with_copy < list->count) {
        err = keep(call, window, list->numbers + with_copy, list->count - with_copy, is_late);
    }
    if (err != EP_OK) {
        fail_memory(call, actions);
        return;
    }
    if (with_copy == 0) {
        return;
    }
    err = ep_call_build_plan(call, NULL, list->numbers, with_copy, &error);
    if (err != EP_OK) {
        fail(call, &error, actions);
        return;
    }
    ep_call_send_plan(call, window, again ? EP_SEND_AGAIN : EP_SEND_FIRST, UINT32_MAX, actions);
}

/* Registers the call for the next wake; if there was one since `seen`, wakes it at once. */
static void wait_for_wake(ep_call *call, uint64_t seen)
{
    if (!ep_call_registry_wait(&call->client->registry, call, seen)) {
        pthread_mutex_lock(&call->lock);
        call->flags |= EP_CALL_FLAG_WAKE; /* this thread is busy with the call and will see it */
        pthread_mutex_unlock(&call->lock);
    }
}

/* Routes a window slot by slot, as some expert has no copy now. It is slower and allocates. */
static void route_window_by_slot(ep_call *call, uint32_t window, ep_call_actions *actions)
{
    const uint32_t per_token = call->slots_per_token;
    uint32_t begin = call->windows[window].begin * per_token;
    uint32_t end = call->windows[window].end * per_token;
    slot_list list = {.numbers = malloc((size_t)(end - begin) * sizeof(uint32_t) + 1)};
    if (list.numbers == NULL) {
        fail_memory(call, actions);
        return;
    }
    ep_call_refresh_view(call);
    ep_call_choose(call, call->plan.expert_slots, NULL, false);
    for (uint32_t number = begin; number < end; number++) {
        uint32_t expert;
        ep_slot_kind kind = ep_call_slot(call, number, &expert);
        if (kind == EP_SLOT_ROUTED || kind == EP_SLOT_SHARED) {
            list.numbers[list.count++] = number;
        }
    }
    route_list(call, window, &list, false, actions);
    free(list.numbers);
}

/* Claims room for all rows of the window; otherwise calls that each hold half of their rows could
 * wait for each other for ever. */
static ep_err claim_window(ep_call *call, ep_call_window *window, ep_error *out_error)
{
    ep_client *client = call->client;
    /* Small first windows claim as much as later ones, so that those find room. */
    const uint32_t all = call->spec.batch.tokens;
    const uint32_t most = call->flow.window_tokens < all ? call->flow.window_tokens : all;
    const uint32_t tokens = call->flow.first_tokens < most ? most : window->end - window->begin;
    uint64_t slots = (uint64_t)tokens * call->slots_per_token;
    uint64_t bytes = ep_flow_claim_bytes(&call->flow, slots, call->at.view->table->nodes_count);
    uint64_t kept = bytes < call->kept_bytes ? bytes : call->kept_bytes;
    uint64_t more = bytes - kept;
    uint64_t total = __atomic_add_fetch(&client->window_bytes, more, __ATOMIC_RELAXED);
    if (more > 0 && total > client->window_bytes_max && total != bytes) {
        __atomic_fetch_sub(&client->window_bytes, more, __ATOMIC_RELAXED);
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "reply rows of calls in flight need %llu bytes: %llu are allowed by "
                            "buffer_bytes_max %llu",
                            (unsigned long long)total, (unsigned long long)client->window_bytes_max,
                            (unsigned long long)client->config.buffer_bytes_max);
    }
    call->kept_bytes -= kept;
    window->bytes = bytes;
    return EP_OK;
}

/* Counts the rows that each token of a new window waits for. */
static void count_rows_left(ep_call *call, const ep_call_window *window)
{
    const uint32_t per_token = call->slots_per_token;
    memset(call->rows_left + window->begin, 0,
           (window->end - window->begin) * sizeof(*call->rows_left));
    for (uint32_t i = 0; i < call->state.parcels_count; i++) {
        const ep_parcel *parcel = &call->state.parcels[i];
        const ep_call_frame *frame = call->frames[i];
        if (parcel->phase < EP_PARCEL_OPEN || &call->windows[parcel->window] != window) {
            continue; /* of another window or a former run */
        }
        for (uint32_t s = 0; s < frame->slots_count; s++) {
            call->rows_left[frame->slots[s] / per_token]++;
        }
    }
}

/* False, with nothing changed: there is no room for another window beside those under way. */
static bool send_window(ep_call *call, uint32_t index, ep_call_actions *actions)
{
    ep_error error;
    ep_call_window *window = &call->windows[index];
    uint32_t left = call->spec.batch.tokens - call->tokens_sent;
    *window = (ep_call_window){.begin = call->tokens_sent};
    uint32_t tokens = ep_flow_window_at(&call->flow, window->begin);
    window->end = window->begin + (left > tokens ? tokens : left);
    if (call->trace.is_on) {
        ep_call_trace_plan_begin(call, window->begin, window->end);
    }
    if (window->begin > 0) { /* the first one goes by the table the call began with */
        ep_call_refresh_view(call);
    }
    ep_err err = claim_window(call, window, &error);
    if (err != EP_OK) {
        if (call->trace.plan_open) {
            ep_call_trace_plan_end(call);
        }
        ep_call_state_withdraw_window(&call->state, index);
        if (ep_call_state_has_window(&call->state)) {
            return false;
        }
        fail(call, &error, actions);
        return true;
    }
    call->tokens_sent = window->end;
    size_t per_token = call->slots_per_token;
    memset(call->rows + window->begin * per_token, 0,
           (window->end - window->begin) * per_token * sizeof(*call->rows));
    err = ep_routing_plan_list(&call->plan, &call->spec.batch, &call->at.layer->shape,
                               window->begin, window->end, NULL, 0, &error);
    if (err == EP_OK) {
        ep_call_choose(call, call->plan.expert_slots, NULL, false);
        err = ep_call_build_plan(call, window, NULL, 0, &error);
    }
    if (err == EP_OK) {
        ep_call_send_plan(call, index, EP_SEND_FIRST, UINT32_MAX, actions);
    } else if (err == EP_ERR_UNAVAILABLE) {
        route_window_by_slot(call, index, actions);
    } else {
        fail(call, &error, actions);
    }
    if (call->trace.plan_open) {
        ep_call_trace_plan_end(call);
    }
    if (call->flow.is_piecewise && !actions->complete) {
        count_rows_left(call, window);
    }
    call->state.attempt++;
    return true;
}

void ep_call_send_windows(ep_call *call, ep_call_actions *actions)
{
    uint32_t window;
    uint64_t seen = __atomic_load_n(&call->client->registry.wake_generation, __ATOMIC_ACQUIRE);
    while (!actions->complete && ep_call_state_open_window(&call->state, &window)) {
        if (!send_window(call, window, actions)) {
            break;
        }
        if (!actions->complete) {
            ep_call_state_step(&call->state, ep_clock_now_ns(),
                               &(ep_call_event){.kind = EP_EVENT_WINDOW, .window = window},
                               actions);
        }
    }
    if (!actions->complete && call->state.waiting_count > 0) {
        wait_for_wake(call, seen);
    }
}

static void sift_down(uint32_t *numbers, uint32_t root, uint32_t count)
{
    for (uint32_t child; (child = 2 * root + 1) < count; root = child) {
        child += child + 1 < count && numbers[child + 1] > numbers[child];
        if (numbers[root] >= numbers[child]) {
            return;
        }
        uint32_t number = numbers[root];
        numbers[root] = numbers[child];
        numbers[child] = number;
    }
}

/* Heap sort: qsort may allocate. */
void ep_call_sort_slots(uint32_t *numbers, uint32_t count)
{
    for (uint32_t i = count / 2; i-- > 0;) {
        sift_down(numbers, i, count);
    }
    for (uint32_t end = count; end-- > 1;) {
        uint32_t number = numbers[0];
        numbers[0] = numbers[end];
        numbers[end] = number;
        sift_down(numbers, 0, end);
    }
}

static bool is_routable(const ep_call *call, uint32_t parcel, uint32_t window, bool is_late)
{
    const ep_parcel *p = &call->state.parcels[parcel];
    return p->phase == EP_PARCEL_ROUTABLE && p->window == window && (p->reason != EP_OK) == is_late;
}

/* Collects the slots without rows of a window's ROUTABLE parcels, ascending, and frees the parcels.
 * is_late: only parcels whose nodes have no room before the deadline, else only the others. */
static ep_err absorb_routable(ep_call *call, uint32_t window, bool is_late, slot_list *out_list)
{
    size_t total = 0;
    *out_list = (slot_list){.count = 0};
    for (uint32_t i = 0; i < call->state.parcels_count; i++) {
        total += is_routable(call, i, window, is_late) ? call->frames[i]->slots_count : 0;
    }
    if (total == 0) {
        return EP_OK;
    }
    out_list->numbers = malloc(total * sizeof(uint32_t));
    if (out_list->numbers == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < call->state.parcels_count; i++) {
        ep_call_frame *frame = call->frames[i];
        if (is_routable(call, i, window, is_late)) {
            if (is_late) {
                out_list->late = frame->error;
            }
            for (uint32_t k = 0; k < frame->slots_count; k++) {
                if (call->rows[frame->slots[k]] == NULL) {
                    out_list->numbers[out_list->count++] = frame->slots[k];
                }
            }
            ep_call_clear_frame(frame);
            ep_call_state_absorb(&call->state, i);
        }
    }
    ep_call_sort_slots(out_list->numbers, out_list->count);
    return EP_OK;
}

void ep_call_resend(ep_call *call, ep_call_actions *actions)
{
    uint64_t seen = __atomic_load_n(&call->client->registry.wake_generation, __ATOMIC_ACQUIRE);
    if (call->trace.is_on) {
        ep_call_trace_plan_begin(call, 0, call->tokens_sent);
    }
    ep_call_refresh_view(call);
    ep_call_choose(call, NULL, NULL, false);
    for (uint32_t i = 0; i < 2 * EP_CALL_WINDOWS && !actions->complete; i++) {
        slot_list list;
        if (absorb_routable(call, i / 2, i % 2 == 1, &list) != EP_OK) {
            fail_memory(call, actions);
        } else if (list.count > 0) {
            route_list(call, i / 2, &list, true, actions);
        }
        free(list.numbers);
    }
    if (call->trace.plan_open) {
        ep_call_trace_plan_end(call);
    }
    call->state.attempt++;
    if (!actions->complete && call->state.waiting_count > 0) {
        wait_for_wake(call, seen);
    }
}
