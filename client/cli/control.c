/* SPDX-License-Identifier: Apache-2.0 */
/* Makes one call to each of several peers and waits for all. */
#include "control.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/random.h"
#include "base/thread.h"
#include "health.pb-c.h"

#define WAIT_NS (50 * EP_NS_PER_MS)

struct ep_cli_control {
    const ep_cli_connect *connect;
    ep_rpc_common common;       /* owns timers and pool */
    bool (*on_wait)(void *arg); /* NULL: none */
    void *wait_arg;
    bool no_look;
};

typedef struct ask_round {
    pthread_mutex_t lock;
    pthread_cond_t done;
    size_t open_count;
} ask_round;

typedef struct ask_slot {
    ask_round *round;
    ep_rpc_channel *channel;
    ep_cli_answer *answer;
    bool over; /* answered or failed; under the round's lock */
} ask_slot;

static ep_err open_as(const ep_cli_connect *connect, const char *role, const char *token,
                      ep_cli_control **out_control, ep_error *out_error)
{
    ep_cli_control *control = calloc(1, sizeof(*control));
    if (control == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a connection");
    }
    control->connect = connect;
    control->common = (ep_rpc_common){
        .token = token,
        .node = "",
        .role = role,
        .incarnation = ep_random_id(),
        .payload_crc = connect->payload_crc,
    };
    ep_err err = ep_timer_service_create("expertctl", &control->common.timers);
    err = err != EP_OK ? err : ep_buffer_pool_create(0, 0, &control->common.pool);
    if (err != EP_OK) {
        ep_cli_control_close(control);
        return ep_error_set(out_error, err, "cannot prepare connections: %s", ep_err_text(err));
    }
    ep_rpc_limits_default(&control->common.limits);
    ep_rpc_limits_raise_for_control(&control->common.limits);
    *out_control = control;
    return EP_OK;
}

ep_err ep_cli_control_open(const ep_cli_connect *connect, ep_cli_control **out_control,
                           ep_error *out_error)
{
    return open_as(connect, "client", connect->token, out_control, out_error);
}

ep_err ep_cli_control_open_operator(const ep_cli_connect *connect, ep_cli_control **out_control,
                                    ep_error *out_error)
{
    return open_as(connect, "operator", connect->admin_token, out_control, out_error);
}

void ep_cli_control_close(ep_cli_control *control)
{
    if (control != NULL) {
        ep_timer_service_destroy(control->common.timers);
        ep_buffer_pool_destroy(control->common.pool);
        free(control);
    }
}

const ep_rpc_common *ep_cli_control_common(const ep_cli_control *control)
{
    return &control->common;
}

static uint64_t wall_clock_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

static void finish_slot(ask_slot *slot, ProtobufCMessage *taken_message, const ep_error *error)
{
    pthread_mutex_lock(&slot->round->lock);
    if (slot->over) { /* a stream goes on or ends after its first message */
        pthread_mutex_unlock(&slot->round->lock);
        protobuf_c_message_free_unpacked(taken_message, NULL);
        return;
    }
    slot->over = true;
    slot->answer->message = taken_message;
    slot->answer->arrived_us = taken_message != NULL ? wall_clock_us() : 0;
    if (error != NULL) {
        slot->answer->error = *error;
    }
    slot->round->open_count--;
    pthread_cond_signal(&slot->round->done);
    pthread_mutex_unlock(&slot->round->lock);
}

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    ask_slot *slot = arg;
    ep_error why;
    if (error != NULL) {
        finish_slot(slot, NULL, error);
        return;
    }
    if (reply->header == NULL) {
        ep_error_set(&why, EP_ERR_UNAVAILABLE, "the stream ended without a message");
        finish_slot(slot, NULL, &why);
        return;
    }
    ProtobufCMessage *message = ep_rpc_message_copy(reply->header);
    ep_error_set(&why, EP_ERR_NO_MEMORY, "no memory for an answer");
    finish_slot(slot, message, message != NULL ? NULL : &why);
}

static ep_lane_address address_of(const ep_cli_control *control, const char *url)
{
    return (ep_lane_address){
        .url = url, .tls = control->connect->tls.ca_file != NULL ? &control->connect->tls : NULL};
}

static ep_rpc_channel_state state_of(const ask_slot *slot)
{
    return slot->channel != NULL ? ep_rpc_channel_get_state(slot->channel) : EP_CHANNEL_READY;
}

