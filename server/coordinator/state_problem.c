/* SPDX-License-Identifier: Apache-2.0 */
/* Converts a model's nodes, layers, copies and heat into the solvers' input. */
#include "coordinator/state_problem.h"

#include <stdlib.h>
#include <string.h>

void ep_state_problem_fini(cluster_problem *p)
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

/* Memory for weights that other models leave at a node; 0: no limit. */
static uint64_t capacity_left(const ep_coordinator_state *cluster, const cluster_node *node,
                              uint32_t model_index)
{
    uint64_t left = node->capacity_bytes;
    for (uint32_t l = 0; l < cluster->layers_count && node->capacity_bytes != 0; l++) {
        const cluster_layer *layer = &cluster->layers[l];
        uint64_t bytes = 0;
        for (size_t w = 0; layer->model_index != model_index && w < layer_words(layer); w++) {
            bytes +=
                (uint64_t)__builtin_popcountll(node->layers[l].assigned[w]) * layer->expert_bytes;
        }
        /* 1: nothing is left, while 0 would mean no limit */
        left = left > bytes ? left - bytes : 1;
    }
    return left;
}

static void collect_nodes(const ep_coordinator_state *cluster, uint32_t model_index,
                          cluster_problem *p)
{
    const char *id = ep_state_placed_numerics(cluster, model_index);
    p->numerics = id;
    for (uint32_t n = 0; n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        p->solver_node_of[n] = EP_PLACEMENT_NODE_GONE;
        if (ep_state_node_offers(node, model_index) &&
            (id == NULL || strcmp(node->numerics[model_index], id) == 0)) {
            p->nodes[p->nodes_count] =
                (ep_placement_node){.node_id = node->node_id,
                                    .name = node->name,
                                    .host = node->host,
                                    .capacity_bytes = capacity_left(cluster, node, model_index),
                                    .speed = node->speed.placed};
            p->node_of[p->nodes_count] = n;
            p->solver_node_of[n] = p->nodes_count++;
        }
    }
}

static int by_layer_number(const void *left, const void *right, void *arg)
{
    const ep_coordinator_state *cluster = arg;
    uint32_t a = cluster->layers[*(const uint32_t *)left].shape.layer,
             b = cluster->layers[*(const uint32_t *)right].shape.layer;
    return a < b ? -1 : a > b;
}

/*
 * Copies that are assigned or already held stay where they are, so a node that comes back keeps its
 * loaded experts. A copy that the assignment in force gave up is held for a while (drop_grace_ms);
 * it counts only if the expert lacks a copy.
 */
static bool holds(const ep_coordinator_state *cluster, const node_layer *layer, uint32_t expert,
                  bool is_short)
{
    const bool is_given_up =
        layer->is_placed && cluster->committed_number == cluster->assignment_number;
    return bit_get(layer->assigned, expert) ||
           (bit_get(layer->owned, expert) && (!is_given_up || is_short));
}

static const node_layer *layer_on(const ep_coordinator_state *cluster, const cluster_problem *p,
                                  uint32_t node, uint32_t layer_index)
{
    return &cluster->nodes[p->node_of[node]]->layers[layer_index];
}

static bool collect_owned(const ep_coordinator_state *cluster, const cluster_problem *p,
                          uint32_t layer_index, ep_placement_layer *out)
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
        uint32_t count = 0;
        for (uint32_t n = 0; n < p->nodes_count; n++) {
            count += holds(cluster, layer_on(cluster, p, n, layer_index), e, false);
        }
        offsets[e] = used;
        for (uint32_t n = 0; n < p->nodes_count; n++) {
            if (holds(cluster, layer_on(cluster, p, n, layer_index), e,
                      count < cluster->config.copies)) {
                owned[used++] = n;
            }
        }
    }
    offsets[experts] = used;
    out->shape = cluster->layers[layer_index].shape;
    out->expert_bytes = cluster->layers[layer_index].expert_bytes;
    out->heat = cluster->layers[layer_index].heat;
    out->owned_offsets = offsets;
    out->owned = owned;
    return true;
}

bool ep_state_problem_init(const ep_coordinator_state *cluster, uint32_t model_index,
                           cluster_problem *p)
{
    memset(p, 0, sizeof(*p));
    p->nodes = calloc(cluster->nodes_count + 1, sizeof(*p->nodes));
    p->node_of = calloc(cluster->nodes_count + 1, sizeof(uint32_t));
    p->solver_node_of = calloc(cluster->nodes_count + 1, sizeof(uint32_t));
    p->layers = calloc(cluster->layers_count + 1u, sizeof(*p->layers));
    p->layer_of = calloc(cluster->layers_count + 1u, sizeof(uint32_t));
    if (p->nodes == NULL || p->node_of == NULL || p->solver_node_of == NULL || p->layers == NULL ||
        p->layer_of == NULL) {
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

ep_placement_input ep_state_problem_input(const ep_coordinator_state *cluster,
                                          const cluster_problem *p)
{
    return (ep_placement_input){.nodes_count = p->nodes_count,
                                .nodes = p->nodes,
                                .layers_count = p->layers_count,
                                .layers = p->layers,
                                .copies = cluster->config.copies,
                                .spare_copies = cluster->config.spare_copies};
}
