/* SPDX-License-Identifier: Apache-2.0 */
/* Starts, asks and ends a coordinator and its nodes for tests. */
#include "support/cluster.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "coordinator.pb-c.h"

#define OBSERVER_TRIES 3
#define CLUSTERS_MAX 8
#define DIRS_MAX 16
#define ARG_BYTES 1024
#define CTL_LINE_BYTES 4096
#define ANY_PORT "tcp://127.0.0.1:0"
#define HEARTBEAT_MS 50
#define HEARTBEAT_DEAD_COUNT 100 /* 5 s: a busy machine must not look like a dead node */

const char ep_test_expertd[] = EP_TEST_EXPERTD;
const char ep_test_coordinator[] = EP_TEST_COORDINATOR;
const char ep_test_expertctl[] = EP_TEST_EXPERTCTL;
const char ep_test_ref_forward[] = EP_TEST_REF_FORWARD;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
const bool ep_test_sanitized = true;
#else
const bool ep_test_sanitized = false;
#endif

static ep_test_cluster *clusters[CLUSTERS_MAX];
static char dirs[DIRS_MAX][EP_TEST_PATH_BYTES];
static size_t dirs_count;
static pthread_mutex_t fail_lock = PTHREAD_MUTEX_INITIALIZER;

/* Exits without destructors: other threads still run. */
void ep_test_fail(const char *format, ...)
{
    va_list args;
    pthread_mutex_lock(&fail_lock); /* never released: one failure is enough */
    va_start(args, format);
    fprintf(stderr, "FAILED: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    for (size_t i = 0; i < CLUSTERS_MAX; i++) {
        ep_test_cluster *cluster = clusters[i];
        for (uint32_t n = 0; cluster != NULL && n <= cluster->options.nodes_count; n++) {
            ep_test_process *process =
                n < cluster->options.nodes_count ? &cluster->nodes[n] : &cluster->coordinator;
            char *output = ep_test_process_output(process);
            fprintf(stderr, "---- %s (pid %d)\n%s", process->output_path, (int)process->pid,
                    output != NULL ? output : "");
            free(output);
            ep_test_process_destroy(process);
        }
        if (cluster != NULL) {
            ep_test_dir_remove(cluster->dir);
        }
    }
    for (size_t i = 0; i < dirs_count; i++) {
        ep_test_dir_remove(dirs[i]);
    }
    fflush(NULL);
    _exit(1);
}

void ep_test_dir_new(char out_path[EP_TEST_PATH_BYTES])
{
    EP_TEST_CHECK(dirs_count < DIRS_MAX && ep_test_dir_create(dirs[dirs_count]), "no directory");
    memcpy(out_path, dirs[dirs_count++], EP_TEST_PATH_BYTES);
}

void ep_test_checkpoint_new(const ep_fixture_config *config, char out_path[EP_TEST_PATH_BYTES])
{
    ep_error error;
    ep_test_dir_new(out_path);
    EP_TEST_CHECK(ep_fixture_write(config, out_path, &error) == EP_OK, "%s", error.text);
}

static void remember(ep_test_cluster *cluster, ep_test_cluster *instead)
{
    for (size_t i = 0; i < CLUSTERS_MAX; i++) {
        if (clusters[i] == cluster) {
            clusters[i] = instead;
            return;
        }
    }
    ep_test_fail("more than %d clusters", CLUSTERS_MAX);
}

/* ---- starting ---- */

/* Holds the argument texts until the process has started. */
typedef struct arg_list {
    char texts[EP_TEST_ARGS_MAX][ARG_BYTES];
    const char *args[EP_TEST_ARGS_MAX + 1];
    size_t count;
} arg_list;

