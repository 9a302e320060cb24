/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator ends at a named point of its start, of a registration, of a write or of a
 * publication, while calls go on. Then its store holds a whole table or none, and the coordinator
 * started next serves at once, under an epoch above every one that a client saw; nodes come back
 * with the experts they had; no call notices. An operator's policy is as it was.
 *
 * "points": each point of failpoints.def. "random": SIGKILL at random moments while tables change;
 * EP_TEST_LONG=1 for many rounds. "full": writes fail; the old table is served until they work
 * again. "limit": the same by RLIMIT_FSIZE, whose signal would end a program.
 *
 * Tables change because a ghost registers over and over: a node without models, each time at
 * another url.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "coordinator.pb-c.h"
#include "coordinator/table_store_sqlite.h"
#include "fault_fixture.h"

#define GHOST_CALL_MS 2000 /* where the coordinator may end under the call */

static const char *const points[] = {
#define X(name) #name,
#include "coordinator/failpoints.def"
#undef X
};

static const char *const state_files[] = {"coordinator.db", "coordinator.db-wal"};

typedef struct keep_test {
    fault_fixture fixture;
    ep_test_load *load;
    char state_dir[EP_TEST_PATH_BYTES];
    char copy_dir[EP_TEST_PATH_BYTES];
    char state_flag[EP_TEST_PATH_BYTES + 16];
    const char *args[2];
    char failpoint[EP_TEST_PATH_BYTES + 96];
    const char *environment[2];
    char url[EP_TEST_PATH_BYTES]; /* the coordinator's, in each of its lives */
    uint32_t ghost_urls;
    uint64_t policy_revision; /* what was set last, and is written; 0: nothing */
    uint32_t policy_number;
    ep_epoch seen; /* newest a client had */
} keep_test;

static keep_test test;

static ep_epoch client_epoch(ep_client *client)
{
    ep_epoch epoch;
    EP_TEST_CHECK(ep_client_epoch(client, &epoch.term, &epoch.number) == EP_OK, "no epoch");
    return epoch;
}

static void see(ep_client *client)
{
    ep_epoch epoch = client_epoch(client);
    if (ep_epoch_compare(epoch, test.seen) > 0) {
        test.seen = epoch;
    }
}

/* ---- the ghost ---- */

static ep_rpc_channel *ghost_channel(void)
{
    ep_rpc_channel *channel = NULL;
    ep_rpc_channel_config config = {
        .common = {.timers = test.fixture.cluster.timers,
                   .pool = test.fixture.cluster.pool,
                   .token = "",
                   .node = "ghost",
                   .role = "node",
                   .incarnation = 1,
                   .payload_crc = true},
        .address = {.url = test.url},
        .connection_class = "control",
    };
    ep_rpc_limits_default(&config.common.limits);
    ep_rpc_limits_raise_for_control(&config.common.limits);
    EP_TEST_CHECK(ep_rpc_channel_create(&config, &channel, NULL) == EP_OK, "no memory");
    return channel;
}

/* Registers at another url, and says that it has loaded the nothing it was given. False: no answer
 * in patience_ms. */
static bool ghost_registers(uint32_t patience_ms)
{
    char url[64];
    uint64_t deadline_ns = ep_clock_now_ns() + patience_ms * EP_NS_PER_MS;
    ProtobufCMessage *reply = NULL;
    ep_rpc_channel *channel = ghost_channel();
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    snprintf(url, sizeof(url), "tcp://127.0.0.1:%u", 1 + test.ghost_urls++ % 1000);
    request.node = "ghost";
    request.url = url;
    request.incarnation = 1;
    bool good = ep_rpc_channel_wait_ready(channel, deadline_ns, NULL) == EP_OK &&
                ep_rpc_call_sync(channel, "expertd.v1.Coordinator", "RegisterNode", &request.base,
                                 deadline_ns, &reply, NULL) == EP_OK;
    if (good) {
        ProtobufCMessage *answer = NULL;
        Expertd__V1__HeartbeatRequest beat = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
        beat.node = "ghost";
        beat.incarnation = 1;
        beat.epoch = ((Expertd__V1__RegisterReply *)reply)->epoch;
        beat.state = "serving";
        good = ep_rpc_call_sync(channel, "expertd.v1.Coordinator", "Heartbeat", &beat.base,
                                deadline_ns, &answer, NULL) == EP_OK;
        if (answer != NULL) {
            protobuf_c_message_free_unpacked(answer, NULL);
        }
    }
    if (reply != NULL) {
        protobuf_c_message_free_unpacked(reply, NULL);
    }
    ep_rpc_channel_destroy(channel);
    return good;
}

