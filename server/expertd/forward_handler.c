/* SPDX-License-Identifier: Apache-2.0 */
/* One Forward call from its frame to its reply. */
#include "expertd/forward_handler.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "expertd/forward_metrics.h"
#include "expertd/reply_rows.h"
#include "expertd/slot_groups.h"
#include "moe/quantize.h"

/* the most that is kept of a call's time for its answer, while it waits for an expert */
#define WAIT_KEEPS_NS (100 * EP_NS_PER_MS)

_Static_assert(EP_FFN_F8_BLOCK == EP_QUANT_BLOCK_F8,
               "kernels and the wire share the blocks of fp8 rows");

typedef struct forward_request forward_request;

/* The works of a request for one expert: [first, first + count). */
typedef struct expert_group {
    ep_weight_wait wait; /* used when the expert is cold */
    forward_request *request;
    uint32_t first;
    uint32_t count;
    /* the last work releases the expert: others may need its memory while this request goes on */
    _Atomic uint32_t works_left;
} expert_group;

struct forward_request {
    ep_forward_handler *handler;
    ep_rpc_call *call;
    const ep_rpc_incoming *asked; /* the call's deadline, caller and time of arrival */
    Expertd__V1__ForwardReply_Closure closure;
    ep_node_model *model;
    ep_node_layer *layer;
    ep_forward_view view;
    ep_work_class work_class;
    bool wants_timing;
    ep_ticket ticket;
    ep_buffer *arena; /* this struct and the arrays below live in it */
    ep_reply_rows reply;
    ep_job_row *rows; /* [slots], grouped by expert */
    ep_work *works;   /* [works_count] */
    uint32_t works_count;
    uint32_t experts_count;
    uint32_t *experts;       /* [experts_count] distinct, ascending */
    uint32_t *expert_rows;   /* [experts_count] */
    ep_resident **residents; /* [experts_count]; NULL: cold; valid once acquired */
    expert_group *groups;    /* [experts_count] */
    ep_relay_part *parts;    /* [parts_count] slots of neighbours */
    uint32_t parts_count;
    ep_work_trace *traces; /* [works_count]; NULL: not traced */
    uint32_t *order;       /* [slots] by expert; NULL: they came sorted */
    ep_slot_shape shape;
    _Atomic bool are_parts_sent;
    /* the first error, when it came from a neighbour or from the wait for an expert */
    ep_error part_error;
    _Atomic uint32_t works_left;  /* and parts */
    _Atomic uint32_t first_error; /* ep_err */
    _Atomic uint32_t failed_expert;
    _Atomic uint64_t first_start_ns;
    ep_trace_fields trace; /* of serve; call 0: not traced */
};

struct ep_forward_handler {
    ep_forward_handler_config config;
    ep_buffer_pool *arenas;
    ep_forward_metrics metrics;
};

ep_err ep_forward_handler_create(const ep_forward_handler_config *config,
                                 ep_forward_handler **out_handler, ep_error *out_error)
{
    ep_forward_handler *handler = calloc(1, sizeof(*handler));
    if (handler == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the request handler");
    }
    handler->config = *config;
    ep_err err = ep_buffer_pool_create(config->bookkeeping_bytes_max,
                                       config->bookkeeping_bytes_max / 4, &handler->arenas);
    if (err != EP_OK) {
        ep_forward_handler_destroy(handler);
        return ep_error_set(out_error, err, "no memory for the request handler");
    }
    ep_forward_metrics_init(&handler->metrics, config->metrics);
    *out_handler = handler;
    return EP_OK;
}

void ep_forward_handler_destroy(ep_forward_handler *handler)
{
    if (handler != NULL) {
        EP_ASSERT(__atomic_load_n(&handler->metrics.stats.in_flight, __ATOMIC_ACQUIRE) == 0);
        ep_buffer_pool_destroy(handler->arenas);
        free(handler);
    }
}

void ep_forward_handler_read_stats(ep_forward_handler *handler, ep_forward_stats *out_stats)
{
    const ep_forward_stats *stats = &handler->metrics.stats;
    const uint64_t in_flight = __atomic_load_n(&stats->in_flight, __ATOMIC_SEQ_CST);
    *out_stats =
        (ep_forward_stats){.in_flight = in_flight, /* read before the others */
                           .served = __atomic_load_n(&stats->served, __ATOMIC_RELAXED),
                           .failed = __atomic_load_n(&stats->failed, __ATOMIC_RELAXED),
                           .hedged = __atomic_load_n(&stats->hedged, __ATOMIC_RELAXED),
                           .rows_served = __atomic_load_n(&stats->rows_served, __ATOMIC_RELAXED)};
}

