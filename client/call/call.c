/* SPDX-License-Identifier: Apache-2.0 */
/* Life of a call: references, the inbox, who is busy with it, its timer, and telling its end
 * exactly once. */
#include "call/call.h"

#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/cpu_features.h"
#include "base/random.h"
#include "call/call_steps.h"
#include "transport/transport.h"

#define LOOKS_PER_YIELD 8

static void on_timer(ep_timer *timer, void *arg);

/* ---- memory ---- */

static ep_call *call_new(void)
{
    ep_call *call = calloc(1, sizeof(*call));
    if (call == NULL) {
        return NULL;
    }
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&call->changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&call->lock, NULL);
    ep_routing_plan_init(&call->plan);
    ep_timer_init(&call->timer, on_timer, call);
    return call;
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
    free(call->served);
    free(call->combine_scratch);
    free(call->out_scratch);
    pthread_mutex_destroy(&call->lock);
    pthread_cond_destroy(&call->changed);
    free(call);
}

ep_err ep_call_acquire(ep_client *client, ep_call_form form, ep_call **out_call,
                       ep_error *out_error)
{
    ep_call *call =
        form == EP_FORM_PREPARED ? NULL : ep_call_registry_take_spare(&client->registry);
    if (call == NULL) {
        call = call_new();
        if (call == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a call");
        }
        ep_call_state_init(&call->state, &client->budget, ep_random_id());
    }
    call->client = ep_client_ref(client);
    call->refs = 1;
    call->first_frames_max = 0;
    call->form = form;
    call->done = false;
    call->began = false;
    call->deliver = false;
    call->on_done = NULL;
    call->stream_call = NULL;
    *out_call = call;
    return EP_OK;
}

static size_t kept_bytes(const ep_call *call)
{
    return call->rows_bytes + call->host_slots_bytes + call->window_slots_bytes +
           call->rows_left_bytes + call->out_scratch_bytes;
}

void ep_call_unref(ep_call *call)
{
    if (__atomic_fetch_sub(&call->refs, 1, __ATOMIC_ACQ_REL) != 1) {
        return;
    }
    ep_client *client = call->client;
    call->client = NULL;
    bool reusable = call->form != EP_FORM_PREPARED;
    if (!reusable || !ep_call_registry_keep_spare(&client->registry, call, kept_bytes(call))) {
        ep_call_free(call);
    }
    ep_client_unref(client);
}

void ep_call_use(ep_call *call)
{
    ep_call_registry_use(&call->client->registry);
    __atomic_fetch_add(&call->refs, 1, __ATOMIC_RELAXED);
}

/* The client's memory must outlive the end of the use: the call's own reference to it may go
 * first. */
void ep_call_unuse(ep_call *call)
{
    ep_client *client = ep_client_ref(call->client);
    ep_call_unref(call);
    ep_call_registry_unuse(&client->registry);
    ep_client_unref(client);
}

/* Replaces *array when it is shorter than wanted; its contents are not kept. */
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

/* Rows, slot numbers and, with several windows, a place for the result. */
static ep_err reserve_run(ep_call *call, const ep_layer_shape *shape, const ep_flow *flow,
                          ep_error *out_error)
{
    const ep_batch *batch = &call->spec.batch;
    size_t per_token = ep_batch_slots_per_token(batch, shape);
    /* of a slot: its row, its scales */
    size_t pointers = batch->combine_quant != EP_COMBINE_PLAIN ? 2 : 1;
    size_t rows_bytes = (batch->tokens * per_token * pointers + 1) *
                        sizeof(*call->rows); /* never none: an empty batch has an address too */
    /* Twice: each slot may be sent a second time. */
    size_t window_bytes =
        2 * EP_CALL_WINDOWS * flow->window_tokens * per_token * sizeof(*call->window_slots);
    size_t scratch_bytes = ep_combine_scratch_floats(batch->hidden) * sizeof(float);
    bool is_piecewise = ep_flow_is_piecewise(flow);
    size_t left_bytes = is_piecewise ? ((size_t)batch->tokens + 1) * sizeof(*call->rows_left) : 0;
    size_t out_bytes =
        is_piecewise ? (size_t)batch->tokens * batch->hidden * ep_dtype_bytes(batch->out_dtype) : 0;
    size_t host_bytes = call->spec.comm_alg == EP_MOE_COMM_HIERARCHY
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
    return EP_OK;
}

/* Frames of second sends that the budget can pay at once; a silent node's may be more, and then
 * allocate. Thrice, with the first ones: those of the two runs before may still wait for their
 * end. */
