/* SPDX-License-Identifier: Apache-2.0 */
/* One gateway call from its frame to its reply. */
#include "coordinator/gateway.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "moe/load_statistics.h"
#include "observe/trace.h"
#include "wire/gateway_codec.h"
#include "wire/moe_parameters.h"

#define RETRY_AFTER_US_MIN 1000u
#define TABLE_RETRY_US 500000u
/* A call ends so long before its caller's deadline, so that the caller gets the error, or the
 * result with missing slots, in time. */
#define DEADLINE_RESERVE_US_MAX 100000u
#define DEADLINE_RESERVE_PART 10

/* A client and the calls that were begun with it. */
typedef struct gateway_client {
    ep_client *client;
    uint32_t calls; /* atomic */
} gateway_client;

struct ep_gateway {
    Expertd__V1__Gateway_Service rpc; /* first: handlers get a pointer to it */
    ep_gateway_config config;
    /* read lock: to start a call; write lock: to replace the client */
    pthread_rwlock_t client_lock;
    gateway_client *client; /* NULL: none yet, or stopped */
    gateway_client *next;   /* replaces client once it has a table; NULL: none */
    gateway_client *former; /* replaced, but its calls have not ended; NULL: none */
    ep_metric_series *seconds;
    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t idle;  /* in_flight became 0 */
    uint32_t in_flight;
    bool draining;
    uint64_t typical_us; /* typical duration of a call, for retry_after_us */
};

/* Shared by the handler, the completion and the caller's cancel. */
typedef struct gateway_request {
    ep_gateway *gateway;
    gateway_client *client;
    ep_rpc_call *call;
    Expertd__V1__GatewayForwardReply_Closure closure;
    const Expertd__V1__GatewayForwardRequest *header; /* valid until the call is finished */
    uint64_t begin_ns;
    ep_trace_fields trace; /* call 0: not traced */
    ep_buffer *reply;
    pthread_mutex_t lock; /* guards the rest */
    uint32_t refs;        /* held by the handler while it starts the call, and by the completion */
    ep_call *layer_call;  /* valid until done */
    bool done;
    bool cancelled;
    uint32_t missing[]; /* [EP_GATEWAY_MISSING_MAX] with allow_missing */
} gateway_request;

static const double second_bounds[] = {100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3,
                                       50e-3,  0.1,    0.2,    0.5,  1,    2,    5,     10};

/* ---- counting ---- */

static ep_err enter(ep_gateway *gateway, ep_error *out_error)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&gateway->lock);
    if (gateway->draining) {
        err = ep_error_set(out_error, EP_ERR_DRAINING,
                           "the coordinator is stopping and takes no new gateway calls");
    } else if (gateway->in_flight >= gateway->config.calls_max) {
        err = ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                           "%" PRIu32
                           " gateway calls are in flight: gateway_calls_max allows %" PRIu32,
                           gateway->in_flight, gateway->config.calls_max);
        out_error->retry_after_us =
            gateway->typical_us > RETRY_AFTER_US_MIN ? gateway->typical_us : RETRY_AFTER_US_MIN;
    } else {
        gateway->in_flight++;
    }
    pthread_mutex_unlock(&gateway->lock);
    return err;
}

/* Counted before the reply is sent, so that whoever has the reply finds it counted. */
static ep_metric_series *results_counter(const ep_gateway *gateway, ep_err result)
{
    ep_metric_label label = {"result", ep_err_name(result)};
    return ep_metrics_counter(gateway->config.metrics, "expertd_gateway_requests_total",
                              "Gateway calls by result", &label, 1);
}

static void count_result(ep_gateway *gateway, ep_err result, uint64_t took_ns)
{
    ep_counter_add(results_counter(gateway, result), 1);
    ep_histogram_observe(gateway->seconds, (double)took_ns * 1e-9);
}

