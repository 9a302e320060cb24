/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RPC echo (Hello, frames, both checksums, credits, dispatch) beside a raw TCP echo of the same bytes in the same run:
 * round trip at depth 1, goodput at depth 8. Rounds alternate between the two, and medians of ratios are reported, because the
 * machine's speed drifts.
 */
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "bench/tcp_echo.h"
#include "expert.pb-c.h"
#include "rpc/rpc.h"

#define ROUNDS 7
#define URL_BYTES 256

static const size_t sizes[] = {64, 1024, 14336, 131072, 1048576, 4194304, 8388608};

static void on_forward(Expertd__V1__ExpertService_Service *service, const Expertd__V1__ForwardRequest *request,
                       Expertd__V1__ForwardReply_Closure closure, void *closure_data)
{
    size_t bytes;
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    const uint8_t *tensors = ep_rpc_call_tensors(closure_data, &bytes);
    ep_buffer *out = NULL;
    (void)service;
    if (ep_buffer_acquire(ep_rpc_call_pool(closure_data), bytes, &out) != EP_OK) {
        ep_rpc_call_finish(closure_data, EP_ERR_NO_MEMORY, NULL);
        return;
    }
    memcpy(out->data, tensors, bytes); /* a real reply is written by a kernel: one write of each byte */
    reply.slots = request->slots;
    ep_rpc_call_attach(closure_data, out);
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

static void on_describe(Expertd__V1__ExpertService_Service *service, const Expertd__V1__Empty *request,
                        Expertd__V1__DescribeReply_Closure closure, void *closure_data)
{
    Expertd__V1__DescribeReply reply = EXPERTD__V1__DESCRIBE_REPLY__INIT;
    (void)service;
    (void)request;
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

static Expertd__V1__ExpertService_Service service = EXPERTD__V1__EXPERT_SERVICE__INIT(on_);

static void check(ep_err err, const ep_error *error, const char *what)
{
    if (err != EP_OK) {
        fprintf(stderr, "bench_rpc: %s: %s: %s\n", what, ep_err_name(err), error != NULL ? error->text : "");
        exit(1);
    }
}

static void common_init(ep_rpc_common *common, const char *role)
{
    memset(common, 0, sizeof(*common));
    check(ep_timer_service_create("bench-timer", &common->timers), NULL, "timers");
    check(ep_buffer_pool_create(0, (size_t)512 << 20, &common->pool), NULL, "pool");
    ep_rpc_limits_default(&common->limits);
    common->token = "";
    common->node = "bench";
    common->role = role;
    common->incarnation = ep_random_id();
    common->payload_crc = true;
}

static pid_t start_server(char *out_url)
{
    int pipe_fds[2];
    if (pipe(pipe_fds) != 0) {
        return -1;
    }
    pid_t pid = fork();
    if (pid == 0) {
        ep_error error;
        ep_rpc_server *server;
        ep_rpc_server_config config = {0};
        ep_lane_address address = {.url = "tcp://127.0.0.1:0"};
        char url[URL_BYTES] = "";
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        common_init(&config.common, "node");
        check(ep_rpc_server_create(&config, &server, &error), &error, "server");
        check(ep_rpc_server_add_service(server, &service.base, &error), &error, "service");
        check(ep_rpc_server_listen(server, &address, EP_ROLES_MAIN, &error), &error, "listen");
        ep_rpc_server_set_state(server, "serving");
        ep_rpc_server_url(server, 0, url, sizeof(url));
        if (write(pipe_fds[1], url, sizeof(url)) != (ssize_t)sizeof(url)) {
            _exit(1);
        }
        for (;;) {
            pause();
        }
    }
    ssize_t n = read(pipe_fds[0], out_url, URL_BYTES);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    return n == URL_BYTES ? pid : -1;
}

/* Calls in flight and what they measured. */
typedef struct run_state {
    ep_rpc_channel *channel;
    ep_buffer *tensors;
    pthread_mutex_t lock;
    int started, finished, count;
    double begin_us[64];
    double *out_us;
    sem_t done;
} run_state;

typedef struct slot {
    run_state *run;
    int index; /* position in begin_us */
} slot;

static void begin_call(slot *s);

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    slot *s = arg;
    run_state *run = s->run;
    check(error == NULL ? EP_OK : error->code, error, "call");
    if (reply->tensor_bytes != run->tensors->bytes) {
        fprintf(stderr, "bench_rpc: echo of %zu bytes came back as %zu\n", run->tensors->bytes, reply->tensor_bytes);
        exit(1);
    }
    pthread_mutex_lock(&run->lock);
    if (run->out_us != NULL) {
        run->out_us[run->finished] = bench_now_us() - run->begin_us[s->index];
    }
    run->finished++;
    bool more = run->started < run->count;
    run->started += more;
    bool last = run->finished == run->count;
    pthread_mutex_unlock(&run->lock);
    if (more) {
        begin_call(s);
    } else if (last) {
        sem_post(&run->done);
    }
}

static void begin_call(slot *s)
{
    ep_error error;
    ep_rpc_call_id id;
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    header.model = "bench";
    header.slots = 1;
    ep_rpc_request request = {
        .method = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward"),
        .header = &header.base,
        .tensors = s->run->tensors,
        .deadline_ns = ep_clock_now_ns() + 30 * EP_NS_PER_S,
    };
    s->run->begin_us[s->index] = bench_now_us();
    check(ep_rpc_call_start(s->run->channel, &request, on_reply, s, &id, &error), &error, "start");
}

static double rpc_run(ep_rpc_channel *channel, ep_buffer *tensors, int count, int depth, double *out_us)
{
    static slot slots[64];
    run_state run = {.channel = channel, .tensors = tensors, .count = count, .out_us = out_us};
    pthread_mutex_init(&run.lock, NULL);
    sem_init(&run.done, 0, 0);
    double begin = bench_now_us();
    int first = depth < count ? depth : count;
    run.started = first;
    for (int i = 0; i < first; i++) {
        slots[i] = (slot){.run = &run, .index = i};
        begin_call(&slots[i]);
    }
    sem_wait(&run.done);
    double seconds = (bench_now_us() - begin) / 1e6;
    /* the last callback may still hold the lock for a moment */
    pthread_mutex_lock(&run.lock);
    pthread_mutex_unlock(&run.lock);
    return seconds;
}

static int count_for(size_t bytes, int depth)
{
    double budget = 0.15; /* seconds, by a rough cost model */
    double each = 60e-6 + (double)bytes * 2 / 1.0e9;
    int count = (int)(budget / each) * (depth > 1 ? 2 : 1);
    return count < 12 ? 12 : count > 4000 ? 4000 : count;
}

static void bench_size(bench_report *report, ep_rpc_channel *channel, ep_buffer_pool *pool, size_t bytes)
{
    double rtt[ROUNDS], raw_rtt[ROUNDS], rtt_ratio[ROUNDS], rate[ROUNDS], raw_rate[ROUNDS], rate_ratio[ROUNDS];
    double *us = calloc(8192, sizeof(double));
    ep_buffer *tensors;
    tcp_echo echo;
    check(ep_buffer_acquire(pool, bytes, &tensors), NULL, "buffer");
    memset(tensors->data, 1, bytes);
    if (us == NULL || tcp_echo_open(&echo, bytes) != 0) {
        fprintf(stderr, "bench_rpc: raw TCP echo failed\n");
        exit(1);
    }
    int one = count_for(bytes, 1), eight = count_for(bytes, 8);
    rpc_run(channel, tensors, one / 4 + 8, 8, NULL);
    tcp_echo_run(&echo, one / 4 + 8, 8, NULL);
    for (int r = 0; r < ROUNDS; r++) {
        rpc_run(channel, tensors, one, 1, us);
        rtt[r] = bench_quantile(us, (size_t)one, 0.5);
        tcp_echo_run(&echo, one, 1, us);
        raw_rtt[r] = bench_quantile(us, (size_t)one, 0.5);
        rtt_ratio[r] = rtt[r] / raw_rtt[r];
        rate[r] = (double)bytes * eight / rpc_run(channel, tensors, eight, 8, NULL) / 1e6;
        raw_rate[r] = (double)bytes * eight / tcp_echo_run(&echo, eight, 8, NULL) / 1e6;
        rate_ratio[r] = rate[r] / raw_rate[r];
    }
    bench_row row = {.unit = "us", .limit = bench_quantile(raw_rtt, ROUNDS, 0.5), .rival = NAN, .better = BENCH_LOWER, .bar = NAN};
    row.value = bench_quantile(rtt, ROUNDS, 0.5);
    row.ratio = bench_quantile(rtt_ratio, ROUNDS, 0.5);
    snprintf(row.name, sizeof(row.name), "rpc echo round trip p50, %zu B, depth 1", bytes);
    bench_report_add(report, &row);
    row = (bench_row){.unit = "MB/s", .limit = bench_quantile(raw_rate, ROUNDS, 0.5), .rival = NAN, .better = BENCH_HIGHER, .bar = NAN};
    row.value = bench_quantile(rate, ROUNDS, 0.5);
    row.ratio = bench_quantile(rate_ratio, ROUNDS, 0.5);
    snprintf(row.name, sizeof(row.name), "rpc echo goodput each way, %zu B, depth 8", bytes);
    bench_report_add(report, &row);
    tcp_echo_close(&echo);
    ep_buffer_unref(tensors);
    free(us);
}

int main(int argc, char **argv)
{
    char url[URL_BYTES];
    ep_error error;
    pid_t server = start_server(url);
    if (server < 0) {
        fprintf(stderr, "bench_rpc: no server\n");
        return 1;
    }
    ep_rpc_channel *channel;
    ep_rpc_channel_config config = {.address = {.url = url}, .connection_class = "bulk", .reconnect = true};
    common_init(&config.common, "client");
    check(ep_rpc_channel_create(&config, &channel, &error), &error, "channel");
    check(ep_rpc_channel_wait_ready(channel, ep_clock_now_ns() + 5 * EP_NS_PER_S, &error), &error, "connect");
    bench_report *report = bench_report_create("RPC echo against a raw TCP echo (limit), same run");
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        bench_size(report, channel, config.common.pool, sizes[i]);
    }
    ep_rpc_channel_destroy(channel);
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
