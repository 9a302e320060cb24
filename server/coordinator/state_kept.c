/* SPDX-License-Identifier: Apache-2.0 */
/* Converts the state to and from its stored form. */
#include "coordinator/state_kept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/policy.h"
#include "coordinator/state_private.h"

void ep_coordinator_kept_fini(ep_coordinator_kept *kept)
{
    free(kept->nodes);
    free(kept->drained);
    ep_routing_table_unref(kept->assigned);
    ep_routing_table_unref(kept->published);
    *kept = (ep_coordinator_kept){0};
}

/* ---- save ---- */

/* Whether the expert is assigned to the node and the node still offers the model. */
static bool is_assigned(const ep_coordinator_state *cluster, const cluster_node *node,
                        uint32_t layer_index, uint32_t expert)
{
    return node_serves(node, cluster->layers[layer_index].model_index) &&
           bit_get(node->layers[layer_index].assigned, expert);
}

static ep_err save_nodes(const ep_coordinator_state *cluster, ep_coordinator_kept *kept)
{
    kept->nodes = calloc(cluster->nodes_count + 1, sizeof(*kept->nodes));
    kept->drained = calloc(cluster->drained_count + 1, sizeof(*kept->drained));
    if (kept->nodes == NULL || kept->drained == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        ep_coordinator_kept_node *out = &kept->nodes[kept->nodes_count++];
        out->node_id = node->node_id;
        out->incarnation = node->incarnation;
        snprintf(out->name, sizeof(out->name), "%s", node->name);
        snprintf(out->url, sizeof(out->url), "%s", node->url);
        snprintf(out->state, sizeof(out->state), "%s", ep_state_shown(cluster, node));
    }
    if (cluster->drained_count > 0) {
        memcpy(kept->drained, cluster->drained, cluster->drained_count * sizeof(*kept->drained));
    }
    kept->drained_count = cluster->drained_count;
    return EP_OK;
}

ep_err ep_coordinator_state_save(const ep_coordinator_state *cluster, ep_coordinator_kept *out_kept)
{
    ep_coordinator_kept kept = {.number = cluster->counter,
                                .next_node_id = cluster->next_node_id,
                                .policy = cluster->policy};
    ep_err err = save_nodes(cluster, &kept);
    if (err == EP_OK && cluster->placed_once) {
        err = ep_state_build_table(cluster, is_assigned, &kept.assigned);
    }
    if (err != EP_OK) {
        ep_coordinator_kept_fini(&kept);
        return err;
    }
    if (kept.assigned != NULL) {
        kept.assigned->epoch = ep_coordinator_state_assignment_epoch(cluster);
    }
    kept.published = cluster->table != NULL ? ep_routing_table_ref(cluster->table) : NULL;
    *out_kept = kept;
    return EP_OK;
}

/* ---- restore ---- */

static cluster_node *node_by_id(const ep_coordinator_state *cluster, uint32_t node_id)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        if (cluster->nodes[n]->node_id == node_id) {
            return cluster->nodes[n];
        }
    }
    return NULL;
}

static bool restore_nodes(ep_coordinator_state *cluster, uint64_t now_ns,
                          const ep_coordinator_kept *kept)
{
    for (size_t i = 0; i < kept->drained_count; i++) {
        if (!ep_state_drained_add(cluster, kept->drained[i])) {
            return false;
        }
    }
    for (size_t i = 0; i < kept->nodes_count; i++) {
        const ep_coordinator_kept_node *in = &kept->nodes[i];
        cluster_node *node = ep_state_add_node(cluster, in->name);
        if (node == NULL) {
            return false;
        }
        node->node_id = in->node_id;
        snprintf(node->url, sizeof(node->url), "%s", in->url);
        node->incarnation = in->incarnation;
        node->state = NODE_SUSPECT;
        node->is_restored = true;
        node->last_seen_ns = now_ns;
        node->current_ns = now_ns;
    }
    return true;
}

static bool restore_model(ep_coordinator_state *cluster, const ep_routing_table *table, uint32_t m)
{
    const ep_routing_model *model = &table->models[m];
    uint32_t index = ep_state_find_model(cluster, model->name, model->version);
    index = index != UINT32_MAX ? index : ep_state_add_model(cluster, model->name, model->version);
    if (index != UINT32_MAX && model->is_default) {
        cluster->models[index].is_default = true;
    }
    for (uint32_t n = 0; index != UINT32_MAX && n < table->nodes_count; n++) {
        cluster_node *node = node_by_id(cluster, table->nodes[n].node_id);
        if (node != NULL && model->numerics_of_node[n] < model->numerics_count) {
            snprintf(node->numerics[index], EP_NUMERICS_BYTES, "%s",
                     model->numerics[model->numerics_of_node[n]]);
        }
    }
    return index != UINT32_MAX;
}

static bool restore_layer(ep_coordinator_state *cluster, const ep_routing_table *table, uint32_t l,
                          bool is_owned)
{
    const ep_routing_layer *in = &table->layers[l];
    const ep_routing_model *model = &table->models[in->model_index];
    uint32_t m = ep_state_find_model(cluster, model->name, model->version);
    uint32_t index = ep_state_find_layer(cluster, m, in->shape.layer);
    index = index != UINT32_MAX ? index : ep_state_add_layer(cluster, m, &in->shape);
    if (index == UINT32_MAX) {
        return false;
    }
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        cluster->nodes[n]->layers[index].offered |= node_serves(cluster->nodes[n], m);
    }
    uint32_t experts = layer_experts(&cluster->layers[index]);
    for (uint32_t e = 0; e < experts && e < in->shape.experts + in->shape.shared_experts; e++) {
        for (uint32_t c = in->offsets[e]; c < in->offsets[e + 1]; c++) {
            cluster_node *node = node_by_id(cluster, table->nodes[in->copies[c]].node_id);
            if (node != NULL) {
                bit_set(is_owned ? node->layers[index].held : node->layers[index].assigned, e);
            }
        }
    }
    return true;
}

static bool restore_table(ep_coordinator_state *cluster, const ep_routing_table *table,
                          bool is_owned)
{
    bool good = true;
    for (uint32_t n = 0; table != NULL && n < table->nodes_count; n++) {
        cluster_node *node = node_by_id(cluster, table->nodes[n].node_id);
        if (node != NULL) {
            strcpy(node->host, table->nodes[n].host);
        }
    }
    for (uint32_t m = 0; good && table != NULL && m < table->models_count; m++) {
        good = restore_model(cluster, table, m);
    }
    for (uint32_t l = 0; good && table != NULL && l < table->layers_count; l++) {
        good = restore_layer(cluster, table, l, is_owned);
    }
    return good;
}

ep_err ep_coordinator_state_restore(ep_coordinator_state *cluster, uint64_t now_ns,
                                    const ep_coordinator_kept *kept)
{
    cluster->counter = kept->number;
    cluster->policy = kept->policy;
    ep_policy_in_force(&cluster->policy, &cluster->configured, &cluster->config);
    if (!restore_nodes(cluster, now_ns, kept) || !restore_table(cluster, kept->published, true) ||
        !restore_table(cluster, kept->assigned, false)) {
        return EP_ERR_NO_MEMORY;
    }
    cluster->next_node_id = kept->next_node_id; /* set last, as adding nodes has changed it */
    if (kept->assigned != NULL) {
        cluster->placed_once = true;
        cluster->assignment_number = ++cluster->counter;
    }
    (void)ep_state_judge_copies(cluster);
    if (kept->published != NULL && kept->assigned != NULL) {
        (void)ep_state_republish(cluster);
    }
    return EP_OK;
}