/* The last step of a call, after its reply is queued: the gateway may be destroyed then. */
static void leave(ep_gateway *gateway, uint64_t took_ns)
{
    uint64_t took_us = took_ns / EP_NS_PER_US;
    pthread_mutex_lock(&gateway->lock);
    gateway->typical_us =
        gateway->typical_us == 0 ? took_us : (gateway->typical_us * 7 + took_us) / 8;
    gateway->in_flight--;
    if (gateway->in_flight == 0) {
        pthread_cond_broadcast(&gateway->idle);
    }
    pthread_mutex_unlock(&gateway->lock);
}

/* ---- the span; the layer call inside joins its trace as a child ---- */

static ep_trace_fields trace_begin(const Expertd__V1__GatewayForwardRequest *header,
                                   ep_rpc_call *call)
{
    ep_trace_fields fields = {.node = "gateway",
                              .peer = "",
                              .layer = (int32_t)header->layer,
                              .expert = -1,
                              .rows = header->tokens};
    if (EP_TRACE_SPAN_ON(gateway)) {
        fields.call = ep_rpc_call_incoming(call)->number;
        if (!ep_traceparent_parse(ep_rpc_call_metadata(call, "traceparent"), &fields.trace,
                                  &fields.parent)) {
            fields.trace = ep_trace_new_trace();
        }
        ep_rpc_call_set_trace(call, fields.trace);
        EP_TRACE(gateway_begin, &fields);
    }
    return fields;
}

static void trace_end(const ep_trace_fields *trace, ep_err status)
{
    if (trace->call != 0) {
        ep_trace_fields fields = *trace;
        fields.status = (int32_t)status;
        EP_TRACE(gateway_end, &fields);
    }
}

/* Ends a call whose layer call has not begun. */
static void refuse(ep_gateway *gateway, ep_rpc_call *call, const ep_error *error, uint64_t begin_ns,
                   const ep_trace_fields *trace)
{
    count_result(gateway, error->code, ep_clock_now_ns() - begin_ns);
    ep_rpc_call_finish(call, error->code, error);
    trace_end(trace, error->code);
}

/* ---- a request's life ---- */

static ep_err request_create(ep_gateway *gateway, ep_rpc_call *call,
                             const Expertd__V1__GatewayForwardRequest *header, size_t reply_bytes,
                             gateway_request **out_request, ep_error *out_error)
{
    size_t missing = header->allow_missing ? EP_GATEWAY_MISSING_MAX * sizeof(uint32_t) : 0;
    gateway_request *request = calloc(1, sizeof(*request) + missing);
    if (request == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a gateway call");
    }
    ep_err err = ep_buffer_acquire(ep_rpc_call_incoming(call)->pool, reply_bytes, &request->reply);
    if (err != EP_OK) {
        free(request);
        ep_error_set(
            out_error, err,
            "no buffer for a result of %zu bytes: the coordinator's buffer_bytes_max is in use",
            reply_bytes);
        out_error->retry_after_us = RETRY_AFTER_US_MIN;
        return err;
    }
    request->gateway = gateway;
    request->call = call;
    request->header = header;
    request->refs = 1;
    pthread_mutex_init(&request->lock, NULL);
    *out_request = request;
    return EP_OK;
}

