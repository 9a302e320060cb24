/* SPDX-License-Identifier: Apache-2.0 */
/* The board of placer.h. Rows of copies are short, so everything is a plain scan. */
#include "placement/placer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static ep_err check_input(const ep_placement_input *input, ep_error *out_error)
{
    if (input->nodes_count > EP_NODES_MAX) {
        return BAD("placement over %" PRIu32 " nodes: allowed 0..%d", input->nodes_count,
                   EP_NODES_MAX);
    }
    if (input->layers_count > EP_TABLE_LAYERS_MAX) {
        return BAD("placement of %" PRIu32 " layers: allowed 0..%d", input->layers_count,
                   EP_TABLE_LAYERS_MAX);
    }
    if (input->copies < 1) {
        return BAD("placement with 0 copies of each expert: allowed 1 or more");
    }
    for (uint32_t l = 0; l < input->layers_count; l++) {
        const ep_layer_shape *shape = &input->layers[l].shape;
        if (shape->experts < 1 ||
            (uint64_t)shape->experts + shape->shared_experts > EP_EXPERTS_MAX) {
            return BAD("layer %" PRIu32 " has %" PRIu32 " routed and %" PRIu32
                       " shared experts: allowed 1..%d in all, at least one routed",
                       shape->layer, shape->experts, shape->shared_experts, EP_EXPERTS_MAX);
        }
        if (l > 0 && input->layers[l - 1].shape.layer >= shape->layer) {
            return BAD("layer %" PRIu32 " follows layer %" PRIu32 ": layers must ascend",
                       shape->layer, input->layers[l - 1].shape.layer);
        }
    }
    return EP_OK;
}

static bool allocate_layer(ep_placer_layer *layer, uint32_t experts, uint32_t width, uint32_t nodes)
{
    layer->experts = experts;
    layer->counts = calloc(experts, sizeof(*layer->counts));
    layer->copies = calloc((size_t)experts * width + 1, sizeof(*layer->copies));
    layer->load = calloc((size_t)nodes + 1, sizeof(*layer->load));
    return layer->counts != NULL && layer->copies != NULL && layer->load != NULL;
}

#define LOOKS_MAX (1u << 20)
#define ROWS_MAX (UINT64_C(1) << 25) /* about 1 ns each, since the caller may hold a lock */

static const char *host_name(const ep_placement_node *node)
{
    return node->host != NULL ? node->host : "";
}

/* A host's number is the index of its first node. */
static void find_hosts(ep_placer *placer)
{
    const ep_placement_node *nodes = placer->input->nodes;
    uint32_t count = 0;
    for (uint32_t n = 0; n < placer->input->nodes_count; n++) {
        uint32_t first = host_name(&nodes[n])[0] == 0 ? n : 0;
        while (first < n && (placer->host_of[first] != first ||
                             strcmp(host_name(&nodes[first]), host_name(&nodes[n])) != 0)) {
            first++;
        }
        placer->host_of[n] = first;
        count += first == n;
    }
    placer->hosts =
        (ep_hosts){.of_node = placer->host_of,
                   .spread = placer->input->copies < count ? placer->input->copies : count};
}

ep_err ep_placer_init(ep_placer *placer, const ep_placement_input *input, uint32_t width,
                      ep_error *out_error)
{
    memset(placer, 0, sizeof(*placer));
    ep_err err = check_input(input, out_error);
    if (err != EP_OK) {
        return err;
    }
    placer->width = width < input->nodes_count ? width : input->nodes_count;
    placer->input = input;
    placer->layers = calloc((size_t)input->layers_count + 1, sizeof(*placer->layers));
    placer->total = calloc((size_t)input->nodes_count + 1, sizeof(*placer->total));
    placer->bytes = calloc((size_t)input->nodes_count + 1, sizeof(*placer->bytes));
    placer->host_of = calloc((size_t)input->nodes_count + 1, sizeof(*placer->host_of));
    placer->together = calloc((size_t)input->nodes_count + 1, sizeof(*placer->together));
    bool ok = placer->layers != NULL && placer->total != NULL && placer->bytes != NULL &&
              placer->host_of != NULL && placer->together != NULL;
    placer->looks_left = LOOKS_MAX;
    placer->rows_left = ROWS_MAX;
    if (ok && input->copies > 1) {
        find_hosts(placer);
    }
    for (uint32_t l = 0; ok && l < input->layers_count; l++) {
        const ep_layer_shape *shape = &input->layers[l].shape;
        ok = allocate_layer(&placer->layers[l], shape->experts + shape->shared_experts,
                            placer->width, input->nodes_count);
    }
    return ok ? EP_OK
              : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to place %" PRIu32 " layers",
                             input->layers_count);
}

