/* SPDX-License-Identifier: Apache-2.0 */
/* Real programs: a coordinator and three nodes on loopback, their ports read from their ports
 * files. */
#include "clusters.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "support/process.h"

#define EXPERTD EP_BINARY_DIR "/server/expertd/expertd"
#define COORDINATOR EP_BINARY_DIR "/server/coordinator/expertd-coordinator"

enum {
    DAEMONS = 3,
    START_TIMEOUT_MS = 60000,
    STOP_TIMEOUT_MS = 30000,
    FLAG_BYTES = EP_FIXTURE_PATH_BYTES + 96
};

#ifdef __SANITIZE_THREAD__ /* races inside the packaged libnng are not ours to fail on */
#define OTHER_LANE "--stream-lane=uv"
#else
#define OTHER_LANE "--stream-lane=nng"
#endif

struct daemon_cluster {
    ep_test_process coordinator;
    ep_test_process nodes[DAEMONS];
    test_client clients[CLUSTER_CLIENTS_MAX];
    uint32_t clients_count;
};

/* Each over a lane of its own: north libuv's, south nng's, west, on the clients' host, shared
 * memory. */
static const struct {
    const char *name;
    const char *backend;
    const char *threads;
    const char *flags[2];
} kinds[DAEMONS] = {
    {"--node-name=north", "--backend=cpu", "--threads=2", {"--host=pole", "--stream-lane=uv"}},
    {"--node-name=south", "--backend=reference", "--threads=1", {"--host=pole", OTHER_LANE}},
    {"--node-name=west",
     "--backend=cpu",
     "--threads=1",
     {"--shm=on", "--probe-address=127.0.0.1:0"}},
};

static bool start_coordinator(daemon_cluster *cluster, const char *dir)
{
    const char *args[] = {"--listen=tcp://127.0.0.1:0",
                          "--probe-address=",
                          "--admin-listen=",
                          "--copies=2",
                          "--min-nodes=3",
                          NULL};
    return ep_test_process_start(&cluster->coordinator, dir, "coordinator", COORDINATOR, args, NULL,
                                 true) &&
           ep_test_process_wait_ports(&cluster->coordinator, START_TIMEOUT_MS);
}

static bool start_node(daemon_cluster *cluster, uint32_t index, const char *dir,
                       const test_model models[MODELS_COUNT], enum ref_family family)
{
    char flags[MODELS_COUNT][FLAG_BYTES];
    char coordinator[FLAG_BYTES];
    char name[32];
    char shm_dir[FLAG_BYTES];
    char numerics[32];
    const char *args[12 + MODELS_COUNT] = {"--listen=tcp://127.0.0.1:0",
                                           "--probe-address=",
                                           "--admin-listen=",
                                           kinds[index].name,
                                           kinds[index].backend,
                                           kinds[index].threads,
                                           kinds[index].flags[0],
                                           coordinator,
                                           kinds[index].flags[1],
                                           shm_dir,
                                           numerics};
    snprintf(numerics, sizeof(numerics), "--numerics=%s", ref_family_name(family));
    snprintf(shm_dir, sizeof(shm_dir), "--shm-dir=%s", dir);
    snprintf(coordinator, sizeof(coordinator), "--coordinator-url=%s",
             cluster->coordinator.rpc_url);
    snprintf(name, sizeof(name), "expertd-%u", index);
    for (uint32_t m = 0; m < MODELS_COUNT; m++) {
        snprintf(flags[m], sizeof(flags[m]), "--model=%s=%s", models[m].name, models[m].path);
        args[11 + m] = flags[m];
    }
    return ep_test_process_start(&cluster->nodes[index], dir, name, EXPERTD, args, NULL, true);
}

static bool open_clients(daemon_cluster *cluster, const test_model models[MODELS_COUNT])
{
    static const client_kind kinds_of_clients[] = {
        {.name = "daemons"},
        {"daemons, narrow", NULL, 5, 16 * 1024},
        {"daemons, odd windows", "stream", 37, 64 * 1024}};
    for (uint32_t i = 0; i < EP_ARRAY_COUNT(kinds_of_clients); i++) {
        ep_client_config config;
        ep_client_config_init(&config);
        config.coordinator_url = cluster->coordinator.rpc_url;
        cluster->clients_count++;
        if (!test_client_open(&cluster->clients[i], &kinds_of_clients[i], &config, models)) {
            return false;
        }
    }
    return true;
}

bool daemon_cluster_create(const char *dir, const test_model models[MODELS_COUNT],
                           enum ref_family family, daemon_cluster **out_cluster)
{
    daemon_cluster *cluster = calloc(1, sizeof(*cluster));
    *out_cluster = cluster;
    bool ok = cluster != NULL && start_coordinator(cluster, dir);
    for (uint32_t i = 0; ok && i < DAEMONS; i++) {
        ok = start_node(cluster, i, dir, models, family);
    }
    for (uint32_t i = 0; ok && i < DAEMONS; i++) {
        ok = ep_test_process_wait_ports(&cluster->nodes[i], START_TIMEOUT_MS);
    }
    return ok && open_clients(cluster, models);
}

static bool stop(ep_test_process *process, const char *what)
{
    bool ok = true;
    if (process->pid != 0) {
        int code = ep_test_process_stop(process, SIGTERM, STOP_TIMEOUT_MS);
        ok = code == 0;
        if (!ok) {
            char *output = ep_test_process_output(process);
            fprintf(stderr, "%s ended with %d:\n%s\n", what, code, output);
            free(output);
        }
    }
    ep_test_process_destroy(process);
    return ok;
}

bool daemon_cluster_destroy(daemon_cluster *cluster)
{
    bool ok = true;
    if (cluster == NULL) {
        return true;
    }
    for (uint32_t i = 0; i < cluster->clients_count; i++) {
        test_client_close(&cluster->clients[i]);
    }
    for (uint32_t i = 0; i < DAEMONS; i++) {
        ok = stop(&cluster->nodes[i], kinds[i].name + sizeof("--node-name=") - 1) && ok;
    }
    ok = stop(&cluster->coordinator, "coordinator") && ok;
    free(cluster);
    return ok;
}

double daemon_cluster_shm_bytes(const daemon_cluster *cluster)
{
    return ep_test_metric(&cluster->nodes[DAEMONS - 1],
                          "expertd_lane_received_bytes_total{lane=\"shm\"}");
}

const test_client *daemon_cluster_client(const daemon_cluster *cluster, uint32_t choice)
{
    return &cluster->clients[choice % cluster->clients_count];
}