static void request_unref(gateway_request *request)
{
    if (__atomic_sub_fetch(&request->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        ep_buffer_unref(request->reply);
        pthread_mutex_destroy(&request->lock);
        free(request);
    }
}

static void on_cancel(void *arg, ep_rpc_call *call)
{
    gateway_request *request = arg;
    (void)call;
    pthread_mutex_lock(&request->lock);
    request->cancelled = true;
    ep_call_cancel(request->layer_call); /* NULL before its begin and after its end */
    pthread_mutex_unlock(&request->lock);
}

static void send_reply(gateway_request *request, const ep_moe_result *result)
{
    Expertd__V1__GatewayForwardReply reply = EXPERTD__V1__GATEWAY_FORWARD_REPLY__INIT;
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    epoch.term = result->epoch_term;
    epoch.number = result->epoch_number;
    reply.tokens = request->header->tokens;
    reply.hidden = request->header->hidden;
    reply.dtype = request->header->out_dtype;
    reply.numerics = (char *)(uintptr_t)result->numerics;
    ep_parameters_to_message(&ep_moe_result_parameters, result, &reply);
    if (request->header->allow_missing) {
        reply.missing_slots = request->missing;
        reply.n_missing_slots = result->missing_count < EP_GATEWAY_MISSING_MAX
                                    ? result->missing_count
                                    : EP_GATEWAY_MISSING_MAX;
    }
    reply.epoch = &epoch;
    reply.total_us = (ep_clock_now_ns() - request->begin_ns) / EP_NS_PER_US;
    ep_rpc_call_attach(request->call, request->reply);
    request->reply = NULL;
    request->closure(&reply, request->call);
}

/* The call's own error; but if the client is being closed, the coordinator is stopping. */
static ep_err read_failure(gateway_request *request, const ep_moe_result *result,
                           ep_error *out_error)
{
    *out_error = result->error;
    pthread_mutex_lock(&request->gateway->lock);
    bool draining = request->gateway->draining;
    pthread_mutex_unlock(&request->gateway->lock);
    if (result->error.code == EP_ERR_CANCELLED && draining &&
        !ep_rpc_call_is_cancelled(request->call)) {
        ep_error_set(out_error, EP_ERR_DRAINING,
                     "the coordinator stopped before the call was done");
    }
    return out_error->code;
}

static void on_done(void *arg, const ep_moe_result *result)
{
    gateway_request *request = arg;
    ep_gateway *gateway = request->gateway;
    uint64_t took_ns = ep_clock_now_ns() - request->begin_ns;
    ep_error error;
    ep_error_clear(&error);
    pthread_mutex_lock(&request->lock);
    request->done = true;
    request->layer_call = NULL;
    pthread_mutex_unlock(&request->lock);
    ep_err err = result->error.code == EP_OK ? EP_OK : read_failure(request, result, &error);
    count_result(gateway, err, took_ns);
    if (err == EP_OK) {
        send_reply(request, result);
    }
    ep_rpc_call_finish(request->call, err, err == EP_OK ? NULL : &error);
    trace_end(&request->trace, err);
    __atomic_sub_fetch(&request->client->calls, 1, __ATOMIC_RELEASE);
    request_unref(request);
    leave(gateway, took_ns);
}

/* ---- from the message to the client's arguments ---- */

/* The model as the client would find it, with the pinned id. False: it is not in the table, and the
 * call's own error will list what is. */
static bool find_model(ep_client *client, const Expertd__V1__GatewayForwardRequest *header,
                       ep_model_desc *out_model)
{
    ep_model_desc model = {.struct_bytes = sizeof(model)};
    bool found = false;
    for (uint32_t i = 0; ep_client_model(client, i, &model) == EP_OK; i++) {
        bool fits = strcmp(model.name, header->model) == 0 &&
                    (header->version[0] == 0 || strcmp(model.version, header->version) == 0);
        if (fits && (!found || model.is_default != 0)) {
            *out_model = model;
            found = true;
        }
    }
    return found;
}

static ep_err check_numerics(ep_client *client, const Expertd__V1__GatewayForwardRequest *header,
                             ep_error *out_error)
{
    ep_model_desc model;
    if (header->numerics[0] == 0 || !find_model(client, header, &model) ||
        strcmp(model.numerics, header->numerics) == 0) {
        return EP_OK;
    }
    return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                        "numerics '%.95s' of model %.100s: the gateway has '%s'", header->numerics,
                        header->model, model.numerics);
}