static void start_slot(ep_cli_control *control, ask_slot *slot, const char *url,
                       const ep_rpc_method *method, const ProtobufCMessage *request,
                       uint64_t deadline_ns)
{
    ep_error error;
    ep_rpc_channel_config config = {
        .common = control->common,
        .address = address_of(control, url),
        .connection_class = "control",
        .reconnect = false,
    };
    ep_rpc_request call = {
        .method = method, .header = request, .deadline_ns = deadline_ns, .wait_for_ready = true};
    ep_err err = ep_rpc_channel_create(&config, &slot->channel, &error);
    err =
        err != EP_OK ? err : ep_rpc_call_start(slot->channel, &call, on_reply, slot, NULL, &error);
    if (err != EP_OK) {
        finish_slot(slot, NULL, &error);
    }
}

/* ---- peers without an answer ---- */

typedef struct port {
    ep_lane_address address;
    ep_rpc_look *look;
    pthread_t thread;
    bool is_looked_at;
} port;

static void *look_main(void *arg)
{
    port *p = arg;
    ep_rpc_look_at(&p->address, NULL, NULL, p->look);
    return NULL;
}

void ep_cli_control_look(const ep_cli_control *control, const char *const *urls, size_t count,
                         ep_rpc_look *out_looks)
{
    port *ports = calloc(count + 1, sizeof(*ports));
    memset(out_looks, 0, count * sizeof(*out_looks));
    for (size_t i = 0; ports != NULL && i < count; i++) {
        if (urls[i] != NULL) {
            ports[i] = (port){.address = address_of(control, urls[i]), .look = &out_looks[i]};
            ports[i].is_looked_at =
                ep_thread_start("ep-look", look_main, &ports[i], &ports[i].thread) == EP_OK;
        }
    }
    for (size_t i = 0; ports != NULL && i < count; i++) {
        if (ports[i].is_looked_at) {
            pthread_join(ports[i].thread, NULL);
        }
    }
    free(ports);
}

/* Replaces "not sent, the connection ended" by the channel's own error, or by what stands at its
 * port. */
static void explain(ask_slot *slot, const char *url, const ep_rpc_look *look)
{
    ep_error *error = &slot->answer->error;
    ep_error last;
    ep_error_clear(&last);
    if (state_of(slot) == EP_CHANNEL_BROKEN) {
        ep_rpc_channel_last_error(slot->channel, &last);
    } else if (look != NULL && look->code != NULL) {
        ep_error_set(&last, EP_ERR_UNAVAILABLE, "%s: %s; %s", url, look->text, look->advice);
    }
    if (last.code != EP_OK) { /* its text already has the URL */
        bool refused = last.code == EP_ERR_CONNECTION_LOST || last.code == EP_ERR_IO ||
                       last.code == EP_ERR_DEADLINE_EXCEEDED;
        *error = last;
        error->code = refused ? EP_ERR_UNAVAILABLE : last.code;
    } else {
        ep_error_prefix(error, error->code, "%s", url);
    }
}

static void explain_all(const ep_cli_control *control, ask_slot *slots, const char *const *urls,
                        size_t count, bool no_look)
{
    const char **silent = no_look ? NULL : calloc(count + 1, sizeof(*silent));
    ep_rpc_look *looks = silent != NULL ? calloc(count + 1, sizeof(*looks)) : NULL;
    for (size_t i = 0; looks != NULL && i < count; i++) {
        /* the call's time-out came before that of Hello */
        const bool is_silent =
            slots[i].answer->message == NULL && state_of(&slots[i]) == EP_CHANNEL_CONNECTING;
        silent[i] = is_silent ? urls[i] : NULL;
    }
    if (looks != NULL) {
        ep_cli_control_look(control, silent, count, looks);
    }
    for (size_t i = 0; i < count; i++) {
        if (slots[i].answer->message == NULL) {
            explain(&slots[i], urls[i], looks != NULL ? &looks[i] : NULL);
        }
    }
    free(silent);
    free(looks);
}

void ep_cli_control_on_wait(ep_cli_control *control, bool (*on_wait)(void *arg), void *arg,
                            bool no_look)
{
    control->on_wait = on_wait;
    control->wait_arg = arg;
    control->no_look = no_look;
}

/* Waits for all answers or until on_wait ends it, then true; each call ends by its deadline. */
static bool wait_for_answers(ep_cli_control *control, ask_round *round)
{
    bool over = false;
    pthread_mutex_lock(&round->lock);
    while (round->open_count > 0 && !over) {
        if (control->on_wait == NULL) {
            pthread_cond_wait(&round->done, &round->lock);
            continue;
        }
        ep_clock_wait(&round->done, &round->lock, ep_clock_now_ns() + WAIT_NS);
        pthread_mutex_unlock(&round->lock);
        over = control->on_wait(control->wait_arg);
        pthread_mutex_lock(&round->lock);
    }
    pthread_mutex_unlock(&round->lock);
    return over;
}