static void add_arg(arg_list *list, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_arg(arg_list *list, const char *format, ...)
{
    va_list args;
    EP_TEST_CHECK(list->count < EP_TEST_ARGS_MAX, "more than %d arguments", EP_TEST_ARGS_MAX);
    va_start(args, format);
    int bytes = vsnprintf(list->texts[list->count], ARG_BYTES, format, args);
    va_end(args);
    EP_TEST_CHECK(bytes < ARG_BYTES, "an argument has %d characters", bytes);
    list->args[list->count] = list->texts[list->count];
    list->args[++list->count] = NULL;
}

static void add_more(arg_list *list, const char *const *more)
{
    for (size_t i = 0; more != NULL && more[i] != NULL; i++) {
        add_arg(list, "%s", more[i]);
    }
}

static void spawn_coordinator(ep_test_cluster *cluster, const char *url)
{
    const ep_test_cluster_options *options = &cluster->options;
    char map_path[EP_TEST_PATH_BYTES + 32];
    arg_list *list = calloc(1, sizeof(*list));
    EP_TEST_CHECK(list != NULL, "no memory");
    add_arg(list, "--listen=%s", url);
    add_arg(list, "--probe-address=127.0.0.1:0");
    add_arg(list, "--admin-listen=tcp://127.0.0.1:0");
    add_arg(list, "--min-nodes=%u", options->nodes_count);
    /* nodes learn their experts by a heartbeat */
    add_arg(list, "--heartbeat-ms=%u",
            options->heartbeat_ms > 0 ? options->heartbeat_ms : HEARTBEAT_MS);
    add_arg(list, "--heartbeat-dead-count=%u",
            options->heartbeat_dead_count > 0 ? options->heartbeat_dead_count
                                              : HEARTBEAT_DEAD_COUNT);
    add_arg(list, "--copies=%u", options->copies > 0 ? options->copies : 1);
    if (options->expert_map != NULL) {
        snprintf(map_path, sizeof(map_path), "%s/expert-map.json", cluster->dir);
        EP_TEST_CHECK(ep_test_write_file(map_path, options->expert_map, 0600), "%s", map_path);
        add_arg(list, "--placement=static");
        add_arg(list, "--expert-map-file=%s", map_path);
    }
    add_more(list, options->coordinator_args);
    const char *program =
        options->coordinator_program != NULL ? options->coordinator_program : ep_test_coordinator;
    bool ok = ep_test_process_start(&cluster->coordinator, cluster->dir, "coordinator", program,
                                    list->args, options->coordinator_environment, true);
    free(list);
    EP_TEST_CHECK(ok, "the coordinator did not start");
}

static void start_coordinator(ep_test_cluster *cluster, const char *url)
{
    spawn_coordinator(cluster, url);
    EP_TEST_CHECK(ep_test_process_wait_ports(&cluster->coordinator, EP_TEST_PATIENCE_MS),
                  "the coordinator does not listen");
}

/* url: where it listens. */
static void start_node(ep_test_cluster *cluster, uint32_t index, const char *url)
{
    const ep_test_cluster_options *options = &cluster->options;
    const char *program = options->node_programs != NULL ? options->node_programs[index] : NULL;
    char name[32];
    arg_list *list = calloc(1, sizeof(*list));
    EP_TEST_CHECK(list != NULL, "no memory");
    snprintf(name, sizeof(name), "node%u", index);
    add_arg(list, "--node-name=%s", name);
    add_arg(list, "--coordinator-url=%s",
            options->nodes_coordinator_url != NULL ? options->nodes_coordinator_url
                                                   : cluster->coordinator.rpc_url);
    if (options->node_numerics != NULL && options->node_numerics[index] != NULL) {
        add_arg(list, "--numerics=%s", options->node_numerics[index]);
    }
    if (options->hosts != NULL) {
        add_arg(list, "--host=%s", options->hosts[index]);
    }
    if (options->advertise_urls != NULL) {
        add_arg(list, "--advertise-url=%s", options->advertise_urls[index]);
    }
    add_arg(list, "--listen=%s", url);
    add_arg(list, "--probe-address=127.0.0.1:0");
    add_arg(list, "--admin-listen=tcp://127.0.0.1:0");
    add_arg(list, "--threads=%u", options->threads > 0 ? options->threads : 1);
    for (size_t m = 0; m < options->models_count; m++) {
        add_arg(list, "--model=%s=%s", options->models[m].name, options->models[m].path);
    }
    add_more(list, options->node_args);
    bool ok =
        ep_test_process_start(&cluster->nodes[index], cluster->dir, name,
                              program != NULL ? program : ep_test_expertd, list->args, NULL, true);
    free(list);
    EP_TEST_CHECK(ok, "%s did not start", name);
}

void ep_test_cluster_start(ep_test_cluster *cluster, const ep_test_cluster_options *options)
{
    *cluster = (ep_test_cluster){.options = *options};
    EP_TEST_CHECK(options->nodes_count <= EP_TEST_NODES_MAX, "%u nodes", options->nodes_count);
    EP_TEST_CHECK(ep_test_dir_create(cluster->dir), "no directory");
    remember(NULL, cluster);
    EP_TEST_CHECK(ep_timer_service_create("test", &cluster->timers) == EP_OK &&
                      ep_buffer_pool_create(0, 0, &cluster->pool) == EP_OK,
                  "no memory");
    start_coordinator(cluster, "tcp://127.0.0.1:0");
    for (uint32_t i = 0; i < options->nodes_count; i++) {
        start_node(cluster, i, ANY_PORT);
    }
    for (uint32_t i = 0; i < options->nodes_count; i++) {
        EP_TEST_CHECK(ep_test_process_wait_ports(&cluster->nodes[i], EP_TEST_PATIENCE_MS),
                      "node%u does not listen", i);
    }
}

static void restart_node(ep_test_cluster *cluster, uint32_t node, const char *url)
{
    ep_test_process_destroy(&cluster->nodes[node]);
    start_node(cluster, node, url);
    EP_TEST_CHECK(ep_test_process_wait_ports(&cluster->nodes[node], EP_TEST_PATIENCE_MS),
                  "node%u does not listen", node);
}

void ep_test_cluster_restart_node(ep_test_cluster *cluster, uint32_t node)
{
    restart_node(cluster, node, ANY_PORT);
}

void ep_test_cluster_return_node(ep_test_cluster *cluster, uint32_t node)
{
    char url[EP_TEST_PATH_BYTES];
    snprintf(url, sizeof(url), "%s", cluster->nodes[node].rpc_url);
    restart_node(cluster, node, url);
}

void ep_test_cluster_add_node(ep_test_cluster *cluster)
{
    EP_TEST_CHECK(cluster->options.nodes_count < EP_TEST_NODES_MAX, "%u nodes",
                  cluster->options.nodes_count);
    ep_test_cluster_restart_node(cluster, cluster->options.nodes_count++);
}

void ep_test_cluster_spawn_coordinator(ep_test_cluster *cluster)
{
    char url[EP_TEST_PATH_BYTES];
    snprintf(url, sizeof(url), "%s", cluster->coordinator.rpc_url);
    ep_test_process_destroy(&cluster->coordinator);
    spawn_coordinator(cluster, url);
    snprintf(cluster->coordinator.rpc_url, sizeof(cluster->coordinator.rpc_url), "%s", url);
}

void ep_test_cluster_restart_coordinator(ep_test_cluster *cluster)
{
    char url[EP_TEST_PATH_BYTES];
    snprintf(url, sizeof(url), "%s", cluster->coordinator.rpc_url);
    ep_test_process_destroy(&cluster->coordinator);
    start_coordinator(cluster, url);
    EP_TEST_CHECK(strcmp(url, cluster->coordinator.rpc_url) == 0, "%s became %s", url,
                  cluster->coordinator.rpc_url);
}

/* ---- ending ---- */

static void wait_drained(ep_test_process *process)
{
    if (process->pid > 0) {
        int code = ep_test_process_wait(process, EP_TEST_PATIENCE_MS);
        EP_TEST_CHECK(code == 0, "%s: exit code %d after SIGTERM", process->output_path, code);
    }
}

void ep_test_cluster_stop(ep_test_cluster *cluster)
{
    for (uint32_t i = 0; i < cluster->options.nodes_count; i++) {
        ep_test_process_signal(&cluster->nodes[i], SIGTERM);
    }
    for (uint32_t i = 0; i < cluster->options.nodes_count; i++) {
        wait_drained(&cluster->nodes[i]);
    }
    ep_test_process_signal(&cluster->coordinator, SIGTERM);
    wait_drained(&cluster->coordinator);
    ep_test_cluster_destroy(cluster);
}

void ep_test_cluster_destroy(ep_test_cluster *cluster)
{
    for (uint32_t i = 0; i < cluster->options.nodes_count; i++) {
        ep_test_process_destroy(&cluster->nodes[i]);
    }
    ep_test_process_destroy(&cluster->coordinator);
    ep_timer_service_destroy(cluster->timers);
    ep_buffer_pool_destroy(cluster->pool);
    ep_test_dir_remove(cluster->dir);
    remember(cluster, NULL);
}

void ep_test_cluster_expect_alive(ep_test_cluster *cluster)
{
    for (uint32_t i = 0; i <= cluster->options.nodes_count; i++) {
        ep_test_process *process =
            i < cluster->options.nodes_count ? &cluster->nodes[i] : &cluster->coordinator;
        int code = ep_test_process_wait(process, 0);
        EP_TEST_CHECK(code == -1 && process->pid > 0, "%s ended with %d", process->output_path,
                      code);
    }
}

/* ---- asking ---- */

ep_client *ep_test_cluster_client(ep_test_cluster *cluster,
                                  void (*change)(ep_client_config *config))
{
    ep_client_config config;
    ep_client *client = NULL;
    ep_error error;
    ep_client_config_init(&config);
    config.coordinator_url = cluster->coordinator.rpc_url;
    config.deadline_us = (uint64_t)EP_TEST_PATIENCE_MS * 1000;
    if (change != NULL) {
        change(&config);
    }
    EP_TEST_CHECK(ep_client_create(&config, &client, &error) == EP_OK, "client: %s", error.text);
    EP_TEST_CHECK(ep_client_wait_ready(client, (uint64_t)EP_TEST_PATIENCE_MS * 1000, &error) ==
                      EP_OK,
                  "client: %s", error.text);
    return client;
}

/* node: of role "node" only, else "". */
static ep_err call_once(ep_test_cluster *cluster, const char *role, const char *node,
                        const char *url, const char *service, const char *method,
                        const ProtobufCMessage *request, uint64_t deadline_ns,
                        ProtobufCMessage **out_reply, ep_error *out_error)
{
    ep_rpc_channel *channel = NULL;
    ep_rpc_channel_config config = {
        .common = {.timers = cluster->timers,
                   .pool = cluster->pool,
                   .token = "",
                   .node = node,
                   .role = role,
                   .incarnation = ep_random_id(),
                   .payload_crc = true},
        .address = {.url = url},
        .connection_class = "control",
    };
    ep_rpc_limits_default(&config.common.limits);
    config.common.limits.hello_timeout_ms =
        EP_TEST_PATIENCE_MS; /* a hundred other requests may be queued at the peer */
    ep_err err = ep_rpc_channel_create(&config, &channel, out_error);
    err = err != EP_OK ? err : ep_rpc_channel_wait_ready(channel, deadline_ns, out_error);
    err = err != EP_OK ? err
                       : ep_rpc_call_sync(channel, service, method, request, deadline_ns, out_reply,
                                          out_error);
    ep_rpc_channel_destroy(channel);
    return err;
}

/* Calls a service under load: reconnects, with a message, if it gave up the connection. */
ProtobufCMessage *ep_test_cluster_call(ep_test_cluster *cluster, const char *url,
                                       const char *service, const char *method,
                                       const ProtobufCMessage *request)
{
    ProtobufCMessage *reply = NULL;
    ep_error error;
    uint64_t deadline_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    const char *role = strcmp(service, "expertd.v1.Admin") == 0 ? "operator" : "client";
    ep_err err =
        call_once(cluster, role, "", url, service, method, request, deadline_ns, &reply, &error);
    for (int i = 0;
         i < OBSERVER_TRIES && (err == EP_ERR_CONNECTION_LOST || err == EP_ERR_UNAVAILABLE); i++) {
        fprintf(stderr, "%s: %s.%s again: %s\n", url, service, method, error.text);
        err = call_once(cluster, role, "", url, service, method, request, deadline_ns, &reply,
                        &error);
    }
    EP_TEST_CHECK(err == EP_OK, "%s: %s.%s: %s", url, service, method, error.text);
    return reply;
}

Expertd__V1__NodeStatusReply *ep_test_cluster_node_status(ep_test_cluster *cluster, uint32_t node)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    return (Expertd__V1__NodeStatusReply *)ep_test_cluster_call(
        cluster, cluster->nodes[node].rpc_url, "expertd.v1.NodeInfo", "NodeStatus", &empty.base);
}