static ep_err check_ready(ep_gateway *gateway, ep_error *out_error)
{
    uint64_t term;
    uint64_t number;
    if (gateway->client == NULL) {
        return ep_error_set(out_error, EP_ERR_DRAINING, "the coordinator is stopping");
    }
    if (ep_client_epoch(gateway->client->client, &term, &number) == EP_OK) {
        return EP_OK;
    }
    ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                 "no routing table yet: %" PRIu32 " of min_nodes %" PRIu32
                 " nodes are registered; it comes when that many have loaded their experts",
                 gateway->config.nodes_listed(gateway->config.arg), gateway->config.nodes_wanted);
    out_error->retry_after_us = TABLE_RETRY_US;
    return EP_ERR_UNAVAILABLE;
}

static ep_err fill_deadline(const ep_rpc_call *call, uint64_t now_ns, ep_moe_args *args,
                            ep_error *out_error)
{
    uint64_t deadline_ns = ep_rpc_call_incoming(call)->deadline_ns;
    if (deadline_ns == EP_TIME_NEVER) {
        return EP_OK; /* the client's default */
    }
    if (deadline_ns <= now_ns) {
        return ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                            "no time was left when the call was read");
    }
    uint64_t left_us = (deadline_ns - now_ns) / EP_NS_PER_US;
    uint64_t reserve_us = left_us / DEADLINE_RESERVE_PART;
    left_us -= reserve_us < DEADLINE_RESERVE_US_MAX ? reserve_us : DEADLINE_RESERVE_US_MAX;
    args->deadline_us = left_us == 0 ? 1 : left_us < UINT32_MAX ? left_us : UINT32_MAX - 1;
    return EP_OK;
}

/* ---- the handler ---- */

/* Begins the layer call. On success its completion ends the rpc call and calls leave. */
static ep_err start(gateway_request *request, const ep_gateway_view *view, ep_error *out_error)
{
    const Expertd__V1__GatewayForwardRequest *header = request->header;
    ep_client *client = request->gateway->client->client;
    ep_moe_args args = view->args;
    ep_tensor out = view->out;
    ep_call *layer_call = NULL;
    ep_err err;
    out.data = request->reply->data;
    if (header->allow_missing) {
        args.missing_slots = request->missing;
        args.missing_slots_max = EP_GATEWAY_MISSING_MAX;
    }
    request->client = request->gateway->client;
    __atomic_fetch_add(&request->client->calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&request->refs, 1, __ATOMIC_RELAXED);
    if (header->gate != NULL) {
        err = ep_moe_forward_logits_async(client, &args, &view->gate, &view->logits, &out, on_done,
                                          request, &layer_call, out_error);
    } else {
        err = ep_moe_forward_async(client, &args, &out, on_done, request, &layer_call, out_error);
    }
    if (err != EP_OK) {
        __atomic_sub_fetch(&request->client->calls, 1, __ATOMIC_RELEASE);
        request_unref(request); /* the completion's reference */
        return err;
    }
    /* not done yet: the completion waits for the lock, so the handle is valid */
    pthread_mutex_lock(&request->lock);
    if (!request->done) {
        request->layer_call = layer_call;
        if (request->cancelled) {
            ep_call_cancel(layer_call);
        }
    }
    pthread_mutex_unlock(&request->lock);
    return EP_OK;
}

/* Allocated sums per expert of the active tokens' probabilities; NULL: not wanted, or no memory,
 * and then only statistics are missing. */
static double *sum_probabilities(const ep_gateway *gateway,
                                 const Expertd__V1__GatewayForwardRequest *header,
                                 const ep_gateway_view *view, uint64_t *out_tokens)
{
    double *sums = header->gate != NULL && gateway->config.loads != NULL
                       ? calloc(header->experts, sizeof(*sums))
                       : NULL;
    *out_tokens = 0;
    for (uint32_t t = 0; sums != NULL && t < header->tokens; t++) {
        if (!ep_moe_token_is_masked(&view->args, t)) {
            ep_load_add_probabilities(view->gate.select == EP_GATE_SIGMOID,
                                      (const float *)view->logits.data +
                                          (size_t)t * header->experts,
                                      header->experts, sums);
            (*out_tokens)++;
        }
    }
    return sums;
}

