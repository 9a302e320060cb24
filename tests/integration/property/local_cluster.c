/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes inside this process: the daemon's own library, one event loop and thread per node, no
 * coordinator. */
#include "clusters.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expertd/node_private.h"
#include "random.h"
#include "support/process.h"

enum {
    SHARD_NODES = 5,
    NODES = 1 + SHARD_NODES,
    YAML_BYTES = 32768,
    RANGES_BYTES = 256,
    ONE_NODE_CLIENTS = 2
};

typedef struct local_node {
    char name[32];
    char config_path[EP_TEST_PATH_BYTES];
    pthread_t thread;
    bool has_thread;
    sem_t started;
    ep_node *node; /* NULL when it could not start */
} local_node;

struct local_cluster {
    local_node nodes[NODES];
    uint32_t nodes_count;
    test_client clients[CLUSTER_CLIENTS_MAX];
    uint32_t clients_count;
};

static const struct {
    const char *listen;
    const char *backend;
    uint32_t threads;
} kinds[NODES] = {
    {"tcp://127.0.0.1:0", "cpu", 2},           {"loopback://property-1", "cpu", 1},
    {"loopback://property-2", "reference", 1}, {"tcp://127.0.0.1:0", "cpu", 1},
    {"tcp://127.0.0.1:0", "reference", 2},     {"loopback://property-5", "cpu", 2},
};

/* ---- a node's life, on its own thread ---- */

static ep_err create_node(local_node *node, ep_options **out_options, ep_node_config *out_config,
                          ep_error *out_error)
{
    char flag[EP_TEST_PATH_BYTES + 16];
    char program[] = "expertd";
    char *argv[] = {program, flag, NULL};
    char *const environment[] = {NULL};
    snprintf(flag, sizeof(flag), "--config=%s", node->config_path);
    ep_err err = ep_options_load(&ep_node_options, 2, argv, environment, out_options, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_node_source source = {.options = *out_options};
    err = ep_node_config_load(*out_options, out_config, out_error);
    return err == EP_OK ? ep_node_create(out_config, &source, &node->node, out_error) : err;
}

static void *run_node(void *arg)
{
    local_node *node = arg;
    ep_options *options = NULL;
    ep_node_config config = {0};
    ep_error error;
    ep_err err = create_node(node, &options, &config, &error);
    if (err != EP_OK) {
        fprintf(stderr, "%s: %s: %s\n", node->name, ep_err_name(err), error.text);
    }
    bool runs = err == EP_OK;
    sem_post(&node->started);
    if (runs) {
        ep_node_run(node->node);
        ep_node_destroy(node->node);
    }
    ep_node_config_fini(&config);
    ep_options_free(options);
    return NULL;
}

/* ---- which node holds what ---- */

/* owners[e]: bit set of the shard nodes that hold table index e. Uneven: early nodes get more; one
 * may get none. */
static void draw_owners(random_source *random, uint32_t experts, uint32_t *owners)
{
    uint32_t idle = random_below(random, SHARD_NODES);
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t copies = random_between(random, 1, 2);
        owners[e] = 0;
        while (copies > 0) {
            uint32_t first = random_below(random, SHARD_NODES);
            uint32_t node = random_below(random, first + 1);
            if (node != idle && (owners[e] & (1u << node)) == 0) {
                owners[e] |= 1u << node;
                copies--;
            }
        }
    }
}

static void list_owned(const uint32_t *owners, uint32_t experts, uint32_t node,
                       char out[RANGES_BYTES])
{
    size_t n = 0;
    out[0] = 0;
    for (uint32_t e = 0; e < experts; e++) {
        if ((owners[e] & (1u << node)) != 0) {
            n += (size_t)snprintf(out + n, RANGES_BYTES - n, "%s%u", n > 0 ? "," : "", e);
        }
    }
}

static uint32_t table_experts(const test_model *model)
{
    return model->config.experts + (model->config.shared_inner > 0 ? 1 : 0);
}

/* Node 0 holds everything; the others share each model. */
static bool write_config(const char *dir, local_node *node, uint32_t index,
                         const test_model models[MODELS_COUNT],
                         const uint32_t owners[MODELS_COUNT][64], enum ref_family family)
{
    char *yaml = malloc(YAML_BYTES);
    if (yaml == NULL) {
        return false;
    }
    size_t n = (size_t)snprintf(yaml, YAML_BYTES,
                                "node_name: %s\nlisten:\n  - %s\nprobe_address: ''\nadmin_listen: "
                                "''\ndoor_listen: ''\nbackend: %s\nnumerics: %s\n"
                                "threads: %u\nlog_level: error\nmodels:\n",
                                node->name, kinds[index].listen, kinds[index].backend,
                                ref_family_name(family), kinds[index].threads);
    for (uint32_t m = 0; m < MODELS_COUNT; m++) {
        char owned[RANGES_BYTES] = "all";
        if (index > 0) {
            list_owned(owners[m], table_experts(&models[m]), index - 1, owned);
        }
        if (owned[0] != 0) {
            n += (size_t)snprintf(yaml + n, YAML_BYTES - n,
                                  "  - name: %s\n    path: %s\n    experts: '%s'\n", models[m].name,
                                  models[m].path, owned);
        }
    }
    snprintf(node->config_path, sizeof(node->config_path), "%s/%s.yaml", dir, node->name);
    bool ok = n < YAML_BYTES && ep_test_write_file(node->config_path, yaml, 0644);
    free(yaml);
    return ok;
}

