/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of a placement for operators: each layer and node before and after. */
#include <stdlib.h>
#include <string.h>

#include "coordinator/state_problem.h"

/* The growing reply, which owns all that it points to. */
typedef struct planner {
    const ep_coordinator_state *cluster;
    Expertd__V1__PlanReply *reply;
    Expertd__V1__NodePlan **nodes; /* [cluster->nodes_count]; NULL: not in the plan */
    uint32_t *index_of;            /* [cluster->nodes_count] in reply->nodes */
    bool with_copies;
} planner;

static ep_err no_memory(ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the plan");
}

/* ---- nodes ---- */

static int by_name(const void *left, const void *right, void *arg)
{
    const ep_coordinator_state *cluster = arg;
    return strcmp(cluster->nodes[*(const uint32_t *)left]->name,
                  cluster->nodes[*(const uint32_t *)right]->name);
}

static Expertd__V1__NodePlan *new_node(const cluster_node *node)
{
    Expertd__V1__NodePlan *plan = malloc(sizeof(*plan));
    if (plan == NULL) {
        return NULL;
    }
    expertd__v1__node_plan__init(plan);
    plan->name = strdup(node->name);
    if (plan->name == NULL) {
        free(plan);
        return NULL;
    }
    return plan;
}

/* Lists the nodes on which some model can be placed. */
static bool list_nodes(planner *to)
{
    const ep_coordinator_state *cluster = to->cluster;
    uint32_t *order = calloc(cluster->nodes_count + 1, sizeof(*order));
    to->nodes = calloc(cluster->nodes_count + 1, sizeof(Expertd__V1__NodePlan *));
    to->index_of = calloc(cluster->nodes_count + 1, sizeof(*to->index_of));
    to->reply->nodes = calloc(cluster->nodes_count + 1, sizeof(Expertd__V1__NodePlan *));
    bool good =
        order != NULL && to->nodes != NULL && to->index_of != NULL && to->reply->nodes != NULL;
    for (uint32_t n = 0; good && n < cluster->nodes_count; n++) {
        order[n] = n;
    }
    if (good) {
        qsort_r(order, cluster->nodes_count, sizeof(*order), by_name, (void *)(uintptr_t)cluster);
    }
    for (uint32_t i = 0; good && i < cluster->nodes_count; i++) {
        const cluster_node *node = cluster->nodes[order[i]];
        bool offers = false;
        for (uint32_t m = 0; m < cluster->models_count && !offers; m++) {
            offers = ep_state_node_offers(node, m);
        }
        if (offers) {
            to->index_of[order[i]] = (uint32_t)to->reply->n_nodes;
            to->nodes[order[i]] = new_node(node);
            good = to->nodes[order[i]] != NULL;
            to->reply->nodes[to->reply->n_nodes] = to->nodes[order[i]];
            to->reply->n_nodes += good;
        }
    }
    free(order);
    return good;
}

static bool list_loading(planner *to)
{
    const ep_coordinator_state *cluster = to->cluster;
    Expertd__V1__PlanReply *reply = to->reply;
    reply->loading = calloc(cluster->nodes_count + 1, sizeof(char *));
    bool good = reply->loading != NULL;
    for (uint32_t n = 0;
         good && cluster->committed_number < cluster->assignment_number && n < cluster->nodes_count;
         n++) {
        const cluster_node *node = cluster->nodes[n];
        if (node_is_listed(node) && node->loaded_number < cluster->assignment_number) {
            reply->loading[reply->n_loading] = strdup(node->name);
            good = reply->loading[reply->n_loading] != NULL;
            reply->n_loading += good;
        }
    }
    return good;
}

/* ---- layers ---- */

