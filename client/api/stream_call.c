/* SPDX-License-Identifier: Apache-2.0 */
#include "api/stream_call.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "call/call.h"
#include "common/device_stage.h"

#define REPORT_MS 500     /* between two checks for a lost device */
#define SETTLE_MS 5000    /* wait for streams that still hold tasks of a destroyed call */
#define RETRY_NS 50000000 /* pause while no stream is subscribed to the thread */

typedef enum ep_stream_phase {
    PHASE_IDLE,
    PHASE_ENQUEUED, /* inputs are being copied */
    PHASE_COPIED,   /* set by the callback, or for a lost device, with error */
    PHASE_STARTING,
    PHASE_RUNNING, /* the run has started; the call's own state tells more */
    PHASE_FAILED   /* it ended without a start; see error */
} ep_stream_phase;

/* The thread for callbacks of one context. It exists as long as a call of the context does. */
typedef struct reports {
    ep_stage stage; /* only symbols, context and device */
    uint32_t users;
    pthread_t thread;
    bool stopping;
    LIST_ENTRY(reports) entry;
} reports;

struct ep_stream_call {
    ep_stage stage;
    ep_call *call; /* of the run */
    reports *reports;
    ep_acl_stream stream;
    ep_acl_event begun;
    ep_acl_event copied;
    ep_acl_event taken; /* recorded when the notify and the result have been taken */
    ep_acl_notify ended;
    uint32_t tokens; /* of the run */
    bool is_awaited; /* a stream waits for the end of the run */
    bool has_taken;  /* it has been recorded or will be */
    /* guarded by the lock below */
    ep_stream_phase phase;
    uint64_t run; /* number of the run, passed to the callback */
    bool is_cancelled;
    ep_error error;
    LIST_ENTRY(ep_stream_call) entry;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* phases; stopping */
    LIST_HEAD(, ep_stream_call) calls;
    LIST_HEAD(, reports) reports;
    uint64_t runs;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* ---- the end of a run ---- */

/* Fills the result of a failed run with 0xff, which is NaN in every type, so that rows that were
 * not computed cannot pass for results. */
static void spoil_result(const ep_stream_call *s)
{
    for (uint32_t i = 0; i < s->stage.parts_count; i++) {
        const ep_stage_part *part = &s->stage.parts[i];
        if ((part->ways & EP_STAGE_OUT) != 0 && s->tokens > 0) {
            memset(s->stage.memory + part->offset, 0xff, s->tokens * part->row_bytes);
        }
    }
}

static ep_err record_end(const ep_stream_call *s, ep_error *out_error)
{
    ep_acl_context before = NULL;
    ep_err err = ep_stage_enter(&s->stage, &before, out_error);
    if (err == EP_OK) {
        err = EP_STAGE_CALL(&s->stage, out_error, aclrtRecordNotify, s->ended, s->stream);
    }
    ep_stage_leave(&s->stage, before);
    return err;
}

void ep_stream_call_end(void *stream_call, const ep_moe_result *result)
{
    ep_stream_call *s = stream_call;
    ep_error error;
    if (result->error.code != EP_OK) {
        spoil_result(s);
    }
    if (record_end(s, &error) != EP_OK && result->error.code == EP_OK) {
        s->call->result.error = error;
    }
}

/* ---- the start of a run: on the reports' thread ---- */

/* Starts the call's run; this thread is then busy with the call. */
static ep_err start_call(ep_stream_call *s, ep_error *out_error)
{
    pthread_mutex_lock(&all.lock);
    const ep_error before = s->error;
    const bool is_cancelled = s->is_cancelled;
    pthread_mutex_unlock(&all.lock);
    if (before.code != EP_OK) {
        *out_error = before;
        return before.code;
    }
    if (is_cancelled) {
        return ep_error_set(out_error, EP_ERR_CANCELLED,
                            "cancelled before its inputs had been copied from the device");
    }
    /* The event has passed; this reports whether the copies failed. */
    ep_err err =
        EP_STAGE_CALL(&s->stage, out_error, aclrtSynchronizeEventWithTimeout, s->copied, REPORT_MS);
    return err == EP_OK ? ep_call_start_newest(s->call, s->tokens, out_error) : err;
}

static void start_run(ep_stream_call *s)
{
    ep_call *call = s->call;
    ep_client *client = call->client;
    ep_error error;
    ep_err err = ep_client_enter(client, &error);
    const bool has_entered = err == EP_OK;
    if (has_entered) {
        err = start_call(s, &error);
    }
    if (err != EP_OK) {
        spoil_result(s);
        (void)record_end(s, NULL);
    }
    pthread_mutex_lock(&all.lock);
    s->phase = err == EP_OK ? PHASE_RUNNING : PHASE_FAILED;
    if (err != EP_OK) {
        s->error = error;
    }
    const bool is_cancelled = s->is_cancelled;
    pthread_cond_broadcast(&all.changed);
    pthread_mutex_unlock(&all.lock);
    /* from here on s may be freed, once the run has ended */
    if (err == EP_OK) {
        if (is_cancelled) {
            ep_call_stop(call);
        }
        ep_call_leave(call);
    }
    if (has_entered) {
        ep_client_leave(client);
    }
    ep_call_unuse(call);
}

/* Runs inside aclrtProcessReport, so it must not call the runtime. */
static void on_copied(void *arg)
{
    const uint64_t run = (uint64_t)(uintptr_t)arg;
    pthread_mutex_lock(&all.lock);
    for (ep_stream_call *s = LIST_FIRST(&all.calls); s != NULL; s = LIST_NEXT(s, entry)) {
        if (s->run == run && s->phase == PHASE_ENQUEUED) {
            s->phase = PHASE_COPIED;
        }
    }
    pthread_mutex_unlock(&all.lock);
}

/* Lock held. Finds runs of a lost device, which sends no callback. */
static void look_for_loss(const reports *r)
{
    for (ep_stream_call *s = LIST_FIRST(&all.calls); s != NULL; s = LIST_NEXT(s, entry)) {
        ep_acl_event_status status = 0;
        ep_error error;
        if (s->reports == r && s->phase == PHASE_ENQUEUED &&
            EP_STAGE_CALL(&s->stage, &error, aclrtQueryEventStatus, s->copied, &status) ==
                EP_ERR_DEVICE_LOST) {
            s->error = error;
            s->phase = PHASE_COPIED;
        }
    }
}

/* Lock held. */
static ep_stream_call *take_copied(const reports *r)
{
    ep_stream_call *s = LIST_FIRST(&all.calls);
    while (s != NULL && (s->reports != r || s->phase != PHASE_COPIED)) {
        s = LIST_NEXT(s, entry);
    }
    if (s != NULL) {
        s->phase = PHASE_STARTING;
    }
    return s;
}

static void *reports_main(void *arg)
{
    reports *r = arg;
    const ep_acl_symbols *acl = r->stage.acl;
    (void)acl->aclrtSetCurrentContext(r->stage.context);
    pthread_mutex_lock(&all.lock);
    while (!r->stopping) {
        pthread_mutex_unlock(&all.lock);
        const ep_acl_code code = acl->aclrtProcessReport(REPORT_MS);
        pthread_mutex_lock(&all.lock);
        if (code != EP_ACL_SUCCESS) {
            look_for_loss(r);
        }
        ep_stream_call *s = take_copied(r);
        if (s == NULL && code != EP_ACL_SUCCESS &&
            ep_acl_code_err(code) != EP_ERR_DEADLINE_EXCEEDED && !r->stopping) {
            /* it failed without waiting */
            ep_clock_wait(&all.changed, &all.lock, ep_clock_now_ns() + RETRY_NS);
        }
        for (; s != NULL; s = take_copied(r)) {
            pthread_mutex_unlock(&all.lock);
            start_run(s);
            pthread_mutex_lock(&all.lock);
        }
    }
    pthread_mutex_unlock(&all.lock);
    return NULL;
}

/* Lock held. */
static ep_err reports_acquire(const ep_stage *stage, reports **out_reports, ep_error *out_error)
{
    reports *r = LIST_FIRST(&all.reports);
    while (r != NULL && r->stage.context != stage->context) {
        r = LIST_NEXT(r, entry);
    }
    if (r == NULL) {
        r = calloc(1, sizeof(*r));
        if (r == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a call");
        }
        r->stage =
            (ep_stage){.acl = stage->acl, .context = stage->context, .device = stage->device};
        if (ep_thread_start("ep-device", reports_main, r, &r->thread) != EP_OK) {
            free(r);
            return ep_error_set(out_error, EP_ERR_IO, "no thread for callbacks of device %" PRId32,
                                stage->device);
        }
        LIST_INSERT_HEAD(&all.reports, r, entry);
    }
    r->users++;
    *out_reports = r;
    return EP_OK;
}

/* stream: of the last user, to wake the thread with a callback; NULL: none is subscribed. */
static void reports_release(reports *r, ep_acl_stream stream)
{
    pthread_mutex_lock(&all.lock);
    const bool is_last = --r->users == 0;
    if (is_last) {
        LIST_REMOVE(r, entry);
        r->stopping = true;
        pthread_cond_broadcast(&all.changed);
    }
    pthread_mutex_unlock(&all.lock);
    if (!is_last) {
        return;
    }
    if (stream != NULL) {
        (void)r->stage.acl->aclrtLaunchCallback(on_copied, NULL, EP_ACL_CALLBACK_NO_BLOCK, stream);
    }
    pthread_join(r->thread, NULL);
    free(r);
}

/* ---- create, destroy ---- */

static ep_err add_tensors(ep_stage *stage, ep_moe_args *args, ep_tensor *out, ep_error *out_error)
{
    const struct {
        const char *name;
        ep_tensor *tensor;
    } inputs[] = {{"x", &args->x},
                  {"x_scales", &args->x_scales},
                  {"expert_ids", &args->expert_ids},
                  {"expert_scales", &args->expert_scales},
                  {"active_mask", &args->active_mask},
                  {"partial_slots", &args->partial_slots},
                  {"shared", &args->shared}};
    ep_err err = EP_OK;
    for (size_t i = 0; i < EP_ARRAY_COUNT(inputs) && err == EP_OK; i++) {
        err = ep_stage_add(stage, inputs[i].name, inputs[i].tensor, EP_STAGE_IN | EP_STAGE_ROWS,
                           out_error);
    }
    if (err == EP_OK) {
        err = ep_stage_add(stage, "out", out, EP_STAGE_OUT | EP_STAGE_ROWS, out_error);
    }
    if (err != EP_OK || stage->parts_count == 0) {
        return err;
    }
    if (args->x.memory == EP_MEMORY_HOST || out->memory == EP_MEMORY_HOST) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "%s is in host memory, other tensors are on a device: x and out must both be there",
            args->x.memory == EP_MEMORY_HOST ? "x" : "out");
    }
    if (args->on_tokens != NULL) { /* finished rows would be only in the pinned copy */
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "on_tokens is set with tensors on a device: allowed NULL, the stream of "
            "ep_moe_finish_on_stream has the result");
    }
    if (stage->sync_handle != 0) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "x has sync_handle 0x%" PRIx64
            ": allowed 0, ep_moe_begin_on_stream and ep_moe_finish_on_stream name the stream",
            stage->sync_handle);
    }
    return EP_OK;
}