/* Begins the layer call and counts its logits. They are read before, because the call may end at
 * once and free the frame. */
static ep_err start_counted(gateway_request *request, const ep_gateway_view *view,
                            ep_error *out_error)
{
    ep_gateway *gateway = request->gateway;
    const Expertd__V1__GatewayForwardRequest *header = request->header;
    uint32_t layer = header->layer;
    uint32_t experts = header->experts;
    uint64_t tokens;
    ep_model_desc model;
    double *sums = sum_probabilities(gateway, header, view, &tokens);
    bool counts = sums != NULL && tokens > 0 && find_model(gateway->client->client, header, &model);
    ep_err err = start(request, view, out_error);
    if (err == EP_OK && counts) {
        ep_load_sums_add_probabilities(gateway->config.loads, model.name, model.version, layer,
                                       experts, sums, tokens);
    }
    free(sums);
    return err;
}

/* Read lock of client_lock held. */
static ep_err begin_call(ep_gateway *gateway, const Expertd__V1__GatewayForwardRequest *header,
                         Expertd__V1__GatewayForwardReply_Closure closure, ep_rpc_call *call,
                         uint64_t now_ns, const ep_trace_fields *trace, ep_error *out_error)
{
    char traceparent[EP_TRACEPARENT_CHARS + 1];
    ep_gateway_view view;
    gateway_request *request = NULL;
    const ep_rpc_incoming *asked = ep_rpc_call_incoming(call);
    ep_err err =
        ep_gateway_view_make(header, asked->tensors, asked->tensor_bytes, &view, out_error);
    if (err == EP_OK && view.reply_bytes > gateway->config.reply_bytes_max) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                           "tokens %" PRIu32 ", hidden %" PRIu32
                           ": a result of %zu bytes is above frame_bytes_max, allowed %zu",
                           header->tokens, header->hidden, view.reply_bytes,
                           gateway->config.reply_bytes_max);
    }
    err = err != EP_OK ? err : check_ready(gateway, out_error);
    err = err != EP_OK ? err : check_numerics(gateway->client->client, header, out_error);
    if (err != EP_OK) {
        return err;
    }
    view.args.traceparent = ep_rpc_call_metadata(call, "traceparent");
    view.args.tenant = ep_rpc_call_metadata(call, "tenant");
    err = fill_deadline(call, now_ns, &view.args, out_error);
    err = err != EP_OK
              ? err
              : request_create(gateway, call, header, view.reply_bytes, &request, out_error);
    if (err != EP_OK) {
        return err;
    }
    request->closure = closure;
    request->begin_ns = now_ns;
    request->trace = *trace;
    if (trace->call != 0) {
        ep_traceparent_format(trace->trace, trace->call, traceparent);
        view.args.traceparent = traceparent; /* copied when the layer call begins */
    }
    ep_rpc_call_on_cancel(call, on_cancel, request);
    err = start_counted(request, &view, out_error);
    /* on_cancel may run until the call is finished, so the request is released after that */
    if (err != EP_OK) {
        refuse(gateway, call, out_error, now_ns, trace);
        leave(gateway, ep_clock_now_ns() - now_ns);
    }
    request_unref(request);
    return EP_OK;
}

