/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything a coordinator does, at once, for ThreadSanitizer and for crashes: gateway calls that
 * complete, are cancelled, run out of time or lose their caller; nodes that register, tell of load
 * and move; watches that begin and end; statistics, status and metrics that are read; SIGHUP. Then
 * SIGTERM while calls are in flight. A report of a sanitizer makes the daemon's exit code another
 * than 0.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "coordinator.pb-c.h"
#include "gateway_fixture.h"

enum { CALLERS = 3, GHOSTS = 2, TOKENS = 4, CALLS = 120 };
#define X_BYTES (TOKENS * GATEWAY_HIDDEN * sizeof(uint16_t))
#define SLOTS (TOKENS * GATEWAY_TOP_K)
#define IDS_OFFSET X_BYTES
#define SCALES_OFFSET (IDS_OFFSET + 64)
#define TENSOR_BYTES (SCALES_OFFSET + SLOTS * sizeof(float))

static gateway_fixture f;
static uint8_t tensors[TENSOR_BYTES];
static bool callers_done; /* atomic, as the next ones */
static uint32_t answered;
static uint32_t ended_otherwise;
static uint32_t reloads;

static bool done(void)
{
    return __atomic_load_n(&callers_done, __ATOMIC_ACQUIRE);
}

static void fill_tensors(void)
{
    int32_t ids[SLOTS];
    float scales[SLOTS];
    uint64_t random = 1;
    for (size_t i = 0; i < X_BYTES; i += 2) {
        tensors[i] = (uint8_t)ep_splitmix64(&random);
        tensors[i + 1] = 0x3f;
    }
    for (int i = 0; i < SLOTS; i++) {
        ids[i] = i % GATEWAY_EXPERTS;
        scales[i] = 0.5f;
    }
    memcpy(tensors + IDS_OFFSET, ids, sizeof(ids));
    memcpy(tensors + SCALES_OFFSET, scales, sizeof(scales));
}

static void begin(gateway_raw *raw, uint32_t timeout_ms)
{
    Expertd__V1__GatewayForwardRequest header = EXPERTD__V1__GATEWAY_FORWARD_REQUEST__INIT;
    header.model = (char *)(uintptr_t)f.models[0].name;
    header.layer = gateway_layer(0);
    header.tokens = TOKENS;
    header.hidden = GATEWAY_HIDDEN;
    header.top_k = GATEWAY_TOP_K;
    header.x_dtype = EP_DTYPE_BF16;
    header.out_dtype = EP_DTYPE_BF16;
    header.ids_dtype = EP_DTYPE_I32;
    header.scales_dtype = EP_DTYPE_F32;
    gateway_raw_begin(raw, &header, tensors, sizeof(tensors), timeout_ms);
}

/* One of: a whole call, one cancelled at once, one without time, one whose caller goes. */
static void *call_gateway(void *arg)
{
    uint64_t random = *(const uint64_t *)arg;
    gateway_raw *raw = gateway_raw_open(&f);
    for (int i = 0; i < CALLS; i++) {
        uint64_t way = (ep_splitmix64(&random) >> 20) % 8;
        ep_error error;
        begin(raw, way == 0 ? 1 : EP_TEST_PATIENCE_MS);
        if (way == 1) {
            gateway_raw_cancel(raw);
        } else if (way == 2) {
            gateway_raw_close(raw);
            raw = gateway_raw_open(&f);
            continue;
        }
        ep_err err = gateway_raw_wait(raw, &error, NULL);
        /* At its deadline a call says what it waited for most: an answer, or a copy. A node that
         * was late refuses before. */
        const bool out_of_time = err == EP_ERR_DEADLINE_EXCEEDED || err == EP_ERR_UNAVAILABLE ||
                                 err == EP_ERR_RESOURCE_EXHAUSTED;
        bool as_wanted =
            err == EP_OK || (way == 0 && out_of_time) || (way == 1 && err == EP_ERR_CANCELLED);
        EP_TEST_CHECK(as_wanted, "way %d: %s: %s", (int)way, ep_err_name(err), error.text);
        __atomic_fetch_add(err == EP_OK ? &answered : &ended_otherwise, 1, __ATOMIC_RELAXED);
    }
    gateway_raw_close(raw);
    return NULL;
}