static void count_copy(planner *to, Expertd__V1__LayerPlan *plan, uint32_t node, uint64_t bytes,
                       bool was, bool will_be)
{
    Expertd__V1__NodePlan *on = to->nodes[node];
    on->copies_before += was;
    on->bytes_before += was ? bytes : 0;
    on->copies_after += will_be;
    on->bytes_after += will_be ? bytes : 0;
    plan->copies += will_be;
    plan->copies_given_up += was && !will_be;
    if (will_be && !was) {
        on->copies_to_load++;
        on->bytes_to_load += bytes;
        plan->copies_to_load++;
        plan->bytes_to_load += bytes;
    }
}

/* Fills offsets [E+S+1] and copies, as solver nodes, from the planned rows, and counts changes. */
static void read_rows(planner *to, const cluster_problem *p, uint32_t layer,
                      const cluster_rows *rows, Expertd__V1__LayerPlan *plan, uint32_t *offsets,
                      uint32_t *copies)
{
    const ep_placement_layer *in = &p->layers[layer];
    const uint32_t experts = in->shape.experts + in->shape.shared_experts;
    uint32_t used = 0;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t owned = in->owned_offsets[e];
        offsets[e] = used;
        for (uint32_t n = 0; n < p->nodes_count; n++) {
            /* owned is ascending */
            const bool was = owned < in->owned_offsets[e + 1] && in->owned[owned] == n;
            const bool will_be = bit_get(rows->wanted + p->node_of[n] * rows->words, e);
            owned += was;
            count_copy(to, plan, p->node_of[n], in->expert_bytes, was, will_be);
            if (will_be) {
                copies[used++] = n;
            }
        }
    }
    offsets[experts] = used;
}

static Expertd__V1__LayerBalance *new_balance(const ep_placement_input *input, uint32_t layer,
                                              const uint32_t *offsets, const uint32_t *copies)
{
    ep_layer_balance balance;
    Expertd__V1__LayerBalance *message = malloc(sizeof(*message));
    if (message == NULL || ep_placement_judge(input, layer, offsets, copies, &balance) != EP_OK) {
        free(message);
        return NULL;
    }
    expertd__v1__layer_balance__init(message);
    if (balance.mean > 0) {
        message->busiest_over_mean = balance.busiest / balance.mean;
        message->busiest_over_bound = balance.busiest / balance.bound;
    }
    return message;
}

static bool keep_copies(const planner *to, const cluster_problem *p, const uint32_t *offsets,
                        const uint32_t *copies, Expertd__V1__LayerPlan *plan)
{
    const uint32_t count = offsets[plan->experts]; /* of routed experts, which come first */
    plan->offsets = calloc(plan->experts + 1u, sizeof(uint32_t));
    plan->node_indexes = calloc(count + 1u, sizeof(uint32_t));
    if (plan->offsets == NULL || plan->node_indexes == NULL) {
        return false;
    }
    memcpy(plan->offsets, offsets, (plan->experts + 1u) * sizeof(uint32_t));
    plan->n_offsets = plan->experts + 1u;
    for (uint32_t i = 0; i < count; i++) {
        plan->node_indexes[i] = to->index_of[p->node_of[copies[i]]];
    }
    plan->n_node_indexes = count;
    return true;
}

static bool fill_layer(planner *to, const cluster_problem *p, uint32_t layer,
                       const cluster_rows *rows, Expertd__V1__LayerPlan *plan)
{
    const cluster_layer *of = &to->cluster->layers[p->layer_of[layer]];
    const ep_placement_layer *in = &p->layers[layer];
    const ep_placement_input input = ep_state_problem_input(to->cluster, p);
    const uint32_t experts = layer_experts(of);
    uint32_t *offsets = calloc(experts + 1u, sizeof(*offsets));
    uint32_t *copies = calloc((size_t)experts * p->nodes_count + 1, sizeof(*copies));
    bool good = offsets != NULL && copies != NULL;
    if (good) {
        plan->layer = of->shape.layer;
        plan->experts = of->shape.experts;
        for (uint32_t e = 0; of->heat != NULL && e < of->shape.experts; e++) {
            plan->has_heat |= of->heat[e] > 0;
        }
        plan->model = strdup(to->cluster->models[of->model_index].name);
        plan->version = strdup(to->cluster->models[of->model_index].version);
        read_rows(to, p, layer, rows, plan, offsets, copies);
        plan->before = new_balance(&input, layer, in->owned_offsets, in->owned);
        plan->after = new_balance(&input, layer, offsets, copies);
        good = plan->model != NULL && plan->version != NULL && plan->before != NULL &&
               plan->after != NULL &&
               (!to->with_copies || keep_copies(to, p, offsets, copies, plan));
    }
    free(offsets);
    free(copies);
    return good;
}

