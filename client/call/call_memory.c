/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a call: the object and its references, arrays, frames, and the table in use. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/random.h"
#include "call/call_steps.h"

#define FRAMES_GROWTH 16u

/* ---- the object ---- */

ep_err ep_call_new(ep_client *client, ep_call **out_call)
{
    ep_call *call = calloc(1, sizeof(*call));
    if (call == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_cond_init(&call->changed, NULL);
    pthread_mutex_init(&call->lock, NULL);
    STAILQ_INIT(&call->inbox);
    ep_routing_plan_init(&call->plan);
    ep_timer_init(&call->timer, ep_call_on_timer, call);
    ep_call_state_init(&call->state, &client->budget, ep_random_id());
    *out_call = call;
    return EP_OK;
}

void ep_call_free(ep_call *call)
{
    for (uint32_t i = 0; i < call->frames_count; i++) {
        ep_call_clear_frame(call->frames[i]);
        free(call->frames[i]);
    }
    ep_call_state_fini(&call->state);
    ep_routing_plan_fini(&call->plan);
    free(call->frames);
    free(call->rows);
    free(call->window_slots);
    free(call->rows_left);
    free(call->chosen);
    free(call->host_slots);
    free(call->usable);
    free(call->slowness);
    free(call->room_bytes);
    free(call->hosts);
    free(call->host_loads);
    free(call->host_scratch);
    free(call->served);
    free(call->combine_scratch);
    free(call->out_scratch);
    pthread_mutex_destroy(&call->lock);
    pthread_cond_destroy(&call->changed);
    free(call);
}

void ep_call_unref(ep_call *call)
{
    if (__atomic_fetch_sub(&call->refs, 1, __ATOMIC_ACQ_REL) != 1) {
        return;
    }
    ep_client *client = call->client;
    size_t kept_bytes = call->rows_bytes + call->host_slots_bytes + call->window_slots_bytes +
                        call->rows_left_bytes + call->out_scratch_bytes;
    call->client = NULL;
    if (call->form == EP_FORM_PREPARED ||
        !ep_call_registry_keep_spare(&client->registry, call, kept_bytes)) {
        ep_call_free(call);
    }
    ep_client_unref(client);
}

void ep_call_use(ep_call *call)
{
    ep_client_use(call->client);
    __atomic_fetch_add(&call->refs, 1, __ATOMIC_RELAXED);
}

void ep_call_unuse(ep_call *call)
{
    ep_client *client = call->client;
    ep_call_unref(call);
    ep_client_leave(client);
}

/* ---- arrays ---- */

/* Replaces *array when it is too short; its contents are lost. */
static bool grow_aligned(void *array, size_t *capacity_bytes, size_t wanted_bytes)
{
    void *old;
    if (wanted_bytes <= *capacity_bytes) {
        return true;
    }
    void *fresh = aligned_alloc(EP_BUFFER_ALIGN, ep_align_up(wanted_bytes, EP_BUFFER_ALIGN));
    memcpy(&old, array, sizeof(old));
    free(old);
    memcpy(array, &fresh, sizeof(fresh));
    *capacity_bytes = fresh != NULL ? wanted_bytes : 0;
    return fresh != NULL;
}

/* Reserves rows, slot numbers and, with is_aside, the scratch result. */
ep_err ep_call_reserve_run(ep_call *call, const ep_layer_shape *shape, const ep_flow *flow,
                           ep_error *out_error)
{
    const ep_batch *batch = &call->spec.batch;
    size_t per_token = ep_batch_slots_per_token(batch, shape);
    /* per slot: its row and its scales */
    size_t pointers = batch->combine_quant != EP_COMBINE_PLAIN ? 2 : 1;
    /* one more, so that an empty batch has an address */
    size_t rows_bytes = (batch->tokens * per_token * pointers + 1) * sizeof(*call->rows);
    /* Twice, because each slot may be sent a second time. */
    size_t window_bytes =
        2 * EP_CALL_WINDOWS * flow->window_tokens * per_token * sizeof(*call->window_slots);
    size_t scratch_bytes = ep_combine_scratch_floats(batch->hidden) * sizeof(float);
    size_t left_bytes =
        flow->is_piecewise ? ((size_t)batch->tokens + 1) * sizeof(*call->rows_left) : 0;
    size_t out_bytes =
        flow->is_aside ? (size_t)batch->tokens * batch->hidden * ep_dtype_bytes(batch->out_dtype)
                       : 0;
    const ep_moe_comm comm_alg = call->spec.comm_alg;
    size_t host_bytes = comm_alg == EP_MOE_COMM_HIERARCHY || comm_alg == EP_MOE_COMM_AUTO
                            ? flow->window_tokens * per_token * sizeof(*call->host_slots)
                            : 0;
    if (batch->form == EP_RESULT_UNCOMBINED) {
        out_bytes *= batch->top_k;
    }
    if (!grow_aligned(&call->rows, &call->rows_bytes, rows_bytes) ||
        !grow_aligned(&call->window_slots, &call->window_slots_bytes, window_bytes) ||
        !grow_aligned(&call->host_slots, &call->host_slots_bytes, host_bytes) ||
        !grow_aligned(&call->rows_left, &call->rows_left_bytes, left_bytes) ||
        !grow_aligned(&call->combine_scratch, &call->combine_scratch_bytes, scratch_bytes) ||
        !grow_aligned(&call->out_scratch, &call->out_scratch_bytes, out_bytes)) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory for a call of %" PRIu32 " tokens", batch->tokens);
    }
    call->window_part = call->window_slots_bytes / sizeof(*call->window_slots) / EP_CALL_WINDOWS;
    return EP_OK;
}