static ep_rpc_channel *open_channel(const char *role, const char *node)
{
    ep_rpc_channel *channel = NULL;
    ep_error error;
    ep_rpc_channel_config config = {
        .common = {.timers = f.cluster.timers,
                   .pool = f.cluster.pool,
                   .token = "",
                   .node = node,
                   .role = role,
                   .incarnation = 1,
                   .payload_crc = true},
        .address = {.url = f.cluster.coordinator.rpc_url},
        .connection_class = "control",
    };
    ep_rpc_limits_default(&config.common.limits);
    ep_rpc_limits_raise_for_control(&config.common.limits);
    ep_err err = ep_rpc_channel_create(&config, &channel, &error);
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    err = err != EP_OK ? err : ep_rpc_channel_wait_ready(channel, end_ns, &error);
    EP_TEST_CHECK(err == EP_OK, "%s", error.text);
    return channel;
}

static void ask(ep_rpc_channel *channel, const char *method, const ProtobufCMessage *request)
{
    ProtobufCMessage *reply = NULL;
    ep_error error;
    ep_err err =
        ep_rpc_call_sync(channel, "expertd.v1.Coordinator", method, request,
                         ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS, &reply, &error);
    EP_TEST_CHECK(err == EP_OK, "%s: %s", method, error.text);
    protobuf_c_message_free_unpacked(reply, NULL);
}

/* A node without models that keeps moving, so that tables change; it tells of load in a layer that
   nobody has given it. */
static void *be_ghost(void *arg)
{
    char name[16];
    char url[48];
    uint32_t number = *(const uint32_t *)arg;
    snprintf(name, sizeof(name), "ghost%u", number);
    ep_rpc_channel *channel = open_channel("node", name);
    for (uint32_t i = 0; !done(); i++) {
        Expertd__V1__RegisterRequest registers = EXPERTD__V1__REGISTER_REQUEST__INIT;
        Expertd__V1__HeartbeatRequest beat = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
        Expertd__V1__LayerLoad load = EXPERTD__V1__LAYER_LOAD__INIT;
        Expertd__V1__LayerLoad *loads[] = {&load};
        uint32_t expert = i % GATEWAY_EXPERTS;
        uint64_t slots = i + 1;
        snprintf(url, sizeof(url), "tcp://127.0.0.1:%u", 1 + (i / 4) % 1000);
        registers.node = beat.node = name;
        registers.url = url;
        registers.incarnation = beat.incarnation = 1;
        beat.state = (char *)(uintptr_t) "serving";
        load.model = (char *)(uintptr_t)f.models[0].name;
        load.experts = &expert;
        load.slots = &slots;
        load.n_experts = load.n_slots = 1;
        beat.loads = loads;
        beat.n_loads = 1;
        ask(channel, "RegisterNode", &registers.base);
        ask(channel, "Heartbeat", &beat.base);
    }
    ep_rpc_channel_destroy(channel);
    return NULL;
}

typedef struct watch {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t messages;
    bool ended;
} watch;

