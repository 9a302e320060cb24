/* SPDX-License-Identifier: Apache-2.0 */
/* Who shall own what: one placement problem per model, over the nodes that offer it. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "coordinator/state_private.h"
#include "placement/placement.h"

/* One model's problem: input for the solver, and which cluster layer and node each index stands for. */
typedef struct problem {
    uint32_t nodes_count;
    ep_placement_node *nodes;
    uint32_t *node_of;           /* solver node -> cluster node */
    uint32_t *solver_node_of;    /* cluster node -> solver node, or EP_PLACEMENT_NODE_GONE */
    uint32_t layers_count;
    ep_placement_layer *layers;
    uint32_t *layer_of;          /* solver layer -> cluster layer */
} problem;

static void problem_fini(problem *p)
{
    for (uint32_t l = 0; l < p->layers_count; l++) {
        free((void *)(uintptr_t)p->layers[l].owned_offsets);
        free((void *)(uintptr_t)p->layers[l].owned);
    }
    free(p->nodes);
    free(p->node_of);
    free(p->solver_node_of);
    free(p->layers);
    free(p->layer_of);
}

static bool node_offers(const ep_coordinator_state *cluster, const cluster_node *node, uint32_t model_index)
{
    return node_can_own(node) && node->numerics[model_index][0] != 0 && cluster->models_count > model_index;
}

static void collect_nodes(const ep_coordinator_state *cluster, uint32_t model_index, problem *p)
{
    for (uint32_t n = 0; n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        p->solver_node_of[n] = EP_PLACEMENT_NODE_GONE;
        if (node_offers(cluster, node, model_index)) {
            p->nodes[p->nodes_count] = (ep_placement_node){.node_id = node->node_id, .name = node->name};
            p->node_of[p->nodes_count] = n;
            p->solver_node_of[n] = p->nodes_count++;
        }
    }
}

static int by_layer_number(const void *left, const void *right, void *arg)
{
    const ep_coordinator_state *cluster = arg;
    uint32_t a = cluster->layers[*(const uint32_t *)left].shape.layer, b = cluster->layers[*(const uint32_t *)right].shape.layer;
    return a < b ? -1 : a > b;
}

/* What nodes were given or already hold stays where it is: a node that comes back keeps its loaded experts. */
static bool holds(const node_layer *layer, uint32_t expert)
{
    return bit_get(layer->assigned, expert) || bit_get(layer->owned, expert);
}

static bool collect_owned(const ep_coordinator_state *cluster, const problem *p, uint32_t layer_index, ep_placement_layer *out)
{
    uint32_t experts = layer_experts(&cluster->layers[layer_index]), used = 0;
    uint32_t *offsets = calloc(experts + 1u, sizeof(uint32_t));
    uint32_t *owned = calloc((size_t)experts * p->nodes_count + 1, sizeof(uint32_t));
    if (offsets == NULL || owned == NULL) {
        free(offsets);
        free(owned);
        return false;
    }
    for (uint32_t e = 0; e < experts; e++) {
        offsets[e] = used;
        for (uint32_t n = 0; n < p->nodes_count; n++) {
            if (holds(&cluster->nodes[p->node_of[n]]->layers[layer_index], e)) {
                owned[used++] = n;
            }
        }
    }
    offsets[experts] = used;
    out->shape = cluster->layers[layer_index].shape;
    out->owned_offsets = offsets;
    out->owned = owned;
    return true;
}

static bool problem_init(const ep_coordinator_state *cluster, uint32_t model_index, problem *p)
{
    memset(p, 0, sizeof(*p));
    p->nodes = calloc(cluster->nodes_count + 1, sizeof(*p->nodes));
    p->node_of = calloc(cluster->nodes_count + 1, sizeof(uint32_t));
    p->solver_node_of = calloc(cluster->nodes_count + 1, sizeof(uint32_t));
    p->layers = calloc(cluster->layers_count + 1u, sizeof(*p->layers));
    p->layer_of = calloc(cluster->layers_count + 1u, sizeof(uint32_t));
    if (p->nodes == NULL || p->node_of == NULL || p->solver_node_of == NULL || p->layers == NULL || p->layer_of == NULL) {
        return false;
    }
    collect_nodes(cluster, model_index, p);
    uint32_t count = 0;
    for (uint32_t i = 0; i < cluster->layers_count; i++) {
        if (cluster->layers[i].model_index == model_index) {
            p->layer_of[count++] = i;
        }
    }
    qsort_r(p->layer_of, count, sizeof(uint32_t), by_layer_number, (void *)(uintptr_t)cluster);
    for (; p->layers_count < count; p->layers_count++) {
        if (!collect_owned(cluster, p, p->layer_of[p->layers_count], &p->layers[p->layers_count])) {
            return false;
        }
    }
    return true;
}

