/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Wrong bytes on every port of a node and of a coordinator. Each is refused, the daemons live,
 * another client's calls go on with the right bits all the time, and when the peers are gone so are
 * their connections, descriptors, threads and memory.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/check.h"
#include "hostile_groups.h"
#include "hostile_peer.h"
#include "support/cluster.h"

enum {
    BATCHES = 4,
    DAEMONS = 2,
    DOORS = 4,
    SLOW_GROUPS_MAX = 4,
    CROWD = 500,
    STEP = 9,
    DESCRIPTORS = 8192
};

/*
 * Memory is flat when neither daemon grows by more than RSS_GROWTH_KIB_MAX in FLAT_ROUNDS rounds of
 * noise on end (some 12,000 wrong peers each: 90 bytes lost for every one would be seen). Before
 * that comes the warm-up, as long as it takes: malloc keeps what the largest crowd needed, and the
 * heap's holes fill in steps. A leak never gets flat, and ROUNDS_MAX ends it.
 */
enum { RSS_GROWTH_KIB_MAX = 1024, FLAT_ROUNDS = 60, ROUNDS_MAX = 600, SANITIZED_ROUNDS = STEP };

/* Closing takes a moment after the peer saw the end; the other client's calls are the clock. */
static ep_test_usage settle(ep_test_cluster *cluster, const ep_test_process *process,
                            ep_test_load *load, const ep_test_usage *before)
{
    ep_test_usage now = ep_test_process_usage(process->pid);
    for (int i = 0; now.descriptors > before->descriptors || now.threads > before->threads; i++) {
        EP_TEST_CHECK(i < 20000, "%s: %ld descriptors and %ld threads became %ld and %ld",
                      process->output_path, before->descriptors, before->threads, now.descriptors,
                      now.threads);
        ep_test_load_wait_succeeded(load, 8);
        ep_test_cluster_expect_alive(cluster);
        now = ep_test_process_usage(process->pid);
    }
    return now;
}

/* Both daemons answer on all their ports. */
static void expect_well(ep_test_cluster *cluster, ep_test_load *load)
{
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    ep_test_cluster_expect_alive(cluster);
    ep_test_load_wait_succeeded(load, 32);
    ProtobufCMessage *reply =
        ep_test_cluster_call(cluster, cluster->coordinator.rpc_url, "expertd.v1.Coordinator",
                             "ClusterStatus", &empty.base);
    protobuf_c_message_free_unpacked(reply, NULL);
    protobuf_c_message_free_unpacked(&ep_test_cluster_node_status(cluster, 0)->base, NULL);
    EP_TEST_CHECK(ep_test_http_get(cluster->nodes[0].probe_url, "/readyz", NULL) == 200,
                  "the node is not ready");
    EP_TEST_CHECK(ep_test_http_get(cluster->coordinator.probe_url, "/readyz", NULL) == 200,
                  "the coordinator is not ready");
}

typedef struct waiting {
    const char *what;
    size_t count;
    int fds[HOSTILE_OPEN_MAX];
} waiting;

/* Silent peers on all ports at once, then slow ones; all must be closed, in seconds. Then
 * crowds. */
static void run_silent(ep_test_cluster *cluster, const hostile_door *doors)
{
    static waiting silent[SLOW_GROUPS_MAX * DOORS];
    size_t silent_count = 0;
    for (size_t g = 0; g < hostile_slow_groups_count; g++) {
        for (size_t d = 0; d < DOORS; d++) {
            if (doors[d].is_http ? hostile_slow_groups[g].http : hostile_slow_groups[g].rpc) {
                waiting *w = &silent[silent_count++];
                w->what = hostile_slow_groups[g].name;
                w->count = hostile_slow_groups[g].open(&doors[d], w->fds);
                expect_well(cluster, doors[d].load);
            }
        }
    }
    for (size_t d = 0; d < DOORS; d++) {
        if (!doors[d].is_http) {
            hostile_slow_hello(&doors[d]);
        }
    }
    for (size_t s = 0; s < silent_count; s++) {
        for (size_t i = 0; i < silent[s].count; i++) {
            hostile_wait_closed(silent[s].fds[i], silent[s].what);
        }
    }
    for (size_t d = 0; d < DOORS; d++) {
        hostile_crowd(&doors[d], CROWD);
        expect_well(cluster, doors[d].load);
    }
}

static void run_noisy(ep_test_cluster *cluster, const hostile_door *doors)
{
    for (size_t g = 0; g < hostile_groups_count; g++) {
        for (size_t d = 0; d < DOORS; d++) {
            if (doors[d].is_http ? hostile_groups[g].http : hostile_groups[g].rpc) {
                hostile_groups[g].run(&doors[d]);
                expect_well(cluster, doors[d].load);
            }
        }
    }
}