void ep_placer_fini(ep_placer *placer)
{
    for (uint32_t l = 0; placer->layers != NULL && l < placer->input->layers_count; l++) {
        free(placer->layers[l].counts);
        free(placer->layers[l].copies);
        free(placer->layers[l].load);
    }
    free(placer->layers);
    free(placer->total);
    free(placer->bytes);
    free(placer->host_of);
    free(placer->together);
}

static uint32_t *row_of(const ep_placer *placer, uint32_t layer, uint32_t expert)
{
    return placer->layers[layer].copies + (size_t)expert * placer->width;
}

bool ep_placer_holds(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node)
{
    const uint32_t *row = row_of(placer, layer, expert);
    for (uint32_t i = 0; i < placer->layers[layer].counts[expert]; i++) {
        if (row[i] == node) {
            return true;
        }
    }
    return false;
}

bool ep_placer_may_move(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t from,
                        uint32_t to)
{
    return ep_hosts_allow(&placer->hosts, row_of(placer, layer, expert),
                          placer->layers[layer].counts[expert], from, to);
}

bool ep_placer_was_owned(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node)
{
    const ep_placement_layer *in = &placer->input->layers[layer];
    for (uint32_t i = in->owned_offsets == NULL ? 0 : in->owned_offsets[expert];
         in->owned_offsets != NULL && i < in->owned_offsets[expert + 1]; i++) {
        if (in->owned[i] == node) {
            return true;
        }
    }
    return false;
}

bool ep_placer_has_room(const ep_placer *placer, uint32_t layer, uint32_t node)
{
    const ep_placement_node *limits = &placer->input->nodes[node];
    uint64_t bytes;
    if (limits->capacity_experts != 0 && placer->total[node] >= limits->capacity_experts) {
        return false;
    }
    return limits->capacity_bytes == 0 ||
           (!__builtin_add_overflow(placer->bytes[node], placer->input->layers[layer].expert_bytes,
                                    &bytes) &&
            bytes <= limits->capacity_bytes);
}

void ep_placer_add(ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node)
{
    ep_placer_layer *l = &placer->layers[layer];
    EP_ASSERT(l->counts[expert] < placer->width);
    row_of(placer, layer, expert)[l->counts[expert]++] = node;
    l->load[node]++;
    placer->total[node]++;
    placer->bytes[node] += placer->input->layers[layer].expert_bytes;
}

void ep_placer_remove(ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node)
{
    ep_placer_layer *l = &placer->layers[layer];
    uint32_t *row = row_of(placer, layer, expert);
    uint32_t i = 0;
    while (row[i] != node) {
        i++;
        EP_ASSERT(i < l->counts[expert]);
    }
    l->counts[expert]--;
    memmove(row + i, row + i + 1, (l->counts[expert] - i) * sizeof(*row));
    l->load[node]--;
    placer->total[node]--;
    placer->bytes[node] -= placer->input->layers[layer].expert_bytes;
}

/* Lists the nodes that hold an expert now, each once, in the old table's order. Returns how
 * many. */
static uint32_t list_owners(const ep_placer *placer, uint32_t layer, uint32_t expert,
                            uint32_t *out_nodes)
{
    const ep_placement_layer *in = &placer->input->layers[layer];
    uint32_t count = 0;
    for (uint32_t i = in->owned_offsets[expert]; i < in->owned_offsets[expert + 1]; i++) {
        uint32_t node = in->owned[i];
        bool known = node >= placer->input->nodes_count;
        for (uint32_t j = 0; j < count && !known; j++) {
            known = out_nodes[j] == node;
        }
        if (!known) {
            out_nodes[count++] = node;
        }
    }
    return count;
}

/* Removes nodes from the list until count is copies: first those whose host has another one, of
 * these the fullest of the layer. load counts all owners. */
