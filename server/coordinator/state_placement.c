/* SPDX-License-Identifier: Apache-2.0 */
/* Assignments: one placement problem per model, over the nodes that offer it. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "coordinator/state_problem.h"
#include "moe/routing_plan.h"

#define MOVES_AT_ONCE 64 /* moves by heat per step, before heat is looked at again */
#define PAUSE_MIN_NS (5 * EP_NS_PER_S)
#define PAUSE_MAX_NS (40 * EP_NS_PER_S)
/* Fewer slots say little: with 1024 slots per node the busiest one is off by a tenth by chance. */
#define HEAT_SLOTS_OF_EXPERT 32
#define HEAT_SLOTS_OF_NODE 1024

/* Device d of a static map is the d-th node of node_order. A missing node is an error. */
static ep_err map_devices(const ep_coordinator_state *cluster, const cluster_problem *p,
                          uint32_t **out_devices, ep_error *out_error)
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
            const cluster_node *node = ep_state_find_node(cluster, config->node_order[d]);
            bool is_drained = ep_state_is_drained(cluster, config->node_order[d]) ||
                              (node != NULL && node->is_leaving);
            const char *why = is_drained ? "drained" : "not registered";
            return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                                "expert map %s: device %zu is node %s, which is %s",
                                config->expert_map->file, d, config->node_order[d], why);
        }
        devices[d] = n;
    }
    *out_devices = devices;
    return EP_OK;
}

/* If the nodes' memory cannot hold all copies, it is not used as a limit: a node can serve more
 * than it has memory for, only slower. */
static ep_err solve_by_room(const ep_coordinator_state *cluster, const cluster_problem *p,
                            const ep_placement_input *input, ep_placement **out_placement,
                            ep_error *out_error)
{
    ep_err (*const place)(const ep_placement_input *, ep_placement **, ep_error *) =
        cluster->config.is_balanced ? ep_placement_balanced : ep_placement_uniform;
    ep_err err = place(input, out_placement, out_error);
    const bool is_short =
        err == EP_ERR_RESOURCE_EXHAUSTED || (err == EP_OK && (*out_placement)->copies_missing > 0);
    if (is_short) {
        if (err == EP_OK) {
            ep_placement_destroy(*out_placement);
            *out_placement = NULL;
        }
        for (uint32_t n = 0; n < p->nodes_count; n++) {
            p->nodes[n].capacity_bytes = 0;
        }
        err = place(input, out_placement, out_error);
    }
    return err;
}

/* Not before the first table, when nothing is served yet. */
static bool is_paced(const ep_coordinator_state *cluster)
{
    return cluster->table != NULL && cluster->config.expert_map == NULL;
}

/* How many copies move_rate lets move for balance now; the others wait. */
static uint32_t moves_allowed(const ep_coordinator_state *cluster, const cluster_problem *p,
                              uint32_t wanted)
{
    uint64_t bytes = 0; /* of the largest expert */
    for (uint32_t l = 0; l < p->layers_count; l++) {
        bytes = p->layers[l].expert_bytes > bytes ? p->layers[l].expert_bytes : bytes;
    }
    return is_paced(cluster) ? ep_move_pace_copies(&cluster->pace, bytes, wanted) : wanted;
}

/* is_order: an operator asks for all moves now. */
static ep_err solve(ep_coordinator_state *cluster, const cluster_problem *p, bool is_order,
                    ep_placement **out_placement, ep_error *out_error)
{
    const uint32_t moves_wanted = !cluster->rebalance  ? 0
                                  : cluster->is_pacing ? MOVES_AT_ONCE
                                                       : UINT32_MAX;
    ep_placement_input input = ep_state_problem_input(cluster, p);
    input.moves_max = is_order ? moves_wanted : moves_allowed(cluster, p, moves_wanted);
    ep_err err;
    if (cluster->config.expert_map == NULL) {
        err = solve_by_room(cluster, p, &input, out_placement, out_error);
        /* Not while is_pacing: balance by heat continues by itself as long as something moves. */
        cluster->waits_moves |= err == EP_OK && !cluster->is_pacing &&
                                input.moves_max < moves_wanted &&
                                (*out_placement)->copies_dropped >= input.moves_max;
        return err;
    }
    uint32_t *devices;
    err = map_devices(cluster, p, &devices, out_error);
    if (err == EP_OK) {
        err = ep_placement_static(&input, cluster->config.expert_map, devices, out_placement,
                                  out_error);
        free(devices);
    }
    return err;
}