uint64_t ep_test_cluster_wait_in_flight(ep_test_cluster *cluster, uint32_t node)
{
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    for (;;) {
        Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(cluster, node);
        uint64_t count = status->requests_in_flight;
        protobuf_c_message_free_unpacked(&status->base, NULL);
        if (count > 0) {
            return count;
        }
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "node%u never had a request in flight", node);
    }
}

void ep_test_cluster_register(ep_test_cluster *cluster, const char *name, const char *url,
                              const char *host)
{
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    ProtobufCMessage *reply = NULL;
    ep_error error;
    uint64_t deadline_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    request.node = (char *)(uintptr_t)name;
    request.url = (char *)(uintptr_t)url;
    request.host = (char *)(uintptr_t)host;
    request.incarnation = 1;
    ep_err err =
        call_once(cluster, "node", name, cluster->coordinator.rpc_url, "expertd.v1.Coordinator",
                  "RegisterNode", &request.base, deadline_ns, &reply, &error);
    EP_TEST_CHECK(err == EP_OK, "RegisterNode of %s: %s", name, error.text);
    protobuf_c_message_free_unpacked(reply, NULL);
}

int ep_test_cluster_ctl(ep_test_cluster *cluster, char **out_output, const char *line, ...)
{
    const char *program =
        cluster->options.ctl_program != NULL ? cluster->options.ctl_program : ep_test_expertctl;
    char words[CTL_LINE_BYTES];
    va_list values;
    va_start(values, line);
    const int bytes = vsnprintf(words, sizeof(words), line, values);
    va_end(values);
    EP_TEST_CHECK(bytes > 0 && (size_t)bytes < sizeof(words), "no command line: %s", line);
    return ep_test_process_run_line(cluster->dir, program, NULL, EP_TEST_PATIENCE_MS, out_output,
                                    "%s --coordinator=%s", words, cluster->coordinator.rpc_url);
}
