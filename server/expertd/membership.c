/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small state machine on the loop's thread: connect, register, send heartbeats; one call at a
 * time. RPC callbacks only put their result into the mailbox and wake the loop.
 */
#include "expertd/membership.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "expertd/load_report.h"

#define CALL_MS 5000

typedef enum letter_kind { LETTER_NONE, LETTER_REGISTER, LETTER_HEARTBEAT } letter_kind;

/* The result of the call in flight, passed from an RPC thread to the loop. */
typedef struct mailbox {
    pthread_mutex_t lock;
    bool has_state;
    bool is_ready;
    ep_error state_error;
    bool has_letter;
    bool failed;
    ep_error error;
    uint8_t *packed; /* the reply, malloc'ed */
    size_t packed_bytes;
} mailbox;

struct ep_membership {
    ep_membership_config config;
    ep_rpc_channel *channel;
    ep_load_report *loads;
    ep_loop_timer *heartbeat;
    ep_loop_timer *drop;
    ep_loop_task mail_task;
    mailbox mail;
    letter_kind in_flight; /* LETTER_NONE: no call */
    bool is_ready;         /* the channel */
    bool is_registered;
    bool hurries; /* send another heartbeat as soon as this call has ended */
    bool models_changed;
    bool sent_draining; /* the state in the heartbeat in flight is "draining" */
    bool sent_leaving;  /* the same for "leaving" */
    bool is_loading;    /* assigned is not loaded yet */
    bool has_drop_timer;
    uint32_t heartbeat_ms;
    /* proves to the coordinator that this is the same process; see RegisterRequest */
    char secret[33];
    uint64_t owned_changes; /* of the store, when last looked at */
    ep_epoch assigned;      /* newest assignment; 0.0 none */
    pthread_mutex_t view_lock;
    /* lost_why is also the last failure logged, so that a lasting failure gives one line */
    ep_membership_view view;
};

static void tick(void *arg);
static void on_mail(void *arg);

static void set_connected(ep_membership *m, bool connected)
{
    pthread_mutex_lock(&m->view_lock);
    bool changed = m->view.is_connected != connected;
    m->view.is_connected = connected;
    m->view.lost_why[0] = connected ? 0 : m->view.lost_why[0];
    pthread_mutex_unlock(&m->view_lock);
    if (changed) {
        ep_log(EP_LOG_INFO, "coordinator", EP_KV(state, connected ? "registered" : "lost"),
               EP_KV(url, m->config.coordinator_url));
        m->config.on_change(m->config.arg);
    }
}

static void log_once(ep_membership *m, const char *what, const ep_error *error)
{
    if (strcmp(m->view.lost_why, error->text) != 0) { /* no lock: only this thread writes it */
        pthread_mutex_lock(&m->view_lock);
        snprintf(m->view.lost_why, sizeof(m->view.lost_why), "%s", error->text);
        pthread_mutex_unlock(&m->view_lock);
        ep_log(EP_LOG_WARN, "coordinator", EP_KV(url, m->config.coordinator_url), EP_KV(step, what),
               EP_KV(code, ep_err_name(error->code)), EP_KV(reason, error->text),
               EP_KV(effect, "the step is tried again"));
    }
}

static ep_epoch epoch_of(const Expertd__V1__Epoch *epoch)
{
    return epoch != NULL ? (ep_epoch){.term = epoch->term, .number = epoch->number} : (ep_epoch){0};
}

static bool is_none(ep_epoch epoch)
{
    return epoch.term == 0 && epoch.number == 0;
}

/* ---- assignments ---- */

static void mark_assigned(const ep_node_layer *layer, const Expertd__V1__NodeAssignment *assignment,
                          uint8_t *wanted)
{
    for (size_t i = 0; i < assignment->n_experts; i++) {
        if (assignment->experts[i] < layer->experts_total) {
            wanted[assignment->experts[i]] = 1;
        } else {
            ep_log(EP_LOG_ERROR, "assignment", EP_KV(model, assignment->model),
                   EP_KV(layer, assignment->layer), EP_KV(expert, assignment->experts[i]),
                   EP_KV(expert_max, layer->experts_total - 1),
                   EP_KV(reason, "the layer has no such expert"),
                   EP_KV(effect, "the others are loaded"));
        }
    }
}