static ep_err make_objects(ep_stream_call *s, ep_error *out_error)
{
    ep_acl_event *const events[] = {&s->begun, &s->copied, &s->taken};
    ep_err err = EP_STAGE_CALL(&s->stage, out_error, aclrtCreateStream, &s->stream);
    for (size_t i = 0; i < EP_ARRAY_COUNT(events) && err == EP_OK; i++) {
        /* the host also asks how far the stream has come, but not whether a run has begun */
        const uint32_t flags = EP_ACL_EVENT_SYNC | (i > 0 ? EP_ACL_EVENT_PROGRESS : 0);
        err = EP_STAGE_CALL(&s->stage, out_error, aclrtCreateEventExWithFlag, events[i], flags);
    }
    return err == EP_OK ? EP_STAGE_CALL(&s->stage, out_error, aclrtCreateNotify, &s->ended, 0)
                        : err;
}

static ep_err join_reports(ep_stream_call *s, ep_error *out_error)
{
    reports *r = NULL;
    pthread_mutex_lock(&all.lock);
    ep_err err = reports_acquire(&s->stage, &r, out_error);
    pthread_mutex_unlock(&all.lock);
    if (err != EP_OK) {
        return err;
    }
    err = EP_STAGE_CALL(&s->stage, out_error, aclrtSubscribeReport, (uint64_t)r->thread, s->stream);
    if (err != EP_OK) {
        reports_release(r, NULL);
        return err;
    }
    pthread_mutex_lock(&all.lock);
    s->reports = r;
    LIST_INSERT_HEAD(&all.calls, s, entry);
    pthread_cond_broadcast(&all.changed);
    pthread_mutex_unlock(&all.lock);
    return EP_OK;
}