static uint32_t drop_surplus(const ep_hosts *hosts, uint32_t *nodes, uint32_t count,
                             uint32_t copies, uint32_t *load)
{
    while (count > copies) {
        uint32_t fullest = 0;
        bool may_go = ep_hosts_allow(hosts, nodes, count, nodes[0], EP_HOSTS_NO_NODE);
        for (uint32_t i = 1; i < count; i++) {
            const bool may_too = ep_hosts_allow(hosts, nodes, count, nodes[i], EP_HOSTS_NO_NODE);
            if (may_too != may_go ? may_too : load[nodes[i]] >= load[nodes[fullest]]) {
                fullest = i;
                may_go = may_too;
            }
        }
        load[nodes[fullest]]--;
        count--;
        memmove(nodes + fullest, nodes + fullest + 1, (count - fullest) * sizeof(*nodes));
    }
    return count;
}

ep_err ep_placer_keep_owned(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copies)
{
    uint32_t nodes_count = placer->input->nodes_count;
    uint32_t experts = placer->layers[layer].experts;
    if (placer->input->layers[layer].owned_offsets == NULL || nodes_count == 0) {
        return EP_OK;
    }
    uint32_t *owners = calloc(nodes_count, sizeof(*owners));
    uint32_t *load = calloc(nodes_count, sizeof(*load));
    if (owners == NULL || load == NULL) {
        free(owners);
        free(load);
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t e = first; e < experts; e++) {
        uint32_t count = list_owners(placer, layer, e, owners);
        for (uint32_t i = 0; i < count; i++) {
            load[owners[i]]++;
        }
    }
    uint32_t keep = copies < placer->width ? copies : placer->width;
    for (uint32_t e = first; e < experts; e++) {
        uint32_t count =
            drop_surplus(&placer->hosts, owners, list_owners(placer, layer, e, owners), keep, load);
        for (uint32_t i = 0; i < count; i++) {
            ep_placer_add(placer, layer, e, owners[i]);
        }
    }
    free(owners);
    free(load);
    return EP_OK;
}

static bool gains_host(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t from,
                       uint32_t to)
{
    return ep_hosts_gain(&placer->hosts, row_of(placer, layer, expert),
                         placer->layers[layer].counts[expert], from, to);
}

static void add_together(ep_placer *placer, uint32_t layer, uint32_t node)
{
    const ep_placer_layer *l = &placer->layers[layer];
    if (placer->rows_left < l->experts) {
        return;
    }
    placer->rows_left -= l->experts;
    for (uint32_t e = 0; e < l->experts; e++) {
        const uint32_t *row = row_of(placer, layer, e);
        const uint32_t count = ep_placer_holds(placer, layer, e, node) ? l->counts[e] : 0;
        for (uint32_t i = 0; i < count; i++) {
            placer->together[row[i]] += row[i] != node;
        }
    }
}

static void clear_together(ep_placer *placer)
{
    memset(placer->together, 0, placer->input->nodes_count * sizeof(*placer->together));
}

void ep_placer_count_together(ep_placer *placer, uint32_t layer, uint32_t node)
{
    clear_together(placer);
    add_together(placer, layer, node);
}

uint32_t ep_placer_in_common(const ep_placer *placer, uint32_t layer, uint32_t expert,
                             uint32_t from)
{
    const uint32_t *row = row_of(placer, layer, expert);
    uint32_t sum = 0;
    for (uint32_t i = 0; i < placer->layers[layer].counts[expert]; i++) {
        sum += row[i] != from ? placer->together[row[i]] : 0;
    }
    return sum;
}

static bool is_emptier(const ep_placer *placer, const uint32_t *load, uint32_t a, uint32_t b)
{
    if (load[a] != load[b]) {
        return load[a] < load[b];
    }
    if (placer->together[a] != placer->together[b]) {
        return placer->together[a] < placer->together[b];
    }
    return placer->total[a] < placer->total[b];
}

uint32_t ep_placer_emptiest(ep_placer *placer, uint32_t layer, uint32_t expert)
{
    const uint32_t *load = placer->layers[layer].load;
    uint32_t best = EP_PLACER_NO_NODE;
    bool best_gains = false;
    clear_together(placer);
    for (uint32_t i = 0; expert != EP_NO_EXPERT && i < placer->layers[layer].counts[expert]; i++) {
        add_together(placer, layer, row_of(placer, layer, expert)[i]);
    }
    for (uint32_t n = 0; n < placer->input->nodes_count; n++) {
        if (!ep_placer_has_room(placer, layer, n) ||
            (expert != EP_NO_EXPERT && ep_placer_holds(placer, layer, expert, n))) {
            continue;
        }
        const bool gains =
            expert != EP_NO_EXPERT && gains_host(placer, layer, expert, EP_PLACER_NO_NODE, n);
        const bool better = best == EP_PLACER_NO_NODE || is_emptier(placer, load, n, best);
        if (gains != best_gains ? gains : better) {
            best = n;
            best_gains = gains;
        }
    }
    return best;
}

