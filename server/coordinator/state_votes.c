/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chooses the numerics id that gets a model's experts. A change of it moves the whole model and
 * leaves clients that pinned the old id without copies. So it does not depend on which nodes are
 * up: nodes also vote while they restart, reboot or leave.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/state_private.h"

/* ---- votes of forgotten nodes ---- */

void ep_state_votes_keep(ep_coordinator_state *cluster, const cluster_node *node, uint64_t until_ns)
{
    for (uint32_t m = 0; m < cluster->models_count; m++) {
        if (!node_serves(node, m)) {
            continue;
        }
        former_vote *votes =
            realloc(cluster->former_votes, (cluster->former_votes_count + 1) * sizeof(*votes));
        if (votes == NULL) {
            return;
        }
        cluster->former_votes = votes;
        former_vote *vote = &votes[cluster->former_votes_count++];
        strcpy(vote->node, node->name);
        vote->model = cluster->models[m];
        strcpy(vote->numerics, node->numerics[m]);
        vote->until_ns = until_ns;
    }
}

void ep_state_votes_drop(ep_coordinator_state *cluster, const char *node)
{
    size_t used = 0;
    for (size_t i = 0; i < cluster->former_votes_count; i++) {
        if (strcmp(cluster->former_votes[i].node, node) != 0) {
            cluster->former_votes[used++] = cluster->former_votes[i];
        }
    }
    cluster->former_votes_count = used;
}

bool ep_state_votes_expire(ep_coordinator_state *cluster, uint64_t now_ns)
{
    const size_t before = cluster->former_votes_count;
    size_t used = 0;
    for (size_t i = 0; i < before; i++) {
        if (cluster->former_votes[i].until_ns > now_ns) {
            cluster->former_votes[used++] = cluster->former_votes[i];
        }
    }
    cluster->former_votes_count = used;
    return used < before;
}

/* ---- the choice ---- */

bool ep_state_node_offers(const cluster_node *node, uint32_t model_index)
{
    return node_can_own(node) && node_serves(node, model_index);
}

static uint64_t copies_held(const ep_coordinator_state *cluster, uint32_t model_index,
                            const cluster_node *node)
{
    uint64_t count = 0;
    for (uint32_t l = 0; l < cluster->layers_count; l++) {
        const cluster_layer *layer = &cluster->layers[l];
        for (size_t w = 0; layer->model_index == model_index && w < layer_words(layer); w++) {
            count += (uint64_t)__builtin_popcountll(node->layers[l].assigned[w] |
                                                    node->layers[l].owned[w]);
        }
    }
    return count;
}

/* Whether the node offers the model and no earlier node with its id does. */
static bool is_first_of_id(const ep_coordinator_state *cluster, uint32_t model_index, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const cluster_node *other = cluster->nodes[i];
        if (ep_state_node_offers(other, model_index) &&
            strcmp(other->numerics[model_index], cluster->nodes[n]->numerics[model_index]) == 0) {
            return false;
        }
    }
    return ep_state_node_offers(cluster->nodes[n], model_index);
}

static uint64_t former_votes(const ep_coordinator_state *cluster, uint32_t model_index,
                             const char *id)
{
    const cluster_model *model = &cluster->models[model_index];
    uint64_t count = 0;
    for (size_t i = 0; i < cluster->former_votes_count; i++) {
        const former_vote *vote = &cluster->former_votes[i];
        count += strcmp(vote->numerics, id) == 0 && strcmp(vote->model.name, model->name) == 0 &&
                 strcmp(vote->model.version, model->version) == 0 &&
                 !ep_state_is_drained(cluster, vote->node);
    }
    return count;
}

const char *ep_state_placed_numerics(const ep_coordinator_state *cluster, uint32_t model_index)
{
    const char *best = NULL;
    uint64_t best_nodes = 0;
    uint64_t best_copies = 0;
    for (uint32_t n = 0; cluster->config.expert_map == NULL && n < cluster->nodes_count; n++) {
        if (!is_first_of_id(cluster, model_index, n)) {
            continue;
        }
        const char *id = cluster->nodes[n]->numerics[model_index];
        uint64_t nodes = former_votes(cluster, model_index, id);
        uint64_t copies = 0;
        for (uint32_t i = 0; i < cluster->nodes_count; i++) {
            const cluster_node *other = cluster->nodes[i];
            if (!other->is_drained && strcmp(other->numerics[model_index], id) == 0) {
                nodes++;
                copies += copies_held(cluster, model_index, other);
            }
        }
        if (nodes > best_nodes || (nodes == best_nodes && copies > best_copies)) {
            best = id;
            best_nodes = nodes;
            best_copies = copies;
        }
    }
    return best;
}

void ep_state_note_left_out(const ep_coordinator_state *cluster, uint32_t model_index,
                            ep_error *out_note)
{
    const char *id = ep_state_placed_numerics(cluster, model_index);
    const char *other = NULL;
    uint32_t nodes = 0;
    uint32_t left_out = 0;
    for (uint32_t n = 0; id != NULL && n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        if (ep_state_node_offers(node, model_index)) {
            nodes++;
            if (strcmp(node->numerics[model_index], id) != 0) {
                left_out++;
                other = other == NULL ? node->numerics[model_index] : other;
            }
        }
    }
    if (left_out > 0) {
        ep_error_set(out_note, EP_ERR_FAILED_PRECONDITION,
                     "model %.100s:%.50s: %u of %u nodes compute with other numerics ('%s'): only "
                     "those of '%s' get experts",
                     cluster->models[model_index].name, cluster->models[model_index].version,
                     left_out, nodes, other, id);
    }
}
