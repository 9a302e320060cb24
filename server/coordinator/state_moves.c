/* SPDX-License-Identifier: Apache-2.0 */
/* Moves under way: assigned copies that nodes have not loaded, copies that they are to give up, and
 * turns to load. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "coordinator/state_private.h"

#define TURN_IDLE_NS (60 * EP_NS_PER_S)

void ep_coordinator_state_moves(const ep_coordinator_state *cluster, size_t index,
                                uint32_t *out_to_load, uint32_t *out_to_drop)
{
    const cluster_node *node = cluster->nodes[index];
    *out_to_load = 0;
    *out_to_drop = 0;
    for (uint32_t l = 0; node_is_listed(node) && l < cluster->layers_count; l++) {
        const node_layer *layer = &node->layers[l];
        for (size_t w = 0; w < layer_words(&cluster->layers[l]); w++) {
            *out_to_load += (uint32_t)__builtin_popcountll(layer->assigned[w] & ~layer->owned[w]);
            *out_to_drop += (uint32_t)__builtin_popcountll(layer->owned[w] & ~layer->assigned[w]);
        }
    }
}

static void add_copies(uint64_t bits, uint32_t first_expert, uint32_t node_id,
                       ep_coordinator_copies *io_copies)
{
    for (; bits != 0; bits &= bits - 1, io_copies->count++) {
        if (io_copies->count < EP_COORDINATOR_MOVES_MAX) {
            io_copies->list[io_copies->count].expert =
                first_expert + (uint32_t)__builtin_ctzll(bits);
            io_copies->list[io_copies->count].node_id = node_id;
        }
    }
}

bool ep_coordinator_state_layer(ep_coordinator_state *cluster, const char *model,
                                const char *version, uint32_t layer,
                                ep_coordinator_layer_view *out_view)
{
    const uint32_t index =
        ep_state_find_layer(cluster, ep_state_find_model(cluster, model, version), layer);
    *out_view = (ep_coordinator_layer_view){0};
    if (index == UINT32_MAX) {
        return true;
    }
    const cluster_layer *of = &cluster->layers[index];
    if (of->heat != NULL) {
        out_view->heat = malloc(of->shape.experts * sizeof(*out_view->heat));
        if (out_view->heat == NULL) {
            return false;
        }
        memcpy(out_view->heat, of->heat, of->shape.experts * sizeof(*out_view->heat));
        out_view->heat_count = of->shape.experts;
    }
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        const node_layer *bits = &node->layers[index];
        for (size_t w = 0; node_is_listed(node) && w < layer_words(of); w++) {
            add_copies(bits->assigned[w] & ~bits->owned[w], (uint32_t)w * 64, node->node_id,
                       &out_view->to_load);
            add_copies(bits->owned[w] & ~bits->assigned[w], (uint32_t)w * 64, node->node_id,
                       &out_view->to_drop);
        }
    }
    return true;
}

/* ---- turns ---- */

static bool has_to_load(const ep_coordinator_state *cluster, const cluster_node *node)
{
    uint64_t missing = 0;
    for (uint32_t l = 0; missing == 0 && l < cluster->layers_count; l++) {
        const node_layer *layer = &node->layers[l];
        for (size_t w = 0; w < layer_words(&cluster->layers[l]); w++) {
            missing |= layer->assigned[w] & ~layer->held[w];
        }
    }
    return missing != 0;
}

/* A turn lasts until the node reports the whole assignment as loaded. */
static bool has_turn(const cluster_node *node, uint64_t now_ns)
{
    return node->turn_ns != 0 && node_is_listed(node) && now_ns - node->turn_ns <= TURN_IDLE_NS;
}

void ep_state_take_progress(cluster_node *node, uint64_t now_ns, uint32_t left_to_load)
{
    if (node->turn_ns != 0 && left_to_load != node->left_to_load) {
        node->turn_ns = now_ns;
    }
    node->left_to_load = left_to_load;
}

bool ep_coordinator_state_take_turn(ep_coordinator_state *cluster, uint64_t now_ns,
                                    const char *name)
{
    cluster_node *node = ep_state_find_node(cluster, name);
    const uint32_t max = cluster->config.loading_nodes_max;
    uint32_t before = 0; /* nodes that load or have waited longer */
    if (node == NULL) {
        return true;
    }
    node->waits_turn = false;
    if (has_turn(node, now_ns) || !has_to_load(cluster, node)) {
        return true;
    }
    for (size_t i = 0; i < cluster->nodes_count; i++) {
        const cluster_node *other = cluster->nodes[i];
        before += has_turn(other, now_ns) || (other->waits_turn && node_is_listed(other) &&
                                              other->turn_given < node->turn_given);
    }
    if (max != 0 && before >= max) {
        node->waits_turn = true;
        node->current_ns = node->last_seen_ns; /* while it waits it does not count as behind */
        return false;
    }
    node->turn_ns = now_ns;
    node->turn_given = ++cluster->turns;
    return true;
}