static uint32_t hedges_max(uint32_t frames, uint64_t slots, uint32_t nodes)
{
    uint64_t paid = EP_HEDGE_BUDGET_MAX / EP_HEDGE_COST;
    uint64_t split = (uint64_t)frames * nodes;
    split = split < slots ? split : slots;
    return (uint32_t)(split < 2 * paid ? split : 2 * paid);
}

ep_err ep_call_reserve(ep_call *call, const ep_view *view, const ep_routing_layer *layer,
                       ep_error *out_error)
{
    const ep_batch *batch = &call->spec.batch;
    uint32_t per_token = ep_batch_slots_per_token(batch, &layer->shape);
    uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
    uint32_t nodes = view->table->nodes_count;
    uint32_t frames = 0;
    ep_err err = EP_OK;
    /* A smaller run may travel in the other mode; together they bound what any run needs. */
    for (int mode = EP_MODE_DECODE; mode <= EP_MODE_PREFILL && err == EP_OK; mode++) {
        ep_flow flow;
        ep_flow_pick(&call->client->flow, (ep_mode)mode, batch, &layer->shape, &flow);
        uint32_t n =
            ep_flow_frames_max(&flow, batch, (uint64_t)flow.window_tokens * per_token, nodes);
        n *= flow.windows_count < EP_CALL_WINDOWS ? flow.windows_count : EP_CALL_WINDOWS;
        frames = n > frames ? n : frames;
        /* a run of fewer tokens may be one window as large as all */
        uint64_t whole = (uint64_t)EP_CALL_WINDOWS * flow.window_tokens;
        flow.window_tokens = whole < batch->tokens ? (uint32_t)whole : batch->tokens;
        err = reserve_run(call, &layer->shape, &flow, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    call->first_frames_max = frames;
    frames = 3 * (frames + hedges_max(frames, (uint64_t)batch->tokens * per_token, nodes));
    err = ep_call_reserve_layer(call, view, layer);
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

/* ---- who is busy ---- */

static bool has_events(const ep_call *call)
{
    return call->inbox_head != NULL || call->flags != 0;
}

static void perform(ep_call *call, ep_call_actions *actions)
{
    while (actions->complete || actions->windows_done != 0 || actions->route || actions->look ||
           actions->cancel) {
        if (actions->complete) {
            *actions = (ep_call_actions){.late = false};
            ep_call_end_run(call, ep_clock_now_ns());
            call->deliver = true;
        } else if (actions->cancel) {
            actions->cancel = false;
            ep_call_cancel_zombies(call, ep_clock_now_ns());
        } else if (actions->windows_done != 0) {
            uint32_t done = actions->windows_done;
            actions->windows_done = 0;
            for (uint32_t w = 0; w < EP_CALL_WINDOWS; w++) {
                if ((done & 1u << w) != 0) {
                    ep_call_end_window(call, w);
                }
            }
            ep_call_send_windows(call, actions);
        } else if (actions->route) {
            actions->route = false;
            ep_call_resend(call, actions);
        } else {
            actions->look = false;
            ep_call_look(call, ep_clock_now_ns(), actions);
        }
    }
}

/* Takes everything out of the inbox and steps the state with it; called and returns with the lock
 * held. */
static void work(ep_call *call)
{
    ep_call_frame *frame = call->inbox_head;
    uint32_t flags = call->flags;
    ep_call_actions actions = {0};
    call->inbox_head = NULL;
    call->inbox_tail = NULL;
    call->flags = 0;
    pthread_mutex_unlock(&call->lock);

    uint64_t now_ns = ep_clock_now_ns();
    while (frame != NULL) {
        ep_call_frame *next = frame->next;
        ep_call_take_answer(call, frame, now_ns, &actions);
        frame = next;
    }
    if ((flags & EP_CALL_FLAG_CANCEL) != 0) {
        ep_call_state_step(&call->state, now_ns, &(ep_call_event){.kind = EP_EVENT_CANCEL},
                           &actions);
    }
    if ((flags & EP_CALL_FLAG_WAKE) != 0) {
        ep_call_state_step(&call->state, now_ns, &(ep_call_event){.kind = EP_EVENT_WAKE}, &actions);
    }
    if ((flags & EP_CALL_FLAG_TIMER) != 0) {
        call->timer_ns = 0;
        ep_call_state_step(&call->state, now_ns, &(ep_call_event){.kind = EP_EVENT_TIMER},
                           &actions);
    }
    perform(call, &actions);
    pthread_mutex_lock(&call->lock);
}

/* Tells the end of the run. The timer of a finished call is not needed any more. */
static void tell_end(ep_call *call)
{
    if (call->timer_used && ep_timer_cancel(call->client->timers, &call->timer)) {
        ep_call_unuse(call);
    }
    call->timer_ns = 0;
    ep_call_registry_remove(&call->client->registry, call);
    if (call->stream_call != NULL) {
        ep_stream_call_end(call->stream_call, &call->result);
    }
    if (call->form == EP_FORM_CALLBACK) {
        call->on_done(call->on_done_arg, &call->result);
    }
    pthread_mutex_lock(&call->lock);
    call->done = true;
    pthread_cond_broadcast(&call->changed);
    pthread_mutex_unlock(&call->lock);
    if (call->form == EP_FORM_CALLBACK) {
        ep_call_unref(call); /* its owner was the run itself */
    }
    ep_call_unuse(call);
}

/* Only the busy thread arms. The armed timer holds a use; so does one whose function is just
 * running. */
static bool arm_timer(ep_call *call, uint64_t due_ns)
{
    if (!call->timer_used || !ep_timer_cancel(call->client->timers, &call->timer)) {
        ep_call_use(call); /* else the use of the cancelled one goes on */
    }
    call->timer_used = true;
    if (ep_timer_arm(call->client->timers, &call->timer, due_ns) != EP_OK) {
        ep_call_unuse(call);
        return false;
    }
    return true;
}

/* Arms the timer for what the state waits for. With no memory for that the call ends: it could not
 * keep its deadline. */
static void sync_timer(ep_call *call)
{
    uint64_t due_ns = ep_call_state_due_ns(&call->state);
    if (due_ns == EP_TIME_NEVER || due_ns == call->timer_ns) {
        return;
    }
    call->timer_ns = due_ns;
    if (!arm_timer(call, due_ns)) {
        call->timer_ns = 0;
        ep_call_cancel(call);
    }
}

/* Lets go when there is nothing to do; the lock is held, and dropped if so. */
static bool try_let_go(ep_call *call)
{
    if (call->deliver || has_events(call)) {
        return false;
    }
    call->busy = false;
    if (call->waiters > 0) {
        pthread_cond_broadcast(&call->changed);
    }
    pthread_mutex_unlock(&call->lock);
    return true;
}

/* Works while there are events, then lets go. Called busy, with the lock held and a reference;
 * returns without the lock. */
static void work_and_leave(ep_call *call)
{
    do {
        while (has_events(call)) {
            work(call);
        }
        bool deliver = call->deliver;
        call->deliver = false;
        pthread_mutex_unlock(&call->lock);
        if (deliver) {
            tell_end(call);
        } else {
            sync_timer(call);
        }
        pthread_mutex_lock(&call->lock);
    } while (!try_let_go(call));
}

/* The busy thread makes a worker the busy one. */
static void hand_over(ep_call *call)
{
    ep_call_use(call);
    ep_call_workers_post(call->client->workers, call);
}

void ep_call_post(ep_call *call, ep_call_frame *taken_frame, uint32_t flags)
{
    pthread_mutex_lock(&call->lock);
    if (taken_frame != NULL) {
        taken_frame->next = NULL;
        if (call->inbox_tail != NULL) {
            call->inbox_tail->next = taken_frame;
        } else {
            call->inbox_head = taken_frame;
        }
        call->inbox_tail = taken_frame;
    }
    call->flags |= flags;
    if (call->busy) {
        if (call->driven) {
            pthread_cond_broadcast(&call->changed);
        }
        pthread_mutex_unlock(&call->lock);
        return;
    }
    call->busy = true;
    /* packing, combining or a callback would delay every deadline */
    if (ep_timer_on_thread(call->client->timers)) {
        pthread_mutex_unlock(&call->lock);
        hand_over(call);
        return;
    }
    ep_call_use(call);
    work_and_leave(call);
    ep_call_unuse(call);
}

void ep_call_run_handed(ep_call *call)
{
    pthread_mutex_lock(&call->lock);
    work_and_leave(call);
    ep_call_unuse(call);
}

static void on_timer(ep_timer *timer, void *arg)
{
    ep_call *call = arg;
    (void)timer;
    ep_call_post(call, NULL, EP_CALL_FLAG_TIMER);
    ep_call_unuse(call);
}

/* A callback never runs in the thread that cancels, so the work is handed over. */
void ep_call_cancel(ep_call *call)
{
    if (call == NULL || ep_fork_guard_in_child(&call->client->guard)) {
        return;
    }
    if (call->stream_call != NULL && ep_stream_call_cancel(call->stream_call)) {
        return;
    }
    ep_call_use(call);
    bool mine = false;
    pthread_mutex_lock(&call->lock);
    /* else there is nothing to cancel, and the workers may have ended with the client */
    if (!call->done) {
        mine = !call->busy;
        call->flags |= EP_CALL_FLAG_CANCEL;
        call->busy = true;
        if (call->driven) {
            pthread_cond_broadcast(&call->changed);
        }
    }
    pthread_mutex_unlock(&call->lock);
    if (mine) {
        hand_over(call);
    }
    ep_call_unuse(call);
}

/* ---- a run ---- */

static void wait_changed(ep_call *call)
{
    call->waiters++;
    pthread_cond_wait(&call->changed, &call->lock);
    call->waiters--;
}

static void become_busy(ep_call *call)
{
    pthread_mutex_lock(&call->lock);
    while (call->busy) { /* a late answer of the run before is being dropped */
        wait_changed(call);
    }
    call->busy = true;
    call->flags = 0;
    call->done = false;
    pthread_mutex_unlock(&call->lock);
}

static void stop_being_busy(ep_call *call)
{
    pthread_mutex_lock(&call->lock);
    work_and_leave(call);
}

static ep_err prepare_run(ep_call *call, ep_view *view, uint32_t tokens, ep_error *out_error)
{
    uint32_t model_index = 0;
    const ep_routing_layer *layer = NULL;
    ep_err err = ep_view_find(view, call->spec.model, call->spec.version, call->spec.layer,
                              &model_index, &layer, out_error);
    if (err != EP_OK) {
        return err;
    }
    call->spec.batch.tokens = tokens;
    err = ep_batch_check(&call->spec.batch, &layer->shape, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (!ep_view_has_numerics(view, model_index, out_error)) {
        return EP_ERR_UNAVAILABLE;
    }
    err = ep_call_reserve_layer(call, view, layer);
    if (err == EP_OK) {
        err = ep_call_state_use_layer(&call->state, layer);
    }
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for a call");
    }
    if (call->view != view) {
        ep_view_unref(call->view);
        call->view = ep_view_ref(view);
    }
    call->model_index = model_index;
    call->layer = layer;
    return EP_OK;
}

static void count_nonfinite(ep_call *call)
{
    const ep_batch *batch = &call->spec.batch;
    uint64_t rows = 0;
    if (batch->nan_policy == EP_NAN_PASS) {
        return; /* x is then read once only, when it is packed */
    }
    for (uint32_t t = 0; t < batch->tokens; t++) {
        rows += ep_batch_token_active(batch, t) && ep_batch_count_nonfinite(batch, t) > 0;
    }
    ep_count(&call->client->counters.nonfinite_rows, rows);
}

static void reset_result(ep_call *call)
{
    call->result = (ep_moe_result){.struct_bytes = sizeof(call->result)};
    call->pack_ns = 0;
    call->combine_ns = 0;
    call->slowest_wait_us = 0;
    ep_error_clear(&call->result.error);
    call->result.mode = call->flow.prefill ? EP_MOE_PREFILL : EP_MOE_DECODE;
    /* Nodes pass rows on to whom the coordinator has named to them; a table made here knows of
     * none. */
    bool has_neighbours = call->view->table->epoch.term != 0;
    call->result.comm_alg = call->spec.comm_alg == EP_MOE_COMM_HIERARCHY && has_neighbours
                                ? EP_MOE_COMM_HIERARCHY
                                : EP_MOE_COMM_FULLMESH;
    call->result.combine_at =
        call->spec.batch.node_sum ? EP_MOE_COMBINE_NODE_SUM : EP_MOE_COMBINE_ROWS;
}

static ep_err start_busy(ep_call *call, ep_view *view, uint32_t tokens, uint64_t begin_ns,
                         ep_error *out_error)
{
    ep_client *client = call->client;
    ep_flow_limits limits = client->flow;
    ep_err err = prepare_run(call, view, tokens, out_error);
    if (err != EP_OK) {
        return err;
    }
    limits.decode_tokens_max = view->table->decode_tokens_max;
    ep_retry_budget_share(&client->budget, ep_client_hedge_permille(&client->config, view->table));
    ep_flow_pick(&limits, call->spec.mode, &call->spec.batch, &call->layer->shape, &call->flow);
    err = ep_flow_check(&call->flow, &call->spec.batch, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = reserve_run(call, &call->layer->shape, &call->flow, out_error);
    if (err == EP_OK) {
        err = ep_call_registry_add(&client->registry, call, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    ep_call_use(call);
    ep_count(&client->counters.calls, 1);
    count_nonfinite(call);
    reset_result(call);
    call->spread = __atomic_fetch_add(&client->sequence, 1, __ATOMIC_RELAXED);
    call->step_member = call->spec.step_group != 0 ? ep_rpc_call_id_next() : 0;
    uint64_t deadline_us =
        call->spec.deadline_us != 0 ? call->spec.deadline_us : client->config.deadline_us;
    call->served_count = 0;
    ep_call_state_begin(&call->state, begin_ns, begin_ns + deadline_us * EP_NS_PER_US,
                        call->flow.windows_count, call->spec.allow_missing);
    call->tokens_sent = 0;
    call->is_piecewise = ep_flow_is_piecewise(&call->flow);
    ep_call_actions actions = {0};
    ep_call_send_windows(call, &actions);
    perform(call, &actions); /* a first round may fail, or need nothing, at once */
    return EP_OK;
}

ep_err ep_call_start(ep_call *call, ep_view *view, uint32_t tokens, uint64_t begin_ns,
                     ep_error *out_error)
{
    become_busy(call);
    call->spec.batch.tokens = tokens;
    ep_call_trace_begin(call, view->table->epoch.number);
    ep_err err = start_busy(call, view, tokens, begin_ns, out_error);
    if (err != EP_OK) {
        ep_call_trace_end(call, err);
        ep_call_drop_view(call);
        stop_being_busy(call);
    }
    return err;
}

void ep_call_leave(ep_call *call)
{
    if (call->form != EP_FORM_CALLBACK) {
        pthread_mutex_lock(&call->lock);
        work_and_leave(call);
        return;
    }
    sync_timer(call);
    pthread_mutex_lock(&call->lock);
    if (!try_let_go(call)) {
        pthread_mutex_unlock(&call->lock);
        hand_over(call); /* the callback must not run inside the call that began it */
    }
}

/*
 * With busy polling: looks for an event again and again for so long, which saves the wake-up. The
 * lock is held, and free between two looks, for whoever brings the event; the core now and then,
 * for whoever needs it.
 */
static void look_for_event(ep_call *call, uint64_t due_ns)
{
    ep_stream_lane_stats lane;
    ep_stream_lane_read_stats(&lane);
    if (lane.busy_poll_us == 0) {
        return;
    }
    uint64_t end_ns = ep_clock_now_ns() + lane.busy_poll_us * EP_NS_PER_US;
    end_ns = end_ns < due_ns ? end_ns : due_ns;
    for (uint32_t looks = 1; !has_events(call) && ep_clock_now_ns() < end_ns; looks++) {
        pthread_mutex_unlock(&call->lock);
        if (looks % LOOKS_PER_YIELD == 0) {
            sched_yield();
        } else {
            ep_cpu_relax();
        }
        pthread_mutex_lock(&call->lock);
    }
}

/* Waits for an event or the time the state waits for; the lock is held. */
static void wait_event(ep_call *call)
{
    uint64_t due_ns = ep_call_state_due_ns(&call->state);
    look_for_event(call, due_ns);
    struct timespec until = {.tv_sec = (time_t)(due_ns / EP_NS_PER_S),
                             .tv_nsec = (long)(due_ns % EP_NS_PER_S)};
    int timeout = 0;
    while (!has_events(call) && timeout == 0) {
        timeout = pthread_cond_timedwait(&call->changed, &call->lock, &until);
    }
    if (timeout != 0) {
        call->flags |= EP_CALL_FLAG_TIMER;
    }
}

void ep_call_drive(ep_call *call)
{
    pthread_mutex_lock(&call->lock);
    call->driven = true;
    while (!call->deliver) {
        if (has_events(call)) {
            work(call);
        } else {
            wait_event(call);
        }
    }
    call->driven = false;
    work_and_leave(call);
}

void ep_call_wait(ep_call *call)
{
    pthread_mutex_lock(&call->lock);
    while (call->busy && !call->done) { /* a library thread is at it */
        wait_changed(call);
    }
    bool done = call->done;
    call->busy = call->busy || !done;
    pthread_mutex_unlock(&call->lock);
    if (!done) {
        ep_call_drive(call);
    }
}
