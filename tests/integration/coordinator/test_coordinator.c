/* SPDX-License-Identifier: Apache-2.0 */
/* The real program: a table of a large model travels whole, bad configuration is named, SIGTERM
 * ends it cleanly. */
#include <criterion/criterion.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "coordinator.pb-c.h"
#include "rpc/rpc.h"
#include "support/expect.h"
#include "support/process.h"
#include "wire/placement_codec.h"

#define LAYERS 61
#define EXPERTS 896
#define WAIT_MS 60000

static char dir[EP_TEST_PATH_BYTES];
static ep_test_process coordinator;
static ep_timer_service *timers;
static ep_buffer_pool *pool;

static void setup(void)
{
    cr_assert(ep_test_dir_create(dir));
}

static void teardown(void)
{
    ep_test_process_destroy(&coordinator);
    ep_test_dir_remove(dir);
}

static void start(const char *flag, const char *other_flag)
{
    const char *args[] = {"--listen=tcp://127.0.0.1:0",
                          "--admin-listen=tcp://127.0.0.1:0",
                          "--probe-address=127.0.0.1:0",
                          "--copies=1",
                          flag,
                          other_flag,
                          NULL};
    cr_assert(ep_test_process_start(&coordinator, dir, "coordinator", EP_COORDINATOR_PROGRAM, args,
                                    NULL, true));
    cr_assert(ep_test_process_wait_ports(&coordinator, WAIT_MS));
}

static ep_rpc_channel *connect_as(const char *node, const char *role)
{
    ep_error error;
    ep_rpc_channel *channel;
    ep_rpc_channel_config config = {
        .address = {.url = coordinator.rpc_url}, .connection_class = "control", .reconnect = true};
    if (timers == NULL) {
        cr_assert_eq(ep_timer_service_create("test-timer", &timers), EP_OK);
        cr_assert_eq(ep_buffer_pool_create(0, 0, &pool), EP_OK);
    }
    config.common = (ep_rpc_common){.timers = timers,
                                    .pool = pool,
                                    .token = "",
                                    .node = node,
                                    .role = role,
                                    .incarnation = 1,
                                    .payload_crc = true};
    ep_rpc_limits_default(&config.common.limits);
    ep_rpc_limits_raise_for_control(&config.common.limits);
    ASSERT_OK(ep_rpc_channel_create(&config, &channel, &error), error);
    ASSERT_OK(
        ep_rpc_channel_wait_ready(channel, ep_clock_now_ns() + WAIT_MS * EP_NS_PER_MS, &error),
        error);
    return channel;
}

