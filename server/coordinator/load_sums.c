/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/load_sums.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

/* the most reports of each node between two reports of a busy layer by one node */
#define REPORTS_BETWEEN 4

/* The newest report of a layer by a node's incarnation: experts ascending; count 0: none yet. */
typedef struct told_expert {
    uint32_t expert;
    uint64_t slots, passes;
} told_expert;

typedef struct told_layer {
    size_t count;
    told_expert *experts;
} told_layer;

typedef struct told_node {
    char name[EP_NODE_NAME_BYTES];
    uint64_t incarnation;
    uint64_t used;       /* sums->clock at its last report */
    size_t layers_count; /* up to sums->layers_count */
    told_layer *layers;  /* by index in sums->layers */
} told_node;

struct ep_load_sums {
    pthread_mutex_t lock;
    uint32_t nodes_max;
    uint64_t clock; /* reports so far */
    size_t nodes_count;
    told_node *nodes;
    size_t layers_count;
    ep_load_layer *layers; /* sorted when read */
    /* index after the layer found last, since reports name layers in one order */
    size_t likely;
};

ep_err ep_load_sums_create(uint32_t nodes_max, ep_load_sums **out_sums)
{
    ep_load_sums *sums = calloc(1, sizeof(*sums));
    if (sums == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    sums->nodes_max = nodes_max;
    pthread_mutex_init(&sums->lock, NULL);
    *out_sums = sums;
    return EP_OK;
}

static void forget_layers(told_node *node)
{
    for (size_t i = 0; i < node->layers_count; i++) {
        free(node->layers[i].experts);
    }
    free(node->layers);
    node->layers = NULL;
    node->layers_count = 0;
}

void ep_load_sums_destroy(ep_load_sums *sums)
{
    if (sums == NULL) {
        return;
    }
    for (size_t i = 0; i < sums->nodes_count; i++) {
        forget_layers(&sums->nodes[i]);
    }
    free(sums->nodes);
    ep_load_layers_free(sums->layers, sums->layers_count);
    pthread_mutex_destroy(&sums->lock);
    free(sums);
}

/* ---- finding and making ---- */

/* Finds or makes a node's entry; a new incarnation begins at 0. NULL: no memory. */
static told_node *find_node(ep_load_sums *sums, const char *name, uint64_t incarnation)
{
    told_node *node = NULL;
    told_node *oldest = NULL;
    for (size_t i = 0; i < sums->nodes_count && node == NULL; i++) {
        told_node *candidate = &sums->nodes[i];
        node = strcmp(candidate->name, name) == 0 ? candidate : NULL;
        oldest = oldest == NULL || candidate->used < oldest->used ? candidate : oldest;
    }
    if (node == NULL && sums->nodes_count < sums->nodes_max) {
        told_node *grown = realloc(sums->nodes, (sums->nodes_count + 1) * sizeof(*grown));
        if (grown == NULL) {
            return NULL;
        }
        sums->nodes = grown;
        node = &grown[sums->nodes_count++];
        *node = (told_node){.incarnation = incarnation};
    } else if (node == NULL) {
        node = oldest;
    }
    if (node->incarnation != incarnation || strcmp(node->name, name) != 0) {
        forget_layers(node);
        node->incarnation = incarnation;
        snprintf(node->name, sizeof(node->name), "%s", name);
    }
    node->used = ++sums->clock;
    return node;
}

/* Finds or makes a layer. SIZE_MAX: no memory. */
static size_t find_layer(ep_load_sums *sums, const char *model, const char *version, uint32_t layer,
                         uint32_t experts)
{
    for (size_t n = 0; n < sums->layers_count; n++) {
        size_t i = (sums->likely + n) % sums->layers_count;
        const ep_load_layer *known = &sums->layers[i];
        if (known->layer == layer && known->experts == experts &&
            strcmp(known->model, model) == 0 && strcmp(known->version, version) == 0) {
            sums->likely = i + 1;
            return i;
        }
    }
    ep_load_layer *grown = realloc(sums->layers, (sums->layers_count + 1) * sizeof(*grown));
    if (grown == NULL) {
        return SIZE_MAX;
    }
    sums->layers = grown;
    ep_load_layer made = {.layer = layer, .experts = experts};
    made.counts = calloc(experts, sizeof(*made.counts));
    made.passes = calloc(experts, sizeof(*made.passes));
    made.probability_sums = calloc(experts, sizeof(*made.probability_sums));
    if (made.counts == NULL || made.passes == NULL || made.probability_sums == NULL) {
        free(made.counts);
        free(made.passes);
        free(made.probability_sums);
        return SIZE_MAX;
    }
    snprintf(made.model, sizeof(made.model), "%s", model);
    snprintf(made.version, sizeof(made.version), "%s", version);
    grown[sums->layers_count] = made;
    return sums->layers_count++;
}

/* NULL: no memory. */
static told_layer *find_told(const ep_load_sums *sums, told_node *node, size_t layer_index)
{
    if (layer_index >= node->layers_count) {
        told_layer *grown = realloc(node->layers, sums->layers_count * sizeof(*grown));
        if (grown == NULL) {
            return NULL;
        }
        memset(grown + node->layers_count, 0,
               (sums->layers_count - node->layers_count) * sizeof(*grown));
        node->layers = grown;
        node->layers_count = sums->layers_count;
    }
    return &node->layers[layer_index];
}

/* ---- a node's report ---- */

static ep_err check_load(const char *node, const Expertd__V1__LayerLoad *load, uint32_t experts,
                         ep_error *out_error)
{
    if (load->n_experts != load->n_slots || load->n_experts > experts) {
        return BAD("node %s: loads of model %.60s layer %" PRIu32
                   " have %zu experts and %zu slots: allowed the same number, up to %" PRIu32,
                   node, load->model, load->layer, load->n_experts, load->n_slots, experts);
    }
    if (load->n_passes != 0 && load->n_passes != load->n_experts) {
        return BAD("node %s: loads of model %.60s layer %" PRIu32
                   " have %zu experts and %zu passes: allowed the same "
                   "number, or none",
                   node, load->model, load->layer, load->n_experts, load->n_passes);
    }
    for (size_t i = 0; i < load->n_experts; i++) {
        const uint64_t passes = load->n_passes != 0 ? load->passes[i] : 0;
        if (load->experts[i] >= experts || (i > 0 && load->experts[i] <= load->experts[i - 1])) {
            return BAD("node %s: loads of model %.60s layer %" PRIu32 " name expert %" PRIu32
                       ": allowed 0..%" PRIu32 ", ascending",
                       node, load->model, load->layer, load->experts[i], experts - 1);
        }
        if (load->slots[i] > EP_LOAD_SLOTS_MAX || passes > EP_LOAD_SLOTS_MAX) {
            return BAD("node %s: loads of model %.60s layer %" PRIu32 " expert %" PRIu32
                       " are %" PRIu64 " slots, "
                       "%" PRIu64 " passes: allowed 0..%llu",
                       node, load->model, load->layer, load->experts[i], load->slots[i], passes,
                       EP_LOAD_SLOTS_MAX);
        }
    }
    return EP_OK;
}

static told_expert told_before(const told_layer *told, uint32_t expert, size_t *at)
{
    while (*at < told->count && told->experts[*at].expert < expert) {
        (*at)++;
    }
    const bool is_told = *at < told->count && told->experts[*at].expert == expert;
    return is_told ? told->experts[*at] : (told_expert){.expert = expert};
}

/* Adds the increase and replaces the kept report. An older report that comes late changes
 * nothing. */
static ep_err take_load(told_layer *told, const Expertd__V1__LayerLoad *load, bool counts_passes,
                        ep_load_layer *sums)
{
    size_t at = 0;
    uint64_t sum_before = 0, sum = 0;
    for (size_t i = 0; i < told->count; i++) {
        sum_before += told->experts[i].slots;
    }
    for (size_t i = 0; i < load->n_experts; i++) {
        sum += load->slots[i];
    }
    if (sum <= sum_before) {
        return EP_OK;
    }
    told_expert *experts = malloc((load->n_experts + 1) * sizeof(*experts));
    if (experts == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < load->n_experts; i++) {
        const told_expert before = told_before(told, load->experts[i], &at);
        const uint64_t passes = load->n_passes != 0 ? load->passes[i] : 0;
        told_expert *now = &experts[i];
        *now = before;
        now->slots = load->slots[i] > before.slots ? load->slots[i] : before.slots;
        now->passes = passes > before.passes ? passes : before.passes;
        sums->counts[now->expert] += now->slots - before.slots;
        sums->passes[now->expert] += counts_passes ? now->passes - before.passes : 0;
    }
    free(told->experts);
    told->experts = experts;
    told->count = load->n_experts;
    return EP_OK;
}

static ep_err take_layer(ep_load_sums *sums, told_node *node, const Expertd__V1__LayerLoad *load,
                         uint32_t experts)
{
    size_t index = find_layer(sums, load->model, load->version, load->layer, experts);
    told_layer *told = index != SIZE_MAX ? find_told(sums, node, index) : NULL;
    if (told == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    ep_load_layer *to = &sums->layers[index];
    to->slots_only = load->n_slots > 0 && load->n_passes == 0 ? sums->clock : to->slots_only;
    const bool counts_passes =
        to->slots_only == 0 || sums->clock - to->slots_only > REPORTS_BETWEEN * sums->nodes_count;
    return take_load(told, load, counts_passes, to);
}

ep_err ep_load_sums_take(ep_load_sums *sums, ep_load_experts_func experts_of, void *arg,
                         const Expertd__V1__HeartbeatRequest *request, ep_error *out_error)
{
    ep_err err = EP_OK;
    if (request->n_loads == 0) {
        return EP_OK;
    }
    pthread_mutex_lock(&sums->lock);
    told_node *node = find_node(sums, request->node, request->incarnation);
    err = node == NULL ? EP_ERR_NO_MEMORY : EP_OK;
    for (size_t i = 0; err == EP_OK && i < request->n_loads; i++) {
        const Expertd__V1__LayerLoad *load = request->loads[i];
        uint32_t experts = experts_of(arg, load->model, load->version, load->layer);
        if (experts > 0) {
            err = check_load(request->node, load, experts, out_error);
            err = err != EP_OK ? err : take_layer(sums, node, load, experts);
        }
    }
    pthread_mutex_unlock(&sums->lock);
    return err == EP_ERR_NO_MEMORY
               ? ep_error_set(out_error, err, "no memory for the loads of node %s", request->node)
               : err;
}

void ep_load_sums_add_probabilities(ep_load_sums *sums, const char *model, const char *version,
                                    uint32_t layer, uint32_t experts,
                                    const double *probability_sums, uint64_t tokens)
{
    pthread_mutex_lock(&sums->lock);
    size_t index = find_layer(sums, model, version, layer, experts);
    for (uint32_t e = 0; index != SIZE_MAX && e < experts; e++) {
        sums->layers[index].probability_sums[e] += probability_sums[e];
    }
    if (index != SIZE_MAX) {
        sums->layers[index].tokens += tokens;
    }
    pthread_mutex_unlock(&sums->lock);
}

/* ---- reading ---- */

static int compare_layers(const void *a, const void *b)
{
    const ep_load_layer *left = a;
    const ep_load_layer *right = b;
    int order = strcmp(left->model, right->model);
    order = order != 0 ? order : strcmp(left->version, right->version);
    return order != 0 ? order : (left->layer > right->layer) - (left->layer < right->layer);
}

static bool copy_layer(const ep_load_layer *from, ep_load_layer *to)
{
    *to = *from;
    to->counts = malloc(from->experts * sizeof(*to->counts));
    to->passes = malloc(from->experts * sizeof(*to->passes));
    to->probability_sums = malloc(from->experts * sizeof(*to->probability_sums));
    if (to->counts == NULL || to->passes == NULL || to->probability_sums == NULL) {
        return false;
    }
    memcpy(to->counts, from->counts, from->experts * sizeof(*to->counts));
    memcpy(to->passes, from->passes, from->experts * sizeof(*to->passes));
    memcpy(to->probability_sums, from->probability_sums,
           from->experts * sizeof(*to->probability_sums));
    return true;
}

ep_err ep_load_sums_read(ep_load_sums *sums, ep_load_layer **out_layers, size_t *out_count)
{
    pthread_mutex_lock(&sums->lock);
    size_t count = sums->layers_count;
    ep_load_layer *layers = calloc(count + 1, sizeof(*layers));
    bool good = layers != NULL;
    for (size_t i = 0; good && i < count; i++) {
        good = copy_layer(&sums->layers[i], &layers[i]);
    }
    pthread_mutex_unlock(&sums->lock);
    if (!good) {
        ep_load_layers_free(layers, count);
        return EP_ERR_NO_MEMORY;
    }
    qsort(layers, count, sizeof(*layers), compare_layers);
    *out_layers = layers;
    *out_count = count;
    return EP_OK;
}

void ep_load_layers_free(ep_load_layer *layers, size_t count)
{
    for (size_t i = 0; layers != NULL && i < count; i++) {
        free(layers[i].counts);
        free(layers[i].passes);
        free(layers[i].probability_sums);
    }
    free(layers);
}