ep_err ep_stream_call_create(ep_moe_args *args, ep_tensor *out, ep_stream_call **out_stream_call,
                             ep_error *out_error)
{
    ep_stream_call *s = calloc(1, sizeof(*s));
    if (s == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a call");
    }
    ep_err err = add_tensors(&s->stage, args, out, out_error);
    if (err == EP_OK && s->stage.parts_count == 0) {
        free(s);
        *out_stream_call = NULL;
        return EP_OK;
    }
    if (err == EP_OK) {
        err = ep_stage_place(&s->stage, out_error);
    }
    if (err == EP_OK) {
        err = make_objects(s, out_error);
    }
    if (err == EP_OK) {
        err = join_reports(s, out_error);
    }
    if (err != EP_OK) {
        ep_stream_call_destroy(s);
        return err;
    }
    *out_stream_call = s;
    return EP_OK;
}

/* Whether the streams hold no tasks of this fully made call any more, or never will run them
 * because the device is lost. */
static bool settle(const ep_stream_call *s)
{
    ep_error error;
    ep_err err = EP_OK;
    if (s->has_taken) {
        err =
            EP_STAGE_CALL(&s->stage, &error, aclrtSynchronizeEventWithTimeout, s->taken, SETTLE_MS);
    }
    if (err == EP_OK) {
        err = EP_STAGE_CALL(&s->stage, &error, aclrtSynchronizeStreamWithTimeout, s->stream,
                            SETTLE_MS);
    }
    /* a time-out gives the same code: ask the device to tell them apart */
    if (err == EP_ERR_DEVICE_LOST) {
        ep_acl_event_status status = 0;
        err = EP_STAGE_CALL(&s->stage, &error, aclrtQueryEventStatus, s->taken, &status);
        return err == EP_ERR_DEVICE_LOST;
    }
    return true; /* the tasks have passed, even if some failed */
}