void ep_cli_control_ask(ep_cli_control *control, const char *const *urls, size_t count,
                        const char *service, const char *method, const ProtobufCMessage *request,
                        uint64_t timeout_us, ep_cli_answer *out_answers)
{
    const Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    const ep_rpc_method *row = ep_rpc_method_by_name(service, method);
    uint64_t deadline_ns = ep_clock_now_ns() + timeout_us * EP_NS_PER_US;
    ask_round round = {.open_count = count};
    ask_slot *slots = calloc(count + 1, sizeof(*slots));
    for (size_t i = 0; i < count; i++) {
        out_answers[i] = (ep_cli_answer){.message = NULL};
        ep_error_clear(&out_answers[i].error);
        if (slots == NULL || row == NULL) {
            ep_error_set(&out_answers[i].error, slots == NULL ? EP_ERR_NO_MEMORY : EP_ERR_NOT_FOUND,
                         "%s: cannot call %s.%s", urls[i], service, method);
        }
    }
    if (slots == NULL || row == NULL) {
        free(slots);
        return;
    }
    pthread_mutex_init(&round.lock, NULL);
    pthread_cond_init(&round.done, NULL);
    for (size_t i = 0; i < count; i++) {
        slots[i].round = &round;
        slots[i].answer = &out_answers[i];
        start_slot(control, &slots[i], urls[i], row, request != NULL ? request : &empty.base,
                   deadline_ns);
    }
    const bool is_ended = wait_for_answers(control, &round);
    for (size_t i = 0; i < count; i++) {
        ep_error cancelled;
        ep_error_set(&cancelled, EP_ERR_CANCELLED, "nobody waits for the answer any more");
        finish_slot(&slots[i], NULL, &cancelled);
    }
    explain_all(control, slots, urls, count, is_ended || control->no_look);
    for (size_t i = 0; i < count; i++) {
        ep_rpc_channel_destroy(slots[i].channel); /* ends streams; waits for callbacks */
    }
    pthread_cond_destroy(&round.done);
    pthread_mutex_destroy(&round.lock);
    free(slots);
}

void ep_cli_answers_free(ep_cli_answer *answers, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        protobuf_c_message_free_unpacked(answers[i].message, NULL);
        answers[i].message = NULL;
    }
}

static ep_err ask_one(ep_cli_control *control, const char *url, const char *service,
                      const char *method, const ProtobufCMessage *request, uint64_t timeout_us,
                      ProtobufCMessage **out_message, ep_error *out_error)
{
    ep_cli_answer answer;
    ep_cli_control_ask(control, &url, 1, service, method, request, timeout_us, &answer);
    if (answer.message != NULL) {
        *out_message = answer.message;
    } else if (out_error != NULL) {
        *out_error = answer.error;
    }
    return answer.error.code;
}

ep_err ep_cli_control_ask_one(ep_cli_control *control, const char *url, const char *service,
                              const char *method, const ProtobufCMessage *request,
                              ProtobufCMessage **out_message, ep_error *out_error)
{
    return ask_one(control, url, service, method, request, control->connect->timeout_us,
                   out_message, out_error);
}

ep_err ep_cli_admin_call(ep_cli_control *control, const char *method,
                         const ProtobufCMessage *request, uint64_t timeout_us,
                         ProtobufCMessage **out_message, ep_error *out_error)
{
    return ask_one(control, control->connect->admin_url, "expertd.v1.Admin", method, request,
                   timeout_us, out_message, out_error);
}

ep_err ep_cli_admin_call_once(const ep_cli_connect *connect, const char *method,
                              const ProtobufCMessage *request, ProtobufCMessage **out_message,
                              ep_error *out_error)
{
    ep_cli_control *control = NULL;
    ep_err err = ep_cli_control_open_operator(connect, &control, out_error);
    err = err != EP_OK ? err
                       : ep_cli_admin_call(control, method, request, connect->timeout_us,
                                           out_message, out_error);
    ep_cli_control_close(control);
    return err;
}

ep_err ep_cli_control_probe(const ep_cli_connect *connect, ep_error *out_error)
{
    ep_cli_answer answers[EP_CLI_NODES_MAX];
    ep_cli_control *control = NULL;
    Expertd__V1__HealthCheckRequest request = EXPERTD__V1__HEALTH_CHECK_REQUEST__INIT;
    bool direct = connect->coordinator_url == NULL;
    size_t count = direct ? connect->node_urls_count : 1;
    bool answered = false;
    ep_err err = ep_cli_control_open(connect, &control, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_cli_control_ask(control, direct ? connect->node_urls : &connect->coordinator_url, count,
                       "expertd.v1.Health", "Check", &request.base, connect->timeout_us, answers);
    for (size_t i = 0; i < count; i++) {
        answered = answered || answers[i].message != NULL;
    }
    if (!answered) {
        err = answers[0].error.code;
        if (out_error != NULL) {
            *out_error = answers[0].error;
        }
    }
    ep_cli_answers_free(answers, count);
    ep_cli_control_close(control);
    return err;
}