static void on_table(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    watch *w = arg;
    (void)error;
    pthread_mutex_lock(&w->lock);
    w->messages += reply == NULL || !reply->end;
    w->ended = w->ended || error != NULL || (reply != NULL && reply->end);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Watches until a few tables came, then ends the watch, or its connection. */
static void *watch_tables(void *arg)
{
    (void)arg;
    for (uint32_t i = 0; !done(); i++) {
        watch w = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
        Expertd__V1__WatchPlacementRequest request = EXPERTD__V1__WATCH_PLACEMENT_REQUEST__INIT;
        ep_rpc_channel *channel = open_channel("client", "");
        ep_rpc_call_id id;
        ep_error error;
        const ep_rpc_request call = {
            .method = ep_rpc_method_by_name("expertd.v1.Coordinator", "WatchPlacement"),
            .header = &request.base,
            .deadline_ns = EP_TIME_NEVER};
        EP_TEST_CHECK(ep_rpc_call_start(channel, &call, on_table, &w, &id, &error) == EP_OK, "%s",
                      error.text);
        pthread_mutex_lock(&w.lock);
        while (w.messages == 0 && !w.ended) {
            pthread_cond_wait(&w.changed, &w.lock);
        }
        pthread_mutex_unlock(&w.lock);
        if (i % 2 == 0) {
            ep_rpc_call_cancel(channel, id);
        }
        ep_rpc_channel_destroy(channel);
        EP_TEST_CHECK(w.ended, "a watch outlived its channel");
    }
    return NULL;
}

static void *read_all(void *arg)
{
    ep_rpc_channel *channel = open_channel("client", "");
    Expertd__V1__StatisticsRequest statistics = EXPERTD__V1__STATISTICS_REQUEST__INIT;
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    (void)arg;
    statistics.per_expert = true;
    while (!done()) {
        ask(channel, "Statistics", &statistics.base);
        ask(channel, "ClusterStatus", &empty.base);
        ep_test_http_get(f.cluster.coordinator.probe_url, "/metrics", NULL);
        ep_test_http_get(f.cluster.coordinator.probe_url, "/readyz?verbose", NULL);
    }
    ep_rpc_channel_destroy(channel);
    return NULL;
}

static void *reload(void *arg)
{
    (void)arg;
    while (!done()) {
        ep_test_process_signal(&f.cluster.coordinator, SIGHUP);
        reloads++;
        /* not faster than it answers */
        ep_test_http_get(f.cluster.coordinator.probe_url, "/livez", NULL);
    }
    return NULL;
}

/* Calls until the coordinator stops. */
static void *call_until_stop(void *arg)
{
    gateway_raw *raw = gateway_raw_open(&f);
    ep_error error;
    ep_err err = EP_OK;
    uint32_t *succeeded = arg;
    while (err == EP_OK) {
        begin(raw, EP_TEST_PATIENCE_MS);
        err = gateway_raw_wait(raw, &error, NULL);
        __atomic_fetch_add(succeeded, err == EP_OK, __ATOMIC_RELEASE);
    }
    EP_TEST_CHECK(
        err == EP_ERR_DRAINING || err == EP_ERR_UNAVAILABLE || err == EP_ERR_CONNECTION_LOST,
        "the coordinator stopped, a call ended with %s: %s", ep_err_name(err), error.text);
    gateway_raw_close(raw);
    return NULL;
}

static void stop_under_load(void)
{
    pthread_t callers[CALLERS];
    uint32_t succeeded[CALLERS] = {0};
    for (int i = 0; i < CALLERS; i++) {
        EP_TEST_CHECK(pthread_create(&callers[i], NULL, call_until_stop, &succeeded[i]) == 0,
                      "no thread");
    }
    for (int i = 0; i < CALLERS; i++) {
        while (__atomic_load_n(&succeeded[i], __ATOMIC_ACQUIRE) == 0) {
            ep_test_http_get(f.cluster.coordinator.probe_url, "/livez", NULL);
        }
    }
    ep_test_process_signal(&f.cluster.coordinator, SIGHUP);
    int code = ep_test_process_stop(&f.cluster.coordinator, SIGTERM, EP_TEST_PATIENCE_MS);
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
    }
    EP_TEST_CHECK(code == 0, "the coordinator ended with %d", code);
}

int main(void)
{
    static char state_dir[EP_TEST_PATH_BYTES];
    static char state_flag[EP_TEST_PATH_BYTES + 16];
    const char *const args[] = {state_flag, "--metrics-per-expert=true", NULL};
    pthread_t callers[CALLERS];
    pthread_t others[GHOSTS + 3];
    uint64_t seeds[CALLERS];
    uint32_t ghosts[GHOSTS];
    ep_test_dir_new(state_dir);
    snprintf(state_flag, sizeof(state_flag), "--state-dir=%s", state_dir);
    fill_tensors();
    gateway_fixture_init(&f, 2, args);
    gateway_wait_table(&f);
    void *(*const readers[])(void *) = {watch_tables, read_all, reload};
    for (uint32_t i = 0; i < GHOSTS + EP_ARRAY_COUNT(readers); i++) {
        bool is_ghost = i < GHOSTS;
        if (is_ghost) {
            ghosts[i] = i;
        }
        EP_TEST_CHECK(pthread_create(&others[i], NULL, is_ghost ? be_ghost : readers[i - GHOSTS],
                                     is_ghost ? &ghosts[i] : NULL) == 0,
                      "no thread");
    }
    for (uint64_t i = 0; i < CALLERS; i++) {
        seeds[i] = i;
        EP_TEST_CHECK(pthread_create(&callers[i], NULL, call_gateway, &seeds[i]) == 0, "no thread");
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
    }
    __atomic_store_n(&callers_done, true, __ATOMIC_RELEASE);
    for (size_t i = 0; i < EP_ARRAY_COUNT(others); i++) {
        pthread_join(others[i], NULL);
    }
    printf("%u gateway calls answered, %u cancelled or out of time, %u reloads, %.0f tables\n",
           answered, ended_otherwise, reloads,
           gateway_metric(&f, "expertd_coordinator_tables_total"));
    EP_TEST_CHECK(answered > 0 && ended_otherwise > 0 && reloads > 0, "nothing raced");
    stop_under_load();
    gateway_fixture_fini(&f);
    ep_test_dir_remove(state_dir);
    return 0;
}