/* ---- spans: serve and what is inside of it. Without serve none of them is recorded ---- */

static ep_trace_fields trace_begin(const ep_forward_handler *handler,
                                   const Expertd__V1__ForwardRequest *header, ep_rpc_call *call)
{
    ep_trace_fields fields = {.node = handler->config.node_name,
                              .peer = "",
                              .call = ep_rpc_call_incoming(call)->number,
                              .epoch = header->epoch != NULL ? header->epoch->number : 0,
                              .layer = (int32_t)header->layer,
                              .expert = -1};
    ep_traceparent_parse(ep_rpc_call_metadata(call, "traceparent"), &fields.trace, &fields.parent);
    ep_rpc_call_set_trace(call, fields.trace);
    EP_TRACE(serve_begin, &fields);
    EP_TRACE(decode_begin, &fields);
    return fields;
}

static void trace_decode_end(ep_trace_fields fields, uint32_t slots, ep_err status)
{
    fields.rows = slots;
    fields.status = (int32_t)status;
    EP_TRACE(decode_end, &fields);
}

static void trace_serve_end(ep_trace_fields fields, uint32_t slots, ep_err status)
{
    fields.rows = slots;
    fields.status = (int32_t)status;
    EP_TRACE(serve_end, &fields);
}

/* Gives each work the fields of its job's spans. */
static void trace_works(forward_request *request)
{
    ep_work_trace *traces = request->traces;
    for (uint32_t w = 0; w < request->works_count; w++) {
        ep_work *work = &request->works[w];
        traces[w] = (ep_work_trace){.fields = request->trace, .group = w};
        traces[w].fields.parent = request->trace.call;
        traces[w].fields.call = ep_trace_new_id();
        traces[w].fields.expert = (int32_t)(work->place.queue - request->layer->queues);
        traces[w].fields.rows = work->job.rows_count;
        work->trace = &traces[w];
        work->job.trace = &traces[w].fields;
    }
}

/* Ends a call that never became a request. */
static void refuse(const forward_request *request, ep_error *error)
{
    ep_forward_handler *handler = request->handler;
    const bool is_traced = request->trace.call != 0;
    if (is_traced) {
        trace_decode_end(request->trace, 0, error->code);
    }
    snprintf(error->node, sizeof(error->node), "%s", handler->config.node_name);
    ep_forward_metrics_ended(&handler->metrics, error->code, false, 0,
                             ep_clock_now_ns() - request->asked->received_ns, 0);
    ep_rpc_call_finish(request->call, error->code, error);
    if (is_traced) {
        trace_serve_end(request->trace, 0, error->code);
    }
    /* the last thing: after it the handler may go */
    __atomic_fetch_sub(&handler->metrics.stats.in_flight, 1, __ATOMIC_RELEASE);
}

static void send_reply(forward_request *request, uint64_t took_ns, uint64_t queue_ns)
{
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    reply.slots = request->view.slots;
    reply.hidden = request->view.hidden;
    reply.dtype = (uint32_t)request->view.reply_dtype;
    reply.numerics = request->model->numerics;
    reply.node_sum = request->view.node_sum;
    reply.pass_rows = ep_batcher_pass_rows(request->handler->config.batcher);
    if (request->wants_timing) {
        reply.queue_us = queue_ns / EP_NS_PER_US;
        reply.compute_us = (took_ns - queue_ns) / EP_NS_PER_US;
        reply.service_us = (ep_clock_now_ns() - request->asked->received_ns) / EP_NS_PER_US;
    }
    ep_rpc_call_attach(request->call, request->reply.reply);
    request->reply.reply = NULL;
    /* the send is patient, since this is a compute thread that others wait for */
    if (request->work_class == EP_WORK_PREFILL) {
        ep_rpc_call_set_patient(request->call);
    }
    bool is_traced = request->trace.call != 0 && EP_TRACE_SPAN_ON(reply);
    ep_trace_fields fields = request->trace;
    fields.rows = request->view.slots;
    if (is_traced) {
        EP_TRACE(reply_begin, &fields);
    }
    request->closure(&reply, request->call);
    if (is_traced) {
        EP_TRACE(reply_end, &fields);
    }
}

