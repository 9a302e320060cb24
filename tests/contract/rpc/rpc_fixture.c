/* SPDX-License-Identifier: Apache-2.0 */
/* Server, channel and collector for the RPC contract tests. */
#include "rpc_fixture.h"

#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "support/check.h"

uint64_t in_ms(uint64_t ms)
{
    return ep_clock_now_ns() + ms * EP_NS_PER_MS;
}

/* ---- waiting ---- */

static void wait_changed(fixture *f, uint64_t until_ns, const char *what)
{
    struct timespec t = {.tv_sec = (time_t)(until_ns / EP_NS_PER_S),
                         .tv_nsec = (long)(until_ns % EP_NS_PER_S)};
    CHECK(pthread_cond_timedwait(&f->changed, &f->lock, &t) == 0 || ep_clock_now_ns() < until_ns,
          "%s", what);
}

void fixture_wait(fixture *f, const uint32_t *counter, uint32_t value)
{
    uint64_t until_ns = in_ms(SECONDS * 1000);
    pthread_mutex_lock(&f->lock);
    while (*counter < value) {
        wait_changed(f, until_ns, "an event never came");
    }
    pthread_mutex_unlock(&f->lock);
}

/* ---- ExpertService ---- */

static void reply_ok(ep_rpc_call *call, Expertd__V1__ForwardReply_Closure closure, uint32_t slots)
{
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    const ep_rpc_incoming *asked = ep_rpc_call_incoming(call);
    if (asked->tensor_bytes > 0) {
        ep_buffer *copy;
        CHECK(ep_buffer_acquire(asked->pool, asked->tensor_bytes, &copy) == EP_OK, "no buffer");
        memcpy(copy->data, asked->tensors, asked->tensor_bytes);
        ep_rpc_call_attach(call, copy);
    }
    reply.slots = slots;
    closure(&reply, call);
    ep_rpc_call_finish(call, EP_OK, NULL);
}

/* Takes call out of the held ones; false when somebody else did. */
static bool unhold(fixture *f, ep_rpc_call *call)
{
    bool found = false;
    pthread_mutex_lock(&f->lock);
    for (uint32_t i = 0; i < f->held_count && !found; i++) {
        if (f->held[i] == call) {
            f->held[i] = f->held[--f->held_count];
            found = true;
        }
    }
    pthread_mutex_unlock(&f->lock);
    return found;
}

static void held_cancelled(void *arg, ep_rpc_call *call)
{
    fixture *f = arg;
    bool ours = unhold(f, call);
    pthread_mutex_lock(&f->lock);
    f->cancels++;
    f->answered += ep_rpc_call_is_answered(call);
    if (!ours && f->registering == call) {
        f->registering = NULL; /* cancelled before it was held: hold() then finishes it */
    }
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    if (ours) {
        ep_rpc_call_finish(call, EP_ERR_CANCELLED, NULL);
    }
}

/* Keeps a call until it is released or cancelled. on_cancel must be set before another thread may
 * finish the call. */
static void hold(fixture *f, ep_rpc_call *call)
{
    /* one registration at a time: two connections have two threads */
    pthread_mutex_lock(&f->hold_lock);
    pthread_mutex_lock(&f->lock);
    f->registering = call;
    pthread_mutex_unlock(&f->lock);
    ep_rpc_call_on_cancel(call, held_cancelled, f);
    pthread_mutex_lock(&f->lock);
    bool cancelled = f->registering == NULL;
    f->registering = NULL;
    if (!cancelled) {
        CHECK(f->held_count != HELD_MAX, "too many held calls");
        f->held[f->held_count++] = call;
    }
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    pthread_mutex_unlock(&f->hold_lock);
    if (cancelled) {
        ep_rpc_call_finish(call, EP_ERR_CANCELLED, NULL);
    }
}