static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    EP_TEST_CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0, "RLIMIT_NOFILE");
    limit.rlim_cur = limit.rlim_max < DESCRIPTORS ? limit.rlim_max : DESCRIPTORS;
    EP_TEST_CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "RLIMIT_NOFILE");
}

/* A part of every list in each round; all of them in STEP rounds. */
static void run_until_flat(ep_test_cluster *cluster, hostile_door *doors, ep_test_load *load,
                           const ep_test_usage start[DAEMONS])
{
    const ep_test_process *daemons[DAEMONS] = {&cluster->nodes[0], &cluster->coordinator};
    ep_test_usage flat_since[DAEMONS] = {{.rss_kib = 0}};
    ep_test_usage now[DAEMONS];
    int rounds = 0;
    int flat_rounds = 0;
    while (flat_rounds < (ep_test_sanitized ? SANITIZED_ROUNDS : FLAT_ROUNDS)) {
        EP_TEST_CHECK(rounds < ROUNDS_MAX,
                      "memory still grows after %d rounds: node %ld KiB, coordinator %ld KiB",
                      rounds, now[0].rss_kib, now[1].rss_kib);
        for (int d = 0; d < DOORS; d++) {
            doors[d].first = (size_t)rounds % STEP;
            doors[d].step = STEP;
        }
        run_noisy(cluster, doors);
        rounds++;
        flat_rounds++;
        for (int d = 0; d < DAEMONS; d++) {
            now[d] = settle(cluster, daemons[d], load, &start[d]);
            if (!ep_test_sanitized && now[d].rss_kib > flat_since[d].rss_kib + RSS_GROWTH_KIB_MAX) {
                flat_since[d] = now[d];
                flat_rounds = 0;
            }
        }
    }
    for (int d = 0; d < DAEMONS; d++) {
        printf("%s: %ld KiB resident, flat for the last %d of %d rounds of noise (%+ld KiB); %ld "
               "threads, "
               "%ld descriptors\n",
               d == 0 ? "node" : "coordinator", now[d].rss_kib, flat_rounds, rounds,
               now[d].rss_kib - flat_since[d].rss_kib, now[d].threads, now[d].descriptors);
    }
}

static void run_all(ep_test_cluster *cluster, ep_test_load *load)
{
    const ep_test_usage start[DAEMONS] = {ep_test_process_usage(cluster->nodes[0].pid),
                                          ep_test_process_usage(cluster->coordinator.pid)};
    hostile_door doors[DOORS] = {
        {"node rpc", cluster->nodes[0].rpc_url, false, false, load, 0, 1},
        {"coordinator rpc", cluster->coordinator.rpc_url, false, true, load, 0, 1},
        {"node probe", cluster->nodes[0].probe_url, true, false, load, 0, 1},
        {"coordinator probe", cluster->coordinator.probe_url, true, true, load, 0, 1},
    };
    run_silent(cluster, doors);
    run_noisy(cluster, doors);
    run_until_flat(cluster, doors, load, start);
}

int main(void)
{
    char model_path[EP_TEST_PATH_BYTES];
    ep_fixture_config config = ep_fixture_default();
    ep_test_batch batches[BATCHES];
    ep_test_load_counts counts;
    ep_test_cluster cluster;
    raise_descriptor_limit();
    ep_test_checkpoint_new(&config, model_path);
    ep_test_batches_init(batches, BATCHES, model_path, "demo", 1, 7, 2, 0);
    const ep_test_model model = {"demo", model_path};
    /* Threads are counted from the start: LTTng's come when it pleases. */
    static const char *const no_tracing[] = {"--tracing=off", NULL};
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){.nodes_count = 1,
                                                               .models = &model,
                                                               .models_count = 1,
                                                               .coordinator_args = no_tracing,
                                                               .node_args = no_tracing});
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    ep_test_load *load = ep_test_load_start(&(ep_test_load_config){
        .client = client, .batches = batches, .batches_count = BATCHES, .calls_in_flight = 2});
    expect_well(&cluster, load);
    run_all(&cluster, load);
    ep_test_load_stop(load, &counts);
    printf("%llu calls of another client meanwhile, %llu failed\n",
           (unsigned long long)counts.succeeded, (unsigned long long)counts.failed);
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
    for (uint32_t b = 0; b < BATCHES; b++) {
        ep_test_batch_fini(&batches[b]);
    }
    ep_test_dir_remove(model_path);
    return 0;
}