static void describe_failure(const forward_request *request, ep_err result, ep_error *out_error)
{
    uint32_t expert = atomic_load(&request->failed_expert);
    ep_error_set(out_error, result, "model %s layer %u expert %u: %s", request->model->config->name,
                 request->layer->shape.layer, expert,
                 result != EP_ERR_CANCELLED ? ep_err_text(result)
                 : ep_rpc_call_is_cancelled(request->call)
                     ? "the caller no longer waits"
                     : "the node has more work than it can do before the deadline");
    out_error->layer = (int32_t)request->layer->shape.layer;
    out_error->expert = (int32_t)expert;
    snprintf(out_error->node, sizeof(out_error->node), "%s", request->handler->config.node_name);
}

/* Gives back everything and ends the call. The request is gone afterwards. */
static void finish(forward_request *request, ep_err result, const ep_error *error)
{
    ep_forward_handler *handler = request->handler;
    ep_node_layer *layer = request->layer;
    uint64_t now_ns = ep_clock_now_ns();
    uint64_t took_ns = now_ns - request->asked->received_ns;
    /* a request with a result has begun, so first_start_ns is set */
    uint64_t queue_ns =
        result == EP_OK ? atomic_load(&request->first_start_ns) - request->asked->received_ns : 0;
    uint64_t rows = request->view.own_slots;
    ep_admission_leave(handler->config.admission, &request->ticket, now_ns, took_ns, result);
    bool hedged = result == EP_ERR_CANCELLED && ep_rpc_call_is_answered(request->call);
    ep_forward_metrics_ended(&handler->metrics, result, hedged, rows, took_ns, queue_ns);
    if (result == EP_OK) {
        if (request->view.node_sum) {
            ep_reply_rows_finish(&request->reply);
        }
        atomic_fetch_add_explicit(&layer->rows_served, rows, memory_order_relaxed);
        /* shared experts are not counted: every token uses them */
        for (uint32_t g = 0;
             g < request->experts_count && request->experts[g] < layer->shape.experts; g++) {
            atomic_fetch_add_explicit(&layer->slots[request->experts[g]], request->expert_rows[g],
                                      memory_order_relaxed);
        }
        send_reply(request, took_ns, queue_ns);
    }
    ep_rpc_call_finish(request->call, result, error);
    for (uint32_t i = 0; i < request->parts_count; i++) {
        ep_relay_release(&request->parts[i]);
    }
    if (request->trace.call != 0) {
        trace_serve_end(request->trace, (uint32_t)rows, result);
    }
    ep_reply_rows_release(&request->reply);
    ep_buffer_unref(request->arena);
    /* the last thing: after it the handler may go */
    __atomic_fetch_sub(&handler->metrics.stats.in_flight, 1, __ATOMIC_RELEASE);
}

/* Cancels parts whose rows are not needed. While parts are being sent, send_parts does it. */
static void cancel_parts(forward_request *request)
{
    for (uint32_t i = 0; atomic_load(&request->are_parts_sent) && i < request->parts_count; i++) {
        ep_relay_cancel(&request->parts[i]);
    }
}

/* A work or a part has ended; the last one ends the request. */
static void end_one(forward_request *request)
{
    if (atomic_fetch_sub(&request->works_left, 1) != 1) {
        return;
    }
    ep_err outcome = (ep_err)atomic_load(&request->first_error);
    ep_error error;
    ep_error_clear(&error);
    /* Work that was dropped as too late ends CANCELLED too, and then the caller asks another copy
     * at once. With the load of eight nodes on seven 0.85 of the calls were in time this way; 0.02
     * were when such requests ended RESOURCE_EXHAUSTED as on arrival (bench capacity). */
    if (outcome == EP_ERR_CANCELLED && ep_clock_now_ns() >= request->asked->deadline_ns) {
        outcome = EP_ERR_DEADLINE_EXCEEDED;
    }
    if (outcome != EP_OK && request->part_error.code != EP_OK) {
        error = request->part_error;
    } else if (outcome != EP_OK) {
        describe_failure(request, outcome, &error);
    }
    finish(request, outcome, outcome == EP_OK ? NULL : &error);
}