/* The planned copies of one layer: a row of bits for each node of the cluster. */
typedef struct layer_plan {
    uint32_t index; /* cluster layer */
    size_t words;
    uint64_t *wanted;
} layer_plan;

static uint64_t *plan_row(const layer_plan *plan, uint32_t node)
{
    return plan->wanted + node * plan->words;
}

static const node_layer *layer_of(const ep_coordinator_state *cluster, const layer_plan *plan,
                                  uint32_t node)
{
    return &cluster->nodes[node]->layers[plan->index];
}

static uint32_t row_count(const layer_plan *plan, uint32_t node)
{
    uint32_t count = 0;
    for (size_t w = 0; w < plan->words; w++) {
        count += (uint32_t)__builtin_popcountll(plan_row(plan, node)[w]);
    }
    return count;
}

/* Of the nodes that neither failed with this expert nor have it in the plan, the one with the
 * fewest experts of the layer. */
static uint32_t another_owner(const ep_coordinator_state *cluster, const cluster_problem *p,
                              const layer_plan *plan, uint32_t expert)
{
    uint32_t best = UINT32_MAX;
    uint32_t best_count = UINT32_MAX;
    for (uint32_t i = 0; i < p->nodes_count; i++) {
        uint32_t n = p->node_of[i];
        const node_layer *layer = layer_of(cluster, plan, n);
        if (layer->offered && !bit_get(layer->failed, expert) &&
            !bit_get(plan_row(plan, n), expert) && row_count(plan, n) < best_count) {
            best = n;
            best_count = row_count(plan, n);
        }
    }
    return best;
}

/* How well a node suits to keep an expert that no other can take: best in placement, else with the
 * same numerics id. */
static int keeper_rank(const ep_coordinator_state *cluster, const cluster_problem *p,
                       uint32_t model_index, uint32_t n)
{
    if (p->solver_node_of[n] != EP_PLACEMENT_NODE_GONE) {
        return 2;
    }
    return p->numerics == NULL ||
           strcmp(cluster->nodes[n]->numerics[model_index], p->numerics) == 0;
}

/* The best node (keeper_rank) that has the expert loaded. */
static uint32_t present_owner(const ep_coordinator_state *cluster, const cluster_problem *p,
                              const layer_plan *plan, uint32_t expert)
{
    const uint32_t model_index = cluster->layers[plan->index].model_index;
    uint32_t best = UINT32_MAX;
    int best_rank = -1;
    for (uint32_t n = 0; n < cluster->nodes_count; n++) {
        const bool has =
            node_is_listed(cluster->nodes[n]) && bit_get(layer_of(cluster, plan, n)->owned, expert);
        const int rank = has ? keeper_rank(cluster, p, model_index, n) : -1;
        if (rank > best_rank) {
            best = n;
            best_rank = rank;
        }
    }
    return best;
}

static bool has_good_owner(const ep_coordinator_state *cluster, const layer_plan *plan,
                           uint32_t expert)
{
    for (uint32_t n = 0; n < cluster->nodes_count; n++) {
        if (bit_get(plan_row(plan, n), expert) &&
            !bit_get(layer_of(cluster, plan, n)->failed, expert)) {
            return true;
        }
    }
    return false;
}

/*
 * Handles an expert that its node could not load: another node gets it. If there is none, and
 * always with a static map, a node that has it loaded keeps it, even a drained one.
 */
static void avoid_failed(ep_coordinator_state *cluster, const cluster_problem *p,
                         const layer_plan *plan, uint32_t failed_node, uint32_t expert)
{
    bool is_static = cluster->config.expert_map != NULL;
    uint32_t other = is_static ? UINT32_MAX : another_owner(cluster, p, plan, expert);
    if (other != UINT32_MAX) {
        bit_clear(plan_row(plan, failed_node), expert);
        bit_set(plan_row(plan, other), expert);
        return;
    }
    if (has_good_owner(cluster, plan, expert)) {
        return; /* one copy less than wanted is left */
    }
    const cluster_layer *layer = &cluster->layers[plan->index];
    const cluster_model *model = &cluster->models[layer->model_index];
    uint32_t present = present_owner(cluster, p, plan, expert);
    if (present != UINT32_MAX) {
        bit_set(plan_row(plan, present), expert);
    }
    ep_error_set(&cluster->placement_error, EP_ERR_RESOURCE_EXHAUSTED,
                 "model %s:%s, layer %u, expert %u: node %s could not load it and no other node "
                 "can take it; %s%s",
                 model->name, model->version, layer->shape.layer, expert,
                 cluster->nodes[failed_node]->name,
                 present != UINT32_MAX ? "it stays on node " : "no node has it",
                 present != UINT32_MAX ? cluster->nodes[present]->name : "");
}

