/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decides which copies of an expert are used. Results must not depend on the copy, so one digest
 * per expert is in force: the one that most nodes report; on a tie the one of more live nodes, then
 * the one that was in force. Copies with another digest are not used. A silent node's report counts
 * until the node is forgotten, restarts, ends, or is drained by an operator. Otherwise one wrong
 * node would win over two that a switch cuts off, and lose again later.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/state_private.h"

/* 0: the node has never read the expert, is of an older version, or no longer offers the layer. */
static uint32_t digest_of(const cluster_node *node, uint32_t layer_index, uint32_t expert)
{
    const node_layer *layer = &node->layers[layer_index];
    return layer->digests != NULL && layer->offered ? layer->digests[expert] : 0;
}

static bool has_say(const cluster_node *node)
{
    return node->state != NODE_DRAINING && !node->is_drained;
}

static uint32_t nodes_with(const ep_coordinator_state *cluster, uint32_t layer_index,
                           uint32_t expert, uint32_t digest, uint32_t *out_up)
{
    uint32_t count = 0;
    *out_up = 0;
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        if (has_say(node) && digest_of(node, layer_index, expert) == digest) {
            count++;
            *out_up += node_is_listed(node);
        }
    }
    return count;
}

static bool said_before(const ep_coordinator_state *cluster, uint32_t layer_index, uint32_t expert,
                        size_t node)
{
    const uint32_t digest = digest_of(cluster->nodes[node], layer_index, expert);
    size_t n = 0;
    while (n < node && digest_of(cluster->nodes[n], layer_index, expert) != digest) {
        n++;
    }
    return n < node;
}

/* Chooses the digest in force; 0: none is known. Nodes without a vote decide only if no other knows
 * one. */
static uint32_t choose(const ep_coordinator_state *cluster, uint32_t layer_index, uint32_t expert)
{
    const uint32_t in_force = cluster->layers[layer_index].digests[expert];
    uint32_t best = 0, best_nodes = 0, best_up = 0;
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const uint32_t digest = digest_of(cluster->nodes[n], layer_index, expert);
        if (digest == 0 || digest == best || said_before(cluster, layer_index, expert, n)) {
            continue;
        }
        uint32_t up;
        const uint32_t nodes = nodes_with(cluster, layer_index, expert, digest, &up);
        const bool is_equal = nodes == best_nodes && up == best_up;
        if (best == 0 || nodes > best_nodes || (nodes == best_nodes && up > best_up) ||
            (is_equal && digest == in_force)) {
            best = digest;
            best_nodes = nodes;
            best_up = up;
        }
    }
    return best;
}

/* True: the node can take the expert now and could not before, or the reverse. */
static bool apply_verdict(cluster_node *node, uint32_t layer_index, uint32_t expert,
                          uint32_t before, uint32_t now)
{
    node_layer *layer = &node->layers[layer_index];
    const uint32_t digest = digest_of(node, layer_index, expert);
    const bool was_failed = bit_get(layer->failed, expert);
    if (digest != 0 && digest != now) {
        bit_clear(layer->owned, expert);
        bit_set(layer->failed, expert); /* loading it again would give the same bytes */
        return !was_failed;
    }
    if (digest != 0 && before != 0 && digest != before) {
        bit_clear(layer->failed, expert);
        return was_failed;
    }
    return false;
}

static bool has_digests(const ep_coordinator_state *cluster, uint32_t layer_index)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        if (cluster->nodes[n]->layers[layer_index].digests != NULL) {
            return true;
        }
    }
    return false;
}

typedef struct difference {
    uint32_t layer_index;
    uint32_t expert;
    const cluster_node *node;
} difference;

/* Counts the refused copies of each node with a vote; returns the first as an example. */
static difference count_differences(const ep_coordinator_state *cluster, uint32_t *out_counts)
{
    difference first = {0};
    for (uint32_t l = 0; l < cluster->layers_count; l++) {
        const uint32_t experts = has_digests(cluster, l) ? layer_experts(&cluster->layers[l]) : 0;
        for (uint32_t e = 0; e < experts; e++) {
            for (size_t n = 0; n < cluster->nodes_count; n++) {
                const uint32_t digest = digest_of(cluster->nodes[n], l, e);
                if (digest == 0 || digest == cluster->layers[l].digests[e] ||
                    !has_say(cluster->nodes[n])) {
                    continue;
                }
                if (first.node == NULL) {
                    first = (difference){.layer_index = l, .expert = e, .node = cluster->nodes[n]};
                }
                out_counts[n]++;
            }
        }
    }
    return first;
}

