/* SPDX-License-Identifier: Apache-2.0 */
/* One channel to the coordinator, with one Gateway.Forward at a time. */
#include "gateway_call.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "batch_file.h"
#include "control.h"
#include "observe/trace.h"
#include "rpc/rpc.h"
#include "wire/moe_parameters.h"

struct ep_cli_gateway {
    const ep_cli_connect *connect;
    ep_cli_control *control; /* timers and memory are its */
    ep_rpc_channel *channel;
};

/* The answer that the calling thread waits for. */
typedef struct gateway_answer {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_done;
    const ep_tensor *out;
    size_t out_bytes;
    ep_moe_result *result;
} gateway_answer;

ep_err ep_cli_gateway_open(const ep_cli_connect *connect, ep_cli_gateway **out_gateway,
                           ep_error *out_error)
{
    ep_cli_gateway *gateway = calloc(1, sizeof(*gateway));
    if (gateway == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a connection");
    }
    gateway->connect = connect;
    ep_err err = ep_cli_control_open(connect, &gateway->control, out_error);
    if (err == EP_OK) {
        ep_rpc_channel_config config = {
            .common = *ep_cli_control_common(gateway->control),
            .address = {.url = connect->coordinator_url,
                        .tls = connect->tls.ca_file != NULL ? &connect->tls : NULL},
            .connection_class = "bulk",
            .reconnect = false,
        };
        ep_rpc_limits_default(&config.common.limits);
        err = ep_rpc_channel_create(&config, &gateway->channel, out_error);
    }
    err = err != EP_OK
              ? err
              : ep_rpc_channel_wait_ready(gateway->channel,
                                          ep_clock_now_ns() + connect->timeout_us * EP_NS_PER_US,
                                          out_error);
    if (err != EP_OK) {
        ep_cli_gateway_close(gateway);
        bool refused =
            err == EP_ERR_CONNECTION_LOST || err == EP_ERR_IO || err == EP_ERR_DEADLINE_EXCEEDED;
        if (refused) { /* no call has timed out: the service could not be reached */
            err = EP_ERR_UNAVAILABLE;
            out_error->code = err;
        }
        return err;
    }
    *out_gateway = gateway;
    return EP_OK;
}

void ep_cli_gateway_close(ep_cli_gateway *gateway)
{
    if (gateway != NULL) {
        ep_rpc_channel_destroy(gateway->channel);
        ep_cli_control_close(gateway->control);
        free(gateway);
    }
}

/* ---- request ---- */

ep_err ep_cli_gateway_request_make(const ep_moe_args *args, const ep_gate_config *gate,
                                   const ep_tensor *logits, ep_dtype out_dtype,
                                   ep_buffer_pool *pool, ep_cli_gateway_request *out_request,
                                   ep_error *out_error)
{
    out_request->tensors = NULL;
    ep_err err = ep_gateway_request_fill(args, gate, logits, out_dtype, &out_request->header,
                                         &out_request->gate, out_error);
    err = err != EP_OK
              ? err
              : ep_gateway_layout_make(&out_request->header, &out_request->layout, out_error);
    if (err != EP_OK || out_request->layout.total_bytes == 0) {
        return err;
    }
    err = ep_buffer_acquire(pool, out_request->layout.total_bytes, &out_request->tensors);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for a request of %zu bytes",
                            out_request->layout.total_bytes);
    }
    ep_gateway_request_pack(args, gate, logits, &out_request->layout, out_request->tensors->data);
    return EP_OK;
}

void ep_cli_gateway_request_fini(ep_cli_gateway_request *request)
{
    ep_buffer_unref(request->tensors);
}

/* ---- reply ---- */