/* The emptiest node that puts the expert on another host in place of `from`. If it has no room,
 * *out_other is an expert that can go the other way, to `from`. EP_PLACER_NO_NODE if there is
 * none. */
static uint32_t find_partner(ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t from,
                             uint32_t *out_other)
{
    const uint32_t *load = placer->layers[layer].load;
    uint32_t best = EP_PLACER_NO_NODE;
    for (uint32_t n = 0; n < placer->input->nodes_count; n++) {
        uint32_t other = ep_placer_has_room(placer, layer, n) ? EP_NO_EXPERT : 0;
        const bool is_free = other == EP_NO_EXPERT, best_is_free = *out_other == EP_NO_EXPERT;
        if ((best != EP_PLACER_NO_NODE &&
             (is_free == best_is_free ? load[n] >= load[best] : best_is_free)) ||
            !gains_host(placer, layer, expert, from, n)) {
            continue;
        }
        while (other < placer->layers[layer].experts && placer->looks_left > 0 &&
               (!ep_placer_holds(placer, layer, other, n) ||
                ep_placer_holds(placer, layer, other, from) ||
                !ep_placer_may_move(placer, layer, other, n, from))) {
            other++;
            placer->looks_left--;
        }
        if (other == EP_NO_EXPERT ||
            (placer->looks_left > 0 && other < placer->layers[layer].experts)) {
            best = n;
            *out_other = other;
        }
    }
    return best;
}

/* Moves one of the expert's copies to a host that has none; false: impossible. */
static bool spread_once(ep_placer *placer, uint32_t layer, uint32_t expert)
{
    const uint32_t *row = row_of(placer, layer, expert);
    for (uint32_t i = placer->layers[layer].counts[expert]; i-- > 0;) {
        const uint32_t from = row[i];
        uint32_t other = EP_NO_EXPERT;
        const uint32_t to = find_partner(placer, layer, expert, from, &other);
        if (to == EP_PLACER_NO_NODE) {
            continue;
        }
        ep_placer_remove(placer, layer, expert, from);
        if (other != EP_NO_EXPERT) {
            ep_placer_remove(placer, layer, other, to);
            ep_placer_add(placer, layer, other, from);
        }
        ep_placer_add(placer, layer, expert, to);
        return true;
    }
    return false;
}

void ep_placer_spread(ep_placer *placer, uint32_t layer, uint32_t first)
{
    for (uint32_t e = first; placer->hosts.spread > 1 && e < placer->layers[layer].experts; e++) {
        while (spread_once(placer, layer, e)) {
        }
    }
}

/* Gives up a spare copy of any expert if that makes room for a first copy in this layer. Returns
 * the node, or NO_NODE. */
static uint32_t make_room(ep_placer *placer, uint32_t layer)
{
    for (uint32_t l = 0; l < placer->input->layers_count; l++) {
        for (uint32_t e = 0; e < placer->layers[l].experts; e++) {
            if (placer->layers[l].counts[e] < 2) {
                continue;
            }
            uint32_t node = row_of(placer, l, e)[placer->layers[l].counts[e] - 1];
            ep_placer_remove(placer, l, e, node);
            if (ep_placer_has_room(placer, layer, node)) {
                return node;
            }
            ep_placer_add(placer, l, e, node);
        }
    }
    return EP_PLACER_NO_NODE;
}

ep_err ep_placer_fill(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copy_index,
                      ep_error *out_error)
{
    for (uint32_t e = first; e < placer->layers[layer].experts; e++) {
        if (placer->layers[layer].counts[e] != copy_index) {
            continue;
        }
        uint32_t node = ep_placer_emptiest(placer, layer, e);
        if (node == EP_PLACER_NO_NODE && copy_index == 0) {
            node = make_room(placer, layer);
        }
        if (node != EP_PLACER_NO_NODE) {
            ep_placer_add(placer, layer, e, node);
            continue;
        }
        if (copy_index == 0) {
            uint32_t number = placer->input->layers[layer].shape.layer;
            ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                         "none of %" PRIu32 " nodes has room for expert %" PRIu32
                         " of layer %" PRIu32 ": add nodes or raise their weight budget",
                         placer->input->nodes_count, e, number);
            if (out_error != NULL) {
                out_error->layer = (int32_t)number;
                out_error->expert = (int32_t)e;
            }
            return EP_ERR_RESOURCE_EXHAUSTED;
        }
    }
    return EP_OK;
}