/* ---- the policy ---- */

/* Another value each time, with the revision that comes next. */
static void set_policy(void)
{
    char change[64], expect[32], says[64];
    char *output = NULL;
    snprintf(change, sizeof(change), "hedge_permille=%u", 100 + ++test.policy_number % 900);
    snprintf(expect, sizeof(expect), "%llu", (unsigned long long)test.policy_revision);
    snprintf(says, sizeof(says), "policy revision %llu\n",
             (unsigned long long)++test.policy_revision);
    int code = ep_test_process_run_line(test.fixture.cluster.dir, ep_test_expertctl, NULL,
                                        EP_TEST_PATIENCE_MS, &output,
                                        "policy set %s --expect-revision %s --admin %s", change,
                                        expect, test.fixture.cluster.coordinator.admin_url);
    EP_TEST_CHECK(code == 0 && strncmp(output, says, strlen(says)) == 0, "%d: %s", code, output);
    free(output);
}

static void check_policy(const ep_policy *policy)
{
    const ep_policy_value *value = &policy->values[EP_POLICY_HEDGE_PERMILLE];
    EP_TEST_CHECK(policy->revision == test.policy_revision && value->revision == policy->revision &&
                      value->number == 100 + test.policy_number % 900,
                  "the stored policy is at %llu with %llu, set was %llu with %u",
                  (unsigned long long)policy->revision, (unsigned long long)value->number,
                  (unsigned long long)test.policy_revision, 100 + test.policy_number % 900);
}

/* ---- checks ---- */

static void check_table(const ep_routing_table *table, const char *what)
{
    ep_error error;
    EP_TEST_CHECK(ep_routing_table_check(table, &error) == EP_OK, "%s: %s", what, error.text);
    EP_TEST_CHECK(table->layers_count == FAULT_LAYERS, "%s has %u layers", what,
                  table->layers_count);
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        for (uint32_t e = 0; e < layer->shape.experts; e++) {
            EP_TEST_CHECK(layer->offsets[e + 1] > layer->offsets[e], "%s: layer %u lost expert %u",
                          what, l, e);
        }
    }
}

static void copy_file(const char *from_dir, const char *to_dir, const char *name)
{
    static char bytes[1 << 16];
    char from_path[EP_TEST_PATH_BYTES + 32];
    char to_path[EP_TEST_PATH_BYTES + 32];
    size_t count;
    snprintf(from_path, sizeof(from_path), "%s/%s", from_dir, name);
    snprintf(to_path, sizeof(to_path), "%s/%s", to_dir, name);
    unlink(to_path);
    FILE *from = fopen(from_path, "rbe");
    if (from == NULL) {
        return;
    }
    FILE *to = fopen(to_path, "wbe");
    EP_TEST_CHECK(to != NULL, "%s", to_path);
    while ((count = fread(bytes, 1, sizeof(bytes), from)) > 0) {
        EP_TEST_CHECK(fwrite(bytes, 1, count, to) == count, "%s", to_path);
    }
    EP_TEST_CHECK(fclose(to) == 0, "%s", to_path);
    fclose(from);
}

/* What the dead coordinator left. A copy is opened: opening takes a term, which is the next
 * coordinator's to take. */
static void check_store(bool may_be_new)
{
    ep_table_store *store = NULL;
    ep_coordinator_kept kept;
    uint64_t term;
    ep_error error;
    for (size_t i = 0; i < EP_ARRAY_COUNT(state_files); i++) {
        copy_file(test.state_dir, test.copy_dir, state_files[i]);
    }
    EP_TEST_CHECK(ep_table_store_sqlite_open(test.copy_dir, &store, &error) == EP_OK, "%s",
                  error.text);
    EP_TEST_CHECK(ep_table_store_begin_term(store, 1, &kept, &term, &error) == EP_OK, "%s",
                  error.text);
    EP_TEST_CHECK(may_be_new || term > test.seen.term, "term %llu after %llu",
                  (unsigned long long)term, (unsigned long long)test.seen.term);
    EP_TEST_CHECK(may_be_new || (kept.published != NULL && kept.assigned != NULL),
                  "the store has no table");
    if (!may_be_new) {
        check_policy(&kept.policy);
    }
    if (kept.published != NULL) {
        check_table(kept.published, "the stored table");
        EP_TEST_CHECK(may_be_new || ep_epoch_compare(kept.published->epoch, test.seen) >= 0 ||
                          kept.published->epoch.term < test.seen.term,
                      "a client saw %llu/%llu, stored is %llu/%llu",
                      (unsigned long long)test.seen.term, (unsigned long long)test.seen.number,
                      (unsigned long long)kept.published->epoch.term,
                      (unsigned long long)kept.published->epoch.number);
    }
    ep_coordinator_kept_fini(&kept);
    ep_table_store_close(store);
}