static void want_layer(ep_membership *m, const ep_node_model *model, const ep_node_layer *layer,
                       Expertd__V1__NodeAssignment *const *assignments, size_t count)
{
    uint8_t *wanted = malloc(layer->experts_total);
    if (wanted == NULL) {
        ep_log(EP_LOG_ERROR, "assignment", EP_KV(model, model->config->name),
               EP_KV(layer, layer->shape.layer), EP_KV(reason, "no memory"),
               EP_KV(effect, "the layer stays as it is"));
        return;
    }
    ep_node_model_configured(model, layer, wanted);
    for (size_t i = 0; i < count; i++) {
        const Expertd__V1__NodeAssignment *a = assignments[i];
        bool same_version = a->version[0] == 0 || strcmp(a->version, model->info->version) == 0;
        if (a->layer == layer->shape.layer && same_version &&
            strcmp(a->model, model->config->name) == 0) {
            mark_assigned(layer, a, wanted);
        }
    }
    ep_weight_store_want(m->config.store, layer->store_slot, wanted);
    free(wanted);
}

static void check_models_known(const ep_membership *m,
                               Expertd__V1__NodeAssignment *const *assignments, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        ep_node_model *model;
        ep_node_layer *layer;
        ep_error error;
        if (ep_node_models_find(m->config.models, assignments[i]->model, assignments[i]->version,
                                assignments[i]->layer, &model, &layer, &error) != EP_OK) {
            ep_log(EP_LOG_ERROR, "assignment", EP_KV(reason, error.text),
                   EP_KV(effect, "that part is left out"));
        }
    }
}

static void apply(ep_membership *m, ep_epoch epoch, Expertd__V1__NodeAssignment *const *assignments,
                  size_t count)
{
    if (is_none(epoch) || ep_epoch_compare(epoch, m->assigned) == 0) {
        return; /* no table yet, or one that is already being worked on */
    }
    m->assigned = epoch;
    m->is_loading = true;
    check_models_known(m, assignments, count);
    for (uint32_t i = 0; i < m->config.models->count; i++) {
        const ep_node_model *model = &m->config.models->models[i];
        for (uint32_t l = 0; l < model->layers_count; l++) {
            want_layer(m, model, &model->layers[l], assignments, count);
        }
    }
    ep_log(EP_LOG_INFO, "assignment", EP_KV(state, "taken"), EP_KV(term, epoch.term),
           EP_KV(epoch, epoch.number), EP_KV(parts, count));
    ep_membership_on_weights(m);
}

/* Starts the grace period once the table in force is as new as the assignment, so that it no longer
 * needs the experts that the assignment left out. */
static void consider_drop(ep_membership *m)
{
    ep_epoch in_force = ep_node_epoch_in_force(m->config.epoch);
    if (!m->has_drop_timer && !m->is_loading && !is_none(m->assigned) &&
        ep_epoch_compare(in_force, m->assigned) >= 0 &&
        ep_weight_store_unwanted_count(m->config.store) > 0) {
        m->has_drop_timer = true;
        ep_loop_timer_start(m->drop, m->config.drop_grace_ms, 0);
    }
}

static void on_drop(void *arg)
{
    ep_membership *m = arg;
    m->has_drop_timer = false;
    if (m->is_loading ||
        ep_epoch_compare(ep_node_epoch_in_force(m->config.epoch), m->assigned) < 0) {
        return; /* a newer assignment came; its commit starts a new grace period */
    }
    ep_log(EP_LOG_INFO, "experts-drop",
           EP_KV(experts, ep_weight_store_unwanted_count(m->config.store)));
    ep_weight_store_drop_unwanted(m->config.store);
    m->models_changed = true;
    ep_membership_hurry(m);
    m->config.on_change(m->config.arg);
}

void ep_membership_on_weights(ep_membership *m)
{
    ep_weight_stats stats;
    ep_weight_store_read_stats(m->config.store, &stats);
    /* a cold expert was read for the first time, or its load failed */
    if (stats.owned_changes != m->owned_changes) {
        m->owned_changes = stats.owned_changes;
        m->models_changed = true;
    }
    if (!m->is_loading || stats.pending_count > 0) {
        return;
    }
    m->models_changed = true;
    m->is_loading = false;
    /* The epoch counts as loaded even if experts failed: which are owned is reported beside it. */
    ep_node_epoch_set_loaded(m->config.epoch, m->assigned);
    ep_log(stats.failed_count == 0 ? EP_LOG_INFO : EP_LOG_WARN, "assignment",
           EP_KV(state, "loaded"), EP_KV(term, m->assigned.term), EP_KV(epoch, m->assigned.number),
           EP_KV(experts, stats.owned_count), EP_KV(experts_failed, stats.failed_count),
           EP_KV(reason, stats.failed_count == 0 ? NULL : stats.last_error));
    pthread_mutex_lock(&m->view_lock);
    m->view.was_assigned = true;
    pthread_mutex_unlock(&m->view_lock);
    consider_drop(m);
    ep_membership_hurry(m);
    m->config.on_change(m->config.arg);
}

