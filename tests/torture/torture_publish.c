/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From registrations to a published table, saved and encoded, with each allocation failing once. A
 * step that fails says NO_MEMORY; the same cluster, asked again as nodes ask again with every
 * heartbeat, then publishes a whole table, and its epoch never goes back.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc_fail.h"
#include "base/clock.h"
#include "coordinator/state_kept.h"
#include "wire/placement_codec.h"

#define EXPERTS 6
#define LAYERS 2
#define NODES 3
#define ROUNDS_MAX 200

typedef struct fake_node {
    char name[16];
    char url[40];
    bool known;
    uint64_t loaded_number;
    uint32_t owned[LAYERS][EXPERTS];
    size_t owned_count[LAYERS];
} fake_node;

static ep_coordinator_state *cluster;
static fake_node nodes[NODES];
static uint64_t now_ns;
static ep_epoch newest;

static const ep_coordinator_state_config config = {.copies = 2,
                                                   .min_nodes = NODES,
                                                   .heartbeat_ms = 500,
                                                   .heartbeat_dead_count = 3,
                                                   .restore_ms = 10000,
                                                   .nodes_max = 8,
                                                   .decode_tokens_max = 256,
                                                   .term = 5};

static void must_be_memory(ep_err err, const char *what)
{
    if (err != EP_OK && err != EP_ERR_NO_MEMORY) {
        torture_broken("without memory, %s said %s", what, ep_err_name(err));
    }
}

/* What a node says of itself; the message points into out_* and the node. */
typedef struct description {
    Expertd__V1__LayerInfo layers[LAYERS];
    Expertd__V1__LayerInfo *layer_list[LAYERS];
    Expertd__V1__ModelInfo model;
    Expertd__V1__ModelInfo *models[1];
} description;

static void describe(fake_node *node, description *out)
{
    expertd__v1__model_info__init(&out->model);
    out->model.name = (char *)(uintptr_t) "demo";
    out->model.version = (char *)(uintptr_t) "v1";
    out->model.numerics = (char *)(uintptr_t) "portable/bf16/rne/00000000";
    out->model.layers = out->layer_list;
    out->model.n_layers = LAYERS;
    out->models[0] = &out->model;
    for (uint32_t l = 0; l < LAYERS; l++) {
        expertd__v1__layer_info__init(&out->layers[l]);
        out->layers[l].layer = l;
        out->layers[l].hidden = 64;
        out->layers[l].inner = 32;
        out->layers[l].experts = EXPERTS;
        out->layers[l].top_k = 2;
        out->layers[l].owned = node->owned[l];
        out->layers[l].n_owned = node->owned_count[l];
        out->layer_list[l] = &out->layers[l];
    }
}

static void register_node(fake_node *node)
{
    uint32_t id;
    description d;
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    describe(node, &d);
    request.node = node->name;
    request.url = node->url;
    request.incarnation = 9;
    request.models = d.models;
    request.n_models = 1;
    ep_err err = ep_coordinator_state_register(cluster, now_ns, &request, &id, NULL);
    must_be_memory(err, "register");
    node->known = err == EP_OK;
}

/* Loads what it was given. */
static void load(fake_node *node)
{
    Expertd__V1__NodeAssignment **list;
    size_t count;
    ep_err err = ep_coordinator_state_assignments(cluster, node->name, &list, &count);
    must_be_memory(err, "assignments");
    if (err != EP_OK) {
        return;
    }
    for (size_t a = 0; a < count; a++) {
        uint32_t l = list[a]->layer;
        node->owned_count[l] = list[a]->n_experts;
        memcpy(node->owned[l], list[a]->experts, list[a]->n_experts * sizeof(uint32_t));
    }
    ep_coordinator_state_assignments_free(list, count);
    node->loaded_number = ep_coordinator_state_assignment_epoch(cluster).number;
}

static void beat(fake_node *node)
{
    bool reregister = false;
    description d;
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    Expertd__V1__HeartbeatRequest request = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
    describe(node, &d);
    epoch.term = config.term;
    epoch.number = node->loaded_number;
    request.node = node->name;
    request.incarnation = 9;
    request.epoch = &epoch;
    request.state = (char *)(uintptr_t) "serving";
    request.models = d.models;
    request.n_models = 1;
    must_be_memory(ep_coordinator_state_heartbeat(cluster, now_ns, &request, &reregister, NULL),
                   "heartbeat");
    node->known = !reregister;
}

/* Saved, encoded and decoded, a table is the same. */
static void publish(void)
{
    ep_routing_table *table = ep_coordinator_state_table(cluster), *again = NULL;
    Expertd__V1__PlacementSnapshot *snapshot = NULL;
    ep_coordinator_kept kept = {0};
    ep_error error;
    must_be_memory(ep_coordinator_state_save(cluster, &kept), "save");
    ep_coordinator_kept_fini(&kept);
    if (table == NULL) {
        return;
    }
    if (ep_epoch_compare(table->epoch, newest) < 0) {
        torture_broken("the epoch went back to %llu", (unsigned long long)table->epoch.number);
    }
    newest = table->epoch;
    ep_err err = ep_placement_encode(table, &snapshot);
    must_be_memory(err, "encode");
    if (err == EP_OK) {
        err = ep_placement_decode(snapshot, &again, &error);
        must_be_memory(err, "decode");
        if (err == EP_OK && ep_routing_table_checksum(again) != ep_routing_table_checksum(table)) {
            torture_broken("a table was decoded that is another");
        }
        ep_routing_table_unref(again);
        ep_placement_snapshot_free(snapshot);
    }
}

static void round_of_heartbeats(void)
{
    for (int i = 0; i < NODES; i++) {
        if (!nodes[i].known) {
            register_node(&nodes[i]);
        }
        if (nodes[i].known) {
            load(&nodes[i]);
            beat(&nodes[i]);
        }
    }
    now_ns += 500 * EP_NS_PER_MS;
    ep_coordinator_state_tick(cluster, now_ns);
    publish();
}

static bool table_is_whole(void)
{
    const ep_routing_table *table = ep_coordinator_state_table(cluster);
    if (table == NULL || table->layers_count != LAYERS) {
        return false;
    }
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            if (table->layers[l].offsets[e + 1] - table->layers[l].offsets[e] != 2) {
                return false;
            }
        }
    }
    return true;
}

static void attempt(void *arg)
{
    (void)arg;
    memset(nodes, 0, sizeof(nodes));
    newest = (ep_epoch){0};
    now_ns = 1000 * EP_NS_PER_S;
    for (int i = 0; i < NODES; i++) {
        snprintf(nodes[i].name, sizeof(nodes[i].name), "node-%d", i);
        snprintf(nodes[i].url, sizeof(nodes[i].url), "tcp://127.0.0.1:%d", 9000 + i);
    }
    must_be_memory(ep_coordinator_state_create(&config, &cluster), "create");
    for (int i = 0; cluster != NULL && i < 4; i++) {
        round_of_heartbeats();
    }
}

static void recover(void *arg)
{
    if (cluster == NULL) {
        attempt(arg);
    }
    for (int i = 0; !table_is_whole(); i++) {
        if (i == ROUNDS_MAX) {
            const ep_error *error = ep_coordinator_state_placement_error(cluster);
            torture_broken("no whole table after %d more rounds of heartbeats: %s", ROUNDS_MAX,
                           error->text);
        }
        round_of_heartbeats();
    }
    ep_coordinator_state_destroy(cluster);
    cluster = NULL;
}

int main(void)
{
    return alloc_fail_sweep("publish", attempt, recover, NULL) > 20 ? 0 : 1;
}