static Expertd__V1__ClusterStatusReply *cluster_status(void)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    return (Expertd__V1__ClusterStatusReply *)ep_test_cluster_call(
        &test.fixture.cluster, test.fixture.cluster.coordinator.rpc_url, "expertd.v1.Coordinator",
        "ClusterStatus", &empty.base);
}

static uint32_t nodes_serving(void)
{
    uint32_t count = 0;
    Expertd__V1__ClusterStatusReply *status = cluster_status();
    for (size_t n = 0; n < status->n_nodes; n++) {
        bool is_ours = strcmp(status->nodes[n]->name, "ghost") != 0;
        count += is_ours && strcmp(status->nodes[n]->state, "serving") == 0;
    }
    protobuf_c_message_free_unpacked(&status->base, NULL);
    return count;
}

/* The coordinator runs again: everybody comes back, with an epoch above all before. */
static void check_service(const char *after)
{
    ep_moe_result result;
    ep_epoch old = test.seen;
    ep_client *second = ep_test_cluster_client(&test.fixture.cluster, NULL);
    EP_TEST_CHECK(ep_epoch_compare(client_epoch(second), old) > 0,
                  "after %s: epoch %llu/%llu, before %llu/%llu", after,
                  (unsigned long long)client_epoch(second).term,
                  (unsigned long long)client_epoch(second).number, (unsigned long long)old.term,
                  (unsigned long long)old.number);
    EP_TEST_CHECK(ep_test_batch_call(&test.fixture.all[0], second, 0, &result), "after %s: %s",
                  after, result.error.text);
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    while (nodes_serving() < FAULT_NODES) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "after %s: %u nodes serve", after,
                      nodes_serving());
    }
    /* its calls are the clock */
    while (ep_epoch_compare(client_epoch(test.fixture.client), old) <= 0) {
        ep_test_load_wait_succeeded(test.load, 8);
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "after %s: the old client has the old epoch",
                      after);
    }
    see(second);
    see(test.fixture.client);
    ep_client_destroy(second);
    set_policy();
    ep_test_load_wait_succeeded(test.load, 16);
}

/* ---- the three programs ---- */

static void kill_coordinator(void)
{
    see(test.fixture.client);
    int code =
        ep_test_process_stop(&test.fixture.cluster.coordinator, SIGKILL, EP_TEST_PATIENCE_MS);
    EP_TEST_CHECK(code == 128 + SIGKILL, "the coordinator ended with %d", code);
    see(test.fixture.client);
}

static void set_failpoint(const char *name, const char *action)
{
    if (name == NULL) {
        test.fixture.cluster.options.coordinator_environment = NULL;
        return;
    }
    snprintf(test.failpoint, sizeof(test.failpoint), "EP_FAILPOINT=%s=%s", name, action);
    test.environment[0] = test.failpoint;
    test.fixture.cluster.options.coordinator_environment = test.environment;
}

static void remove_state(void)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(state_files); i++) {
        char path[EP_TEST_PATH_BYTES + 32];
        snprintf(path, sizeof(path), "%s/%s", test.state_dir, state_files[i]);
        unlink(path);
    }
}