uint32_t fixture_release(fixture *f, ep_err code)
{
    for (uint32_t count = 0;; count++) {
        pthread_mutex_lock(&f->lock);
        ep_rpc_call *call = f->held_count > 0 ? f->held[--f->held_count] : NULL;
        pthread_mutex_unlock(&f->lock);
        if (call == NULL) {
            return count;
        }
        ep_rpc_call_finish(call, code, NULL);
    }
}

static void finish_error(ep_rpc_call *call)
{
    ep_error error;
    ep_error_set(&error, EP_ERR_NOT_OWNER, "expert 9 of layer 4 is not here");
    error.layer = 4;
    error.expert = 9;
    error.waited_us = 11;
    error.retry_after_us = 22;
    error.current_epoch = 33;
    snprintf(error.node, sizeof(error.node), "node-a");
    ep_rpc_call_finish(call, error.code, &error);
}

static void finish_big(ep_rpc_call *call, Expertd__V1__ForwardReply_Closure closure)
{
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    ep_buffer *big;
    CHECK(ep_buffer_acquire(ep_rpc_call_incoming(call)->pool, (size_t)17 << 20, &big) == EP_OK,
          "no buffer");
    ep_rpc_call_attach(call, big);
    closure(&reply, call);
    ep_rpc_call_finish(call, EP_OK, NULL);
}