/* Finishes rows that a neighbour sent: they are of the wire type, like rows computed here. */
static void finish_rows(const forward_request *request, const Expertd__V1__RelayPart *part)
{
    const size_t row_bytes = request->reply.row_bytes;
    for (uint32_t i = 0; i < part->slots_count; i++) {
        const ep_job_row row = {.out = request->reply.rows + (part->slots_begin + i) * row_bytes};
        ep_reply_rows_done(&request->reply, &row, 1);
    }
}

/* Keeps the first error. error: NULL when a work of this group failed with code. */
static void fail(forward_request *request, ep_err code, const expert_group *group,
                 const ep_error *error)
{
    uint32_t none = EP_OK;
    if (atomic_compare_exchange_strong(&request->first_error, &none, (uint32_t)code)) {
        if (error != NULL) {
            request->part_error = *error;
        } else {
            atomic_store(&request->failed_expert, request->experts[group - request->groups]);
        }
    }
    cancel_parts(request);
}

static void on_part_done(ep_relay_part *part, const ep_error *error)
{
    forward_request *request = part->arg;
    if (error == NULL) {
        finish_rows(request, part->header->relay[part->index]);
    } else {
        fail(request, error->code, NULL, error);
    }
    end_one(request);
}

static void on_call_cancelled(void *arg, ep_rpc_call *call)
{
    (void)call;
    cancel_parts(arg);
}

/* To be called before the works begin: the request lives until they end. */
static void send_parts(forward_request *request, const Expertd__V1__ForwardRequest *header)
{
    const size_t row_bytes = request->reply.row_bytes;
    for (uint32_t i = 0; i < request->parts_count; i++) {
        request->parts[i] = (ep_relay_part){.call = request->call,
                                            .header = header,
                                            .view = &request->view,
                                            .index = i + 1,
                                            .rows = request->reply.rows +
                                                    header->relay[i + 1]->slots_begin * row_bytes,
                                            .done = on_part_done,
                                            .arg = request};
    }
    for (uint32_t i = 0; i < request->parts_count; i++) {
        ep_relay_send(request->handler->config.relay, &request->parts[i]);
    }
    atomic_store(&request->are_parts_sent, true);
    if (atomic_load(&request->first_error) != EP_OK) {
        cancel_parts(request);
    }
    ep_rpc_call_on_cancel(request->call, on_call_cancelled, request);
}

static void on_work_done(ep_work *work, ep_err result)
{
    expert_group *group = work->arg;
    forward_request *request = group->request;
    if (result != EP_OK) {
        fail(request, result, group, NULL);
    } else {
        ep_forward_metrics_rows(&request->handler->metrics, work->job.rows, work->job.rows_count,
                                request->view.reply_dtype, request->view.hidden);
        ep_reply_rows_done(&request->reply, work->job.rows, work->job.rows_count);
        uint64_t first = atomic_load(&request->first_start_ns);
        while ((first == 0 || work->started_ns < first) &&
               !atomic_compare_exchange_weak(&request->first_start_ns, &first, work->started_ns)) {
        }
    }
    if (atomic_fetch_sub(&group->works_left, 1) == 1) {
        ep_resident_release(request->residents[group - request->groups]);
    }
    end_one(request);
}

/* True when nobody waits for the result any more, or when the rest of it would come too late. */
static bool is_dropped(const ep_work *work)
{
    const forward_request *request = ((const expert_group *)work->arg)->request;
    const uint32_t left = atomic_load(&request->works_left),
                   all = request->works_count + request->parts_count;
    return atomic_load(&request->first_error) != EP_OK || ep_rpc_call_is_cancelled(request->call) ||
           ep_admission_is_lost(request->handler->config.admission, &request->ticket,
                                (double)left / all, ep_clock_now_ns());
}

/* The next piece of an arena; NULL when it is empty or only counted. */
static void *part_of(uint8_t *base, size_t *used, size_t bytes)
{
    void *at = base == NULL || bytes == 0 ? NULL : base + *used;
    *used += ep_align_up(bytes, EP_BUFFER_ALIGN);
    return at;
}

/* Places the request's arrays behind it in its arena; base NULL: only counts. Returns the bytes of
 * all. The counts come from a checked frame, so 64-bit sums cannot overflow. */