static bool start_nodes(local_cluster *cluster, const char *dir, uint64_t seed,
                        const test_model models[MODELS_COUNT], enum ref_family family)
{
    static uint32_t owners[MODELS_COUNT][64];
    random_source random = random_begin(seed, 0x706c616365ull);
    for (uint32_t m = 0; m < MODELS_COUNT; m++) {
        draw_owners(&random, table_experts(&models[m]), owners[m]);
    }
    for (uint32_t i = 0; i < NODES; i++) {
        local_node *node = &cluster->nodes[i];
        snprintf(node->name, sizeof(node->name), "local-%u", i);
        sem_init(&node->started, 0, 0);
        if (!write_config(dir, node, i, models, owners, family)) {
            return false;
        }
        if (pthread_create(&node->thread, NULL, run_node, node) != 0) {
            return false;
        }
        node->has_thread = true;
        cluster->nodes_count++;
        while (sem_wait(&node->started) != 0) {
        }
        if (node->node == NULL) {
            return false;
        }
    }
    return true;
}

static bool open_clients(local_cluster *cluster, const test_model models[MODELS_COUNT])
{
    static const struct {
        client_kind kind;
        uint32_t first_node;
        uint32_t nodes;
    } clients[] = {{{.name = "one"}, 0, 1},
                   {{"one, stream", "stream", 11, 16 * 1024}, 0, 1},
                   {{.name = "many"}, 1, SHARD_NODES},
                   {{"many, stream", "stream", 0, 0}, 1, SHARD_NODES},
                   {{"many, narrow", NULL, 5, 16 * 1024}, 1, SHARD_NODES},
                   {{"many, stream, narrow", "stream", 5, 16 * 1024}, 1, SHARD_NODES},
                   {{"many, a token a window", "stream", 1, 16 * 1024}, 1, SHARD_NODES},
                   {{"all, odd windows", NULL, 37, 48 * 1024}, 0, NODES},
                   {{"all, stream, odd windows", "stream", 64, 100 * 1024}, 0, NODES}};
    for (size_t i = 0; i < sizeof(clients) / sizeof(clients[0]); i++) {
        const char *urls[NODES];
        ep_client_config config;
        ep_client_config_init(&config);
        for (uint32_t n = 0; n < clients[i].nodes; n++) {
            urls[n] = cluster->nodes[clients[i].first_node + n].node->url;
        }
        config.node_urls = urls;
        config.node_urls_count = clients[i].nodes;
        cluster->clients_count++;
        if (!test_client_open(&cluster->clients[i], &clients[i].kind, &config, models)) {
            return false;
        }
    }
    return true;
}

bool local_cluster_create(const char *dir, uint64_t seed, const test_model models[MODELS_COUNT],
                          enum ref_family family, local_cluster **out_cluster)
{
    local_cluster *cluster = calloc(1, sizeof(*cluster));
    *out_cluster = cluster;
    if (cluster == NULL || !start_nodes(cluster, dir, seed, models, family)) {
        return false;
    }
    /* The nodes' loops took these over to drain; whoever stops this test means all of it. */
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    signal(SIGHUP, SIG_DFL);
    return open_clients(cluster, models);
}

void local_cluster_destroy(local_cluster *cluster)
{
    if (cluster == NULL) {
        return;
    }
    for (uint32_t i = 0; i < cluster->clients_count; i++) {
        test_client_close(&cluster->clients[i]);
    }
    for (uint32_t i = 0; i < cluster->nodes_count; i++) {
        local_node *node = &cluster->nodes[i];
        if (node->node != NULL) {
            ep_service_loop_quit(node->node->loop);
        }
        if (node->has_thread) {
            pthread_join(node->thread, NULL);
        }
        sem_destroy(&node->started);
    }
    free(cluster);
}

const test_client *local_cluster_client(const local_cluster *cluster, uint32_t choice,
                                        bool one_node)
{
    return &cluster->clients[choice % (one_node ? ONE_NODE_CLIENTS : cluster->clients_count)];
}