static void drop_objects(ep_stream_call *s)
{
    const ep_acl_symbols *acl = s->stage.acl;
    ep_acl_event const events[] = {s->begun, s->copied, s->taken};
    if (s->stream != NULL && (acl->aclrtDestroyStreamForce == NULL ||
                              acl->aclrtDestroyStreamForce(s->stream) != EP_ACL_SUCCESS)) {
        (void)acl->aclrtDestroyStream(s->stream);
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(events); i++) {
        if (events[i] != NULL) {
            (void)acl->aclrtDestroyEvent(events[i]);
        }
    }
    if (s->ended != NULL) {
        (void)acl->aclrtDestroyNotify(s->ended);
    }
    ep_stage_fini(&s->stage);
}

static void leave_reports(ep_stream_call *s, bool is_settled)
{
    const uint64_t thread = (uint64_t)s->reports->thread;
    pthread_mutex_lock(&all.lock);
    LIST_REMOVE(s, entry);
    pthread_mutex_unlock(&all.lock);
    reports_release(s->reports, s->stream);
    if (is_settled) { /* waits for the callback that woke the thread, the last task */
        (void)s->stage.acl->aclrtSynchronizeStreamWithTimeout(s->stream, SETTLE_MS);
        (void)s->stage.acl->aclrtUnSubscribeReport(thread, s->stream);
    }
}