/* ---- replies, on the loop's thread ---- */

static void set_in_force(ep_membership *m, const Expertd__V1__Epoch *committed,
                         const Expertd__V1__Epoch *newest,
                         Expertd__V1__Neighbour *const *neighbours, size_t neighbours_count)
{
    ep_epoch epoch = epoch_of(committed != NULL ? committed : newest);
    /* otherwise the coordinator has no table yet, and clients keep an older one */
    if (!is_none(epoch)) {
        ep_node_epoch_set_in_force(m->config.epoch, epoch);
        m->config.on_neighbours(m->config.arg, neighbours, neighbours_count);
    }
    consider_drop(m);
}

static void set_heartbeat(ep_membership *m, uint32_t ms)
{
    ms = ms == 0                    ? EP_HEARTBEAT_MS_DEFAULT
         : ms < EP_HEARTBEAT_MS_MIN ? EP_HEARTBEAT_MS_MIN
         : ms > EP_HEARTBEAT_MS_MAX ? EP_HEARTBEAT_MS_MAX
                                    : ms;
    m->heartbeat_ms = ms;
    ep_loop_timer_start(m->heartbeat, ms, ms);
}

static void on_registered(ep_membership *m, const Expertd__V1__RegisterReply *reply)
{
    m->is_registered = true;
    ep_load_report_forget(m->loads); /* this may be another coordinator */
    /* repeated with the first heartbeat, as it may have changed since the request was made */
    m->models_changed = true;
    pthread_mutex_lock(&m->view_lock);
    m->view.node_id = reply->node_id;
    pthread_mutex_unlock(&m->view_lock);
    set_heartbeat(m, reply->heartbeat_ms);
    set_connected(m, true);
    apply(m, epoch_of(reply->epoch), reply->assignments, reply->n_assignments);
    set_in_force(m, reply->committed, reply->epoch, reply->neighbours, reply->n_neighbours);
    m->config.on_policy(m->config.arg, reply->policy);
}

static void on_heartbeat(ep_membership *m, const Expertd__V1__HeartbeatReply *reply)
{
    if (reply->reregister) {
        ep_log(EP_LOG_INFO, "coordinator", EP_KV(state, "registering"),
               EP_KV(url, m->config.coordinator_url), EP_KV(reason, "the coordinator asks for it"));
        m->is_registered = false;
        m->hurries = true;
        return;
    }
    set_connected(m, true);
    pthread_mutex_lock(&m->view_lock);
    m->view.said_draining |= m->sent_draining;
    m->view.said_leaving = m->sent_leaving;
    m->view.copies_listed = reply->copies_listed;
    snprintf(m->view.note, sizeof(m->view.note), "%s", reply->note);
    pthread_mutex_unlock(&m->view_lock);
    if (m->sent_draining) {
        m->config.on_change(m->config.arg);
    }
    if (reply->has_assignments) {
        apply(m, epoch_of(reply->epoch), reply->assignments, reply->n_assignments);
    }
    set_in_force(m, reply->committed, reply->epoch, reply->neighbours, reply->n_neighbours);
    m->config.on_policy(m->config.arg, reply->policy);
}

static void open_letter(ep_membership *m, letter_kind kind, const uint8_t *packed, size_t bytes)
{
    const ProtobufCMessageDescriptor *type = kind == LETTER_REGISTER
                                                 ? &expertd__v1__register_reply__descriptor
                                                 : &expertd__v1__heartbeat_reply__descriptor;
    ProtobufCMessage *message = protobuf_c_message_unpack(type, NULL, bytes, packed);
    if (message == NULL) {
        ep_log(EP_LOG_ERROR, "coordinator", EP_KV(url, m->config.coordinator_url),
               EP_KV(reason, "no memory for its reply"), EP_KV(effect, "it is asked again"));
        return;
    }
    if (kind == LETTER_REGISTER) {
        on_registered(m, (const Expertd__V1__RegisterReply *)message);
    } else {
        on_heartbeat(m, (const Expertd__V1__HeartbeatReply *)message);
    }
    protobuf_c_message_free_unpacked(message, NULL);
}

