/* SPDX-License-Identifier: Apache-2.0 */
/* How even the load of the nodes is, by the newest table and the present heat. */
#include <stdlib.h>
#include <string.h>

#include "coordinator/state_private.h"
#include "placement/placement.h"

/* The node at a position of the table; NULL: it is gone. */
static const cluster_node *node_of(const ep_coordinator_state *cluster, uint32_t position)
{
    const char *name = cluster->table->nodes[position].name;
    if (position < cluster->nodes_count && strcmp(cluster->nodes[position]->name, name) == 0) {
        return cluster->nodes[position]; /* usually the same position */
    }
    return ep_state_find_node(cluster, name);
}

/* Nodes of the balance: those that could have copies of the layer or still have some. index_of
 * [nodes of the table]. */
static uint32_t pick_nodes(const ep_coordinator_state *cluster, uint32_t model_index,
                           const ep_routing_layer *listed, uint32_t *index_of,
                           ep_placement_node *nodes)
{
    const uint32_t copies = listed->offsets[listed->shape.experts + listed->shape.shared_experts];
    uint32_t count = 0;
    for (uint32_t i = 0; i < copies; i++) {
        index_of[listed->copies[i]] = 1;
    }
    for (uint32_t n = 0; n < cluster->table->nodes_count; n++) {
        const cluster_node *node = node_of(cluster, n);
        const bool takes_part =
            index_of[n] != 0 || (node != NULL && ep_state_node_offers(node, model_index));
        index_of[n] = takes_part ? count : UINT32_MAX;
        if (takes_part) {
            nodes[count++].speed = node != NULL ? node->speed.placed : 0;
        }
    }
    return count;
}

static bool judge(const ep_coordinator_state *cluster, const cluster_layer *layer,
                  const ep_routing_layer *listed, ep_layer_balance *out_balance)
{
    const uint32_t copies_count = listed->offsets[layer_experts(layer)];
    uint32_t *index_of = calloc(cluster->table->nodes_count + 1u, sizeof(*index_of));
    uint32_t *copies = calloc(copies_count + 1u, sizeof(*copies));
    ep_placement_node *nodes = calloc(cluster->table->nodes_count + 1u, sizeof(*nodes));
    bool good = index_of != NULL && copies != NULL && nodes != NULL;
    if (good) {
        const ep_placement_layer in = {.shape = layer->shape, .heat = layer->heat};
        const ep_placement_input input = {
            .nodes_count = pick_nodes(cluster, layer->model_index, listed, index_of, nodes),
            .nodes = nodes,
            .layers_count = 1,
            .layers = &in,
            .copies = cluster->config.copies,
            .spare_copies = cluster->config.spare_copies};
        for (uint32_t i = 0; i < copies_count; i++) {
            copies[i] = index_of[listed->copies[i]];
        }
        good = ep_placement_judge(&input, 0, listed->offsets, copies, out_balance) == EP_OK &&
               out_balance->mean > 0;
    }
    free(index_of);
    free(copies);
    free(nodes);
    return good;
}

static const ep_routing_layer *find_listed(const ep_coordinator_state *cluster, const char *model,
                                           const char *version, const cluster_layer *layer)
{
    uint32_t index;
    const ep_routing_layer *listed = NULL;
    if (cluster->table != NULL &&
        ep_routing_table_find_model(cluster->table, model, version, &index) != NULL) {
        listed = ep_routing_table_find_layer(cluster->table, index, layer->shape.layer);
    }
    const bool fits = listed != NULL && listed->shape.experts == layer->shape.experts &&
                      listed->shape.shared_experts == layer->shape.shared_experts;
    return fits ? listed : NULL;
}

void ep_state_forget_balance(ep_coordinator_state *cluster)
{
    for (uint32_t l = 0; l < cluster->layers_count; l++) {
        cluster->layers[l].judged_heat = 0;
    }
}

bool ep_coordinator_state_balance(ep_coordinator_state *cluster, const char *model,
                                  const char *version, uint32_t layer,
                                  ep_coordinator_balance *out_balance)
{
    const uint32_t index =
        ep_state_find_layer(cluster, ep_state_find_model(cluster, model, version), layer);
    if (index == UINT32_MAX || cluster->layers[index].heat_number == 0) {
        return false;
    }
    cluster_layer *of = &cluster->layers[index];
    const ep_routing_layer *listed = find_listed(cluster, model, version, of);
    ep_layer_balance balance;
    if (listed == NULL) {
        return false;
    }
    if (of->judged_heat != of->heat_number || of->judged_table != cluster->table->epoch.number) {
        of->judged_heat = of->heat_number;
        of->judged_table = cluster->table->epoch.number;
        of->balance = (ep_coordinator_balance){0};
        if (judge(cluster, of, listed, &balance)) {
            of->balance.busiest_over_mean = balance.busiest / balance.mean;
            of->balance.busiest_over_bound = balance.busiest / balance.bound;
        }
    }
    *out_balance = of->balance;
    return of->balance.busiest_over_mean > 0;
}