/* Device d of a static map is the node the configuration names d-th; a named node that is not there yet is an error. */
static ep_err map_devices(const ep_coordinator_state *cluster, const problem *p, uint32_t **out_devices, ep_error *out_error)
{
    const ep_coordinator_state_config *config = &cluster->config;
    *out_devices = NULL;
    if (config->node_order_count == 0) {
        return EP_OK;
    }
    uint32_t *devices = calloc(config->node_order_count, sizeof(uint32_t));
    if (devices == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the device order");
    }
    for (size_t d = 0; d < config->node_order_count; d++) {
        uint32_t n = 0;
        while (n < p->nodes_count && strcmp(p->nodes[n].name, config->node_order[d]) != 0) {
            n++;
        }
        if (n == p->nodes_count) {
            free(devices);
            return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "expert map %s: device %zu is node %s, which is not registered",
                                config->expert_map->file, d, config->node_order[d]);
        }
        devices[d] = n;
    }
    *out_devices = devices;
    return EP_OK;
}

static ep_err solve(const ep_coordinator_state *cluster, const problem *p, ep_placement **out_placement, ep_error *out_error)
{
    ep_placement_input input = {
        .nodes_count = p->nodes_count,
        .nodes = p->nodes,
        .layers_count = p->layers_count,
        .layers = p->layers,
        .copies = cluster->config.copies,
    };
    if (cluster->config.expert_map == NULL) {
        return ep_placement_uniform(&input, out_placement, out_error);
    }
    uint32_t *devices;
    ep_err err = map_devices(cluster, p, &devices, out_error);
    if (err == EP_OK) {
        err = ep_placement_static(&input, cluster->config.expert_map, devices, out_placement, out_error);
        free(devices);
    }
    return err;
}

/* Writes a solution into the nodes' bits; true when anything differs from before. */
static bool apply(ep_coordinator_state *cluster, const problem *p, const ep_placement *placement)
{
    bool changed = false;
    for (uint32_t l = 0; l < placement->layers_count; l++) {
        const ep_placed_layer *placed = &placement->layers[l];
        uint32_t index = p->layer_of[l];
        size_t words = layer_words(&cluster->layers[index]);
        for (uint32_t n = 0; n < p->nodes_count; n++) {
            node_layer *layer = &cluster->nodes[p->node_of[n]]->layers[index];
            uint64_t wanted[EP_EXPERTS_MAX / 64 + 1] = {0};
            for (uint32_t e = 0; e < placed->experts; e++) {
                for (uint32_t c = placed->offsets[e]; c < placed->offsets[e + 1]; c++) {
                    if (placed->copies[c] == n) {
                        bit_set(wanted, e);
                    }
                }
            }
            changed |= memcmp(layer->assigned, wanted, words * sizeof(uint64_t)) != 0;
            memcpy(layer->assigned, wanted, words * sizeof(uint64_t));
        }
    }
    return changed;
}

static ep_err place_model(ep_coordinator_state *cluster, uint32_t model_index, bool *io_changed, ep_error *out_error)
{
    problem p;
    ep_placement *placement = NULL;
    ep_err err = EP_OK;
    if (!problem_init(cluster, model_index, &p)) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to place model %s", cluster->models[model_index].name);
    } else if (p.nodes_count > 0 && p.layers_count > 0) {
        err = solve(cluster, &p, &placement, out_error);
    }
    if (err == EP_OK && placement != NULL) {
        *io_changed |= apply(cluster, &p, placement);
    }
    ep_placement_destroy(placement);
    problem_fini(&p);
    return err;
}

void cluster_place(ep_coordinator_state *cluster)
{
    uint32_t able = 0;
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        able += node_can_own(cluster->nodes[n]);
    }
    if (!cluster->placed_once && able < cluster->config.min_nodes) {
        return;
    }
    bool changed = !cluster->placed_once;
    ep_error_clear(&cluster->placement_error);
    for (uint32_t m = 0; m < cluster->models_count; m++) {
        ep_error error;
        if (place_model(cluster, m, &changed, &error) != EP_OK) {
            cluster->placement_error = error; /* this model keeps what it had */
        }
    }
    if (cluster->placement_error.code == EP_OK) {
        cluster->placed_once = true;
    }
    if (changed) {
        cluster->assignment_number = ++cluster->counter;
    }
}