static ep_err take_reply(gateway_answer *answer, const ep_rpc_reply *reply)
{
    ep_moe_result *result = answer->result;
    const Expertd__V1__GatewayForwardReply *header =
        (const Expertd__V1__GatewayForwardReply *)(const void *)reply->header;
    const ep_tensor *out = answer->out;
    if (header->tokens != (uint32_t)out->shape[0] ||
        header->hidden != (uint32_t)out->shape[out->rank - 1] ||
        header->dtype != (uint32_t)out->dtype || reply->tensor_bytes != answer->out_bytes) {
        return ep_error_set(
            &result->error, EP_ERR_PROTOCOL,
            "the gateway's result is [%" PRIu32 ",%" PRIu32 "] of type %" PRIu32
            " in %zu bytes: asked for was [%" PRId64 ",%" PRId64 "] of type %u in %zu bytes",
            header->tokens, header->hidden, header->dtype, reply->tensor_bytes, out->shape[0],
            out->shape[out->rank - 1], (unsigned)out->dtype, answer->out_bytes);
    }
    if (ep_parameters_check(&ep_moe_result_parameters, header, true, &result->error) != EP_OK) {
        ep_error_prefix(&result->error, EP_ERR_PROTOCOL, "the gateway's result");
        return result->error.code = EP_ERR_PROTOCOL;
    }
    if (answer->out_bytes > 0) {
        memcpy(answer->out->data, reply->tensors, answer->out_bytes);
    }
    ep_parameters_from_message(&ep_moe_result_parameters, header, result);
    result->missing_first_slot = header->n_missing_slots > 0 ? header->missing_slots[0] : 0;
    if (header->epoch != NULL) {
        result->epoch_term = header->epoch->term;
        result->epoch_number = header->epoch->number;
    }
    result->bytes_received = reply->tensor_bytes;
    snprintf(result->numerics, sizeof(result->numerics), "%s", header->numerics);
    return EP_OK;
}

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    gateway_answer *answer = arg;
    if (error != NULL) {
        answer->result->error = *error;
    } else {
        take_reply(answer, reply);
    }
    pthread_mutex_lock(&answer->lock);
    answer->is_done = true;
    pthread_cond_signal(&answer->changed);
    pthread_mutex_unlock(&answer->lock);
}

/* ---- spans: the layer call with its one exchange, as in a routing client ---- */

typedef struct gateway_trace {
    ep_trace_fields forward;
    ep_trace_fields exchange; /* call 0: not open */
    bool forward_open;
    char traceparent[EP_TRACEPARENT_CHARS + 1]; /* of the request; "" none */
} gateway_trace;

static void trace_begin(const ep_moe_args *args, gateway_trace *out_trace)
{
    ep_trace_fields *fields = &out_trace->forward;
    *out_trace = (gateway_trace){.forward = {.node = ep_trace_process(),
                                             .peer = "",
                                             .layer = (int32_t)args->layer,
                                             .expert = -1,
                                             .rows = (uint32_t)args->x.shape[0]}};
    bool is_given = ep_traceparent_parse(args->traceparent, &fields->trace, &fields->parent);
    out_trace->forward_open = EP_TRACE_SPAN_ON(forward);
    if (!out_trace->forward_open && !is_given) {
        return;
    }
    fields->call = ep_trace_new_id();
    fields->trace = is_given ? fields->trace : ep_trace_new_trace();
    ep_traceparent_format(fields->trace, fields->call, out_trace->traceparent);
    if (out_trace->forward_open) {
        EP_TRACE(forward_begin, fields);
    }
}

static void trace_exchange_begin(gateway_trace *trace, uint64_t rpc_id)
{
    if (trace->forward.call != 0 && EP_TRACE_SPAN_ON(exchange)) {
        trace->exchange = trace->forward;
        trace->exchange.parent = trace->forward.call;
        trace->exchange.call = rpc_id;
        trace->exchange.peer = "gateway";
        EP_TRACE(exchange_begin, &trace->exchange);
    }
}

static void trace_exchange_end(gateway_trace *trace, ep_err status)
{
    if (trace->exchange.call != 0) {
        trace->exchange.status = (int32_t)status;
        EP_TRACE(exchange_end, &trace->exchange);
    }
}

static void trace_end(gateway_trace *trace, ep_err status)
{
    if (trace->forward_open) {
        trace->forward.status = (int32_t)status;
        EP_TRACE(forward_end, &trace->forward);
    }
}

/* ---- the call ---- */

