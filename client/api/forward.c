/* SPDX-License-Identifier: Apache-2.0 */
/* The public forms of a call. Each fills a call and starts it; who waits for the end differs. */
#include <string.h>

#include "api/stream_call.h"
#include "base/struct_size.h"
#include "base/clock.h"
#include "call/call.h"

#define DEVICE_WAIT_NS (5 * EP_NS_PER_S)

/* ---- shared ---- */

/* Looks up the layer, checks the tensors against it and fills a new call, fixing the model
 * version. */
static ep_err make_call(ep_client *client, ep_call_form form, ep_view *view,
                        const ep_moe_args *args, const ep_tensor *out, ep_view_layer *out_at,
                        ep_call **out_call, ep_error *out_error)
{
    ep_call *call = NULL;
    ep_view_layer at;
    ep_err err = ep_view_find(view, args->model, args->version, args->layer, &at, out_error);
    if (err == EP_OK) {
        err = ep_call_acquire(client, form, &call, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    err = ep_call_spec_fill(args, out, args->model, &at.layer->shape, &call->spec, out_error);
    if (err != EP_OK) {
        ep_call_unref(call);
        return err;
    }
    call->tokens_max = call->spec.batch.tokens;
    memcpy(call->spec.version, view->table->models[at.model_index].version,
           sizeof(call->spec.version));
    *out_at = at;
    *out_call = call;
    return EP_OK;
}

/* ---- blocking ---- */

static ep_err forward(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                      uint64_t begin_ns, ep_moe_result *out_result)
{
    ep_call *call = NULL;
    ep_view *view = NULL;
    ep_view_layer at;
    ep_error *error = &out_result->error;
    uint64_t deadline_us = args->deadline_us != 0 ? args->deadline_us : client->config.deadline_us;
    ep_err err =
        ep_cluster_wait_view(client->cluster, begin_ns + deadline_us * EP_NS_PER_US, &view, error);
    if (err != EP_OK) {
        return err;
    }
    err = make_call(client, EP_FORM_BLOCKING, view, args, out, &at, &call, error);
    if (err == EP_OK) {
        err = ep_call_start(call, &at, call->tokens_max, begin_ns, error);
        if (err == EP_OK) {
            ep_call_drive(call);
            *out_result = call->result;
            err = call->result.error.code;
        }
        ep_call_unref(call);
    }
    ep_view_unref(view);
    return err;
}

ep_err ep_moe_forward(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                      ep_moe_result *out_result)
{
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_moe_args own;
    uint64_t begin_ns = ep_clock_now_ns();
    ep_error_clear(&result.error);
    ep_err err = ep_client_enter(client, &result.error);
    if (err == EP_OK) {
        err = ep_args_take(args, out, &own, &result.error);
        if (err == EP_OK) {
            err = forward(client, &own, out, begin_ns, &result);
        }
        ep_client_leave(client);
    }
    if (out_result != NULL) {
        ep_struct_out(out_result, &result, sizeof(result));
    }
    return err;
}

/* ---- callback ---- */

static ep_err forward_async(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                            ep_moe_done_func done, void *arg, ep_call **out_call,
                            ep_error *out_error)
{
    ep_call *call = NULL;
    ep_view *view = NULL;
    ep_view_layer at;
    ep_moe_args own;
    ep_err err = ep_args_take(args, out, &own, out_error);
    if (err == EP_OK && done == NULL) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "done is NULL");
    }
    if (err == EP_OK) {
        err = ep_cluster_current_view(client->cluster, &view, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    err = make_call(client, EP_FORM_CALLBACK, view, &own, out, &at, &call, out_error);
    if (err == EP_OK) {
        call->on_done = done;
        call->on_done_arg = arg;
        err = ep_call_start(call, &at, call->tokens_max, ep_clock_now_ns(), out_error);
        if (err == EP_OK) {
            if (out_call != NULL) {
                *out_call = call;
            }
            ep_call_use(call); /* its callback may run while this thread is still leaving it */
            ep_call_leave(call);
            ep_call_unuse(call);
        } else {
            ep_call_unref(call);
        }
    }
    ep_view_unref(view);
    return err;
}

ep_err ep_moe_forward_async(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                            ep_moe_done_func done, void *arg, ep_call **out_call,
                            ep_error *out_error)
{
    ep_err err = ep_client_enter(client, out_error);
    if (err == EP_OK) {
        err = forward_async(client, args, out, done, arg, out_call, out_error);
        ep_client_leave(client);
    }
    return err;
}

/* ---- prepared ---- */

static ep_err create_prepared(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                              ep_call **out_call, ep_error *out_error)
{
    ep_call *call = NULL;
    ep_view *view = NULL;
    ep_view_layer at;
    ep_stream_call *stream_call = NULL;
    ep_moe_args host_args;
    ep_err err = ep_args_take(args, out, &host_args, out_error);
    if (err == EP_OK) {
        err = ep_cluster_current_view(client->cluster, &view, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    ep_tensor host_out = *out;
    err = ep_stream_call_create(&host_args, &host_out, &stream_call, out_error);
    if (err == EP_OK) {
        err =
            make_call(client, EP_FORM_PREPARED, view, &host_args, &host_out, &at, &call, out_error);
    }
    if (err == EP_OK) {
        err = ep_call_reserve(call, &at, out_error);
    }
    ep_view_unref(view);
    if (err != EP_OK) {
        if (call != NULL) {
            ep_call_unref(call);
        }
        ep_stream_call_destroy(stream_call);
        return err;
    }
    if (stream_call != NULL) {
        call->stream_call = stream_call;
        call->on_done = ep_stream_call_end;
        call->on_done_arg = stream_call;
    }
    *out_call = call;
    return EP_OK;
}

ep_err ep_call_create(ep_client *client, const ep_moe_args *args, const ep_tensor *out,
                      ep_call **out_call, ep_error *out_error)
{
    ep_err err = ep_client_enter(client, out_error);
    if (err == EP_OK) {
        err = create_prepared(client, args, out, out_call, out_error);
        ep_client_leave(client);
    }
    return err;
}

static ep_err begin_prepared(ep_call *call, uint32_t n_active, ep_error *out_error)
{
    if (call->stream_call != NULL) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "the call's tensors are on a device: ep_moe_begin_on_stream begins it");
    }
    ep_err err = ep_call_check_begin(call, n_active, out_error);
    if (err == EP_OK) {
        err = ep_call_start_newest(call, n_active, out_error);
    }
    if (err == EP_OK) {
        call->began = true;
        ep_call_leave(call);
    }
    return err;
}

ep_err ep_call_begin(ep_call *call, uint32_t n_active, ep_error *out_error)
{
    if (call == NULL || call->form != EP_FORM_PREPARED) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "the call was not made by ep_call_create");
    }
    ep_err err = ep_client_enter(call->client, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = begin_prepared(call, n_active, out_error);
    ep_client_leave(call->client);
    return err;
}

/* For tensors on a device: here a run may also have ended without being started. */
static void wait_run_on_device(ep_call *call)
{
    ep_error error;
    (void)ep_stream_call_wait(call->stream_call, UINT64_MAX, &error);
    if (error.code == EP_OK) {
        ep_call_wait(call);
    } else {
        call->result = (ep_moe_result){.struct_bytes = sizeof(call->result), .error = error};
    }
    ep_stream_call_collect(call->stream_call);
}

/* Calls of a client that is being destroyed can still be finished; they end with CANCELLED. */
ep_err ep_call_finish(ep_call *call, ep_moe_result *out_result)
{
    ep_error error;
    ep_error_clear(&error);
    if (call == NULL || !call->began) {
        ep_error_set(&error, EP_ERR_FAILED_PRECONDITION, "the call has not begun");
    } else if (ep_fork_guard_in_child(&call->client->guard)) {
        ep_error_set(&error, EP_ERR_FAILED_PRECONDITION,
                     "this process was forked from the one that began the call");
    }
    if (error.code != EP_OK) {
        if (out_result != NULL) {
            ep_moe_result failed = {.struct_bytes = sizeof(failed), .error = error};
            ep_struct_out(out_result, &failed, sizeof(failed));
        }
        return error.code;
    }
    if (call->stream_call == NULL) {
        ep_call_wait(call);
    } else {
        wait_run_on_device(call);
    }
    call->began = false;
    call->spec.step_group += call->spec.step_group != 0; /* the next run is the next step */
    if (out_result != NULL) {
        ep_struct_out(out_result, &call->result, sizeof(call->result));
    }
    return call->result.error.code;
}

void ep_call_cancel(ep_call *call)
{
    if (call == NULL || ep_fork_guard_in_child(&call->client->guard)) {
        return;
    }
    if (call->stream_call == NULL || !ep_stream_call_cancel(call->stream_call)) {
        ep_call_stop(call);
    }
}

void ep_call_destroy(ep_call *call)
{
    if (call == NULL || ep_fork_guard_in_child(&call->client->guard)) {
        return;
    }
    if (call->began) {
        ep_error error;
        ep_call_cancel(call);
        if (call->stream_call != NULL &&
            !ep_stream_call_wait(call->stream_call, DEVICE_WAIT_NS, &error)) {
            return; /* the device hangs: memory that it may still write to is not freed */
        }
        ep_call_finish(call, NULL);
    }
    ep_stream_call_destroy(call->stream_call);
    ep_call_unref(call);
}