static void plan_fill(const cluster_problem *p, const ep_placed_layer *placed,
                      const layer_plan *plan)
{
    for (uint32_t e = 0; e < placed->experts; e++) {
        for (uint32_t c = placed->offsets[e]; c < placed->offsets[e + 1]; c++) {
            bit_set(plan_row(plan, p->node_of[placed->copies[c]]), e);
        }
    }
}

static void plan_avoid_failed(ep_coordinator_state *cluster, const cluster_problem *p,
                              const layer_plan *plan)
{
    uint32_t experts = layer_experts(&cluster->layers[plan->index]);
    for (uint32_t i = 0; i < p->nodes_count; i++) {
        uint32_t n = p->node_of[i];
        for (uint32_t e = 0; e < experts; e++) {
            if (bit_get(plan_row(plan, n), e) && bit_get(layer_of(cluster, plan, n)->failed, e)) {
                avoid_failed(cluster, p, plan, n, e);
            }
        }
    }
}

/* Whether the node has the expert or is loading it already. */
static bool is_there(const node_layer *layer, uint32_t expert)
{
    return bit_get(layer->assigned, expert) || bit_get(layer->owned, expert);
}

static uint32_t holders(const ep_coordinator_state *cluster, const layer_plan *plan,
                        uint32_t expert)
{
    uint32_t count = 0;
    for (uint32_t n = 0; n < cluster->nodes_count; n++) {
        count += is_there(layer_of(cluster, plan, n), expert);
    }
    return count;
}

/*
 * Charges loads to the pace. Additional copies of an expert wait while the pace has nothing left.
 * Its first copy, copies that replace others, and an operator's order never wait.
 */
static void plan_pace(ep_coordinator_state *cluster, const layer_plan *plan, bool is_order)
{
    const cluster_layer *layer = &cluster->layers[plan->index];
    for (uint32_t e = 0; e < layer_experts(layer); e++) {
        const uint32_t held = holders(cluster, plan, e), before = held > 0 ? held : 1;
        uint32_t wanted = 0;
        for (uint32_t n = 0; n < cluster->nodes_count; n++) {
            wanted += bit_get(plan_row(plan, n), e);
        }
        for (uint32_t n = 0; n < cluster->nodes_count; n++) {
            if (!bit_get(plan_row(plan, n), e) || is_there(layer_of(cluster, plan, n), e)) {
                continue;
            }
            if (!is_order && wanted > before &&
                ep_move_pace_copies(&cluster->pace, layer->expert_bytes, 1) == 0) {
                bit_clear(plan_row(plan, n), e);
                wanted--;
                cluster->models[layer->model_index].copies_waiting++;
            } else {
                ep_move_pace_charge(&cluster->pace, layer->expert_bytes);
            }
        }
    }
}

/* Writes a plan into the nodes' bits; true: something has changed. */
static bool plan_apply(ep_coordinator_state *cluster, const cluster_problem *p,
                       const layer_plan *plan)
{
    bool changed = false;
    for (uint32_t n = 0; n < cluster->nodes_count; n++) {
        if (cluster->nodes[n]->state == NODE_DRAINING) {
            continue; /* it ends soon and keeps its weights for late requests */
        }
        uint64_t *assigned = cluster->nodes[n]->layers[plan->index].assigned;
        changed |= memcmp(assigned, plan_row(plan, n), plan->words * sizeof(uint64_t)) != 0;
        memcpy(assigned, plan_row(plan, n), plan->words * sizeof(uint64_t));
        cluster->nodes[n]->layers[plan->index].is_placed =
            p->solver_node_of[n] != EP_PLACEMENT_NODE_GONE;
    }
    return changed;
}

