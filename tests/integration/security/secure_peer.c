/* SPDX-License-Identifier: Apache-2.0 */
/* Connecting and calling as anybody. */
#include "secure_peer.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "health.pb-c.h"

static ep_timer_service *timers;
static ep_buffer_pool *pool;

static uint64_t patience(void)
{
    return ep_clock_now_ns() + (uint64_t)SECURE_WAIT_MS * EP_NS_PER_MS;
}

ep_rpc_channel *secure_connect(const secure_claim *claim, ep_error *out_error)
{
    ep_rpc_channel *channel = NULL;
    if (timers == NULL) {
        EP_ASSERT(ep_timer_service_create("test-timer", &timers) == EP_OK);
        EP_ASSERT(ep_buffer_pool_create(0, 0, &pool) == EP_OK);
    }
    ep_rpc_channel_config config = {
        .common = {.timers = timers,
                   .pool = pool,
                   .token = claim->token,
                   .node = claim->node != NULL ? claim->node : "",
                   .role = claim->role,
                   .incarnation = 1,
                   .payload_crc = true},
        .address = {.url = claim->url, .tls = claim->tls},
        .connection_class = "control",
    };
    ep_rpc_limits_default(&config.common.limits);
    ep_rpc_limits_raise_for_control(&config.common.limits);
    ep_error_clear(out_error);
    if (ep_rpc_channel_create(&config, &channel, out_error) != EP_OK ||
        ep_rpc_channel_wait_ready(channel, patience(), out_error) != EP_OK) {
        ep_rpc_channel_destroy(channel);
        return NULL;
    }
    return channel;
}

void secure_close(ep_rpc_channel *channel)
{
    ep_rpc_channel_destroy(channel);
}

bool secure_is_admitted(const secure_claim *claim, ep_error *out_error)
{
    ep_rpc_channel *channel = secure_connect(claim, out_error);
    ep_rpc_channel_destroy(channel);
    return channel != NULL;
}

typedef struct answer {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool ended;
    ep_error error;
} answer;

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    answer *a = arg;
    pthread_mutex_lock(&a->lock);
    if (error != NULL) {
        a->error = *error;
    }
    a->ended |= reply->end;
    pthread_cond_signal(&a->changed);
    pthread_mutex_unlock(&a->lock);
}

static ep_err check_health(ep_rpc_channel *channel, ep_error *out_error)
{
    Expertd__V1__HealthCheckRequest request = EXPERTD__V1__HEALTH_CHECK_REQUEST__INIT;
    ProtobufCMessage *reply = NULL;
    ep_err err = ep_rpc_call_sync(channel, "expertd.v1.Health", "Check", &request.base, patience(),
                                  &reply, out_error);
    if (reply != NULL) {
        protobuf_c_message_free_unpacked(reply, NULL);
    }
    return err;
}

ep_err secure_call(ep_rpc_channel *channel, const ep_rpc_method *method, ep_error *out_error)
{
    answer a = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    ep_rpc_call_id id;
    ProtobufCMessage *request = calloc(1, method->method->input->sizeof_message);
    EP_ASSERT(request != NULL);
    protobuf_c_message_init(method->method->input, request);
    ep_rpc_request call = {
        .method = method, .header = request, .deadline_ns = patience(), .attempt = 1};
    ep_error_clear(&a.error);
    ep_err err = ep_rpc_call_start(channel, &call, on_reply, &a, &id, out_error);
    free(request);
    if (err != EP_OK) {
        return err;
    }
    bool is_stream = method->stream == EP_RPC_SERVER_STREAM;
    /* calls of one connection are judged in order: a refusal comes before this answer */
    if (is_stream) {
        err = check_health(channel, out_error);
    }
    pthread_mutex_lock(&a.lock);
    bool was_refused = a.ended;
    pthread_mutex_unlock(&a.lock);
    if (is_stream && !was_refused) {
        ep_rpc_call_cancel(channel, id);
    }
    pthread_mutex_lock(&a.lock);
    while (!a.ended) {
        pthread_cond_wait(&a.changed, &a.lock);
    }
    pthread_mutex_unlock(&a.lock);
    if (err == EP_OK && (!is_stream || was_refused)) {
        *out_error = a.error;
        err = a.error.code;
    }
    return err;
}

void secure_end(void)
{
    ep_timer_service_destroy(timers);
    ep_buffer_pool_destroy(pool);
    timers = NULL;
    pool = NULL;
    ep_transport_fini();
}