static size_t lay_out(forward_request *request, uint8_t *base)
{
    const ep_slot_shape *shape = &request->shape;
    const size_t slots = request->view.own_slots, works = shape->works_max,
                 experts = shape->experts_max;
    size_t used = ep_align_up(sizeof(*request), EP_BUFFER_ALIGN);
    request->rows = part_of(base, &used, slots * sizeof(*request->rows));
    request->works = part_of(base, &used, works * sizeof(*request->works));
    request->residents = part_of(base, &used, experts * sizeof(*request->residents));
    request->experts = part_of(base, &used, experts * sizeof(*request->experts));
    request->expert_rows = part_of(base, &used, experts * sizeof(*request->expert_rows));
    request->groups = part_of(base, &used, experts * sizeof(*request->groups));
    request->parts = part_of(base, &used, request->parts_count * sizeof(*request->parts));
    if (request->trace.call != 0) {
        request->traces = part_of(base, &used, works * sizeof(*request->traces));
    }
    if (!shape->is_sorted) { /* order, and scratch for counts */
        request->order = part_of(
            base, &used, (slots + request->layer->experts_total + 1) * sizeof(*request->order));
    }
    return used;
}

static ep_work *begin_work(forward_request *request, const ep_job_row *rows)
{
    const ep_forward_view *view = &request->view;
    const ep_layer_shape *shape = &request->layer->shape;
    const uint32_t g = request->experts_count - 1;
    ep_work *work = &request->works[request->works_count++];
    request->groups[g].count++;
    *work = (ep_work){
        .job = {.rows = rows,
                .x_dtype = view->x_dtype,
                .out_dtype = view->reply_dtype,
                .weight_on_input = view->weight_on_input},
        .place = {.queue = &request->layer->queues[request->experts[g]],
                  .work_class = request->work_class,
                  .tenant = request->ticket.tenant,
                  /* multiplications of a row: the unit in which queues and tenants are compared */
                  .row_cost = 1 + (uint32_t)((uint64_t)3 * shape->hidden * shape->inner /
                                             EP_NODE_ROW_COST_UNIT)},
        .is_dropped = is_dropped,
        .done = on_work_done,
        .arg = &request->groups[g],
    };
    return work;
}

/* Fills rows, works, groups and the list of experts. Weights come later. */
static void group_slots(forward_request *request)
{
    const ep_forward_view *view = &request->view;
    const uint32_t *order = request->order;
    const uint32_t rows_max = ep_batch_rows_max[request->work_class];
    ep_work *work = NULL;
    for (uint32_t i = 0; i < view->own_slots; i++) {
        uint32_t slot = order != NULL ? order[i] : i;
        ep_wire_slot place = view->wire_slots[slot];
        bool is_new_expert = request->experts_count == 0 ||
                             request->experts[request->experts_count - 1] != place.expert;
        if (is_new_expert) {
            const uint32_t g = request->experts_count++;
            request->experts[g] = place.expert;
            request->expert_rows[g] = 0;
            request->groups[g] = (expert_group){.request = request, .first = request->works_count};
        }
        if (is_new_expert || work->job.rows_count == rows_max) {
            work = begin_work(request, &request->rows[i]);
        }
        const float *scales = view->row_scales != NULL
                                  ? view->row_scales + (size_t)place.row * view->row_scales_count
                                  : NULL;
        request->rows[i] = (ep_job_row){
            .x = view->x + place.row * view->x_row_bytes,
            .x_scale = scales != NULL ? scales[0] : 1.0f,
            .x_scales = scales,
            .input_weight = view->slot_scales != NULL ? view->slot_scales[slot] : 1.0f,
            .out = request->reply.rows + slot * request->reply.row_bytes,
        };
        work->job.rows_count++;
        request->expert_rows[request->experts_count - 1]++;
    }
    for (uint32_t g = 0; g < request->experts_count; g++) {
        atomic_init(&request->groups[g].works_left, request->groups[g].count);
    }
}

