/* SPDX-License-Identifier: Apache-2.0 */
/* Forward calls through a real RPC server on the loopback lane, with real and hand-driven
 * backends. */
#include <criterion/criterion.h>
#include <arpa/inet.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/numeric.h"
#include "expertd/forward_handler.h"
#include "expertd/forward_metrics.h"
#include "hand_backend.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/forward_call.h"
#include "support/slow_backend.h"

static ep_error e; /* of the last call */

#define H 32
#define EXPERTS 8

typedef struct service {
    Expertd__V1__ExpertService_Service base;
    ep_forward_handler *handler;
} service;

static struct rig {
    char dir[EP_FIXTURE_PATH_BYTES];
    char url[64];
    ep_node_model_config model_config;
    ep_node_config config;
    hand_backend hand;
    ep_backend *backend;
    ep_weight_store *store;
    ep_node_models models;
    ep_node_epoch epoch;
    ep_admission *admission;
    ep_batcher *batcher;
    ep_metrics *metrics;
    ep_tls_config tls; /* of the relay */
    ep_relay *relay;   /* without neighbours */
    ep_forward_handler *handler;
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_server *server;
    service service;
    ep_test_peer peer;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} rig;

static void serve_forward(Expertd__V1__ExpertService_Service *s,
                          const Expertd__V1__ForwardRequest *in,
                          Expertd__V1__ForwardReply_Closure closure, void *data)
{
    ep_forward_handler_call(((service *)(void *)s)->handler, in, closure, data);
}

static void serve_describe(Expertd__V1__ExpertService_Service *s, const Expertd__V1__Empty *in,
                           Expertd__V1__DescribeReply_Closure closure, void *data)
{
    (void)s;
    (void)in;
    (void)closure;
    ep_rpc_call_finish(data, EP_ERR_UNIMPLEMENTED, NULL);
}

static void signal_change(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&rig.lock);
    pthread_cond_broadcast(&rig.changed);
    pthread_mutex_unlock(&rig.lock);
}

static void wait_loaded(void)
{
    ep_weight_stats stats;
    pthread_mutex_lock(&rig.lock);
    for (;;) {
        ep_weight_store_read_stats(rig.store, &stats);
        if (stats.pending_count == 0) {
            break;
        }
        pthread_cond_wait(&rig.changed, &rig.lock);
    }
    pthread_mutex_unlock(&rig.lock);
    cr_assert_eq(stats.failed_count, 0, "%s", stats.last_error);
}

/* Until no request is in work. */
static ep_forward_stats wait_idle(void)
{
    ep_forward_stats stats;
    do {
        sched_yield();
        ep_forward_handler_read_stats(rig.handler, &stats);
    } while (stats.in_flight != 0);
    return stats;
}

static void open_backend(const char *name)
{
    if (strcmp(name, "hand") == 0) {
        hand_backend_init(&rig.hand);
        rig.backend = &rig.hand.base;
        return;
    }
    ep_backend_config config = {.threads = 2};
    const ep_backend_ops *ops =
        strcmp(name, "slow") == 0 ? &ep_slow_backend_ops : ep_backend_by_name(name);
    ASSERT_OK(ops->open(&config, &rig.backend, &e), e);
}

static void open_server(void)
{
    ep_lane_address address = {.url = rig.url};
    cr_assert_eq(ep_timer_service_create("rig", &rig.timers), EP_OK);
    cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &rig.pool), EP_OK);
    ep_rpc_server_config config = {.common = {.timers = rig.timers,
                                              .pool = rig.pool,
                                              .token = "",
                                              .node = "rig",
                                              .role = "node",
                                              .incarnation = 1,
                                              .payload_crc = true}};
    ep_rpc_limits_default(&config.common.limits);
    ASSERT_OK(ep_rpc_server_create(&config, &rig.server, &e), e);
    rig.service =
        (service){.base = EXPERTD__V1__EXPERT_SERVICE__INIT(serve_), .handler = rig.handler};
    ASSERT_OK(ep_rpc_server_add_service(rig.server, &rig.service.base.base, &e), e);
    ep_rpc_server_set_state(rig.server, "serving");
    ASSERT_OK(ep_rpc_server_listen(rig.server, &address, EP_ROLES_MAIN, &e), e);
    ASSERT_OK(ep_test_peer_open(&rig.peer, rig.url, &e), e);
}