static void on_call_failed(ep_membership *m, letter_kind kind, const ep_error *error)
{
    ep_error why = *error;
    ep_error_prefix(&why, why.code, "%s", m->config.coordinator_url);
    log_once(m, kind == LETTER_REGISTER ? "registration" : "heartbeat", &why);
    set_connected(m, false);
    /* the models in this call may be lost, and a loaded epoch counts only together with them */
    m->models_changed = true;
    ep_load_report_forget(m->loads); /* the report may not have arrived */
    if (error->code == EP_ERR_NOT_FOUND || error->code == EP_ERR_FAILED_PRECONDITION) {
        m->is_registered = false; /* the coordinator does not know us */
    }
}

static void on_channel_state(ep_membership *m, bool ready, const ep_error *error)
{
    m->is_ready = ready;
    m->is_registered = false; /* a new connection may lead to a new coordinator */
    if (ready) {
        tick(m);
    } else {
        log_once(m, "connection", error);
        set_connected(m, false);
    }
}

static void on_mail(void *arg)
{
    ep_membership *m = arg;
    pthread_mutex_lock(&m->mail.lock);
    mailbox mail = m->mail;
    m->mail.has_state = false;
    m->mail.has_letter = false;
    m->mail.packed = NULL;
    pthread_mutex_unlock(&m->mail.lock);
    if (mail.has_letter) {
        letter_kind kind = m->in_flight;
        m->in_flight = LETTER_NONE;
        if (mail.failed) {
            on_call_failed(m, kind, &mail.error);
        } else {
            open_letter(m, kind, mail.packed, mail.packed_bytes);
        }
        free(mail.packed);
    }
    if (mail.has_state) {
        on_channel_state(m, mail.is_ready, &mail.state_error);
    }
    if (m->hurries && m->in_flight == LETTER_NONE) {
        m->hurries = false;
        tick(m);
    }
}

/* ---- RPC threads ---- */

static void on_state(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                     const Expertd__V1__Hello *peer, const ep_error *error)
{
    ep_membership *m = arg;
    (void)channel;
    (void)peer;
    if (state != EP_CHANNEL_READY && state != EP_CHANNEL_BROKEN) {
        return;
    }
    pthread_mutex_lock(&m->mail.lock);
    m->mail.has_state = true;
    m->mail.is_ready = state == EP_CHANNEL_READY;
    if (error != NULL) {
        m->mail.state_error = *error;
    }
    pthread_mutex_unlock(&m->mail.lock);
    ep_service_loop_post(m->config.loop, &m->mail_task);
}

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    ep_membership *m = arg;
    uint8_t *packed = NULL;
    size_t bytes = 0;
    if (error == NULL) {
        bytes = protobuf_c_message_get_packed_size(reply->header);
        packed = malloc(bytes > 0 ? bytes : 1);
        if (packed != NULL) {
            protobuf_c_message_pack(reply->header, packed);
        }
    }
    pthread_mutex_lock(&m->mail.lock);
    m->mail.has_letter = true;
    m->mail.failed = packed == NULL;
    m->mail.packed = packed;
    m->mail.packed_bytes = bytes;
    if (error != NULL) {
        m->mail.error = *error;
    } else if (packed == NULL) {
        ep_error_set(&m->mail.error, EP_ERR_NO_MEMORY, "no memory for the reply");
    }
    pthread_mutex_unlock(&m->mail.lock);
    ep_service_loop_post(m->config.loop, &m->mail_task);
}

/* ---- requests ---- */

static void call(ep_membership *m, letter_kind kind, const char *method,
                 const ProtobufCMessage *message)
{
    ep_error error;
    ep_rpc_call_id id;
    ep_rpc_request request = {
        .method = ep_rpc_method_by_name("expertd.v1.Coordinator", method),
        .header = message,
        .deadline_ns = ep_clock_now_ns() + CALL_MS * EP_NS_PER_MS,
    };
    m->in_flight = kind; /* set before the call begins: its reply may come before start returns */
    if (ep_rpc_call_start(m->channel, &request, on_reply, m, &id, &error) != EP_OK) {
        m->in_flight = LETTER_NONE;
        on_call_failed(m, kind, &error);
    }
}

static void send_register(ep_membership *m)
{
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    if (ep_node_models_describe(m->config.models, true, &request.models, &request.n_models) !=
        EP_OK) {
        return; /* the next tick tries again */
    }
    request.node = (char *)(uintptr_t)m->config.common->node;
    request.url = (char *)(uintptr_t)m->config.node_url;
    request.host = (char *)(uintptr_t)m->config.common->host;
    request.incarnation = m->config.common->incarnation;
    request.capacity_bytes = m->config.capacity_bytes;
    request.secret = m->secret;
    call(m, LETTER_REGISTER, "RegisterNode", &request.base);
    ep_node_models_infos_free(request.models, request.n_models);
}