/* A node whose copy of the example is in force: the one to drain if that copy is wrong. */
static const char *holder_in_force(const ep_coordinator_state *cluster, const difference *d)
{
    const uint32_t in_force = cluster->layers[d->layer_index].digests[d->expert];
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        if (has_say(cluster->nodes[n]) &&
            digest_of(cluster->nodes[n], d->layer_index, d->expert) == in_force) {
            return cluster->nodes[n]->name;
        }
    }
    return "";
}

/* "a (3), b (1), 2 more" */
static void list_nodes(const ep_coordinator_state *cluster, const uint32_t *counts, char *out,
                       size_t out_bytes)
{
    size_t used = 0;
    uint32_t more = 0;
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const char *name = cluster->nodes[n]->name;
        if (counts[n] > 0 && used + strlen(name) + sizeof(" (4294967295), 1023 more") < out_bytes) {
            used += (size_t)snprintf(out + used, out_bytes - used, "%s%s (%u)",
                                     used > 0 ? ", " : "", name, counts[n]);
        } else {
            more += counts[n] > 0;
        }
    }
    if (more > 0) {
        snprintf(out + used, out_bytes - used, ", %u more", more);
    }
}

static void note_differences(ep_coordinator_state *cluster, const uint32_t *counts,
                             const difference *d)
{
    char names[120];
    uint32_t up;
    list_nodes(cluster, counts, names, sizeof(names));
    const cluster_layer *layer = &cluster->layers[d->layer_index];
    const cluster_model *model = &cluster->models[layer->model_index];
    const uint32_t digest = digest_of(d->node, d->layer_index, d->expert),
                   in_force = layer->digests[d->expert];
    const uint32_t with_other = nodes_with(cluster, d->layer_index, d->expert, digest, &up);
    const uint32_t with_used = nodes_with(cluster, d->layer_index, d->expert, in_force, &up);
    ep_error_set(&cluster->copy_error, EP_ERR_DATA_LOSS,
                 "experts with other weights are not used, of: %s; as expert %u of layer %u of "
                 "model %.40s:%.31s: "
                 "SHA-256 %08x.. on %u, used %08x.. on %u (%s)%s; on the wrong side copy the "
                 "checkpoint again and "
                 "restart the node, or drain it",
                 names, d->expert, layer->shape.layer, model->name, model->version,
                 __builtin_bswap32(digest), with_other, __builtin_bswap32(in_force), with_used,
                 holder_in_force(cluster, d),
                 with_used > with_other ? ", the majority"
                                        : ", no majority: a third node would decide");
}

bool ep_state_judge_copies(ep_coordinator_state *cluster)
{
    bool is_news = false;
    for (uint32_t l = 0; l < cluster->layers_count; l++) {
        cluster_layer *layer = &cluster->layers[l];
        for (size_t n = 0; n < cluster->nodes_count; n++) {
            node_layer *of = &cluster->nodes[n]->layers[l];
            memcpy(of->owned, of->held, layer_words(layer) * sizeof(uint64_t));
        }
        const bool is_known = has_digests(cluster, l);
        for (uint32_t e = 0; e < layer_experts(layer); e++) {
            const uint32_t before = layer->digests[e];
            layer->digests[e] = is_known ? choose(cluster, l, e) : 0;
            if (layer->digests[e] == 0) {
                continue;
            }
            for (size_t n = 0; n < cluster->nodes_count; n++) {
                is_news |= apply_verdict(cluster->nodes[n], l, e, before, layer->digests[e]);
            }
        }
    }
    ep_error_clear(&cluster->copy_error);
    uint32_t *counts = calloc(cluster->nodes_count + 1, sizeof(*counts));
    if (counts != NULL) { /* without memory the error is not set until next time */
        const difference first = count_differences(cluster, counts);
        if (first.node != NULL) {
            note_differences(cluster, counts, &first);
        }
    }
    free(counts);
    return is_news;
}