ep_err ep_call_reserve_served(ep_call *call, uint32_t count)
{
    const ep_peer **served = realloc(call->served, count * sizeof(*served));
    if (served == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    call->served = served;
    call->served_capacity = count;
    return EP_OK;
}

static ep_err reserve_layer(ep_call *call, const ep_view_layer *at)
{
    uint32_t experts = at->layer->shape.experts + at->layer->shape.shared_experts;
    uint32_t nodes = at->view->table->nodes_count;
    if (experts > call->chosen_capacity) {
        uint32_t *chosen = realloc(call->chosen, 3 * (size_t)experts * sizeof(*chosen));
        if (chosen == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        call->chosen = chosen;
        call->grouped = chosen + experts;
        call->choice_order = call->grouped + experts;
        call->chosen_capacity = experts;
    }
    if (nodes > call->nodes_capacity) {
        uint8_t *usable = realloc(call->usable, nodes);
        call->usable = usable != NULL ? usable : call->usable;
        uint64_t *room_bytes = realloc(call->room_bytes, nodes * sizeof(*room_bytes));
        call->room_bytes = room_bytes != NULL ? room_bytes : call->room_bytes;
        float *slowness = realloc(call->slowness, 2 * (size_t)nodes * sizeof(*slowness));
        call->slowness = slowness != NULL ? slowness : call->slowness;
        ep_call_host *hosts = realloc(call->hosts, nodes * sizeof(*hosts));
        call->hosts = hosts != NULL ? hosts : call->hosts;
        ep_host_load *host_loads = realloc(call->host_loads, nodes * sizeof(*host_loads));
        call->host_loads = host_loads != NULL ? host_loads : call->host_loads;
        uint32_t *host_scratch = realloc(call->host_scratch, 2 * (size_t)nodes * sizeof(uint32_t));
        call->host_scratch = host_scratch != NULL ? host_scratch : call->host_scratch;
        if (usable == NULL || room_bytes == NULL || slowness == NULL || hosts == NULL ||
            host_loads == NULL || host_scratch == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        call->nodes_capacity = nodes;
    }
    return nodes > call->served_capacity ? ep_call_reserve_served(call, nodes) : EP_OK;
}

/* The most frames of hedges that the budget pays for at once. Hedges for a silent node may be more,
 * and then allocate. ep_call_reserve takes three times the frames of a run, as those of the two
 * runs before may still be in flight. */
static uint32_t hedges_max(uint32_t frames, uint64_t slots, uint32_t nodes)
{
    uint64_t paid = EP_HEDGE_BUDGET_MAX / EP_HEDGE_COST;
    uint64_t split = (uint64_t)frames * nodes;
    split = split < slots ? split : slots;
    return (uint32_t)(split < 2 * paid ? split : 2 * paid);
}

ep_err ep_call_reserve(ep_call *call, const ep_view_layer *at, ep_error *out_error)
{
    const ep_batch *batch = &call->spec.batch;
    const ep_routing_layer *layer = at->layer;
    uint32_t per_token = ep_batch_slots_per_token(batch, &layer->shape);
    uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
    uint32_t nodes = at->view->table->nodes_count;
    uint32_t frames = 0;
    ep_flow_limits limits = call->client->flow;
    ep_err err = EP_OK;
    limits.is_streamed = call->spec.on_tokens != NULL;
    /* A smaller run may use the other mode; both together bound what any run needs. */
    for (int mode = EP_MODE_DECODE; mode <= EP_MODE_PREFILL && err == EP_OK; mode++) {
        ep_flow flow;
        ep_flow_pick(&limits, (ep_mode)mode, batch, &layer->shape, &flow);
        uint32_t n = ep_flow_frames_max(&flow, (uint64_t)flow.window_tokens * per_token, nodes);
        n *= flow.windows_count < EP_CALL_WINDOWS ? flow.windows_count : EP_CALL_WINDOWS;
        frames = n > frames ? n : frames;
        /* a run of fewer tokens may be a single window of that size */
        uint64_t whole = (uint64_t)EP_CALL_WINDOWS * flow.window_tokens;
        flow.window_tokens = whole < batch->tokens ? (uint32_t)whole : batch->tokens;
        err = ep_call_reserve_run(call, &layer->shape, &flow, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    call->first_frames_max = frames;
    frames = 3 * (frames + hedges_max(frames, (uint64_t)batch->tokens * per_token, nodes));
    frames++; /* one more than parcels, as ep_call_reserve_frames asks for one ahead */
    err = reserve_layer(call, at);
    if (err == EP_OK) {
        err = ep_call_reserve_frames(call, frames);
    }
    if (err == EP_OK) {
        err = ep_call_state_reserve(&call->state, frames, layer->offsets[experts]);
    }
    if (err == EP_OK) {
        err =
            ep_routing_plan_reserve(&call->plan, batch->tokens, per_token, experts, nodes, frames);
    }
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for a call of %" PRIu32 " tokens",
                            batch->tokens);
    }
    return EP_OK;
}

/* ---- frames ---- */

ep_err ep_call_reserve_frames(ep_call *call, uint32_t count)
{
    if (count > call->frames_capacity) {
        uint32_t capacity = call->frames_capacity + FRAMES_GROWTH > count
                                ? call->frames_capacity + FRAMES_GROWTH
                                : count;
        ep_call_frame **frames = realloc(call->frames, capacity * sizeof(*frames));
        if (frames == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        call->frames = frames;
        call->frames_capacity = capacity;
    }
    while (call->frames_count < count) {
        ep_call_frame *frame = calloc(1, sizeof(*frame));
        if (frame == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        frame->call = call;
        frame->index = call->frames_count;
        call->frames[call->frames_count++] = frame;
    }
    return EP_OK;
}

void ep_call_clear_frame(ep_call_frame *frame)
{
    ep_buffer_unref(frame->reply);
    frame->reply = NULL;
    frame->rows = NULL;
    if (frame->link != NULL) {
        ep_peer_unref(frame->link->peer);
    }
    frame->link = NULL;
    frame->channel = NULL;
    frame->rpc_id = 0;
    frame->is_relayed = false;
    frame->given_up = false;
    if (frame->slots_owned) {
        free(frame->slots);
    }
    frame->slots = NULL;
    frame->slots_count = 0;
    frame->slots_owned = false;
}

/* ---- the table ---- */

ep_err ep_call_use_view(ep_call *call, const ep_view_layer *at)
{
    ep_err err = reserve_layer(call, at);
    if (err == EP_OK) {
        err = ep_call_state_use_layer(&call->state, at->layer);
    }
    if (err != EP_OK) {
        return err;
    }
    ep_view_ref(at->view);
    ep_view_unref(call->at.view);
    call->at = *at;
    call->knows_hosts = false; /* indexes of hosts belong to the former table */
    call->chose_hosts = false;
    call->slots_per_token = ep_batch_slots_per_token(&call->spec.batch, &at->layer->shape);
    call->row_scales = call->spec.batch.combine_quant == EP_COMBINE_PLAIN
                           ? NULL
                           : call->rows + (size_t)call->spec.batch.tokens * call->slots_per_token;
    call->norm = &call->client->norms[call->class_index][at->model_index % EP_CLIENT_NORMS];
    return EP_OK;
}

void ep_call_drop_view(ep_call *call)
{
    ep_view_unref(call->at.view);
    call->at = (ep_view_layer){.view = NULL};
}