static ep_err missing_expert(const ep_forward_handler *handler, const ep_node_model *model,
                             const ep_node_layer *layer, uint32_t expert, ep_expert_state state,
                             ep_epoch asked, ep_error *out_error)
{
    ep_epoch ours = ep_node_epoch_in_force(handler->config.epoch);
    bool has_epoch = asked.term != 0 || asked.number != 0;
    bool is_stale = has_epoch && ep_epoch_compare(asked, ours) < 0;
    ep_err code = is_stale ? EP_ERR_STALE_EPOCH : EP_ERR_NOT_OWNER;
    if (is_stale) {
        ep_error_set(out_error, code,
                     "model %s layer %u expert %u %s: the table's epoch %" PRIu64 ".%" PRIu64
                     " is older than %" PRIu64 ".%" PRIu64,
                     model->config->name, layer->shape.layer, expert, ep_expert_state_text(state),
                     asked.term, asked.number, ours.term, ours.number);
        out_error->current_epoch = ours.number;
    } else {
        ep_error_set(out_error, code, "model %s layer %u expert %u %s", model->config->name,
                     layer->shape.layer, expert, ep_expert_state_text(state));
    }
    out_error->layer = (int32_t)layer->shape.layer;
    out_error->expert = (int32_t)expert;
    return code;
}

static void give_weights(const expert_group *group)
{
    forward_request *request = group->request;
    const ep_resident *resident = request->residents[group - request->groups];
    for (uint32_t w = group->first; w < group->first + group->count; w++) {
        request->works[w].backend = resident->backend;
        request->works[w].job.weights = resident->weights;
    }
}

/* Takes references to the resident experts; those of cold ones stay NULL and are counted in
 * *cold_count. */
static ep_err acquire_experts(forward_request *request, ep_epoch asked, uint32_t *cold_count,
                              ep_error *out_error)
{
    uint32_t missing = 0;
    ep_expert_state state = EP_EXPERT_ABSENT;
    if (!ep_weight_store_acquire(request->handler->config.store, request->layer->store_slot,
                                 request->experts, request->expert_rows, request->experts_count,
                                 request->residents, &missing, &state)) {
        return missing_expert(request->handler, request->model, request->layer, missing, state,
                              asked, out_error);
    }
    for (uint32_t g = 0; g < request->experts_count; g++) {
        if (request->residents[g] != NULL) {
            give_weights(&request->groups[g]);
        } else {
            ++*cold_count;
        }
    }
    return EP_OK;
}

static void fail_group(expert_group *group, const ep_error *error)
{
    forward_request *request = group->request;
    ep_error failed = *error;
    snprintf(failed.node, sizeof(failed.node), "%s", request->handler->config.node_name);
    fail(request, error->code, group, &failed);
    for (uint32_t i = 0, count = group->count; i < count; i++) {
        end_one(request); /* the last call frees the request, and group with it */
    }
}

/* A cold expert has been loaded, or will not be. */
static void on_expert_ready(ep_weight_wait *wait, ep_resident *resident, const ep_error *error)
{
    expert_group *group = wait->arg;
    forward_request *request = group->request;
    if (resident == NULL) {
        fail_group(group, error);
        return;
    }
    request->residents[group - request->groups] = resident;
    give_weights(group);
    ep_batcher_submit(request->handler->config.batcher, &request->works[group->first], group->count,
                      NULL);
}

static bool is_wait_dropped(const ep_weight_wait *wait)
{
    const expert_group *group = wait->arg;
    return is_dropped(&group->request->works[group->first]);
}

/* Part of the call's time is kept for the answer, so that the caller learns the reason. */
static uint64_t wait_until_ns(const forward_request *request)
{
    const uint64_t now_ns = ep_clock_now_ns(), deadline_ns = request->asked->deadline_ns;
    const uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
    const uint64_t kept_ns = left_ns / 8 < WAIT_KEEPS_NS ? left_ns / 8 : WAIT_KEEPS_NS;
    return deadline_ns == EP_TIME_NEVER ? EP_TIME_NEVER : deadline_ns - kept_ns;
}

/* Submits each run of groups whose experts are here. The last submit may end the request. */
static void submit_runs(forward_request *request, const ep_batch_step *step)
{
    ep_batcher *batcher = request->handler->config.batcher;
    const uint32_t experts_count = request->experts_count;
    for (uint32_t g = 0, next; g < experts_count; g = next) {
        uint32_t count = 0;
        const uint32_t first = request->groups[g].first;
        for (next = g; next < experts_count && request->residents[next] != NULL; next++) {
            count += request->groups[next].count;
        }
        if (count > 0) {
            ep_batcher_submit(batcher, &request->works[first], count, step);
            step = NULL; /* a request is one member of its step */
        } else {
            next = g + 1;
        }
    }
}