/* experts: NULL all, else ranges. */
static void start_with(const char *backend, const char *experts, uint32_t inflight_tokens,
                       uint64_t spill_bytes, uint32_t jobs)
{
    static ep_expert_range ranges[EP_EXPERT_RANGES_MAX];
    ep_fixture_config fixture = ep_fixture_default();
    pthread_mutex_init(&rig.lock, NULL);
    pthread_cond_init(&rig.changed, NULL);
    ep_fixture_new(&fixture, rig.dir);
    snprintf(rig.url, sizeof(rig.url), "loopback://rig-%d", (int)getpid());
    open_backend(backend);
    rig.model_config =
        (ep_node_model_config){.name = "demo", .path = rig.dir, .choice = EP_EXPERTS_ALL};
    if (experts != NULL) {
        rig.model_config.choice = EP_EXPERTS_LISTED;
        rig.model_config.ranges = ranges;
        cr_assert(ep_expert_ranges_parse(experts, ranges, &rig.model_config.ranges_count));
    }
    rig.config = (ep_node_config){.models_count = 1, .models = &rig.model_config};
    ep_node_epoch_init(&rig.epoch);
    ep_weight_store_config store = {
        .backends = &rig.backend, .backends_count = 1, .on_change = signal_change};
    cr_assert_eq(ep_weight_store_create(&store, &rig.store, &e), EP_OK);
    ASSERT_OK(ep_node_models_open(&rig.models, &rig.config, &rig.backend, 1, rig.store, NULL, &e),
              e);
    cr_assert_eq(ep_weight_store_start(rig.store, &e), EP_OK);
    for (uint32_t l = 0; l < rig.models.models[0].layers_count; l++) {
        uint8_t wanted[EXPERTS];
        ep_node_model_configured(&rig.models.models[0], &rig.models.models[0].layers[l], wanted);
        ep_weight_store_want(rig.store, rig.models.models[0].layers[l].store_slot, wanted);
    }
    wait_loaded();
    ep_tenants_init(&rig.config.tenants);
    cr_assert_eq(
        ep_admission_create(inflight_tokens, spill_bytes, &rig.config.tenants, &rig.admission),
        EP_OK);
    const ep_batch_policy_config policy = {.jobs_max = jobs, .tenants_count = 1};
    cr_assert_eq(ep_batcher_create(&policy, NULL, &rig.batcher), EP_OK);
    cr_assert_eq(ep_metrics_create(&rig.metrics), EP_OK);
    const ep_rpc_common common = {.node = "rig", .host = "here"};
    cr_assert_eq(
        ep_relay_create(&(ep_relay_config){.common = &common, .tls = &rig.tls}, &rig.relay), EP_OK);
    ep_forward_handler_config handler = {.node_name = "rig",
                                         .models = &rig.models,
                                         .store = rig.store,
                                         .batcher = rig.batcher,
                                         .admission = rig.admission,
                                         .tenants = &rig.config.tenants,
                                         .epoch = &rig.epoch,
                                         .metrics = rig.metrics,
                                         .relay = rig.relay,
                                         .reply_bytes_max = 1 << 20,
                                         .bookkeeping_bytes_max = 16 << 20};
    cr_assert_eq(ep_forward_handler_create(&handler, &rig.handler, &e), EP_OK);
    open_server();
}

/* All experts, and budgets that nothing reaches. */
static void start(const char *backend, uint32_t jobs)
{
    start_with(backend, NULL, 1024, 1 << 20, jobs);
}

static void begin(const ep_test_forward *f, ep_test_pending *out_pending)
{
    ASSERT_OK(ep_test_forward_begin(&rig.peer, f, NULL, out_pending, &e), e);
}