void ep_stream_call_destroy(ep_stream_call *s)
{
    if (s == NULL) {
        return;
    }
    if (s->stage.acl == NULL) {
        free(s);
        return;
    }
    const ep_stage stage = {
        .acl = s->stage.acl, .context = s->stage.context, .device = s->stage.device};
    ep_acl_context before = NULL;
    (void)ep_stage_enter(&stage, &before, NULL);
    const bool is_settled = s->reports == NULL || settle(s);
    if (s->reports != NULL) {
        leave_reports(s, is_settled);
    }
    /* otherwise objects that the device may still use are not freed */
    if (is_settled) {
        drop_objects(s);
        free(s);
    }
    ep_stage_leave(&stage, before);
}

/* ---- a run, for the caller's thread ---- */

/* Copies the inputs after the tasks that stream holds now and after the former result was taken. */
static ep_err enqueue_inputs(const ep_stream_call *s, ep_acl_stream stream, ep_error *out_error)
{
    const ep_stage *stage = &s->stage;
    ep_err err = s->has_taken
                     ? EP_STAGE_CALL(stage, out_error, aclrtStreamWaitEvent, s->stream, s->taken)
                     : EP_OK;
    if (err == EP_OK) {
        err = EP_STAGE_CALL(stage, out_error, aclrtRecordEvent, s->begun, stream);
    }
    if (err == EP_OK) {
        err = EP_STAGE_CALL(stage, out_error, aclrtStreamWaitEvent, s->stream, s->begun);
    }
    if (err == EP_OK) {
        err = ep_stage_copy(stage, EP_STAGE_IN, s->tokens, s->stream, out_error);
    }
    if (err == EP_OK) {
        err = EP_STAGE_CALL(stage, out_error, aclrtRecordEvent, s->copied, s->stream);
    }
    return err;
}

static ep_err enqueue_begin(ep_stream_call *s, ep_acl_stream stream, ep_error *out_error)
{
    ep_err err = enqueue_inputs(s, stream, out_error);
    if (err != EP_OK) {
        return err;
    }
    pthread_mutex_lock(&all.lock);
    s->run = ++all.runs;
    s->is_cancelled = false;
    s->is_awaited = false;
    ep_error_clear(&s->error);
    s->phase = PHASE_ENQUEUED;
    void *run = (void *)(uintptr_t)s->run;
    pthread_mutex_unlock(&all.lock);
    ep_call_use(s->call); /* released once the run has started */
    err = EP_STAGE_CALL(&s->stage, out_error, aclrtLaunchCallback, on_copied, run,
                        EP_ACL_CALLBACK_NO_BLOCK, s->stream);
    if (err == EP_OK) {
        return EP_OK;
    }
    pthread_mutex_lock(&all.lock);
    /* otherwise look_for_loss has taken the run and ends it */
    const bool is_mine = s->phase == PHASE_ENQUEUED;
    s->phase = is_mine ? PHASE_IDLE : s->phase;
    pthread_mutex_unlock(&all.lock);
    if (is_mine) {
        ep_call_unuse(s->call);
    }
    return is_mine ? err : EP_OK;
}

static ep_err begin(ep_call *call, uint32_t n_active, void *stream, ep_error *out_error)
{
    ep_stream_call *s = call->stream_call;
    ep_acl_context before = NULL;
    ep_err err = ep_call_check_begin(call, n_active, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_stage_enter(&s->stage, &before, out_error);
    if (err == EP_OK) {
        s->call = call;
        s->tokens = n_active;
        err = enqueue_begin(s, stream, out_error);
    }
    ep_stage_leave(&s->stage, before);
    call->began = err == EP_OK;
    return err;
}

/* The checks that both public functions share. */
static ep_err check_call(const ep_call *call, const void *stream, ep_error *out_error)
{
    if (call == NULL || call->form != EP_FORM_PREPARED) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "the call was not made by ep_call_create");
    }
    if (call->stream_call == NULL) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "the call's tensors are in host memory: ep_call_begin and "
                            "ep_call_finish are its functions");
    }
    return stream != NULL ? EP_OK
                          : ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                         "stream is NULL: allowed what aclrtCreateStream gave");
}

ep_err ep_moe_begin_on_stream(ep_call *call, uint32_t n_active, void *stream, ep_error *out_error)
{
    ep_err err = check_call(call, stream, out_error);
    if (err == EP_OK) {
        err = ep_client_enter(call->client, out_error);
    }
    if (err == EP_OK) {
        err = begin(call, n_active, stream, out_error);
        ep_client_leave(call->client);
    }
    return err;
}