static void send_heartbeat(ep_membership *m)
{
    Expertd__V1__HeartbeatRequest request = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    ep_membership_texts texts = {.last_error = ""};
    ep_epoch loaded = ep_node_epoch_loaded(m->config.epoch);
    m->config.report(m->config.arg, &request, &texts);
    epoch.term = loaded.term;
    epoch.number = loaded.number;
    request.node = (char *)(uintptr_t)m->config.common->node;
    request.incarnation = m->config.common->incarnation;
    request.epoch = &epoch;
    request.secret = m->secret;
    if (m->models_changed && ep_node_models_describe(m->config.models, true, &request.models,
                                                     &request.n_models) == EP_OK) {
        m->models_changed = false;
    }
    m->sent_draining = strcmp(request.state, "draining") == 0;
    m->sent_leaving = strcmp(request.state, "leaving") == 0;
    ep_load_report_make(m->loads, ep_clock_now_ns(), m->sent_draining, &request.loads,
                        &request.n_loads);
    call(m, LETTER_HEARTBEAT, "Heartbeat", &request.base);
    ep_load_report_free(request.loads, request.n_loads);
    ep_node_models_infos_free(request.models, request.n_models);
}

static void tick(void *arg)
{
    ep_membership *m = arg;
    if (!m->is_ready || m->in_flight != LETTER_NONE) {
        return;
    }
    if (!m->is_registered) {
        send_register(m);
    } else {
        send_heartbeat(m);
    }
}

void ep_membership_hurry(ep_membership *m)
{
    if (m->in_flight != LETTER_NONE) {
        m->hurries = true;
    } else {
        tick(m);
    }
}

void ep_membership_leaving_changed(ep_membership *m)
{
    pthread_mutex_lock(&m->view_lock);
    m->view.said_leaving = false;
    pthread_mutex_unlock(&m->view_lock);
    ep_membership_hurry(m);
}

void ep_membership_read(ep_membership *m, ep_membership_view *out_view)
{
    pthread_mutex_lock(&m->view_lock);
    *out_view = m->view;
    pthread_mutex_unlock(&m->view_lock);
}

ep_err ep_membership_create(const ep_membership_config *config, ep_membership **out_membership,
                            ep_error *out_error)
{
    ep_membership *m = calloc(1, sizeof(*m));
    if (m == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for membership");
    }
    m->config = *config;
    m->mail_task = (ep_loop_task){.func = on_mail, .arg = m};
    pthread_mutex_init(&m->mail.lock, NULL);
    pthread_mutex_init(&m->view_lock, NULL);
    ep_rpc_channel_config channel = {
        .common = *config->common,
        .address = {.url = config->coordinator_url, .tls = config->tls},
        .connection_class = "control",
        .reconnect = true,
        .on_state = on_state,
        .arg = m,
    };
    ep_rpc_limits_raise_for_control(&channel.common.limits);
    ep_err err = ep_load_report_create(config->models, &m->loads);
    snprintf(m->secret, sizeof(m->secret), "%016" PRIx64 "%016" PRIx64, ep_random_id(),
             ep_random_id());
    err = err == EP_OK ? ep_service_loop_timer_create(config->loop, tick, m, &m->heartbeat) : err;
    err = err == EP_OK ? ep_service_loop_timer_create(config->loop, on_drop, m, &m->drop) : err;
    if (err == EP_OK) {
        err = ep_rpc_channel_create(&channel, &m->channel, out_error);
    } else {
        ep_error_set(out_error, err, "no memory for membership");
    }
    if (err != EP_OK) {
        ep_membership_destroy(m);
        return err;
    }
    set_heartbeat(m, EP_HEARTBEAT_MS_DEFAULT);
    *out_membership = m;
    return EP_OK;
}

void ep_membership_destroy(ep_membership *m)
{
    if (m == NULL) {
        return;
    }
    ep_rpc_channel_destroy(m->channel); /* the channel's callbacks post mail_task */
    ep_service_loop_cancel(m->config.loop, &m->mail_task);
    if (m->heartbeat != NULL) {
        ep_loop_timer_stop(m->heartbeat);
    }
    if (m->drop != NULL) {
        ep_loop_timer_stop(m->drop);
    }
    ep_load_report_destroy(m->loads);
    free(m->mail.packed);
    pthread_mutex_destroy(&m->mail.lock);
    pthread_mutex_destroy(&m->view_lock);
    free(m);
}