static void stop(void)
{
    if (rig.peer.channel != NULL) {
        ep_test_peer_close(&rig.peer);
    }
    if (rig.batcher != NULL) {
        ep_batcher_close(rig.batcher, EP_ERR_DRAINING);
    }
    if (rig.backend == &rig.hand.base) {
        hand_backend_complete_all(&rig.hand);
    }
    ep_rpc_server_destroy(rig.server);
    ep_batcher_destroy(rig.batcher);
    ep_relay_destroy(rig.relay);
    ep_forward_handler_destroy(rig.handler);
    ep_metrics_destroy(rig.metrics);
    ep_admission_destroy(rig.admission);
    ep_weight_store_destroy(rig.store);
    ep_node_models_close(&rig.models);
    if (rig.backend != NULL && rig.backend != &rig.hand.base) {
        rig.backend->ops->close(rig.backend);
    }
    ep_buffer_pool_destroy(rig.pool);
    ep_timer_service_destroy(rig.timers);
    ep_fixture_remove(rig.dir);
}

TestSuite(forward_handler, .fini = stop);

/* Rows of bf16, both ways. */
static ep_test_forward request_of(uint32_t layer, uint32_t rows, uint32_t slots, const void *x,
                                  const ep_wire_slot *wire_slots)
{
    return (ep_test_forward){.layer = layer,
                             .rows = rows,
                             .slots = slots,
                             .hidden = H,
                             .x_dtype = EP_DTYPE_BF16,
                             .reply_dtype = EP_DTYPE_BF16,
                             .x = x,
                             .wire_slots = wire_slots};
}

/* A request of 6 rows and 10 slots over experts 0, 3, 5 and 7 of layer 1. */
static ep_test_forward sample(ep_dtype dtype)
{
    static const ep_wire_slot slots[] = {{0, 0}, {4, 0}, {5, 0}, {1, 3}, {2, 5},
                                         {3, 5}, {0, 5}, {2, 7}, {4, 7}, {5, 7}};
    static uint8_t x[6 * H * 4];
    ep_test_fill_rows(7, dtype, 6 * H, x);
    ep_test_forward f = request_of(1, 6, 10, x, slots);
    f.x_dtype = f.reply_dtype = dtype;
    f.want_timing = true;
    return f;
}

/* As open_backend opens it. */
static ep_err expected_rows(const ep_test_forward *f, void *out_rows, ep_error *out_error)
{
    const ep_numerics numerics = EP_NUMERICS_PORTABLE;
    ep_test_forward judged = *f;
    judged.expected_with = &numerics;
    return ep_test_expected_rows(rig.dir, &judged, out_rows, out_error);
}

static void expect_exact(const ep_test_forward *f)
{
    static uint8_t got[4096 * 4], wanted[4096 * 4];
    memset(got, 0xee, sizeof(got));
    memset(wanted, 0xee, sizeof(wanted));
    ASSERT_OK(ep_test_forward_run(&rig.peer, f, got, &e), e);
    ASSERT_OK(expected_rows(f, wanted, &e), e);
    cr_expect_arr_eq(got, wanted, sizeof(got));
}

static void expect_exact_everywhere(void)
{
    static const ep_dtype dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};
    static const float scales[] = {0.5f, -1.25f, 3.0f, 0.1f, 1.0f, 2.0f, 0.0f, 7.5f, -0.75f, 0.33f};
    for (size_t i = 0; i < 3; i++) {
        ep_test_forward f = sample(dtypes[i]);
        expect_exact(&f);
        f.weight_on_input = true;
        f.slot_scales = scales;
        f.prefill = true;
        f.reply_dtype = EP_DTYPE_F32;
        expect_exact(&f);
    }
}

Test(forward_handler, rows_equal_the_reference_on_cpu)
{
    start("cpu", 4);
    expect_exact_everywhere();
}

Test(forward_handler, rows_equal_the_reference_on_a_slow_device_with_its_own_memory)
{
    ep_slow_backend_reset(5);
    start("slow", 4);
    expect_exact_everywhere();
}