/* One node that owns every expert of a large model, with all of it loaded. */
static Expertd__V1__ModelInfo *large_model(void)
{
    static Expertd__V1__ModelInfo model;
    static Expertd__V1__LayerInfo layers[LAYERS], *list[LAYERS];
    static uint32_t owned[EXPERTS];
    for (uint32_t e = 0; e < EXPERTS; e++) {
        owned[e] = e;
    }
    for (uint32_t l = 0; l < LAYERS; l++) {
        expertd__v1__layer_info__init(&layers[l]);
        layers[l].layer = l;
        layers[l].hidden = 7168;
        layers[l].inner = 2048;
        layers[l].experts = EXPERTS;
        layers[l].top_k = 8;
        layers[l].owned = owned;
        layers[l].n_owned = EXPERTS;
        list[l] = &layers[l];
    }
    expertd__v1__model_info__init(&model);
    model.name = "large";
    model.version = "v1";
    model.numerics = "portable/bf16/rne/00000000";
    model.layers = list;
    model.n_layers = LAYERS;
    return &model;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static ep_routing_table *watched;
static ep_error watch_error;
static bool watch_ended;
static size_t snapshot_bytes;

static void on_snapshot(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    (void)arg;
    pthread_mutex_lock(&lock);
    if (error != NULL) {
        watch_error = *error;
    } else if (reply->header != NULL && watched == NULL) {
        snapshot_bytes = protobuf_c_message_get_packed_size(reply->header);
        ep_placement_decode((const Expertd__V1__PlacementSnapshot *)reply->header, &watched,
                            &watch_error);
    }
    watch_ended |= reply->end;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

Test(coordinator, a_table_of_a_large_model_travels_whole, .init = setup, .fini = teardown)
{
    ep_error error;
    ProtobufCMessage *reply = NULL;
    start(NULL, NULL);
    ep_rpc_channel *node = connect_as("big", "node");
    Expertd__V1__ModelInfo *models[] = {large_model()};
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    request.node = "big";
    request.url = "tcp://127.0.0.1:1";
    request.incarnation = 1;
    request.models = models;
    request.n_models = 1;
    uint64_t deadline_ns = ep_clock_now_ns() + WAIT_MS * EP_NS_PER_MS;
    ASSERT_OK(ep_rpc_call_sync(node, "expertd.v1.Coordinator", "RegisterNode", &request.base,
                               deadline_ns, &reply, &error),
              error);
    Expertd__V1__HeartbeatRequest beat = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
    beat.node = "big";
    beat.incarnation = 1;
    beat.state = "serving";
    beat.epoch = ((Expertd__V1__RegisterReply *)reply)->epoch;
    ProtobufCMessage *answer = NULL;
    request.node = "somebody-else";
    cr_expect_eq(ep_rpc_call_sync(node, "expertd.v1.Coordinator", "RegisterNode", &request.base,
                                  deadline_ns, &answer, &error),
                 EP_ERR_PERMISSION_DENIED, "%s", error.text);
    request.node = "big";
    request.url = "foo";
    EXPECT_FAILS(ep_rpc_call_sync(node, "expertd.v1.Coordinator", "RegisterNode", &request.base,
                                  deadline_ns, &answer, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "no lane serves the url 'foo'");
    ASSERT_OK(ep_rpc_call_sync(node, "expertd.v1.Coordinator", "Heartbeat", &beat.base, deadline_ns,
                               &answer, &error),
              error);
    protobuf_c_message_free_unpacked(answer, NULL);
    protobuf_c_message_free_unpacked(reply, NULL);

    ep_rpc_channel *client = connect_as("", "client");
    Expertd__V1__WatchPlacementRequest watch = EXPERTD__V1__WATCH_PLACEMENT_REQUEST__INIT;
    ep_rpc_request call = {.method =
                               ep_rpc_method_by_name("expertd.v1.Coordinator", "WatchPlacement"),
                           .header = &watch.base,
                           .deadline_ns = deadline_ns};
    ep_rpc_call_id id;
    ASSERT_OK(ep_rpc_call_start(client, &call, on_snapshot, NULL, &id, &error), error);
    pthread_mutex_lock(&lock);
    while (watched == NULL && !watch_ended) {
        pthread_cond_wait(&changed, &lock);
    }
    cr_assert_not_null(watched, "%s", watch_error.text);
    cr_assert_eq(watched->layers_count, (uint32_t)LAYERS);
    cr_assert_eq(watched->layers[LAYERS - 1].offsets[EXPERTS], (uint32_t)EXPERTS);
    cr_assert_gt(snapshot_bytes, 65536u, "the case is only one when the table is large");
    pthread_mutex_unlock(&lock);
    ep_rpc_channel_destroy(client);
    ep_rpc_channel_destroy(node);
    ep_routing_table_unref(watched);
    cr_assert_eq(ep_test_process_stop(&coordinator, SIGTERM, WAIT_MS), 0);
    ep_timer_service_destroy(timers);
    ep_buffer_pool_destroy(pool);
    ep_transport_fini();
}

static ProtobufCMessage *ask(ep_rpc_channel *node, const char *method,
                             const ProtobufCMessage *request)
{
    ep_error error;
    ProtobufCMessage *reply = NULL;
    ASSERT_OK(ep_rpc_call_sync(node, "expertd.v1.Coordinator", method, request,
                               ep_clock_now_ns() + WAIT_MS * EP_NS_PER_MS, &reply, &error),
              error);
    return reply;
}

/* A node that has loaded nothing of a small model. */
static Expertd__V1__RegisterReply *register_small(ep_rpc_channel *channel, const char *name)
{
    Expertd__V1__ModelInfo *models[] = {large_model()};
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    models[0]->n_layers = 1;
    models[0]->layers[0]->experts = 8;
    models[0]->layers[0]->n_owned = 0;
    request.node = (char *)(uintptr_t)name;
    request.url = "tcp://127.0.0.1:1";
    request.incarnation = 1;
    request.models = models;
    request.n_models = 1;
    return (Expertd__V1__RegisterReply *)ask(channel, "RegisterNode", &request.base);
}

static Expertd__V1__HeartbeatReply *beat_of(ep_rpc_channel *channel, const char *name,
                                            uint64_t term, uint64_t number, size_t owned)
{
    Expertd__V1__ModelInfo *models[] = {large_model()};
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    Expertd__V1__HeartbeatRequest beat = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
    models[0]->n_layers = 1;
    models[0]->layers[0]->experts = 8;
    models[0]->layers[0]->n_owned = owned;
    epoch.term = term;
    epoch.number = number;
    beat.node = (char *)(uintptr_t)name;
    beat.incarnation = 1;
    beat.state = "serving";
    beat.epoch = &epoch;
    beat.models = models;
    beat.n_models = 1;
    return (Expertd__V1__HeartbeatReply *)ask(channel, "Heartbeat", &beat.base);
}

Test(coordinator, a_node_that_waits_gives_up_nothing_by_what_others_loaded, .init = setup,
     .fini = teardown)
{
    start("--loading-nodes-max=1", "--heartbeat-ms=10000");
    ep_rpc_channel *a = connect_as("a", "node"), *b = connect_as("b", "node"),
                   *c = connect_as("c", "node");
    Expertd__V1__RegisterReply *given = register_small(a, "a");
    Expertd__V1__HeartbeatReply *reply = NULL;
    cr_assert_not_null(given->epoch);
    const uint64_t term = given->epoch->term, number = given->epoch->number;
    do {
        protobuf_c_message_free_unpacked((ProtobufCMessage *)reply, NULL);
        reply = beat_of(a, "a", term, number, 8);
    } while (reply->committed->number < number);
    const uint64_t committed = reply->committed->number;
    protobuf_c_message_free_unpacked((ProtobufCMessage *)reply, NULL);
    protobuf_c_message_free_unpacked((ProtobufCMessage *)given, NULL);
    given = register_small(b, "b");
    cr_assert_gt(given->n_assignments, 0u, "it has the turn");
    protobuf_c_message_free_unpacked((ProtobufCMessage *)given, NULL);
    given = register_small(c, "c");
    cr_assert_null(given->epoch, "it waits");
    protobuf_c_message_free_unpacked((ProtobufCMessage *)given, NULL);

    reply = beat_of(c, "c", term, committed - 1, 0);
    cr_assert(!reply->has_assignments && reply->epoch == NULL && reply->committed == NULL);
    protobuf_c_message_free_unpacked((ProtobufCMessage *)reply, NULL);
    reply = beat_of(c, "c", term, committed, 0);
    cr_assert(!reply->has_assignments && reply->epoch != NULL);
    cr_assert_eq(reply->committed->number, committed);
    protobuf_c_message_free_unpacked((ProtobufCMessage *)reply, NULL);
    ep_rpc_channel_destroy(a);
    ep_rpc_channel_destroy(b);
    ep_rpc_channel_destroy(c);
    cr_assert_eq(ep_test_process_stop(&coordinator, SIGTERM, WAIT_MS), 0);
    ep_timer_service_destroy(timers);
    ep_buffer_pool_destroy(pool);
    ep_transport_fini();
}

static void refuses(const char *const *args, const char *text)
{
    char *output;
    int code =
        ep_test_process_run(dir, "bad", EP_COORDINATOR_PROGRAM, args, NULL, WAIT_MS, &output);
    cr_expect_eq(code, 1, "exit code %d", code);
    cr_expect(strstr(output, text) != NULL, "'%s' is not in: %s", text, output);
    free(output);
}

Test(coordinator, bad_configuration_is_named, .init = setup, .fini = teardown)
{
    char map[EP_TEST_PATH_BYTES + 32], flag[EP_TEST_PATH_BYTES + 64];
    snprintf(map, sizeof(map), "%s/map.json", dir);
    snprintf(flag, sizeof(flag), "--expert-map-file=%s", map);
    cr_assert(ep_test_write_file(
        map,
        "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":"
        "["
        "{\"device_id\":0,\"device_expert\":[0]},{\"device_id\":1,\"device_expert\":[1]}]}]}",
        0600));
    refuses((const char *[]){"--copies=0", NULL}, "copies");
    refuses((const char *[]){"--copies=0", NULL}, "1..64");
    refuses((const char *[]){"--placement=static", NULL}, "'static' needs expert_map_file");
    refuses((const char *[]){flag, NULL}, "is only used with placement: static");
    refuses((const char *[]){"--min-nodes=9", "--nodes-max=8", NULL},
            "9 is above nodes_max, which is 8");
    refuses((const char *[]){"--placement=static", flag, "--node-order=a", NULL},
            "names 1 nodes, the expert map");
    refuses((const char *[]){"--placement=static", "--expert-map-file=/nonexistent/map.json", NULL},
            "/nonexistent/map.json");
    refuses((const char *[]){"--listen=tcp://0.0.0.0:0", NULL}, "insecure");
    refuses((const char *[]){"--state-dir=/nonexistent/state", NULL},
            "/nonexistent/state: No such file or directory");
    snprintf(flag, sizeof(flag), "--state-dir=%s", map);
    refuses((const char *[]){flag, NULL}, "map.json is not a directory");
}

/* Started by mistake beside one that runs. */
Test(coordinator, a_second_one_that_cannot_listen_leaves_the_ports_file, .init = setup,
     .fini = teardown)
{
    char listen[EP_TEST_PATH_BYTES + 16], ports[EP_TEST_PATH_BYTES + 16];
    start(NULL, NULL);
    snprintf(listen, sizeof(listen), "--listen=%s", coordinator.rpc_url);
    snprintf(ports, sizeof(ports), "--ports-file=%s", coordinator.ports_path);
    refuses((const char *[]){listen, ports, "--admin-listen=", "--probe-address=", NULL}, "in use");
    cr_expect_eq(access(coordinator.ports_path, F_OK), 0);
    cr_expect_eq(ep_test_process_stop(&coordinator, SIGTERM, WAIT_MS), 0);
    cr_expect_neq(access(coordinator.ports_path, F_OK), 0, "it removes its own");
}

static int manager; /* plays the service manager */

/* Until the manager is told something that begins with text. */
static void await_notice(const char *text)
{
    char message[1024];
    struct pollfd fd = {.fd = manager, .events = POLLIN};
    do {
        cr_assert_eq(poll(&fd, 1, WAIT_MS), 1, "the program never said %s", text);
        ssize_t n = recv(manager, message, sizeof(message) - 1, 0);
        message[n > 0 ? n : 0] = 0;
    } while (strncmp(message, text, strlen(text)) != 0);
}

static void expect_output(const char *part)
{
    char *output = ep_test_process_output(&coordinator);
    cr_expect(strstr(output, part) != NULL, "no '%s' in:\n%s", part, output);
    free(output);
}

Test(coordinator, hangup_keeps_the_old_configuration_when_the_new_one_is_wrong, .init = setup,
     .fini = teardown)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char file[EP_TEST_PATH_BYTES + 8], flag[EP_TEST_PATH_BYTES + 32], variable[EP_TEST_PATH_BYTES];
    cr_assert(snprintf(address.sun_path, sizeof(address.sun_path), "%s/notify", dir) <
              (int)sizeof(address.sun_path));
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(manager, (struct sockaddr *)&address, sizeof(address)), 0);
    snprintf(variable, sizeof(variable), "NOTIFY_SOCKET=%s", address.sun_path);
    snprintf(file, sizeof(file), "%s/c.yaml", dir);
    snprintf(flag, sizeof(flag), "--config=%s", file);
    const char *args[] = {"--listen=tcp://127.0.0.1:0",
                          "--admin-listen=", "--probe-address=127.0.0.1:0", flag, NULL};
    const char *environment[] = {variable, NULL};
    cr_assert(ep_test_write_file(file, "copies: 1\n", 0600));
    cr_assert(ep_test_process_start(&coordinator, dir, "coordinator", EP_COORDINATOR_PROGRAM, args,
                                    environment, true));
    await_notice("READY=1");

    cr_assert(ep_test_write_file(file, "copies: 0\n", 0600));
    cr_assert(ep_test_process_signal(&coordinator, SIGHUP));
    await_notice("RELOADING=1\nMONOTONIC_USEC=");
    await_notice("READY=1");
    expect_output("event=config-reload outcome=refused reason=\"file ");

    cr_assert(ep_test_write_file(file, "drain_ms: 7777\n", 0600));
    cr_assert(ep_test_process_signal(&coordinator, SIGHUP));
    await_notice("RELOADING=1");
    await_notice("READY=1");
    expect_output("event=config-reload outcome=changed key=drain_ms value=7777ms origin=\"file ");
    cr_expect_eq(ep_test_process_stop(&coordinator, SIGTERM, WAIT_MS), 0);
    expect_output("event=stopping signal=SIGTERM drain_ms=7777");
    ep_test_process_destroy(&coordinator);
    cr_assert(ep_test_process_start(&coordinator, dir, "coordinator", EP_COORDINATOR_PROGRAM, args,
                                    environment, true));
    await_notice("READY=1");

    cr_assert(ep_test_write_file(file, "copies: 2\nlog_level: warn\n", 0600));
    cr_assert(ep_test_process_signal(&coordinator, SIGHUP));
    await_notice("RELOADING=1");
    await_notice("READY=1");
    expect_output("level=warn event=config-reload outcome=waiting key=copies ");
    cr_expect_eq(ep_test_process_stop(&coordinator, SIGTERM, WAIT_MS), 0);
    char *output = ep_test_process_output(&coordinator);
    cr_expect(strstr(output, "SIGTERM") == NULL, "log_level warn is not in force:\n%s", output);
    free(output);
    close(manager);
}