/* Without memory for a layer's plan the layer keeps its assignment. */
static ep_err apply(ep_coordinator_state *cluster, const cluster_problem *p,
                    const ep_placement *placement, cluster_place_watch *watch, bool *io_changed)
{
    for (uint32_t l = 0; l < placement->layers_count; l++) {
        uint32_t index = p->layer_of[l];
        layer_plan plan = {.index = index, .words = layer_words(&cluster->layers[index])};
        plan.wanted = calloc(cluster->nodes_count * plan.words + 1, sizeof(uint64_t));
        if (plan.wanted == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        plan_fill(p, &placement->layers[l], &plan);
        plan_avoid_failed(cluster, p, &plan);
        if (watch != NULL && !watch->has_failed) {
            watch->has_failed = !watch->see(
                watch->arg, p, l, &(cluster_rows){.wanted = plan.wanted, .words = plan.words});
        }
        const bool is_dry = watch != NULL && watch->is_dry;
        if (is_paced(cluster) && !is_dry) {
            plan_pace(cluster, &plan, watch != NULL);
        }
        *io_changed |= !is_dry && plan_apply(cluster, p, &plan);
        free(plan.wanted);
    }
    return EP_OK;
}

/* The error when only drained nodes can load the model: they keep serving it. */
static ep_err check_nowhere_else(const ep_coordinator_state *cluster, uint32_t model_index,
                                 ep_error *out_error)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        if (node_is_emptied(node) && node_serves(node, model_index)) {
            return ep_error_set(
                out_error, EP_ERR_RESOURCE_EXHAUSTED,
                "model %s:%s: no node that can load it is left but drained ones (%s); they keep "
                "their experts",
                cluster->models[model_index].name, cluster->models[model_index].version,
                node->name);
        }
    }
    return EP_OK;
}

static ep_err place_model(ep_coordinator_state *cluster, uint32_t model_index,
                          cluster_place_watch *watch, bool *io_changed, ep_error *out_error)
{
    cluster_problem p;
    ep_placement *placement = NULL;
    ep_err err = EP_OK;
    if (!ep_state_problem_init(cluster, model_index, &p)) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to place model %s",
                           cluster->models[model_index].name);
    } else if (p.nodes_count == 0) {
        err = check_nowhere_else(cluster, model_index, out_error);
    } else if (p.layers_count > 0) {
        err = solve(cluster, &p, watch != NULL, &placement, out_error);
    }
    if (watch != NULL && placement != NULL) {
        watch->is_cut |= placement->is_cut;
    }
    if (err == EP_OK && placement != NULL &&
        apply(cluster, &p, placement, watch, io_changed) != EP_OK) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to place model %s",
                           cluster->models[model_index].name);
    }
    ep_placement_destroy(placement);
    ep_state_problem_fini(&p);
    return err;
}

/* False: some model keeps its assignment, and placement_error says why. */
static bool place_models(ep_coordinator_state *cluster, cluster_place_watch *watch,
                         bool *io_changed)
{
    bool is_placed = true;
    ep_error_clear(&cluster->placement_error);
    ep_error_clear(&cluster->left_out);
    for (uint32_t m = 0; m < cluster->models_count; m++) {
        ep_error error;
        ep_state_note_left_out(cluster, m, &cluster->left_out);
        if (place_model(cluster, m, watch, io_changed, &error) != EP_OK) {
            cluster->placement_error = error;
            is_placed = false;
        }
    }
    return is_placed;
}

static void place(ep_coordinator_state *cluster, cluster_place_watch *watch)
{
    uint32_t able = 0;
    ep_state_forget_balance(cluster);
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        able += node_can_own(cluster->nodes[n]);
    }
    if (!cluster->placed_once && able < cluster->config.min_nodes) {
        return;
    }
    bool changed = !cluster->placed_once;
    for (uint32_t m = 0; m < cluster->models_count; m++) {
        cluster->models[m].copies_waiting = 0;
    }
    cluster->waits_moves &= !cluster->rebalance;
    const bool is_placed = place_models(cluster, watch, &changed);
    cluster->rebalance = false;
    cluster->is_pacing = false;
    cluster->placed_once |= is_placed;
    if (changed) {
        cluster->revision++;
        cluster->assignment_number = ++cluster->counter;
        cluster->assigned_ns = cluster->pace.seen_ns;
    }
}

void ep_state_place(ep_coordinator_state *cluster)
{
    place(cluster, NULL);
}

void ep_state_place_seen(ep_coordinator_state *cluster, cluster_place_watch *watch,
                         ep_error *out_note)
{
    const ep_error placement_error = cluster->placement_error, left_out = cluster->left_out;
    const bool rebalance = cluster->rebalance, is_pacing = cluster->is_pacing;
    bool changed = false;
    cluster->rebalance = true;
    cluster->is_pacing = false;
    if (!watch->is_dry) {
        place(cluster, watch);
        *out_note = cluster->placement_error;
        return;
    }
    (void)place_models(cluster, watch, &changed);
    *out_note = cluster->placement_error;
    cluster->placement_error = placement_error;
    cluster->left_out = left_out;
    cluster->rebalance = rebalance;
    cluster->is_pacing = is_pacing;
}