Test(forward_handler, int8_rows_carry_their_scale)
{
    int8_t x[2 * H];
    static const float scales[2] = {0.02f, 0.5f};
    static const ep_wire_slot slots[] = {{0, 2}, {1, 2}};
    for (int i = 0; i < 2 * H; i++) {
        x[i] = (int8_t)(i * 5 - 127);
    }
    ep_test_forward f = request_of(0, 2, 2, x, slots);
    f.x_dtype = EP_DTYPE_I8;
    f.row_scales = scales;
    start("cpu", 4);
    expect_exact(&f);
}

Test(forward_handler, slots_in_any_order_give_the_same_rows)
{
    ep_wire_slot slots[300];
    static uint16_t x[20 * H];
    for (uint32_t i = 0; i < 300; i++) {
        slots[i] = (ep_wire_slot){.row = (i * 13) % 20, .expert = (i * 5 + i / 7) % EXPERTS};
    }
    ep_test_fill_rows(9, EP_DTYPE_BF16, 20 * H, x);
    ep_test_forward f = request_of(0, 20, 100, x, slots);
    start("cpu", 4);
    expect_exact(&f);
}

static void expect_error(const ep_test_forward *f, ep_err code, const char *part, int32_t layer,
                         int32_t expert)
{
    ep_error_clear(&e);
    cr_expect_eq(ep_test_forward_run(&rig.peer, f, NULL, &e), code, "%s: %s", part, e.text);
    EXPECT_TEXT(e, part);
    cr_expect_eq(e.layer, layer, "%s", e.text);
    cr_expect_eq(e.expert, expert, "%s", e.text);
    cr_expect_str_eq(e.node, "rig");
}

Test(forward_handler, wrong_requests_are_refused_by_name)
{
    start_with("hand", "0-5", 1024, 1 << 20, 4);
    ep_test_forward good = sample(EP_DTYPE_BF16), f = good;
    f.model = "other";
    expect_error(&f, EP_ERR_NOT_FOUND, "no model 'other'", -1, -1);
    f = good;
    f.version = "0123";
    expect_error(&f, EP_ERR_NOT_FOUND, "version '0123'", -1, -1);
    f = good;
    f.layer = 9;
    expect_error(&f, EP_ERR_NOT_FOUND, "no MoE layer 9", 9, -1);
    f = good;
    f.numerics = "elsewhere/bf16";
    expect_error(&f, EP_ERR_UNAVAILABLE, "'hand/bf16', the call pins 'elsewhere/bf16'", -1, -1);
    expect_error(&good, EP_ERR_NOT_OWNER, "model demo layer 1 expert 7 is not held here", 1, 7);
    f = good;
    f.epoch = (ep_epoch){1, 4};
    ep_node_epoch_set_in_force(&rig.epoch, (ep_epoch){1, 5});
    expect_error(&f, EP_ERR_STALE_EPOCH, "epoch 1.4 is older than 1.5", 1, 7);
    f.epoch = (ep_epoch){1, 5};
    expect_error(&f, EP_ERR_NOT_OWNER, "expert 7 is not held here", 1, 7);
    ep_wire_slot outside[] = {{0, EXPERTS}};
    f = good;
    f.wire_slots = outside;
    f.slots = 1;
    cr_expect_eq(ep_test_forward_run(&rig.peer, &f, NULL, NULL), EP_ERR_INVALID_ARGUMENT);
    cr_expect_eq(rig.hand.count, 0, "nothing was computed");
    ep_forward_stats stats = wait_idle();
    cr_expect_eq(stats.served, 0);
    cr_expect_eq(stats.failed, 8);
    ep_admission_stats admission;
    ep_admission_read_stats(rig.admission, &admission);
    cr_expect_eq(admission.tokens_used, 0, "refused requests hold no budget");
}

Test(forward_handler, an_old_table_still_works_while_the_expert_is_here)
{
    start("cpu", 4);
    ep_test_forward f = sample(EP_DTYPE_BF16);
    f.epoch = (ep_epoch){1, 4};
    ep_node_epoch_set_in_force(&rig.epoch, (ep_epoch){1, 5});
    expect_exact(&f);
}

