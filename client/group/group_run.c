/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread at a time drives an operation, that is, does its next part: the caller in poll or
 * finish, the thread that calls back, or a cancel if no other thread drives. Otherwise a cancel
 * only sets a flag, which the driving thread sees where it waits.
 */
#include "group/group_run.h"

/* ---- claiming and driving ---- */

ep_err ep_group_run_claim(ep_group_plan *plan, const char *name, const char *prepare,
                          ep_error *out_error)
{
    if (plan == NULL) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "%s without a plan: call %s first", name, prepare);
    }
    pthread_mutex_lock(&plan->lock);
    bool claimed = plan->claimed;
    plan->claimed = true;
    plan->driven = plan->driven || !claimed;
    pthread_mutex_unlock(&plan->lock);
    return !claimed ? EP_OK
                    : ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                                   "the operation of this plan is under way: finish it first, or "
                                   "use a plan for each");
}

/* Waits for cancels that still use the operation. */
static void let_cancels_out(ep_group_plan *plan)
{
    pthread_mutex_lock(&plan->lock);
    plan->awaits = NULL;
    while (plan->cancels > 0) {
        pthread_cond_wait(&plan->changed, &plan->lock);
    }
    pthread_mutex_unlock(&plan->lock);
}

void ep_group_run_unclaim(ep_group_plan *plan)
{
    let_cancels_out(plan);
    pthread_mutex_lock(&plan->lock);
    plan->claimed = false;
    plan->driven = false;
    plan->cancelled = false;
    plan->in_done = false;
    pthread_cond_broadcast(&plan->changed);
    pthread_mutex_unlock(&plan->lock);
}

/* Becomes the driving thread, unless there is one or the operation has a callback. */
static bool drive(ep_group_plan *plan)
{
    pthread_mutex_lock(&plan->lock);
    bool mine = plan->awaits != NULL && !plan->driven && plan->done == NULL;
    plan->driven = plan->driven || mine;
    pthread_mutex_unlock(&plan->lock);
    return mine;
}

static void stop_driving(ep_group_plan *plan)
{
    pthread_mutex_lock(&plan->lock);
    plan->driven = false;
    plan->by_watcher = false;
    plan->in_done = false;
    pthread_cond_broadcast(&plan->changed);
    pthread_mutex_unlock(&plan->lock);
}

static bool has_pair(const ep_group_plan *plan)
{
    return plan->view.group_tp != NULL;
}

static void await(ep_group_plan *plan, group_op *op)
{
    pthread_mutex_lock(&plan->lock);
    plan->awaits = op;
    pthread_mutex_unlock(&plan->lock);
}

/* ---- going on ---- */

static void fail(ep_group_plan *plan, const ep_error *error)
{
    group_op *ops[2] = {&plan->op, has_pair(plan) ? &plan->pair : NULL};
    plan->error = *error;
    pthread_mutex_lock(&plan->lock);
    plan->awaits = NULL;
    bool cancelled = plan->cancelled;
    pthread_mutex_unlock(&plan->lock);
    for (int i = 0; i < 2 && ops[i] != NULL; i++) {
        if (cancelled || !ops[i]->answered) { /* others still wait for this rank's frames */
            ep_group_op_fail(ops[i], error);
        }
        ep_group_op_give_up(ops[i]);
    }
}

/* Waits for the next exchange and does the step after it. The caller drives the plan. */
static void step(ep_group_plan *plan)
{
    group_op *op = plan->awaits;
    bool is_last = op == plan->last;
    ep_error error;
    ep_err err = ep_group_op_wait(op, &error);
    if (err == EP_OK) {
        err = is_last ? plan->kind->place(plan, &error) : plan->kind->turn(plan, &error);
    }
    if (err == EP_OK) {
        await(plan, is_last ? NULL : plan->last);
    } else {
        fail(plan, &error);
    }
}