static void on_forward(Expertd__V1__Gateway_Service *rpc,
                       const Expertd__V1__GatewayForwardRequest *header,
                       Expertd__V1__GatewayForwardReply_Closure closure, void *closure_data)
{
    ep_gateway *gateway = (ep_gateway *)rpc;
    uint64_t now_ns = ep_clock_now_ns();
    ep_error error;
    ep_error_clear(&error);
    const ep_trace_fields trace = trace_begin(header, closure_data);
    ep_err err =
        gateway->config.enabled
            ? enter(gateway, &error)
            : ep_error_set(
                  &error, EP_ERR_UNIMPLEMENTED,
                  "the gateway is off: set gateway: true in the coordinator's configuration");
    if (err != EP_OK) {
        refuse(gateway, closure_data, &error, now_ns, &trace);
        return;
    }
    pthread_rwlock_rdlock(&gateway->client_lock);
    err = begin_call(gateway, header, closure, closure_data, now_ns, &trace, &error);
    pthread_rwlock_unlock(&gateway->client_lock);
    if (err != EP_OK) {
        error.code = err;
        refuse(gateway, closure_data, &error, now_ns, &trace);
        leave(gateway, ep_clock_now_ns() - now_ns);
    }
}

static const Expertd__V1__Gateway_Service rpc_template = EXPERTD__V1__GATEWAY__INIT(on_);

/* ---- the gateway's life ---- */

ep_err ep_gateway_create(const ep_gateway_config *config, ep_gateway **out_gateway,
                         ep_error *out_error)
{
    ep_gateway *gateway = calloc(1, sizeof(*gateway));
    if (gateway == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the gateway");
    }
    gateway->rpc = rpc_template;
    gateway->config = *config;
    pthread_rwlock_init(&gateway->client_lock, NULL);
    pthread_mutex_init(&gateway->lock, NULL);
    pthread_cond_init(&gateway->idle, NULL);
    gateway->seconds = ep_metrics_histogram(config->metrics, "expertd_gateway_duration_seconds",
                                            "Time of a gateway call in the coordinator", NULL, 0,
                                            second_bounds, EP_ARRAY_COUNT(second_bounds));
    /* creates the series with 0, so that rates have a first value */
    results_counter(gateway, EP_OK);
    *out_gateway = gateway;
    return EP_OK;
}

ProtobufCService *ep_gateway_rpc(ep_gateway *gateway)
{
    return &gateway->rpc.base;
}

static void client_destroy(gateway_client *client)
{
    if (client != NULL) {
        ep_client_destroy(client->client);
        free(client);
    }
}

ep_err ep_gateway_connect(ep_gateway *gateway, const ep_client_config *client, ep_error *out_error)
{
    ep_client_config config = *client;
    gateway_client *made = calloc(1, sizeof(*made));
    config.calls_max = gateway->config.calls_max;
    ep_err err = made != NULL ? ep_client_create(&config, &made->client, out_error)
                              : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a client");
    if (err != EP_OK) {
        free(made);
        return ep_error_prefix(out_error, err, "gateway");
    }
    pthread_rwlock_wrlock(&gateway->client_lock);
    gateway_client **place = gateway->client == NULL ? &gateway->client : &gateway->next;
    gateway_client *dropped = *place;
    *place = made;
    pthread_rwlock_unlock(&gateway->client_lock);
    client_destroy(dropped);
    return EP_OK;
}

/* No node with this id has copies of the model, while others have. */
static bool is_stranded(const ep_routing_table *table, const ep_model_desc *pinned)
{
    uint32_t index;
    const ep_routing_model *model =
        ep_routing_table_find_model(table, pinned->name, pinned->version, &index);
    bool has_other = false;
    for (uint32_t l = 0;
         model != NULL && model->numerics_of_node != NULL && l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        const uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
        for (uint32_t i = 0; layer->model_index == index && i < layer->offsets[experts]; i++) {
            const uint32_t id = model->numerics_of_node[layer->copies[i]];
            if (id < model->numerics_count && strcmp(model->numerics[id], pinned->numerics) == 0) {
                return false;
            }
            has_other |= id < model->numerics_count;
        }
    }
    return has_other && pinned->numerics[0] != 0;
}