Test(forward_handler, beyond_both_budgets_callers_are_told_to_come_back)
{
    ep_test_pending first, second;
    ep_test_forward f = sample(EP_DTYPE_BF16);
    start_with("hand", NULL, 6, 4500, 64); /* room for one such request, about 3 KB, not for two */
    begin(&f, &first);
    hand_backend_wait(&rig.hand, 4);
    begin(&f, &second); /* spills */
    hand_backend_wait(&rig.hand, 8);
    expect_error(&f, EP_ERR_RESOURCE_EXHAUSTED, "6 of inflight_tokens 6", -1, -1);
    cr_expect_eq(ep_test_forward_run(&rig.peer, &f, NULL, &e), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_gt(e.retry_after_us, 0);
    hand_backend_complete_all(&rig.hand);
    cr_expect_eq(ep_test_forward_wait(&first, &e), EP_OK);
    cr_expect_eq(ep_test_forward_wait(&second, &e), EP_OK);
    begin(&f, &first);
    hand_backend_wait(&rig.hand, 12);
    hand_backend_complete_all(&rig.hand);
    EXPECT_OK(ep_test_forward_wait(&first, &e), e);
}

/* Four slots for this node, six for a neighbour. */
static ep_test_forward relayed_sample(void)
{
    static Expertd__V1__RelayPart parts[2];
    static Expertd__V1__RelayPart *list[] = {&parts[0], &parts[1]};
    static const char *const names[] = {"rig", "stranger"};
    for (uint32_t i = 0; i < 2; i++) {
        expertd__v1__relay_part__init(&parts[i]);
        parts[i].node = (char *)(uintptr_t)names[i];
        parts[i].url = (char *)(uintptr_t)(i == 0 ? "" : "tcp://127.0.0.1:1");
        parts[i].slots_begin = i * 4;
        parts[i].slots_count = i == 0 ? 4 : 6;
    }
    ep_test_forward f = sample(EP_DTYPE_BF16);
    f.relay = list;
    f.relay_count = 2;
    return f;
}

Test(forward_handler, what_goes_on_to_neighbours_counts_in_the_budgets)
{
    ep_admission_stats stats;
    ep_test_forward f = relayed_sample();
    start_with("hand", NULL, 12, 0, 64); /* six rows, and at most six copied */
    cr_expect_eq(ep_test_forward_run(&rig.peer, &f, NULL, &e), EP_ERR_UNAVAILABLE, "%s", e.text);
    wait_idle();
    ep_admission_read_stats(rig.admission, &stats);
    cr_expect_eq(stats.tokens_used, 0u);
}

Test(forward_handler, copies_beyond_the_budgets_are_refused)
{
    ep_test_forward f = relayed_sample();
    start_with("hand", NULL, 11, 0, 64);
    expect_error(&f, EP_ERR_RESOURCE_EXHAUSTED, "12 tokens", -1, -1);
}

Test(forward_handler, nothing_goes_to_a_neighbour_that_the_table_does_not_name)
{
    ep_test_forward f = relayed_sample();
    start("cpu", 4);
    EXPECT_FAILS(ep_test_forward_run(&rig.peer, &f, NULL, &e), EP_ERR_UNAVAILABLE, e,
                 "node stranger at 'tcp://127.0.0.1:1' is not of this host in the newest table");
    cr_expect_str_eq(e.node, "stranger");
}

/* The table names a neighbour with an address in plain text, and this node has TLS: it is asked for
 * nothing, and nobody connects to it. */
Test(forward_handler, nothing_goes_to_a_neighbour_in_plain_text)
{
    ep_test_forward f = relayed_sample();
    ep_relay_neighbour *neighbour = calloc(1, sizeof(*neighbour));
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(at);
    int recorder = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    cr_assert(bind(recorder, (struct sockaddr *)&at, bytes) == 0 && listen(recorder, 8) == 0 &&
              getsockname(recorder, (struct sockaddr *)&at, &bytes) == 0);
    snprintf(neighbour->name, sizeof(neighbour->name), "stranger");
    snprintf(neighbour->url, sizeof(neighbour->url), "tcp://127.0.0.1:%u", ntohs(at.sin_port));
    f.relay[1]->url = neighbour->url;
    rig.tls.ca_file = "/ca.pem";
    start("cpu", 4);
    ep_relay_set_neighbours(rig.relay, neighbour, 1);
    cr_expect_eq(ep_test_forward_run(&rig.peer, &f, NULL, &e), EP_ERR_UNAVAILABLE);
    cr_expect(strstr(e.text, neighbour->url) != NULL &&
                  strstr(e.text, "is not dialed: TLS is configured here") != NULL,
              "%s", e.text);
    cr_expect_str_eq(e.node, "stranger");
    cr_expect_lt(accept(recorder, NULL, NULL), 0);
    close(recorder);
}

Test(forward_handler, a_failing_expert_fails_the_call_and_names_it)
{
    ep_test_pending pending;
    ep_test_forward f = sample(EP_DTYPE_BF16);
    start("hand", 64);
    begin(&f, &pending);
    hand_backend_wait(&rig.hand, 4);
    hand_backend_complete(&rig.hand, EP_OK);
    /* expert 5, the second of those with three rows */
    hand_backend_complete(&rig.hand, EP_ERR_DEVICE_LOST);
    hand_backend_complete(&rig.hand, EP_OK);
    hand_backend_complete(&rig.hand, EP_OK);
    cr_expect_eq(ep_test_forward_wait(&pending, &e), EP_ERR_DEVICE_LOST);
    cr_expect_eq(e.layer, 1);
    cr_expect_eq(e.expert, 5, "%s", e.text);
}

/* A call of four jobs, one at a time, is cancelled while its first runs; then a refused one, and
 * the first job ends. */
static ep_forward_stats cancel_at_the_first_job(void (*cancel)(ep_rpc_channel *channel,
                                                               ep_rpc_call_id id))
{
    ep_test_pending pending;
    ep_test_forward f = sample(EP_DTYPE_BF16);
    start("hand", 1); /* one job at a time: three wait */
    begin(&f, &pending);
    hand_backend_wait(&rig.hand, 1);
    cancel(rig.peer.channel, pending.id);
    cr_expect_eq(ep_test_forward_wait(&pending, &e), EP_ERR_CANCELLED);
    /* The cancel frame and this request travel in order: when it is refused, the cancel has
     * arrived. */
    ep_test_forward marker = f;
    marker.model = "other";
    cr_expect_eq(ep_test_forward_run(&rig.peer, &marker, NULL, &e), EP_ERR_NOT_FOUND);
    hand_backend_complete(&rig.hand, EP_OK);
    return wait_idle();
}

/* Until the server has seen the cancel: its call's jobs that wait are then dropped. */
Test(forward_handler, cancelled_work_is_dropped_before_it_is_computed)
{
    ep_forward_stats stats = cancel_at_the_first_job(ep_rpc_call_cancel);
    cr_expect_eq(rig.hand.count, 1, "the other three jobs never reached the backend");
    cr_expect_eq(stats.failed, 2);
    cr_expect_eq(stats.hedged, 0);
}

/* Requests are late and nothing was done for very long: whatever has not begun is lost. */
static void make_late(void)
{
    const uint64_t long_ns = 6500 * EP_NS_PER_S, now_ns = ep_clock_now_ns();
    ep_ticket late = {.tokens = 1, .deadline_ns = EP_TIME_NEVER};
    cr_assert_eq(ep_admission_enter(rig.admission, &late, now_ns, NULL), EP_OK);
    ep_admission_leave(rig.admission, &late, now_ns + long_ns, long_ns, EP_ERR_DEADLINE_EXCEEDED);
}

Test(forward_handler, what_would_be_late_is_dropped_and_one_that_is_alone_is_ended)
{
    ep_test_pending begun, lost;
    ep_test_forward f = sample(EP_DTYPE_BF16);
    ep_test_forward marker = f;
    marker.model = "other";
    f.timeout_ms = 4000; /* less than the estimate */
    start("hand", 1);    /* one job at a time */
    begin(&f, &begun);
    hand_backend_wait(&rig.hand, 1);
    hand_backend_complete(&rig.hand, EP_OK);
    begin(&f, &lost);
    /* behind the other */
    cr_expect_eq(ep_test_forward_run(&rig.peer, &marker, NULL, &e), EP_ERR_NOT_FOUND);
    make_late();
    hand_backend_complete_all(&rig.hand);
    EXPECT_OK(ep_test_forward_wait(&begun, &e), e);
    EXPECT_FAILS(ep_test_forward_wait(&lost, &e), EP_ERR_CANCELLED, e,
                 "more work than it can do before the deadline");
}

/* The caller uses the answer of another copy: what is dropped here is no failure. */
Test(forward_handler, an_answered_call_counts_as_hedged)
{
    ep_forward_stats stats = cancel_at_the_first_job(ep_rpc_call_cancel_answered);
    char *text;
    size_t bytes;
    cr_expect_eq(rig.hand.count, 1);
    cr_expect_eq(stats.hedged, 1);
    cr_expect_eq(stats.failed, 1, "the refused one alone");
    cr_assert_eq(ep_metrics_write(rig.metrics, &text, &bytes), EP_OK);
    cr_expect(strstr(text, "expertd_requests_total{result=\"HEDGED\"} 1\n") != NULL, "%s", text);
    cr_expect(strstr(text, "CANCELLED") == NULL, "%s", text);
    free(text);
}

Test(forward_handler, large_requests_are_cut_into_jobs)
{
    uint32_t slots_count = EP_BATCH_JOB_ROWS_MAX * 2 + 1;
    ep_wire_slot *slots = calloc(slots_count, sizeof(*slots));
    static uint16_t x[64 * H];
    ep_test_pending pending;
    for (uint32_t i = 0; i < slots_count; i++) {
        slots[i] = (ep_wire_slot){i % 64, 3};
    }
    ep_test_forward f = request_of(0, 64, slots_count, x, slots);
    start("hand", 64);
    begin(&f, &pending);
    hand_backend_wait(&rig.hand, 3);
    cr_expect_eq(rig.hand.jobs[0]->rows_count, EP_BATCH_JOB_ROWS_MAX);
    cr_expect_eq(rig.hand.jobs[2]->rows_count, 1);
    hand_backend_complete_all(&rig.hand);
    EXPECT_OK(ep_test_forward_wait(&pending, &e), e);
    free(slots);
}

Test(forward_handler, replies_above_the_frame_limit_are_refused)
{
    uint32_t slots_count = (1 << 20) / (H * 4) + 1;
    ep_wire_slot *slots = calloc(slots_count, sizeof(*slots));
    static uint16_t x[512 * H];
    ep_test_forward f = request_of(0, 512, slots_count, x, slots);
    f.reply_dtype = EP_DTYPE_F32;
    start("hand", 64);
    EXPECT_FAILS(ep_test_forward_run(&rig.peer, &f, NULL, &e), EP_ERR_INVALID_ARGUMENT, e,
                 "frame_bytes_max");
    free(slots);
}

static void *call_many(void *arg)
{
    ep_test_forward f = sample(EP_DTYPE_BF16);
    uint16_t rows[10 * H];
    uint64_t *bad = arg;
    uint16_t wanted[10 * H];
    ep_error own;
    f.prefill = ((uintptr_t)arg & 8) != 0;
    *bad += expected_rows(&f, wanted, &own) != EP_OK;
    for (int i = 0; i < 200; i++) {
        *bad += ep_test_forward_run(&rig.peer, &f, rows, &own) != EP_OK ||
                memcmp(rows, wanted, sizeof(rows)) != 0;
    }
    return NULL;
}

Test(forward_handler, many_callers_at_once_all_get_their_own_rows)
{
    pthread_t threads[4];
    static uint64_t bad[4];
    start("cpu", 4);
    (void)sample(EP_DTYPE_BF16); /* fills the shared rows before the threads read them */
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(pthread_create(&threads[i], NULL, call_many, &bad[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        cr_expect_eq(bad[i], 0);
    }
    ep_forward_stats stats = wait_idle();
    cr_expect_eq(stats.served, 800);
    cr_expect_eq(stats.rows_served, 8000);
}