/* Submits the works of resident experts; those of a cold expert follow when it is loaded. */
static void submit_around_cold(forward_request *request, const ep_batch_step *step)
{
    ep_weight_store *store = request->handler->config.store;
    const uint64_t until_ns = wait_until_ns(request);
    const uint32_t experts_count = request->experts_count;
    const uint32_t store_slot = request->layer->store_slot;
    atomic_fetch_add(&request->works_left, 1); /* one for this function, until all is under way */
    submit_runs(request, step);
    for (uint32_t g = 0; g < experts_count; g++) {
        if (request->residents[g] == NULL) {
            request->groups[g].wait = (ep_weight_wait){.expert = request->experts[g],
                                                       .deadline_ns = until_ns,
                                                       .is_dropped = is_wait_dropped,
                                                       .ready = on_expert_ready,
                                                       .arg = &request->groups[g]};
            ep_weight_store_wait(store, store_slot, &request->groups[g].wait, 1);
        }
    }
    end_one(request);
}

/* Admits rows and bytes, those of neighbours' parts too: their copies and replies are held here as
 * well. */
static ep_err admit(forward_request *request, const Expertd__V1__ForwardRequest *header,
                    uint64_t bytes, ep_error *out_error)
{
    const ep_forward_handler_config *config = &request->handler->config;
    ep_ticket ticket = {.tokens = request->view.rows, /* no overflow: a frame has fewer rows, and
                                                         parts */
                        .bytes = bytes + request->asked->tensor_bytes,
                        .is_prefill = request->work_class == EP_WORK_PREFILL,
                        .deadline_ns = request->asked->deadline_ns};
    if (config->tenants->count > 1) {
        ticket.tenant =
            ep_tenants_find(config->tenants, ep_rpc_call_metadata(request->call, "tenant"));
    }
    for (uint32_t i = 0; i < request->parts_count; i++) {
        uint32_t part_rows;
        uint64_t part_bytes;
        ep_relay_bound(&request->view, header->relay[i + 1]->slots_count, &part_rows, &part_bytes);
        ticket.tokens += part_rows;
        ticket.bytes += part_bytes;
    }
    ep_err err = ep_admission_enter(config->admission, &ticket, ep_clock_now_ns(), out_error);
    request->ticket = ticket;
    return err;
}

/* Gets memory for request and reply within the budgets, and copies draft there. On error holds
 * none. */
static ep_err make_request(forward_request *draft, const Expertd__V1__ForwardRequest *header,
                           forward_request **out_request, ep_error *out_error)
{
    ep_forward_handler *handler = draft->handler;
    const ep_forward_view *view = &draft->view;
    ep_reply_rows_plan(view, &draft->reply);
    size_t reply_bytes = draft->reply.layout.total_bytes;
    if (reply_bytes > handler->config.reply_bytes_max) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "a reply of %u slots x %u values is above frame_bytes_max; allowed: %zu bytes",
            view->slots, view->hidden, handler->config.reply_bytes_max);
    }
    reply_bytes += draft->reply.beside_bytes;
    ep_slot_shape_of(view->wire_slots, view->own_slots, draft->layer->experts_total,
                     ep_batch_rows_max[draft->work_class], &draft->shape);
    const size_t bytes = lay_out(draft, NULL);
    ep_err err = admit(draft, header, reply_bytes + bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_buffer_acquire(handler->arenas, bytes, &draft->arena);
    if (err == EP_OK) {
        err = ep_reply_rows_acquire(&draft->reply, draft->asked->pool);
    }
    if (err != EP_OK) {
        ep_buffer_unref(draft->arena);
        ep_admission_leave(handler->config.admission, &draft->ticket, ep_clock_now_ns(), 0, err);
        return ep_error_set(
            out_error, err,
            "no buffer of %zu bytes for the reply or %zu for the request; see buffer_bytes_max",
            reply_bytes, bytes);
    }
    forward_request *request = (forward_request *)(void *)draft->arena->data;
    *request = *draft;
    request->reply.view = &request->view;
    lay_out(request, request->arena->data);
    *out_request = request;
    return EP_OK;
}