bool ep_gateway_is_stranded(ep_gateway *gateway, const ep_routing_table *table)
{
    bool stranded = false;
    pthread_rwlock_rdlock(&gateway->client_lock);
    ep_model_desc model = {.struct_bytes = sizeof(model)};
    for (uint32_t i = 0;
         gateway->client != NULL && gateway->next == NULL && !stranded && table != NULL &&
         ep_client_model(gateway->client->client, i, &model) == EP_OK;
         i++) {
        stranded = is_stranded(table, &model);
        model.struct_bytes = sizeof(model);
    }
    pthread_rwlock_unlock(&gateway->client_lock);
    return stranded;
}

void ep_gateway_tick(ep_gateway *gateway)
{
    uint64_t term;
    uint64_t number;
    gateway_client *ended = NULL;
    /* no lock: only this thread changes them */
    if (gateway->former == NULL && gateway->next == NULL) {
        return;
    }
    /* with the write lock no call is being started, so a former client's calls only end */
    pthread_rwlock_wrlock(&gateway->client_lock);
    if (gateway->former != NULL &&
        __atomic_load_n(&gateway->former->calls, __ATOMIC_ACQUIRE) == 0) {
        ended = gateway->former;
        gateway->former = NULL;
    }
    if (gateway->former == NULL && gateway->next != NULL &&
        ep_client_epoch(gateway->next->client, &term, &number) == EP_OK) {
        gateway->former = gateway->client;
        gateway->client = gateway->next;
        gateway->next = NULL;
    }
    pthread_rwlock_unlock(&gateway->client_lock);
    client_destroy(ended);
}

static void set_token(gateway_client *client, const char *token)
{
    ep_error error;
    if (client != NULL && ep_client_set_token(client->client, token, &error) != EP_OK) {
        ep_log(EP_LOG_ERROR, "gateway-token", EP_KV(reason, error.text),
               EP_KV(effect, "the gateway calls nodes with the token before"));
    }
}

void ep_gateway_set_token(ep_gateway *gateway, const char *token)
{
    pthread_rwlock_rdlock(&gateway->client_lock);
    set_token(gateway->client, token);
    set_token(gateway->next, token);
    set_token(gateway->former, token);
    pthread_rwlock_unlock(&gateway->client_lock);
}

void ep_gateway_drain(ep_gateway *gateway)
{
    pthread_mutex_lock(&gateway->lock);
    gateway->draining = true;
    pthread_mutex_unlock(&gateway->lock);
}

uint32_t ep_gateway_in_flight(ep_gateway *gateway)
{
    pthread_mutex_lock(&gateway->lock);
    uint32_t in_flight = gateway->in_flight;
    pthread_mutex_unlock(&gateway->lock);
    return in_flight;
}

void ep_gateway_stop(ep_gateway *gateway)
{
    if (gateway == NULL) {
        return;
    }
    ep_gateway_drain(gateway);
    pthread_rwlock_wrlock(&gateway->client_lock);
    gateway_client *const clients[] = {gateway->client, gateway->next, gateway->former};
    gateway->client = gateway->next = gateway->former = NULL;
    pthread_rwlock_unlock(&gateway->client_lock);
    for (size_t i = 0; i < EP_ARRAY_COUNT(clients); i++) {
        client_destroy(clients[i]);
    }
}

void ep_gateway_destroy(ep_gateway *gateway)
{
    if (gateway == NULL) {
        return;
    }
    pthread_mutex_lock(&gateway->lock);
    while (gateway->in_flight > 0) { /* the calls are finished; only leave() is still to come */
        pthread_cond_wait(&gateway->idle, &gateway->lock);
    }
    pthread_mutex_unlock(&gateway->lock);
    pthread_cond_destroy(&gateway->idle);
    pthread_mutex_destroy(&gateway->lock);
    pthread_rwlock_destroy(&gateway->client_lock);
    free(gateway);
}

void ep_gateway_collect(ep_gateway *gateway)
{
    ep_gauge_set(gateway->config.metrics, "expertd_gateway_calls_in_flight",
                 "Gateway calls under way", NULL, 0, ep_gateway_in_flight(gateway));
}