static bool see_layer(void *arg, const cluster_problem *p, uint32_t layer, const cluster_rows *rows)
{
    planner *to = arg;
    Expertd__V1__LayerPlan *plan = malloc(sizeof(*plan));
    if (plan == NULL) {
        return false;
    }
    expertd__v1__layer_plan__init(plan);
    to->reply->layers[to->reply->n_layers++] = plan;
    return fill_layer(to, p, layer, rows, plan);
}

/* ---- the plan ---- */

static ep_err check_ready(const ep_coordinator_state *cluster, bool apply,
                          const Expertd__V1__PlanReply *reply, ep_error *out_error)
{
    if (!cluster->placed_once) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "nothing is placed yet: the coordinator waits until min_nodes %u have "
                            "registered, %zu are here",
                            cluster->config.min_nodes, cluster->nodes_count);
    }
    if (apply && reply->n_loading > 0) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "%zu nodes (%s%s) still load what they were given before: ask again "
                            "once expertctl plan names none",
                            reply->n_loading, reply->loading[0],
                            reply->n_loading > 1 ? ", ..." : "");
    }
    const cluster_node *suspect = apply ? ep_state_find_suspect(cluster) : NULL;
    if (suspect != NULL) {
        return ep_error_set(
            out_error, EP_ERR_UNAVAILABLE,
            "node %s is suspect, and copies would move to it while it is silent: ask again once it "
            "serves or is lost (restore_ms), or drain it",
            suspect->name);
    }
    return EP_OK;
}

static ep_err make_plan(ep_coordinator_state *cluster, bool apply, planner *to, ep_error *out_error)
{
    Expertd__V1__PlanReply *reply = to->reply;
    reply->policy = strdup(ep_coordinator_state_policy(&cluster->config));
    reply->layers = calloc(cluster->layers_count + 1u, sizeof(Expertd__V1__LayerPlan *));
    if (reply->policy == NULL || reply->layers == NULL || !list_nodes(to) || !list_loading(to)) {
        return no_memory(out_error);
    }
    ep_err err = check_ready(cluster, apply, reply, out_error);
    if (err != EP_OK) {
        return err;
    }
    const uint64_t before = cluster->assignment_number;
    cluster_place_watch watch = {.is_dry = !apply, .see = see_layer, .arg = to};
    ep_error note;
    ep_state_place_seen(cluster, &watch, &note);
    reply->applied = cluster->assignment_number != before;
    reply->is_cut = watch.is_cut;
    if (reply->applied) {
        ep_state_publish(cluster);
    }
    reply->note = strdup(note.code != EP_OK ? note.text : "");
    return reply->note != NULL && !watch.has_failed ? EP_OK : no_memory(out_error);
}

ep_err ep_coordinator_state_plan(ep_coordinator_state *cluster, bool apply, bool with_copies,
                                 Expertd__V1__PlanReply **out_reply, ep_error *out_error)
{
    planner to = {
        .cluster = cluster, .reply = malloc(sizeof(*to.reply)), .with_copies = with_copies};
    if (to.reply == NULL) {
        return no_memory(out_error);
    }
    expertd__v1__plan_reply__init(to.reply);
    const ep_err err = make_plan(cluster, apply, &to, out_error);
    free(to.nodes);
    free(to.index_of);
    if (err == EP_OK) {
        *out_reply = to.reply;
    } else {
        expertd__v1__plan_reply__free_unpacked(to.reply, NULL);
    }
    return err;
}