/* Waits for the notify, but not before the former result was taken, which has a notify too. */
static ep_err enqueue_wait(ep_stream_call *s, ep_acl_stream stream, ep_error *out_error)
{
    const ep_stage *stage = &s->stage;
    ep_err err = s->has_taken
                     ? EP_STAGE_CALL(stage, out_error, aclrtStreamWaitEvent, stream, s->taken)
                     : EP_OK;
    if (err == EP_OK) {
        err = EP_STAGE_CALL(stage, out_error, aclrtWaitAndResetNotify, s->ended, stream, 0);
    }
    s->is_awaited = err == EP_OK;
    return err;
}

static ep_err record_taken(ep_stream_call *s, ep_acl_stream stream, ep_error *out_error)
{
    const ep_err err = EP_STAGE_CALL(&s->stage, out_error, aclrtRecordEvent, s->taken, stream);
    s->has_taken = s->has_taken || err == EP_OK;
    return err;
}

static ep_err enqueue_result(ep_stream_call *s, ep_acl_stream stream, ep_error *out_error)
{
    ep_err err = enqueue_wait(s, stream, out_error);
    if (err == EP_OK) {
        err = ep_stage_copy(&s->stage, EP_STAGE_OUT, s->tokens, stream, out_error);
        const ep_err recorded = record_taken(s, stream, err == EP_OK ? out_error : NULL);
        err = err == EP_OK ? recorded : err;
    }
    return err;
}

ep_err ep_moe_finish_on_stream(ep_call *call, void *stream, ep_error *out_error)
{
    ep_acl_context before = NULL;
    ep_err err = check_call(call, stream, out_error);
    if (err == EP_OK && ep_fork_guard_in_child(&call->client->guard)) {
        err = ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                           "this process was forked from the one that began the call");
    }
    if (err == EP_OK && (!call->began || call->stream_call->is_awaited)) {
        err = ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                           call->began
                               ? "ep_moe_finish_on_stream came already: ep_call_finish is next"
                               : "the call has not begun");
    }
    if (err != EP_OK) {
        return err;
    }
    err = ep_stage_enter(&call->stream_call->stage, &before, out_error);
    if (err == EP_OK) {
        err = enqueue_result(call->stream_call, stream, out_error);
    }
    ep_stage_leave(&call->stream_call->stage, before);
    return err;
}

bool ep_stream_call_cancel(ep_stream_call *s)
{
    pthread_mutex_lock(&all.lock);
    const bool is_running = s->phase == PHASE_RUNNING;
    s->is_cancelled = s->is_cancelled || !is_running;
    pthread_mutex_unlock(&all.lock);
    return !is_running;
}

bool ep_stream_call_wait(ep_stream_call *s, uint64_t timeout_ns, ep_error *out_error)
{
    const uint64_t now_ns = ep_clock_now_ns();
    const uint64_t due_ns = timeout_ns < UINT64_MAX - now_ns ? now_ns + timeout_ns : UINT64_MAX;
    pthread_mutex_lock(&all.lock);
    while (s->phase < PHASE_RUNNING && ep_clock_now_ns() < due_ns) {
        ep_clock_wait(&all.changed, &all.lock, due_ns);
    }
    const bool has_started = s->phase >= PHASE_RUNNING;
    *out_error = s->error;
    pthread_mutex_unlock(&all.lock);
    return has_started;
}

/* Consumes the notify if no stream waited for it, or the next run's wait would return too early. */
void ep_stream_call_collect(ep_stream_call *s)
{
    ep_acl_context before = NULL;
    pthread_mutex_lock(&all.lock);
    s->phase = PHASE_IDLE;
    pthread_mutex_unlock(&all.lock);
    if (!s->is_awaited && ep_stage_enter(&s->stage, &before, NULL) == EP_OK) {
        (void)enqueue_wait(s, s->stream, NULL);
        (void)record_taken(s, s->stream, NULL);
        ep_stage_leave(&s->stage, before);
    }
}