static void run_point(const char *point)
{
    ep_test_process *coordinator = &test.fixture.cluster.coordinator;
    bool creates = strncmp(point, "create_", 7) == 0;
    kill_coordinator();
    if (creates) {
        remove_state();
        test.policy_revision = 0;
    }
    set_failpoint(point, "kill");
    ep_test_cluster_spawn_coordinator(&test.fixture.cluster);
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    int code = -1;
    bool listens = false;
    while ((code = ep_test_process_wait(coordinator, listens ? 0 : 20)) == -1) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "the coordinator never came to %s", point);
        listens = listens || access(coordinator->ports_path, R_OK) == 0;
        if (listens) {
            ghost_registers(GHOST_CALL_MS);
            see(test.fixture.client);
        }
    }
    EP_TEST_CHECK(code == 128 + SIGKILL, "%s: the coordinator ended with %d", point, code);
    see(test.fixture.client);
    check_store(creates);
    set_failpoint(NULL, NULL);
    ep_test_cluster_restart_coordinator(&test.fixture.cluster);
    check_service(point);
}

static void run_points(void)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(points); i++) {
        run_point(points[i]);
        printf("%s: epoch %llu/%llu\n", points[i], (unsigned long long)test.seen.term,
               (unsigned long long)test.seen.number);
    }
}

static void *haunt(void *arg)
{
    const bool *goes_on = arg;
    while (__atomic_load_n(goes_on, __ATOMIC_ACQUIRE)) {
        ghost_registers(GHOST_CALL_MS);
    }
    return NULL;
}

static void run_random(void)
{
    const char *wish = getenv("EP_TEST_LONG");
    uint32_t rounds = wish != NULL && strcmp(wish, "1") == 0 ? 300 : ep_test_sanitized ? 6 : 12;
    bool goes_on = true;
    pthread_t ghost;
    EP_TEST_CHECK(pthread_create(&ghost, NULL, haunt, &goes_on) == 0, "no thread");
    for (uint32_t round = 0; round < rounds; round++) {
        usleep((useconds_t)(ep_random_id() % 150000)); /* a moment nobody chose */
        kill_coordinator();
        check_store(false);
        ep_test_cluster_restart_coordinator(&test.fixture.cluster);
        if (round % 3 == 2) {
            /* in the other rounds the next one comes while nodes return */
            check_service("a random SIGKILL");
        }
    }
    __atomic_store_n(&goes_on, false, __ATOMIC_RELEASE);
    pthread_join(ghost, NULL);
    /* One more without the ghost: only a coordinator that starts has a newer epoch to show then. */
    kill_coordinator();
    check_store(false);
    ep_test_cluster_restart_coordinator(&test.fixture.cluster);
    check_service("the last SIGKILL");
    printf("%u rounds, epoch %llu/%llu\n", rounds, (unsigned long long)test.seen.term,
           (unsigned long long)test.seen.number);
}

static bool store_fails(void)
{
    Expertd__V1__ClusterStatusReply *status = cluster_status();
    bool fails = status->store_error[0] != '\0';
    EP_TEST_CHECK(!fails || strstr(status->store_error, "coordinator.db: writing failed") != NULL,
                  "%s", status->store_error);
    protobuf_c_message_free_unpacked(&status->base, NULL);
    return fails;
}

/* Writes fail for as long as a file exists, as on a full disk. */
static void run_full(void)
{
    char *body = NULL;
    char full_path[EP_TEST_PATH_BYTES + 8];
    char action[EP_TEST_PATH_BYTES + 16];
    snprintf(full_path, sizeof(full_path), "%s/full", test.copy_dir);
    snprintf(action, sizeof(action), "error:%s", full_path);
    FILE *full = fopen(full_path, "wbe");
    EP_TEST_CHECK(full != NULL && fclose(full) == 0, "%s", full_path);
    kill_coordinator();
    set_failpoint("write_before_commit", action);
    ep_test_cluster_restart_coordinator(&test.fixture.cluster);
    Expertd__V1__ClusterStatusReply *status = cluster_status();
    while (status->store_error[0] == '\0') {
        protobuf_c_message_free_unpacked(&status->base, NULL);
        EP_TEST_CHECK(ghost_registers(EP_TEST_PATIENCE_MS),
                      "handlers must answer while writes fail");
        status = cluster_status();
    }
    EP_TEST_CHECK(strstr(status->store_error,
                         "coordinator.db: writing failed: database or disk is full") != NULL,
                  "%s", status->store_error);
    ep_epoch restored = {.term = status->epoch->term, .number = status->epoch->number};
    protobuf_c_message_free_unpacked(&status->base, NULL);
    EP_TEST_CHECK(ep_test_http_get(test.fixture.cluster.coordinator.probe_url, "/readyz?verbose",
                                   &body) == 200 &&
                      strstr(body, "store: ") != NULL,
                  "%s", body);
    free(body);
    ep_client *second = ep_test_cluster_client(&test.fixture.cluster, NULL);
    EP_TEST_CHECK(ep_epoch_compare(client_epoch(second), restored) >= 0,
                  "the restored table is not served");
    ep_test_load_wait_succeeded(test.load, 50);
    EP_TEST_CHECK(store_fails(), "writes work on a full disk");
    EP_TEST_CHECK(unlink(full_path) == 0, "%s", full_path);
    while (store_fails()) { /* a second at most, then it is tried again */
        ep_test_load_wait_succeeded(test.load, 8);
    }
    const ep_test_process *coordinator = &test.fixture.cluster.coordinator;
    EP_TEST_CHECK(ep_test_metric(coordinator, "expertd_coordinator_store_errors_total") > 0 &&
                      ep_test_metric(coordinator, "expertd_coordinator_store_failing") == 0,
                  "the metrics do not tell of the errors, or not that they are over");
    ep_client_destroy(second);
    kill_coordinator();
    check_store(false);
    set_failpoint(NULL, NULL);
    ep_test_cluster_restart_coordinator(&test.fixture.cluster);
    check_service("a full disk");
}