static ep_err call(ep_cli_gateway *gateway, const ep_moe_args *args,
                   const ep_cli_gateway_request *forward, gateway_trace *trace,
                   gateway_answer *answer)
{
    const uint64_t deadline_us =
        args->deadline_us != 0 ? args->deadline_us : gateway->connect->timeout_us;
    ep_rpc_metadata metadata[2];
    size_t metadata_count = 0;
    if (trace->traceparent[0] != '\0') {
        metadata[metadata_count++] = (ep_rpc_metadata){"traceparent", trace->traceparent};
    }
    if (args->tenant != NULL) {
        metadata[metadata_count++] = (ep_rpc_metadata){"tenant", args->tenant};
    }
    ep_rpc_request request = {
        .id = ep_rpc_call_id_next(),
        .trace = trace->forward.trace,
        .metadata = metadata,
        .metadata_count = metadata_count,
        .method = ep_rpc_method_by_name("expertd.v1.Gateway", "Forward"),
        .header = &forward->header.base,
        .tensors = forward->tensors,
        .deadline_ns = ep_clock_now_ns() + deadline_us * EP_NS_PER_US,
        .wait_for_ready = true,
    };
    pthread_mutex_init(&answer->lock, NULL);
    pthread_cond_init(&answer->changed, NULL);
    trace_exchange_begin(trace, request.id);
    ep_err err = ep_rpc_call_start(gateway->channel, &request, on_reply, answer, NULL,
                                   &answer->result->error);
    if (err == EP_OK) {
        pthread_mutex_lock(&answer->lock);
        while (!answer->is_done) { /* ends, as every call has a deadline */
            pthread_cond_wait(&answer->changed, &answer->lock);
        }
        pthread_mutex_unlock(&answer->lock);
    }
    trace_exchange_end(trace, answer->result->error.code);
    pthread_cond_destroy(&answer->changed);
    pthread_mutex_destroy(&answer->lock);
    return answer->result->error.code;
}

static ep_err run_call(ep_cli_gateway *gateway, const ep_moe_args *args, const ep_gate_config *gate,
                       const ep_tensor *logits, const ep_tensor *out, gateway_trace *trace,
                       ep_moe_result *out_result)
{
    ep_cli_gateway_request request;
    ep_error *error = &out_result->error;
    ep_err err =
        ep_cli_gateway_request_make(args, gate, logits, out->dtype,
                                    ep_cli_control_common(gateway->control)->pool, &request, error);
    if (err != EP_OK) {
        return err;
    }
    if (ep_cli_tensor_bytes(out) != request.layout.reply_bytes) {
        ep_cli_gateway_request_fini(&request);
        return ep_error_set(error, EP_ERR_INVALID_ARGUMENT,
                            "out has %zu bytes: the result of this call has %zu",
                            ep_cli_tensor_bytes(out), request.layout.reply_bytes);
    }
    gateway_answer answer = {
        .out = out, .out_bytes = request.layout.reply_bytes, .result = out_result};
    out_result->bytes_sent = request.layout.total_bytes;
    err = call(gateway, args, &request, trace, &answer);
    ep_cli_gateway_request_fini(&request);
    return err;
}

ep_err ep_cli_gateway_forward(ep_cli_gateway *gateway, const ep_moe_args *args,
                              const ep_gate_config *gate, const ep_tensor *logits,
                              const ep_tensor *out, ep_moe_result *out_result)
{
    gateway_trace trace;
    *out_result = (ep_moe_result){.struct_bytes = sizeof(*out_result)};
    ep_error_clear(&out_result->error);
    trace_begin(args, &trace);
    ep_err err = run_call(gateway, args, gate, logits, out, &trace, out_result);
    trace_end(&trace, err);
    return err;
}

void ep_cli_gateway_check(struct argp_state *state, bool is_asked)
{
    if (is_asked && ep_cli_peer.coordinator_url == NULL) {
        argp_error(state, "--gateway and --node are both given: the gateway is the coordinator's");
    }
    if (is_asked && ep_cli_peer.numerics != NULL) {
        argp_error(state, "--gateway and --numerics are both given: the gateway chooses the id");
    }
}
