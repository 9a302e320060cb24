/* SPDX-License-Identifier: Apache-2.0 */
/* The whole RPC layer: Hello, frames, both checksums where the lane needs them, credits, dispatch
 * by descriptor. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "bench/lanes_form.h"
#include "expert.pb-c.h"
#include "rpc/rpc.h"

static void on_forward(Expertd__V1__ExpertService_Service *service,
                       const Expertd__V1__ForwardRequest *request,
                       Expertd__V1__ForwardReply_Closure closure, void *closure_data)
{
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    const ep_rpc_incoming *asked = ep_rpc_call_incoming(closure_data);
    ep_buffer *out = NULL;
    (void)service;
    if (ep_buffer_acquire(asked->pool, asked->tensor_bytes, &out) != EP_OK) {
        ep_rpc_call_finish(closure_data, EP_ERR_NO_MEMORY, NULL);
        return;
    }
    /* a real reply is written by a kernel: one write of each byte */
    memcpy(out->data, asked->tensors, asked->tensor_bytes);
    reply.slots = request->slots;
    ep_rpc_call_attach(closure_data, out);
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

static void on_describe(Expertd__V1__ExpertService_Service *service,
                        const Expertd__V1__Empty *request,
                        Expertd__V1__DescribeReply_Closure closure, void *closure_data)
{
    Expertd__V1__DescribeReply reply = EXPERTD__V1__DESCRIBE_REPLY__INIT;
    (void)service;
    (void)request;
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

static Expertd__V1__ExpertService_Service service = EXPERTD__V1__EXPERT_SERVICE__INIT(on_);

typedef struct rpc_state {
    ep_rpc_channel_config config;
    ep_rpc_channel *channel;
    ep_buffer *tensors;
    const ep_rpc_method *method;
    lanes_pipeline pipeline;
    const char *stream_lane;
    char url[EP_ADDRESS_BYTES];
    struct call_slot {
        struct rpc_state *state;
        int slot;
    } slots[LANES_DEPTH_MAX];
} rpc_state;

static void check(ep_err err, const ep_error *error, const char *what)
{
    if (err != EP_OK) {
        lanes_fail(what, error != NULL ? error->text : ep_err_name(err));
    }
}

static void common_init(ep_rpc_common *common, const char *role)
{
    memset(common, 0, sizeof(*common));
    check(ep_timer_service_create("bench-timer", &common->timers), NULL, "timers");
    check(ep_buffer_pool_create(0, (size_t)1 << 30, &common->pool), NULL, "pool");
    ep_rpc_limits_default(&common->limits);
    common->limits.frame_bytes_max = 2 * LANES_BYTES_MAX;
    common->limits.credit_bytes = 4 * LANES_DEPTH_MAX * LANES_BYTES_MAX;
    common->limits.send_queue_bytes_max = 4 * LANES_DEPTH_MAX * LANES_BYTES_MAX;
    common->token = "";
    common->node = "bench";
    common->role = role;
    common->incarnation = ep_random_id();
    common->payload_crc = true;
}

static void serve(const char *listen_url, int url_fd)
{
    ep_error error;
    ep_rpc_server *server;
    ep_rpc_server_config config = {0};
    ep_lane_address address = {.url = listen_url};
    char url[EP_ADDRESS_BYTES] = "";
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    common_init(&config.common, "node");
    check(ep_rpc_server_create(&config, &server, &error), &error, "server");
    check(ep_rpc_server_add_service(server, &service.base, &error), &error, "service");
    check(ep_rpc_server_listen(server, &address, EP_ROLES_MAIN, &error), &error, "listen");
    ep_rpc_server_set_state(server, "serving");
    ep_rpc_server_url(server, 0, url, sizeof(url));
    if (write(url_fd, url, sizeof(url)) != (ssize_t)sizeof(url)) {
        _exit(1);
    }
    for (;;) {
        pause();
    }
}

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    const struct call_slot *slot = arg;
    rpc_state *s = slot->state;
    check(error == NULL ? EP_OK : error->code, error, "call");
    if (reply->tensor_bytes != s->tensors->bytes) {
        lanes_fail("rpc echo", "the reply has another length than the request");
    }
    lanes_pipeline_reply(&s->pipeline, slot->slot);
}

static void begin_call(void *arg, int slot)
{
    rpc_state *s = arg;
    ep_error error;
    ep_rpc_call_id id;
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    header.model = "bench";
    header.slots = 1;
    ep_rpc_request request = {.method = s->method,
                              .header = &header.base,
                              .tensors = s->tensors,
                              .deadline_ns = ep_clock_now_ns() + 60 * EP_NS_PER_S};
    check(ep_rpc_call_start(s->channel, &request, on_reply, &s->slots[slot], &id, &error), &error,
          "start");
}

static double rpc_run(lanes_form *form, size_t bytes, int count, int depth, double *out_us)
{
    rpc_state *s = form->state;
    if (s->tensors == NULL || s->tensors->bytes != bytes) {
        ep_buffer_unref(s->tensors);
        check(ep_buffer_acquire(s->config.common.pool, bytes, &s->tensors), NULL, "buffer");
        memset(s->tensors->data, 1, bytes);
    }
    s->pipeline = (lanes_pipeline){
        .count = count, .depth = depth, .out_us = out_us, .send = begin_call, .arg = s};
    ep_stream_lane_set_busy_poll(form->busy_poll_us);
    double seconds = lanes_pipeline_run(&s->pipeline);
    ep_stream_lane_set_busy_poll(0);
    return seconds;
}

static void rpc_close(lanes_form *form)
{
    rpc_state *s = form->state;
    ep_rpc_channel_destroy(s->channel);
    kill(form->server, SIGKILL);
    waitpid(form->server, NULL, 0);
    ep_buffer_unref(s->tensors);
    free(s);
}

static void rpc_connect(lanes_form *form)
{
    rpc_state *s = form->state;
    ep_error error;
    check(ep_stream_lane_choose(s->stream_lane, &error), &error, "stream lane");
    s->config = (ep_rpc_channel_config){
        .address = {.url = s->url}, .connection_class = "bulk", .reconnect = true};
    common_init(&s->config.common, "client");
    s->method = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward");
    for (int i = 0; i < LANES_DEPTH_MAX; i++) {
        s->slots[i] = (struct call_slot){.state = s, .slot = i};
    }
    check(ep_rpc_channel_create(&s->config, &s->channel, &error), &error, "channel");
    check(ep_rpc_channel_wait_ready(s->channel, ep_clock_now_ns() + 5 * EP_NS_PER_S, &error),
          &error, "connect");
}

void lanes_rpc_open(lanes_form *form, const char *stream_lane, const char *url)
{
    rpc_state *s = calloc(1, sizeof(*s));
    int fds[2];
    ep_error error;
    if (s == NULL || pipe(fds) != 0) {
        lanes_fail("rpc echo", "no memory");
    }
    s->stream_lane = stream_lane;
    form->server = fork();
    if (form->server == 0) {
        check(ep_stream_lane_choose(stream_lane, &error), &error, "stream lane");
        ep_stream_lane_set_busy_poll(form->busy_poll_us);
        serve(url, fds[1]);
    }
    if (read(fds[0], s->url, sizeof(s->url)) != (ssize_t)sizeof(s->url)) {
        lanes_fail("rpc echo", "no server");
    }
    close(fds[0]);
    close(fds[1]);
    form->state = s;
    form->connect = rpc_connect;
    form->run = rpc_run;
    form->close = rpc_close;
}