/* Does all steps that need no wait, without writing outputs. The caller drives the plan. */
static void advance(ep_group_plan *plan)
{
    while (plan->awaits != NULL && ep_group_op_is_over(plan->awaits)) {
        pthread_mutex_lock(&plan->lock);
        bool is_due = plan->awaits != plan->last || plan->cancelled;
        pthread_mutex_unlock(&plan->lock);
        if (!is_due) {
            break;
        }
        step(plan);
    }
}

/* ---- the thread that calls back ---- */

/* Becomes the driving thread; false: another thread finishes the plan. */
static bool take(void *arg)
{
    ep_group_plan *plan = arg;
    pthread_mutex_lock(&plan->lock);
    while (plan->by_watcher) { /* the other group's thread has just handed it over */
        pthread_cond_wait(&plan->changed, &plan->lock);
    }
    bool mine = !plan->driven;
    plan->driven = true;
    plan->by_watcher = mine;
    pthread_mutex_unlock(&plan->lock);
    return mine;
}

static void go_on(void *arg);
static const group_watch plan_watch = {.take = take, .over = go_on};

/* Runs when the awaited exchange is over. */
static void go_on(void *arg)
{
    ep_group_plan *plan = arg;
    bool finished = false;
    advance(plan);
    if (plan->awaits != NULL && !ep_group_op_is_over(plan->awaits)) {
        ep_group_watch(plan->awaits, &plan_watch, plan);
        stop_driving(plan);
        return;
    }
    pthread_mutex_lock(&plan->lock);
    plan->done_due = false;
    plan->in_done = true;
    plan->watcher = pthread_self();
    plan->finished_inside = &finished;
    pthread_mutex_unlock(&plan->lock);
    plan->done(plan->done_arg, plan);
    if (!finished) { /* if finished, the plan may be gone or in its next operation */
        stop_driving(plan);
    }
}

/* ---- beginning ---- */

/* The record that both ranks of a TP pair compare: the call's, without fields of one EP group. */
static ep_group_call tp_call_of(const group_view *view)
{
    ep_group_call call = view->call;
    call.elastic_digest = 0;
    call.dispatch_number = 0;
    call.tokens = 0; /* each EP group has its own batches */
    call.has_inactive = 0;
    call.by_host = 0;
    call.ranks = 2;
    call.local_rank = view->call.tp_rank;
    return call;
}

ep_err ep_group_run_begin(ep_group_plan *plan, const group_operator *kind, ep_group *group,
                          uint64_t deadline_us, ep_group_done_func done, void *arg,
                          ep_error *out_error)
{
    ep_error error;
    ep_group *pair = plan->view.group_tp;
    static const uint32_t pair_members[2] = {0, 1};
    ep_err err = done == NULL ? EP_OK : ep_group_watch_start(group, out_error);
    if (err == EP_OK && done != NULL && pair != NULL) {
        err = ep_group_watch_start(pair, out_error);
    }
    if (err == EP_OK) {
        err = ep_group_op_begin(&plan->op, group, &plan->view.call, plan->view.members, deadline_us,
                                out_error);
    }
    /* both calls get their numbers now, so that their order is the same on all ranks */
    if (err == EP_OK && pair != NULL) {
        plan->pair_call = tp_call_of(&plan->view);
        err = ep_group_op_begin(&plan->pair, pair, &plan->pair_call, pair_members, deadline_us,
                                &error);
        if (err != EP_OK) {
            ep_group_op_fail(&plan->op, &error);
            ep_group_op_end(&plan->op);
            if (out_error != NULL) {
                *out_error = error;
            }
        }
    }
    if (err != EP_OK) {
        return err;
    }
    plan->kind = kind;
    ep_error_clear(&plan->error);
    group_op *first = pair != NULL && kind->pair_first ? &plan->pair : &plan->op;
    plan->last = pair != NULL && !kind->pair_first ? &plan->pair : &plan->op;
    pthread_mutex_lock(&plan->lock);
    plan->done = done;
    plan->done_arg = arg;
    plan->done_due = done != NULL;
    plan->awaits = first;
    pthread_mutex_unlock(&plan->lock);
    if (kind->start(plan, &error) != EP_OK) {
        fail(plan, &error);
        first = &plan->op;
    }
    stop_driving(plan);
    if (done != NULL) {
        ep_group_watch(first, &plan_watch, plan); /* the plan may be gone after this */
    }
    return EP_OK;
}