void ep_placer_count_missing(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copies)
{
    for (uint32_t e = first; e < placer->layers[layer].experts; e++) {
        uint32_t count = placer->layers[layer].counts[e];
        placer->copies_missing += count < copies ? copies - count : 0;
    }
}

static ep_err finish_layer(const ep_placer *placer, uint32_t layer, ep_placed_layer *placed)
{
    const ep_placer_layer *from = &placer->layers[layer];
    size_t total = 0;
    for (uint32_t e = 0; e < from->experts; e++) {
        total += from->counts[e];
    }
    placed->layer = placer->input->layers[layer].shape.layer;
    placed->experts = from->experts;
    placed->busiest = from->balance.busiest;
    placed->mean = from->balance.mean;
    placed->bound = from->balance.bound;
    placed->offsets = calloc((size_t)from->experts + 1, sizeof(*placed->offsets));
    placed->copies = calloc(total + 1, sizeof(*placed->copies));
    if (placed->offsets == NULL || placed->copies == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t e = 0; e < from->experts; e++) {
        memcpy(placed->copies + placed->offsets[e], row_of(placer, layer, e),
               from->counts[e] * sizeof(*placed->copies));
        placed->offsets[e + 1] = placed->offsets[e] + from->counts[e];
    }
    return EP_OK;
}

static ep_err certify_layer(const ep_placer *placer, uint32_t layer, ep_placement *placement)
{
    const ep_placement_layer *in = &placer->input->layers[layer];
    const ep_placer_layer *from = &placer->layers[layer];
    uint32_t *owners = calloc((size_t)placer->input->nodes_count + 1, sizeof(*owners));
    if (owners == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t e = 0; e < from->experts; e++) {
        uint32_t before = in->owned_offsets == NULL ? 0 : list_owners(placer, layer, e, owners);
        uint32_t kept = 0;
        for (uint32_t i = 0; i < before; i++) {
            kept += ep_placer_holds(placer, layer, e, owners[i]);
        }
        placement->copies_total += from->counts[e];
        placement->copies_added += from->counts[e] - kept;
        placement->copies_dropped += before - kept;
        placement->bytes_added += (from->counts[e] - kept) * in->expert_bytes;
    }
    free(owners);
    return EP_OK;
}

ep_err ep_placer_finish(const ep_placer *placer, ep_placement **out_placement)
{
    uint32_t layers_count = placer->input->layers_count;
    ep_placement *placement = calloc(1, sizeof(*placement));
    if (placement == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    placement->layers = calloc((size_t)layers_count + 1, sizeof(*placement->layers));
    ep_err err = placement->layers == NULL ? EP_ERR_NO_MEMORY : EP_OK;
    placement->layers_count = placement->layers == NULL ? 0 : layers_count;
    for (uint32_t l = 0; l < layers_count && err == EP_OK; l++) {
        err = finish_layer(placer, l, &placement->layers[l]);
        if (err == EP_OK) {
            err = certify_layer(placer, l, placement);
        }
    }
    if (err != EP_OK) {
        ep_placement_destroy(placement);
        return err;
    }
    placement->copies_missing = placer->copies_missing;
    for (uint32_t n = 0; n < placer->input->nodes_count; n++) {
        uint32_t total = placer->total[n];
        placement->node_copies_max =
            total > placement->node_copies_max ? total : placement->node_copies_max;
        placement->node_copies_min =
            n == 0 || total < placement->node_copies_min ? total : placement->node_copies_min;
    }
    *out_placement = placement;
    return EP_OK;
}

void ep_placement_destroy(ep_placement *placement)
{
    if (placement == NULL) {
        return;
    }
    for (uint32_t l = 0; placement->layers != NULL && l < placement->layers_count; l++) {
        free(placement->layers[l].offsets);
        free(placement->layers[l].copies);
    }
    free(placement->layers);
    free(placement);
}
