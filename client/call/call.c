/* SPDX-License-Identifier: Apache-2.0 */
/* Life of a call: its inbox, its busy thread, its timer, and the one report of its end. */
#include "call/call.h"

#include <inttypes.h>
#include <sched.h>

#include "base/clock.h"
#include "base/cpu_features.h"
#include "call/call_steps.h"
#include "transport/transport.h"

#define LOOKS_PER_YIELD 8

/* ---- who is busy ---- */

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

/* Empties the inbox and steps the state with the events. Lock held, but not in between. */
static void work(ep_call *call)
{
    ep_call_frame *frame = STAILQ_FIRST(&call->inbox);
    uint32_t flags = call->flags;
    ep_call_actions actions = {0};
    STAILQ_INIT(&call->inbox);
    call->flags = 0;
    pthread_mutex_unlock(&call->lock);

    uint64_t now_ns = ep_clock_now_ns();
    /* first, so that on_tokens is not called after a cancel */
    if ((flags & EP_CALL_FLAG_CANCEL) != 0) {
        ep_call_state_step(&call->state, now_ns, &(ep_call_event){.kind = EP_EVENT_CANCEL},
                           &actions);
    }
    while (frame != NULL) {
        ep_call_frame *next = STAILQ_NEXT(frame, inbox);
        ep_call_take_answer(call, frame, now_ns, &actions);
        frame = next;
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
    /* not after a cancel between runs */
    if (call->spec.on_tokens != NULL && (call->deliver || call->state.phase == EP_CALL_RUNNING)) {
        ep_call_tell_tokens(call); /* last, since sending keeps nodes busy */
    }
    pthread_mutex_lock(&call->lock);
}

/* Reports the end of the run and cancels the timer. */
static void tell_end(ep_call *call)
{
    if (call->timer_used && ep_timer_cancel(call->client->timers, &call->timer)) {
        ep_call_unuse(call);
    }
    call->timer_ns = 0;
    ep_call_registry_remove(&call->client->registry, call);
    if (call->spec.on_tokens != NULL) {
        ep_call_tell_tokens(call); /* for a run that ended at once */
    }
    if (call->on_done != NULL) {
        call->on_done(call->on_done_arg, &call->result);
    }
    pthread_mutex_lock(&call->lock);
    call->done = true;
    pthread_cond_broadcast(&call->changed);
    pthread_mutex_unlock(&call->lock);
    if (call->form == EP_FORM_CALLBACK) {
        ep_call_unref(call); /* the run itself was the owner */
    }
    ep_call_unuse(call);
}

static void cancel_locked(ep_call *call)
{
    call->flags |= EP_CALL_FLAG_CANCEL;
    call->busy = true;
    if (call->driven) {
        pthread_cond_broadcast(&call->changed);
    }
}

/* Arms the timer for the state's next due time; for the busy thread only. A timer holds a use while
 * it is armed or its function runs. Without memory for it the call ends, having no deadline. */
static void sync_timer(ep_call *call)
{
    uint64_t due_ns = ep_call_state_due_ns(&call->state);
    if (due_ns == EP_TIME_NEVER || due_ns == call->timer_ns) {
        return;
    }
    if (!call->timer_used || !ep_timer_cancel(call->client->timers, &call->timer)) {
        ep_call_use(call); /* otherwise the cancelled timer's use is kept */
    }
    call->timer_used = true;
    call->timer_ns = due_ns;
    if (ep_timer_arm(call->client->timers, &call->timer, due_ns) != EP_OK) {
        ep_call_unuse(call);
        call->timer_ns = 0;
        pthread_mutex_lock(&call->lock);
        cancel_locked(call);
        pthread_mutex_unlock(&call->lock);
    }
}

/* Stops being busy if there is nothing to do. Lock held; dropped if true. */
static bool try_let_go(ep_call *call)
{
    if (call->deliver || call->flags != 0) {
        return false;
    }
    call->busy = false;
    if (call->waiters > 0) {
        pthread_cond_broadcast(&call->changed);
    }
    pthread_mutex_unlock(&call->lock);
    return true;
}

/* Works while there are events, then stops being busy. Called with the lock and a reference held;
 * returns without the lock. */
static void work_and_leave(ep_call *call)
{
    do {
        while (call->flags != 0) {
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

/* Passes the role of the busy thread to a worker. */
static void hand_over(ep_call *call)
{
    ep_call_use(call);
    ep_call_workers_post(call->client->workers, call);
}

void ep_call_post(ep_call *call, ep_call_frame *taken_frame, uint32_t flags)
{
    pthread_mutex_lock(&call->lock);
    if (taken_frame != NULL) {
        STAILQ_INSERT_TAIL(&call->inbox, taken_frame, inbox);
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
    /* packing, combining or a callback on the timers' thread would delay every deadline */
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

void ep_call_on_timer(ep_timer *timer, void *arg)
{
    ep_call *call = arg;
    (void)timer;
    ep_call_post(call, NULL, EP_CALL_FLAG_TIMER);
    ep_call_unuse(call);
}

/* Hands the work over, so that no callback runs on the thread that cancels. */
void ep_call_stop(ep_call *call)
{
    ep_call_use(call);
    bool mine = false;
    pthread_mutex_lock(&call->lock);
    /* a done call has nothing to cancel, and its client's workers may be gone */
    if (!call->done) {
        mine = !call->busy;
        cancel_locked(call);
    }
    pthread_mutex_unlock(&call->lock);
    if (mine) {
        hand_over(call);
    }
    ep_call_unuse(call);
}

/* ---- all calls of a client ---- */

ep_err ep_call_acquire(ep_client *client, ep_call_form form, ep_call **out_call,
                       ep_error *out_error)
{
    ep_call *call =
        form == EP_FORM_PREPARED ? NULL : ep_call_registry_take_spare(&client->registry);
    if (call == NULL && ep_call_new(client, &call) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a call");
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

void ep_calls_wake(ep_client *client)
{
    ep_call *call;
    uint64_t generation = ep_call_registry_wake(&client->registry);
    while ((call = ep_call_registry_next_woken(&client->registry, generation)) != NULL) {
        ep_call_post(call, NULL, EP_CALL_FLAG_WAKE);
        ep_call_unuse(call);
    }
}

bool ep_calls_close(ep_client *client, uint64_t timeout_us)
{
    ep_call *call;
    ep_call_registry_close(&client->registry);
    while ((call = ep_call_registry_next_to_cancel(&client->registry)) != NULL) {
        ep_call_stop(call);
        ep_call_unuse(call);
    }
    while ((call = ep_call_registry_take_spare(&client->registry)) != NULL) {
        ep_call_free(call);
    }
    return ep_call_registry_wait_idle(&client->registry, timeout_us);
}

/* ---- a run ---- */

static void wait_changed(ep_call *call)
{
    call->waiters++;
    pthread_cond_wait(&call->changed, &call->lock);
    call->waiters--;
}

static void count_nonfinite(ep_call *call)
{
    const ep_batch *batch = &call->spec.batch;
    uint64_t rows = 0;
    for (uint32_t t = 0; t < batch->tokens; t++) {
        rows += ep_batch_token_active(batch, t) && ep_batch_count_nonfinite(batch, t) > 0;
    }
    ep_count(&call->client->counters.nonfinite_rows, rows);
}

/* Checks the batch against its layer and takes what the run needs. */
static ep_err prepare_run(ep_call *call, const ep_view_layer *at, ep_error *out_error)
{
    ep_client *client = call->client;
    const ep_batch *batch = &call->spec.batch;
    const ep_layer_shape *shape = &at->layer->shape;
    ep_flow_limits limits = client->flow;
    ep_err err = ep_batch_check(batch, shape, out_error);
    if (err == EP_OK && !ep_view_has_numerics(at->view, at->model_index, out_error)) {
        err = EP_ERR_UNAVAILABLE;
    }
    if (err != EP_OK) {
        return err;
    }
    const ep_routing_table *table = at->view->table;
    limits.decode_tokens_max = table->decode_tokens_max;
    const uint32_t nodes_min = table->caller_policy.decode_nodes_min;
    limits.has_few_nodes =
        nodes_min > 0 && ep_routing_table_count_nodes(table, at->model_index) < nodes_min;
    limits.is_streamed = call->spec.on_tokens != NULL;
    ep_flow_pick(&limits, call->spec.mode, batch, shape, &call->flow);
    call->class_index = call->flow.prefill ? EP_PEER_BULK : EP_PEER_DECODE;
    err = ep_flow_check(&call->flow, out_error);
    if (err == EP_OK) {
        err = ep_call_reserve_run(call, shape, &call->flow, out_error);
    }
    if (err == EP_OK && ep_call_use_view(call, at) != EP_OK) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a call");
    }
    return err == EP_OK ? ep_call_registry_add(&client->registry, call, out_error) : err;
}

/* After prepare_run: sends the first windows. */
static void begin_run(ep_call *call, uint64_t begin_ns)
{
    ep_client *client = call->client;
    const ep_call_spec *spec = &call->spec;
    const ep_routing_table *table = call->at.view->table;
    uint64_t deadline_us = spec->deadline_us != 0 ? spec->deadline_us : client->config.deadline_us;
    ep_call_actions actions = {0};
    ep_call_use(call);
    ep_count(&client->counters.calls, 1);
    ep_retry_budget_share(&client->budget, ep_client_hedge_permille(&client->config, table));
    /* with pass x is read only once, when it is packed */
    if (spec->batch.nan_policy != EP_NAN_PASS) {
        count_nonfinite(call);
    }
    call->comm_alg = EP_MOE_COMM_FULLMESH;
    if (spec->comm_alg != EP_MOE_COMM_DEFAULT || call->at.view->has_groups) {
        ep_call_begin_hosts(call);
    }
    call->result = (ep_moe_result){
        .struct_bytes = sizeof(call->result),
        .mode = call->flow.prefill ? EP_MOE_PREFILL : EP_MOE_DECODE,
        .comm_alg =
            call->comm_alg == EP_MOE_COMM_HIERARCHY ? EP_MOE_COMM_HIERARCHY : EP_MOE_COMM_FULLMESH,
        .combine_at = spec->batch.node_sum ? EP_MOE_COMBINE_NODE_SUM : EP_MOE_COMBINE_ROWS};
    ep_error_clear(&call->result.error);
    call->pack_ns = 0;
    call->combine_ns = 0;
    call->slowest_wait_us = 0;
    call->spread = __atomic_fetch_add(&client->sequence, 1, __ATOMIC_RELAXED);
    call->step_member = spec->step_group != 0 ? ep_rpc_call_id_next() : 0;
    call->tokens_sent = 0;
    ep_call_state_begin(&call->state, begin_ns, begin_ns + deadline_us * EP_NS_PER_US,
                        call->flow.windows_count, spec->allow_missing);
    ep_call_send_windows(call, &actions);
    perform(call, &actions); /* the call may fail at once, or need no rows */
}

ep_err ep_call_start(ep_call *call, const ep_view_layer *at, uint32_t tokens, uint64_t begin_ns,
                     ep_error *out_error)
{
    pthread_mutex_lock(&call->lock);
    while (call->busy) { /* a thread is dropping a late answer of the former run */
        wait_changed(call);
    }
    call->busy = true;
    call->flags = 0;
    call->done = false;
    pthread_mutex_unlock(&call->lock);
    call->spec.batch.tokens = tokens;
    call->trace = (ep_call_trace){.is_on = false};
    if (EP_TRACE_ON(forward_begin) || call->spec.traceparent[0] != 0) {
        ep_call_trace_begin(call, at->view->table->epoch.number);
    }
    ep_err err = prepare_run(call, at, out_error);
    if (err == EP_OK) {
        begin_run(call, begin_ns);
        return EP_OK;
    }
    if (call->trace.forward_open) {
        ep_call_trace_end(call, err);
    }
    ep_call_drop_view(call);
    pthread_mutex_lock(&call->lock);
    work_and_leave(call);
    return err;
}

ep_err ep_call_start_newest(ep_call *call, uint32_t tokens, ep_error *out_error)
{
    const ep_call_spec *spec = &call->spec;
    ep_view_layer at;
    ep_view *view = NULL;
    ep_err err = ep_cluster_current_view(call->client->cluster, &view, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_view_find(view, spec->model, spec->version, spec->layer, &at, out_error);
    if (err == EP_OK) {
        err = ep_call_start(call, &at, tokens, ep_clock_now_ns(), out_error);
    }
    ep_view_unref(view);
    return err;
}

ep_err ep_call_check_begin(const ep_call *call, uint32_t n_active, ep_error *out_error)
{
    if (call->began) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "the call has begun already: ep_call_finish comes first");
    }
    if (n_active > call->tokens_max) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "n_active is %" PRIu32 ": allowed 0..%" PRIu32
                            ", the tokens of the registered buffers",
                            n_active, call->tokens_max);
    }
    return EP_OK;
}

void ep_call_leave(ep_call *call)
{
    if (call->form != EP_FORM_CALLBACK && call->spec.on_tokens == NULL) {
        pthread_mutex_lock(&call->lock);
        work_and_leave(call);
        return;
    }
    sync_timer(call);
    pthread_mutex_lock(&call->lock);
    if (!try_let_go(call)) {
        pthread_mutex_unlock(&call->lock);
        hand_over(call); /* callbacks must not run inside the function that began the call */
    }
}

/*
 * Waits for an event or the state's next due time. Lock held. With busy polling it first checks for
 * events in a loop for some time, which saves the wake-up. The lock is held during a check and free
 * in between; now and then the loop yields the core.
 */
static void wait_event(ep_call *call)
{
    const uint64_t due_ns = ep_call_state_due_ns(&call->state);
    const uint64_t poll_ns = ep_stream_lane_busy_poll_ns();
    uint64_t end_ns = poll_ns != 0 ? ep_clock_now_ns() + poll_ns : 0;
    end_ns = end_ns < due_ns ? end_ns : due_ns;
    for (uint32_t looks = 1; poll_ns != 0 && call->flags == 0 && ep_clock_now_ns() < end_ns;
         looks++) {
        pthread_mutex_unlock(&call->lock);
        if (looks % LOOKS_PER_YIELD == 0) {
            sched_yield();
        } else {
            ep_cpu_relax();
        }
        pthread_mutex_lock(&call->lock);
    }
    while (call->flags == 0) {
        if (!ep_clock_wait(&call->changed, &call->lock, due_ns)) {
            call->flags |= EP_CALL_FLAG_TIMER;
            return;
        }
    }
}

void ep_call_drive(ep_call *call)
{
    pthread_mutex_lock(&call->lock);
    call->driven = true;
    while (!call->deliver) {
        wait_event(call);
        work(call);
    }
    call->driven = false;
    work_and_leave(call);
}

void ep_call_wait(ep_call *call)
{
    pthread_mutex_lock(&call->lock);
    while (call->busy && !call->done) { /* a library thread works on it */
        wait_changed(call);
    }
    bool done = call->done;
    call->busy = call->busy || !done;
    pthread_mutex_unlock(&call->lock);
    if (!done) {
        ep_call_drive(call);
    }
}