/* ---- what programs call ---- */

bool ep_group_plan_poll(ep_group_plan *plan)
{
    if (plan == NULL || ep_fork_guard_in_child(&plan->group->fork)) {
        return true;
    }
    if (drive(plan)) {
        advance(plan);
        stop_driving(plan);
    }
    pthread_mutex_lock(&plan->lock);
    const group_op *awaits = plan->awaits;
    bool is_last = awaits == plan->last;
    pthread_mutex_unlock(&plan->lock);
    return awaits == NULL || (is_last && ep_group_op_is_over(awaits));
}

/* Makes the caller the driving thread until the end. False: no operation is under way. */
static bool begin_finish(ep_group_plan *plan)
{
    pthread_mutex_lock(&plan->lock);
    bool claimed = plan->claimed;
    bool inside = plan->in_done && pthread_equal(plan->watcher, pthread_self()) != 0;
    while (claimed && plan->driven && !inside) {
        pthread_cond_wait(&plan->changed, &plan->lock);
        claimed = plan->claimed;
    }
    if (claimed) {
        plan->driven = true;
        plan->by_watcher = false;
        plan->done_due = false;
    }
    if (inside) {
        *plan->finished_inside = true;
    }
    pthread_mutex_unlock(&plan->lock);
    return claimed;
}

ep_err ep_group_plan_finish(ep_group_plan *plan, ep_error *out_error)
{
    if (plan != NULL && ep_fork_guard_in_child(&plan->group->fork)) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "this plan was made before fork: it belongs to the parent");
    }
    if (plan == NULL || !begin_finish(plan)) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "no operation of this plan is under way");
    }
    while (plan->awaits != NULL) {
        step(plan);
    }
    let_cancels_out(plan);
    ep_group_op_end(&plan->op);
    if (has_pair(plan)) {
        ep_group_op_end(&plan->pair);
    }
    if (plan->kind->drop != NULL) {
        plan->kind->drop(plan);
    }
    ep_error error = plan->error;
    ep_err err = error.code == EP_OK ? plan->kind->out(plan, &error) : error.code;
    ep_group_run_unclaim(plan);
    if (err != EP_OK && out_error != NULL) {
        *out_error = error;
    }
    return err;
}

void ep_group_plan_cancel(ep_group_plan *plan)
{
    if (plan == NULL || ep_fork_guard_in_child(&plan->group->fork)) {
        return;
    }
    pthread_mutex_lock(&plan->lock);
    bool active = plan->awaits != NULL;
    bool mine = active && !plan->driven && !plan->done_due;
    plan->cancelled = plan->cancelled || active;
    plan->driven = plan->driven || mine;
    plan->cancels++;
    pthread_mutex_unlock(&plan->lock);
    if (active) {
        ep_group_op_give_up(&plan->op);
    }
    if (active && has_pair(plan)) {
        ep_group_op_give_up(&plan->pair);
    }
    if (mine) {
        step(plan); /* it finds the call given up */
        stop_driving(plan);
    }
    pthread_mutex_lock(&plan->lock);
    plan->cancels--;
    pthread_cond_broadcast(&plan->changed);
    pthread_mutex_unlock(&plan->lock);
}

/* ---- for both operators ---- */

void ep_group_add_performance(const group_op *op, const group_view *view,
                              const ep_tensor *performance)
{
    if (performance->rank == 0) {
        return;
    }
    int64_t *waited = performance->data;
    for (uint32_t m = 0; m < view->layout.ranks; m++) {
        waited[view->members[m]] += ep_group_op_waited_us(op, m);
    }
}