const cluster_node *ep_state_find_suspect(const ep_coordinator_state *cluster)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        for (uint32_t m = 0; cluster->nodes[n]->state == NODE_SUSPECT && m < cluster->models_count;
             m++) {
            if (ep_state_node_offers(cluster->nodes[n], m)) {
                return cluster->nodes[n];
            }
        }
    }
    return NULL;
}

uint32_t ep_coordinator_state_copies_waiting(const ep_coordinator_state *cluster, const char *model,
                                             const char *version)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < cluster->models_count; m++) {
        const cluster_model *of = &cluster->models[m];
        const bool is_asked =
            model == NULL || (strcmp(of->name, model) == 0 && strcmp(of->version, version) == 0);
        count += is_asked ? of->copies_waiting : 0;
    }
    return count;
}

/*
 * The next copies are placed once all nodes have loaded, since nothing is committed while a newer
 * assignment is being loaded. A node that never finishes delays them only for a pause. The pause
 * doubles, as otherwise a slow node would never finish.
 */
void ep_state_place_waiting(ep_coordinator_state *cluster)
{
    const bool is_loaded = cluster->committed_number == cluster->assignment_number;
    const bool moves = cluster->waits_moves && is_loaded && ep_state_find_suspect(cluster) == NULL;
    cluster->pause_ns = is_loaded || cluster->pause_ns == 0 ? PAUSE_MIN_NS : cluster->pause_ns;
    const bool copies =
        ep_coordinator_state_copies_waiting(cluster, NULL, NULL) > 0 &&
        (is_loaded || cluster->pace.seen_ns - cluster->assigned_ns >= cluster->pause_ns);
    if ((moves || copies) && ep_move_pace_copies(&cluster->pace, 1, 1) > 0) {
        cluster->pause_ns = is_loaded || cluster->pause_ns >= PAUSE_MAX_NS ? cluster->pause_ns
                                                                           : 2 * cluster->pause_ns;
        cluster->rebalance |= moves;
        ep_state_place(cluster);
        ep_state_publish(cluster);
    }
}

void ep_coordinator_state_take_heat(ep_coordinator_state *cluster, const char *model,
                                    const char *version, uint32_t layer, const uint64_t *counts,
                                    const uint64_t *passes, uint32_t experts)
{
    const uint32_t index =
        ep_state_find_layer(cluster, ep_state_find_model(cluster, model, version), layer);
    if (index == UINT32_MAX || cluster->layers[index].shape.experts != experts) {
        return;
    }
    cluster_layer *to = &cluster->layers[index];
    if (to->heat == NULL) {
        double *heat = calloc(experts, sizeof(*heat));
        uint64_t *counted = calloc(experts, sizeof(*counted));
        if (heat == NULL || counted == NULL) {
            free(heat);
            free(counted);
            return; /* the next time */
        }
        to->heat = heat;
        to->counted = counted;
    }
    uint64_t slots = 0;
    for (uint32_t e = 0; e < experts; e++) {
        slots += counts[e];
    }
    const uint64_t news = slots - to->slots_counted;
    if (news < (uint64_t)HEAT_SLOTS_OF_EXPERT * experts ||
        news < (uint64_t)HEAT_SLOTS_OF_NODE * cluster->nodes_count) {
        return; /* they count with those to come */
    }
    for (uint32_t e = 0; e < experts; e++) {
        const uint64_t work = counts[e] + EP_COPY_PASS_SLOTS * passes[e];
        to->heat[e] = to->heat[e] / 2 + (double)(work - to->counted[e]);
        to->counted[e] = work;
    }
    to->slots_counted = slots;
    to->heat_number++;
    cluster->has_news = true;
}

void ep_coordinator_state_rebalance(ep_coordinator_state *cluster)
{
    const uint64_t before = cluster->assignment_number;
    if (!cluster->config.is_balanced || !cluster->has_news || !cluster->placed_once ||
        cluster->committed_number < before) {
        return;
    }
    if (ep_move_pace_copies(&cluster->pace, 1, 1) == 0 || ep_state_find_suspect(cluster) != NULL) {
        return; /* the next time: what is known of the heat stays news */
    }
    cluster->rebalance = true;
    cluster->is_pacing = true;
    ep_state_place(cluster);
    ep_state_publish(cluster);
    cluster->has_news = cluster->assignment_number != before;
}