static void look(fixture *f, ep_rpc_call *call)
{
    const char *value = ep_rpc_call_metadata(call, "traceparent");
    pthread_mutex_lock(&f->lock);
    f->forwards++;
    f->seen_deadline_ns = ep_rpc_call_incoming(call)->deadline_ns;
    snprintf(f->seen_metadata, sizeof(f->seen_metadata), "%s", value != NULL ? value : "");
    snprintf(f->seen_peer, sizeof(f->seen_peer), "%s", ep_rpc_call_incoming(call)->peer_node);
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

static void expert_forward(Expertd__V1__ExpertService_Service *service,
                           const Expertd__V1__ForwardRequest *input,
                           Expertd__V1__ForwardReply_Closure closure, void *closure_data)
{
    fixture *f = ((expert_impl *)(void *)service)->f;
    ep_rpc_call *call = closure_data;
    look(f, call);
    if (strcmp(input->model, "hold") == 0) {
        hold(f, call);
    } else if (strcmp(input->model, "late") == 0) {
        pthread_mutex_lock(&f->lock);
        f->forward_closure = closure;
        f->late[f->late_count++] = call;
        pthread_cond_broadcast(&f->changed);
        pthread_mutex_unlock(&f->lock);
    } else if (strcmp(input->model, "error") == 0) {
        finish_error(call);
    } else if (strcmp(input->model, "none") == 0) {
        ep_rpc_call_finish(call, EP_OK, NULL);
    } else if (strcmp(input->model, "big") == 0) {
        finish_big(call, closure);
    } else {
        reply_ok(call, closure, input->slots);
    }
}

static void expert_describe(Expertd__V1__ExpertService_Service *service,
                            const Expertd__V1__Empty *input,
                            Expertd__V1__DescribeReply_Closure closure, void *closure_data)
{
    Expertd__V1__DescribeReply reply = EXPERTD__V1__DESCRIBE_REPLY__INIT;
    (void)service;
    (void)input;
    reply.node = (char *)(uintptr_t) "node-a";
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

/* Answers batches of late calls in an order of its own. */
static void *late_main(void *arg)
{
    fixture *f = arg;
    uint64_t random = 42;
    pthread_mutex_lock(&f->lock);
    while (!f->late_stop || f->late_count > 0) {
        if (f->late_count < f->late_batch && !f->late_stop) {
            pthread_cond_wait(&f->changed, &f->lock);
            continue;
        }
        uint32_t pick = (uint32_t)(ep_splitmix64(&random) % f->late_count);
        ep_rpc_call *call = f->late[pick];
        Expertd__V1__ForwardReply_Closure closure = f->forward_closure;
        f->late[pick] = f->late[--f->late_count];
        f->late_batch = f->late_count > 0 ? 1 : f->late_batch;
        pthread_mutex_unlock(&f->lock);
        reply_ok(call, closure, 7);
        pthread_mutex_lock(&f->lock);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

/* ---- Coordinator ---- */

static void coordinator_register_node(Expertd__V1__Coordinator_Service *service,
                                      const Expertd__V1__RegisterRequest *input,
                                      Expertd__V1__RegisterReply_Closure closure,
                                      void *closure_data)
{
    Expertd__V1__RegisterReply reply = EXPERTD__V1__REGISTER_REPLY__INIT;
    (void)service;
    (void)input;
    reply.node_id = 5;
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

static void coordinator_heartbeat(Expertd__V1__Coordinator_Service *service,
                                  const Expertd__V1__HeartbeatRequest *input,
                                  Expertd__V1__HeartbeatReply_Closure closure, void *closure_data)
{
    Expertd__V1__HeartbeatReply reply = EXPERTD__V1__HEARTBEAT_REPLY__INIT;
    (void)service;
    (void)input;
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

static void coordinator_watch_placement(Expertd__V1__Coordinator_Service *service,
                                        const Expertd__V1__WatchPlacementRequest *input,
                                        Expertd__V1__PlacementSnapshot_Closure closure,
                                        void *closure_data)
{
    fixture *f = ((coordinator_impl *)(void *)service)->f;
    ep_rpc_call *call = closure_data;
    uint64_t count = input->have != NULL ? input->have->number : 0;
    bool stay = input->have != NULL && input->have->term == 1;
    for (uint64_t i = 1; i <= count; i++) {
        Expertd__V1__PlacementSnapshot snapshot = EXPERTD__V1__PLACEMENT_SNAPSHOT__INIT;
        Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
        epoch.number = i;
        snapshot.epoch = &epoch;
        closure(&snapshot, call);
    }
    if (input->have != NULL && input->have->term == 2) {
        Expertd__V1__PlacementSnapshot snapshot = EXPERTD__V1__PLACEMENT_SNAPSHOT__INIT;
        static char policy[100001]; /* above the default header_bytes_max */
        Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
        epoch.number = count + 1;
        memset(policy, 'p', sizeof(policy) - 1);
        snapshot.policy = policy;
        snapshot.epoch = &epoch;
        closure(&snapshot, call);
        stay = true;
    }
    if (stay) {
        hold(f, call);
    } else {
        ep_rpc_call_finish(call, EP_OK, NULL);
    }
}

static void coordinator_statistics(Expertd__V1__Coordinator_Service *service,
                                   const Expertd__V1__StatisticsRequest *request,
                                   Expertd__V1__StatisticsReply_Closure closure, void *closure_data)
{
    Expertd__V1__StatisticsReply reply = EXPERTD__V1__STATISTICS_REPLY__INIT;
    (void)service;
    (void)request;
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

static void coordinator_cluster_status(Expertd__V1__Coordinator_Service *service,
                                       const Expertd__V1__Empty *input,
                                       Expertd__V1__ClusterStatusReply_Closure closure,
                                       void *closure_data)
{
    Expertd__V1__ClusterStatusReply reply = EXPERTD__V1__CLUSTER_STATUS_REPLY__INIT;
    (void)service;
    (void)input;
    reply.policy = (char *)(uintptr_t) "uniform";
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

/* ---- answers ---- */

void answer_init(answer *a, fixture *f)
{
    memset(a, 0, sizeof(*a));
    a->f = f;
}

static void read_message(answer *a, const ep_rpc_reply *reply)
{
    if (reply->header == NULL) {
        return;
    }
    a->messages++;
    a->draining = reply->draining;
    a->tensor_bytes = reply->tensor_bytes;
    a->aligned = ((uintptr_t)reply->tensors & (EP_BUFFER_ALIGN - 1)) == 0;
    if (reply->tensor_bytes > 0) {
        a->first_byte = reply->tensors[0];
        a->last_byte = reply->tensors[reply->tensor_bytes - 1];
    }
    if (reply->header->descriptor == &expertd__v1__forward_reply__descriptor) {
        a->slots = ((const Expertd__V1__ForwardReply *)reply->header)->slots;
    } else if (reply->header->descriptor == &expertd__v1__placement_snapshot__descriptor) {
        a->numbers = a->numbers * 31 +
                     ((const Expertd__V1__PlacementSnapshot *)reply->header)->epoch->number;
    }
}

void answer_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    answer *a = arg;
    fixture *f = a->f;
    pthread_mutex_lock(&f->lock);
    ep_rpc_call_id cancel = reply->end ? 0 : a->cancel_inside;
    if (error != NULL) {
        a->error = *error;
    }
    read_message(a, reply);
    a->ends += reply->end ? 1 : 0;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    if (cancel != 0) {
        ep_rpc_call_cancel(f->channel, cancel);
    }
}

void answer_wait_end(answer *a)
{
    fixture_wait(a->f, &a->ends, 1);
}

void answer_wait_messages(answer *a, uint32_t count)
{
    fixture_wait(a->f, &a->messages, count);
}

ep_err forward_start(fixture *f, const char *model, size_t bytes, uint8_t fill,
                     uint64_t deadline_ns, answer *out_answer, ep_rpc_call_id *out_id,
                     ep_error *out_error)
{
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_rpc_metadata metadata[] = {{"tenant", "t1"}, {"traceparent", "00-abc-def-01"}};
    ep_rpc_request request = {
        .method = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward"),
        .header = &header.base,
        .deadline_ns = deadline_ns,
        .metadata = metadata,
        .metadata_count = 2,
        .wait_for_ready = true,
    };
    header.model = (char *)(uintptr_t)model;
    header.slots = fill;
    if (bytes > 0) {
        CHECK(ep_buffer_acquire(f->pool, bytes, &request.tensors) == EP_OK, "no buffer");
        memset(request.tensors->data, fill, bytes);
    }
    answer_init(out_answer, f);
    ep_err err =
        ep_rpc_call_start(f->channel, &request, answer_reply, out_answer, out_id, out_error);
    ep_buffer_unref(request.tensors);
    return err;
}

ep_err forward(fixture *f, const char *model, size_t bytes, uint8_t fill, uint64_t deadline_ns,
               answer *out_answer)
{
    ep_error error;
    ep_err err = forward_start(f, model, bytes, fill, deadline_ns, out_answer, NULL, &error);
    if (err != EP_OK) {
        return err;
    }
    answer_wait_end(out_answer);
    return out_answer->error.code;
}

ep_err watch_start(fixture *f, uint64_t count, bool stay, uint64_t deadline_ns, answer *out_answer,
                   ep_rpc_call_id *out_id)
{
    Expertd__V1__WatchPlacementRequest header = EXPERTD__V1__WATCH_PLACEMENT_REQUEST__INIT;
    Expertd__V1__Epoch have = EXPERTD__V1__EPOCH__INIT;
    ep_rpc_request request = {
        .method = ep_rpc_method_by_name("expertd.v1.Coordinator", "WatchPlacement"),
        .header = &header.base,
        .deadline_ns = deadline_ns,
        .wait_for_ready = true,
    };
    have.number = count;
    have.term = stay ? 1 : 0;
    header.have = &have;
    answer_init(out_answer, f);
    return ep_rpc_call_start(f->channel, &request, answer_reply, out_answer, out_id, NULL);
}

/* ---- life ---- */

static void channel_state(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                          const Expertd__V1__Hello *peer, const ep_error *error)
{
    fixture *f = arg;
    (void)channel;
    pthread_mutex_lock(&f->lock);
    f->states[state]++;
    if (peer != NULL) {
        snprintf(f->peer_host, sizeof(f->peer_host), "%s", peer->host);
    }
    if (error != NULL) {
        f->broken = *error;
    }
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

void fixture_common(fixture *f, ep_rpc_common *out_common)
{
    *out_common = (ep_rpc_common){.timers = f->timers,
                                  .pool = f->pool,
                                  .token = "",
                                  .node = "",
                                  .role = "client",
                                  .incarnation = 1};
    ep_rpc_limits_default(&out_common->limits);
    out_common->limits.ping_ms = 0; /* on a loaded machine a test may stand still for seconds */
}

static void init_services(fixture *f)
{
    f->expert.service =
        (Expertd__V1__ExpertService_Service)EXPERTD__V1__EXPERT_SERVICE__INIT(expert_);
    f->expert.f = f;
    f->coordinator.service =
        (Expertd__V1__Coordinator_Service)EXPERTD__V1__COORDINATOR__INIT(coordinator_);
    f->coordinator.f = f;
    f->weights.base = (ProtobufCService){&expertd__v1__weight_files__descriptor,
                                         protobuf_c_service_invoke_internal, NULL};
    f->late_batch = 1;
}

static void start_server(fixture *f, const fixture_options *options)
{
    ep_error error;
    ep_rpc_server_config config = {.hello_fill = NULL};
    fixture_common(f, &config.common);
    config.common.node = "node-a";
    config.common.role = "node";
    if (options->server != NULL) {
        options->server(&config);
    }
    const ep_lane_address address = {.url = options->url};
    CHECK(ep_rpc_server_create(&config, &f->server, &error) == EP_OK &&
              ep_rpc_server_add_service(f->server, &f->expert.service.base, &error) == EP_OK &&
              ep_rpc_server_add_service(f->server, &f->coordinator.service.base, &error) == EP_OK &&
              ep_rpc_server_add_service(f->server, &f->weights.base, &error) == EP_OK &&
              ep_rpc_server_listen(f->server, &address, EP_ROLES_ALL, &error) == EP_OK,
          "%s", error.text);
    ep_rpc_server_url(f->server, 0, f->url, sizeof(f->url));
}

static void start_channel(fixture *f, const fixture_options *options)
{
    ep_error error;
    ep_rpc_channel_config config = {.address = {.url = f->url},
                                    .connection_class = "decode",
                                    .reconnect = true,
                                    .on_state = channel_state,
                                    .arg = f};
    fixture_common(f, &config.common);
    config.common.node = "worker-1";
    if (options->channel != NULL) {
        options->channel(&config);
    }
    CHECK(ep_rpc_channel_create(&config, &f->channel, &error) == EP_OK, "%s", error.text);
    CHECK(options->not_ready ||
              ep_rpc_channel_wait_ready(f->channel, in_ms(SECONDS * 1000), &error) == EP_OK,
          "%s", error.text);
}

void fixture_init(fixture *f, const fixture_options *options)
{
    memset(f, 0, sizeof(*f));
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&f->changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&f->lock, NULL);
    pthread_mutex_init(&f->hold_lock, NULL);
    init_services(f);
    CHECK(ep_timer_service_create("test", &f->timers) == EP_OK &&
              ep_buffer_pool_create(0, (size_t)64 << 20, &f->pool) == EP_OK &&
              pthread_create(&f->late_thread, NULL, late_main, f) == 0,
          "no timers, pool or thread");
    start_server(f, options);
    if (!options->no_channel) {
        start_channel(f, options);
    }
}

void fixture_server_stop(fixture *f)
{
    ep_rpc_server_destroy(f->server);
    f->server = NULL;
}

void fixture_fini(fixture *f)
{
    ep_buffer_pool_stats stats;
    ep_rpc_channel_destroy(f->channel);
    /* the late thread still ends calls whose frames were under way */
    ep_rpc_server_destroy(f->server);
    pthread_mutex_lock(&f->lock);
    f->late_stop = true;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    pthread_join(f->late_thread, NULL);
    ep_timer_service_destroy(f->timers);
    ep_transport_fini();
    ep_buffer_pool_read_stats(f->pool, &stats);
    CHECK(stats.lent_bytes == 0, "%llu buffer bytes are still lent",
          (unsigned long long)stats.lent_bytes);
    ep_buffer_pool_destroy(f->pool);
    pthread_cond_destroy(&f->changed);
    pthread_mutex_destroy(&f->hold_lock);
    pthread_mutex_destroy(&f->lock);
}