static ep_err check_relay(forward_request *draft, const Expertd__V1__ForwardRequest *header,
                          ep_error *out_error)
{
    if (draft->handler->config.relay == NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "this node passes nothing on: relay has %zu parts, allowed 0",
                            header->n_relay);
    }
    ep_err err = ep_relay_check(header, draft->handler->config.node_name, out_error);
    if (err == EP_OK) {
        draft->view.own_slots = header->relay[0]->slots_count;
        draft->parts_count = (uint32_t)header->n_relay - 1; /* the first one is our own */
    }
    return err;
}

static ep_err check_header(forward_request *draft, const Expertd__V1__ForwardRequest *header,
                           ep_error *out_error)
{
    const ep_rpc_incoming *asked = draft->asked;
    ep_err err = ep_node_models_find(draft->handler->config.models, header->model, header->version,
                                     header->layer, &draft->model, &draft->layer, out_error);
    if (err != EP_OK) {
        return err;
    }
    const char *numerics = draft->model->numerics;
    if (header->numerics[0] != 0 && strcmp(header->numerics, numerics) != 0) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "model %s is computed here with numerics '%s', the call pins '%.90s'",
                            header->model, numerics, header->numerics);
    }
    err = ep_forward_view_make(header, asked->tensors, asked->tensor_bytes, &draft->layer->shape,
                               &draft->view, out_error);
    if (err == EP_OK && header->n_relay > 0) {
        err = check_relay(draft, header, out_error);
    }
    if (err == EP_OK && ep_rpc_call_is_cancelled(draft->call)) {
        return ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                            "the deadline passed before the work began");
    }
    return err;
}

static void start(forward_request *request, const Expertd__V1__ForwardRequest *header)
{
    uint32_t cold_count = 0;
    ep_error error;
    if (request->order != NULL) {
        ep_slot_order(request->view.wire_slots, request->view.own_slots,
                      request->layer->experts_total, request->order + request->view.own_slots,
                      request->order);
    }
    group_slots(request);
    ep_error_clear(&error);
    ep_epoch asked = {0};
    if (header->epoch != NULL) {
        asked = (ep_epoch){.term = header->epoch->term, .number = header->epoch->number};
    }
    ep_err err = acquire_experts(request, asked, &cold_count, &error);
    if (request->trace.call != 0) {
        trace_works(request);
        trace_decode_end(request->trace, request->view.slots, err);
    }
    if (err != EP_OK) {
        snprintf(error.node, sizeof(error.node), "%s", request->handler->config.node_name);
        request->parts_count = 0; /* none was sent, so none is cancelled */
        finish(request, err, &error);
        return;
    }
    EP_ASSERT(request->works_count > 0); /* a checked request has at least one slot */
    atomic_store(&request->works_left, request->works_count + request->parts_count);
    if (request->parts_count > 0) {
        send_parts(request, header);
    }
    const ep_batch_step step = {.layer = request->layer,
                                .group = header->step_group,
                                .size = header->step_group_size,
                                .member = header->step_member != 0 ? header->step_member
                                                                   : request->asked->number};
    if (cold_count > 0) {
        submit_around_cold(request, &step);
    } else {
        ep_batcher_submit(request->handler->config.batcher, request->works, request->works_count,
                          &step);
    }
}

void ep_forward_handler_call(ep_forward_handler *handler, const Expertd__V1__ForwardRequest *header,
                             Expertd__V1__ForwardReply_Closure closure, ep_rpc_call *call)
{
    forward_request draft = {.handler = handler,
                             .call = call,
                             .asked = ep_rpc_call_incoming(call),
                             .closure = closure,
                             .work_class = header->prefill ? EP_WORK_PREFILL : EP_WORK_DECODE,
                             .wants_timing = header->want_timing};
    forward_request *request;
    ep_error error;
    ep_error_clear(&error);
    __atomic_fetch_add(&handler->metrics.stats.in_flight, 1, __ATOMIC_SEQ_CST);
    if (EP_TRACE_SPAN_ON(serve)) {
        draft.trace = trace_begin(handler, header, call);
    }
    ep_err err = ep_rpc_call_check_draining(call, &error);
    if (err == EP_OK) {
        err = check_header(&draft, header, &error);
    }
    if (err == EP_OK) {
        err = make_request(&draft, header, &request, &error);
    }
    if (err != EP_OK) {
        error.code = err;
        refuse(&draft, &error);
        return;
    }
    start(request, header);
}