/* A limit on the size of files is a failed write like others: the signal that comes with it does
 * not end the coordinator. */
static void run_limit(void)
{
    pid_t pid = test.fixture.cluster.coordinator.pid;
    struct rlimit before, limit;
    EP_TEST_CHECK(prlimit(pid, RLIMIT_FSIZE, NULL, &before) == 0, "no limit can be read");
    limit = before;
    limit.rlim_cur = 4096;
    EP_TEST_CHECK(prlimit(pid, RLIMIT_FSIZE, &limit, NULL) == 0, "no limit can be set");
    while (!store_fails()) {
        EP_TEST_CHECK(ghost_registers(EP_TEST_PATIENCE_MS),
                      "handlers must answer while writes fail");
    }
    ep_test_load_wait_succeeded(test.load, 50);
    EP_TEST_CHECK(
        ep_test_metric(&test.fixture.cluster.coordinator, "expertd_coordinator_store_failing") == 1,
        "the metrics do not tell of the errors");
    EP_TEST_CHECK(prlimit(pid, RLIMIT_FSIZE, &before, NULL) == 0, "no limit can be set");
    while (store_fails()) { /* a second at most, then it is tried again */
        ep_test_load_wait_succeeded(test.load, 8);
    }
    kill_coordinator();
    check_store(false);
    ep_test_cluster_restart_coordinator(&test.fixture.cluster);
    check_service("a limit on file sizes");
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "points";
    ep_test_load_counts end;
    ep_test_dir_new(test.state_dir);
    ep_test_dir_new(test.copy_dir);
    snprintf(test.state_flag, sizeof(test.state_flag), "--state-dir=%s", test.state_dir);
    test.args[0] = test.state_flag;
    const ep_test_cluster_options options = {.nodes_count = FAULT_NODES,
                                             .copies = 2,
                                             .coordinator_args = test.args,
                                             .coordinator_program = EP_TEST_COORDINATOR_FAILPOINTS};
    fault_fixture_init_options(&test.fixture, &options);
    snprintf(test.url, sizeof(test.url), "%s", test.fixture.cluster.coordinator.rpc_url);
    test.load = fault_load(&test.fixture, test.fixture.all, 16, 0, NULL, NULL);
    ep_test_load_wait_succeeded(test.load, 50);
    set_policy();
    if (strcmp(what, "points") == 0) {
        run_points();
    } else if (strcmp(what, "random") == 0) {
        run_random();
    } else if (strcmp(what, "limit") == 0) {
        run_limit();
    } else {
        run_full();
    }
    ep_test_load_stop(test.load, &end);
    printf("%llu calls, %llu failed\n", (unsigned long long)end.succeeded,
           (unsigned long long)end.failed);
    EP_TEST_CHECK(end.failed == 0, "%llu calls failed", (unsigned long long)end.failed);
    fault_fixture_fini(&test.fixture);
    ep_test_dir_remove(test.state_dir);
    ep_test_dir_remove(test.copy_dir);
    return 0;
}
