/* SPDX-License-Identifier: Apache-2.0 */
/* Placement by heat: each layer separately, with slots in proportion to the nodes' room. */
#include "placement/balance.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "placement/placement.h"
#include "placement/placer.h"

#define SEARCH_GOOD 1.001 /* relative to the bound, for a layer placed from nothing */
/* for a placed layer: the next 0.03 would cost as many loads again */
#define REPAIR_GOOD 1.05
/* When moves are limited: a smaller imbalance is noise, which would move copies for ever. */
#define REPAIR_AT 1.10
#define ROUNDING 1e-9
/* pairs of copies, a few ns each, since the caller may hold a lock */
#define WORK_MAX (UINT64_C(1) << 23)
/* Experts of nodes, about 1 ns each: 61 layers of 512 experts with three copies need less. */
#define COMMON_MAX (UINT64_C(1) << 27)

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

typedef struct {
    const ep_placement_input *input;
    ep_placer placer;
    double *speeds;          /* [nodes] */
    double *heat;            /* [EP_EXPERTS_MAX] of the present layer */
    uint32_t *slots;         /* [nodes] of the present layer */
    uint64_t *host_slots;    /* [nodes] */
    uint64_t experts_so_far; /* of all layers up to the present one */
    uint64_t bytes_so_far;
    uint64_t experts_all;
    uint64_t bytes_all;
    uint32_t loads_left;
    uint64_t work_left;
    uint64_t common_left;
} balancer;

static ep_err check_numbers(const ep_placement_input *input, ep_error *out_error)
{
    for (uint32_t n = 0; n < input->nodes_count; n++) {
        if (!(input->nodes[n].speed >= 0) || isinf(input->nodes[n].speed)) {
            return BAD("node %s has speed %g: allowed 0 (as the others) or more",
                       input->nodes[n].name, input->nodes[n].speed);
        }
    }
    for (uint32_t l = 0; l < input->layers_count; l++) {
        const ep_placement_layer *layer = &input->layers[l];
        for (uint32_t e = 0; layer->heat != NULL && e < layer->shape.experts; e++) {
            if (!(layer->heat[e] >= 0) || isinf(layer->heat[e])) {
                return BAD("layer %" PRIu32 ", expert %" PRIu32 ": heat %g: allowed 0 or more",
                           layer->shape.layer, e, layer->heat[e]);
            }
        }
    }
    return EP_OK;
}

static uint32_t experts_of(const balancer *b, uint32_t layer)
{
    return b->placer.layers[layer].experts;
}

/* How many copies of this layer a node can take and leave later layers their part. */
static uint32_t room_of(const balancer *b, uint32_t layer, uint32_t node)
{
    const ep_placement_node *limits = &b->input->nodes[node];
    const uint64_t bytes = b->input->layers[layer].expert_bytes;
    double room = experts_of(b, layer);
    if (limits->capacity_experts != 0) {
        const double part =
            (double)limits->capacity_experts * ((double)b->experts_so_far / (double)b->experts_all);
        room = fmin(room, floor(part + ROUNDING) - b->placer.total[node]);
    }
    if (limits->capacity_bytes != 0 && bytes != 0) {
        const double part =
            (double)limits->capacity_bytes * ((double)b->bytes_so_far / (double)b->bytes_all);
        room = fmin(room, floor((part - (double)b->placer.bytes[node]) / (double)bytes + ROUNDING));
    }
    return room > 0 ? (uint32_t)room : 0;
}

static uint32_t room_in(const balancer *b, uint32_t layer, uint32_t node)
{
    const uint32_t room = b->placer.layers[layer].load[node] +
                          room_of(b, layer, node); /* its total already counts what it holds */
    return room < experts_of(b, layer) ? room : experts_of(b, layer);
}

/* Hosts with few nodes need more slots on each node, or copies would have to share a host. Some
 * slots stay for spare copies and exchanges. */
static void give_hosts_slots(balancer *b, uint32_t layer)
{
    const uint32_t experts = experts_of(b, layer), nodes = b->input->nodes_count;
    const ep_hosts *hosts = &b->placer.hosts;
    /* for each of `spread` hosts */
    const uint64_t part = (uint64_t)experts + b->input->spare_copies + 1;
    bool is_growing = hosts->spread > 1;
    while (is_growing) {
        uint64_t apart = 0;
        memset(b->host_slots, 0, nodes * sizeof(*b->host_slots));
        for (uint32_t n = 0; n < nodes; n++) {
            b->host_slots[hosts->of_node[n]] += b->slots[n];
        }
        for (uint32_t h = 0; h < nodes; h++) {
            apart += b->host_slots[h] < part ? b->host_slots[h] : part;
        }
        is_growing = false;
        for (uint32_t n = 0; n < nodes && apart < part * hosts->spread; n++) {
            if (b->host_slots[hosts->of_node[n]] < part && b->slots[n] < room_in(b, layer, n)) {
                b->slots[n]++;
                is_growing = true;
            }
        }
    }
}

/* Gives slots for `total` copies over all nodes as evenly as their room allows; what a node holds
 * beyond that gets a slot too. Returns the sum of slots. */
static uint64_t give_slots(balancer *b, uint32_t layer, uint64_t total)
{
    const uint32_t *holds = b->placer.layers[layer].load;
    uint64_t sum = 0, before = UINT64_MAX;
    for (uint32_t level = 1; sum < total && sum != before; level++) {
        before = sum;
        sum = 0;
        for (uint32_t n = 0; n < b->input->nodes_count; n++) {
            const uint32_t room = room_in(b, layer, n);
            b->slots[n] = room < level ? room : level;
            sum += b->slots[n];
        }
    }
    give_hosts_slots(b, layer);
    sum = 0;
    for (uint32_t n = 0; n < b->input->nodes_count; n++) {
        b->slots[n] = holds[n] > b->slots[n] ? holds[n] : b->slots[n];
        sum += b->slots[n];
    }
    return sum;
}

/* Copies the result of the balance to the board. */
static void take_over(balancer *b, uint32_t layer, const ep_balance *balance)
{
    for (uint32_t is_adding = 0; is_adding < 2; is_adding++) {
        for (uint32_t e = 0; e < experts_of(b, layer); e++) {
            for (uint32_t n = 0; n < b->input->nodes_count; n++) {
                const bool is_here = ep_placer_holds(&b->placer, layer, e, n),
                           shall_be = ep_balance_holds(balance, e, n);
                if (is_here && !shall_be) {
                    ep_placer_remove(&b->placer, layer, e, n);
                } else if (is_adding != 0 && shall_be && !is_here) {
                    ep_placer_add(&b->placer, layer, e, n);
                }
            }
        }
    }
}

/* Each layer may move its part of the allowed copies, and what earlier ones left; some exchanges
 * need two. */
static void repair(balancer *b, uint32_t layer, ep_balance *balance, double bound)
{
    const bool is_paced = b->input->moves_max != UINT32_MAX;
    const uint64_t part = (uint64_t)b->loads_left / (b->input->layers_count - layer) + 2;
    if (ep_balance_busiest(balance) > (is_paced ? REPAIR_AT : REPAIR_GOOD) * bound) {
        b->loads_left -= ep_balance_repair(balance, REPAIR_GOOD,
                                           part < b->loads_left ? (uint32_t)part : b->loads_left);
    }
}

static ep_err rearrange(balancer *b, uint32_t layer, ep_balance *balance, double bound,
                        ep_error *out_error)
{
    bool is_new = true;
    for (uint32_t e = 0; e < experts_of(b, layer); e++) {
        for (uint32_t n = 0; n < b->input->nodes_count; n++) {
            is_new = !(ep_placer_holds(&b->placer, layer, e, n) && ep_balance_put(balance, e, n)) &&
                     is_new;
        }
    }
    const ep_err err = ep_balance_fill(balance, out_error);
    if (err == EP_OK && is_new) {
        ep_balance_search(balance, SEARCH_GOOD);
    } else if (err == EP_OK && b->loads_left > 0) {
        repair(b, layer, balance, bound);
    }
    return err;
}

static ep_err place_layer(balancer *b, uint32_t layer, ep_error *out_error)
{
    const ep_placement_input *input = b->input;
    const uint32_t experts = experts_of(b, layer);
    const uint64_t wanted = (uint64_t)experts * b->placer.width;
    b->experts_so_far += experts;
    b->bytes_so_far += experts * input->layers[layer].expert_bytes;
    ep_err err = ep_placer_keep_owned(&b->placer, layer, 0, input->nodes_count);
    if (err != EP_OK) {
        return err;
    }
    const uint32_t copies = input->copies < input->nodes_count ? input->copies : input->nodes_count;
    const uint64_t total = (uint64_t)experts * copies + input->spare_copies;
    const uint64_t slots = give_slots(b, layer, total < wanted ? total : wanted);
    if (slots < experts) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "layer %" PRIu32 " has %" PRIu32
                            " experts, nodes have room for %" PRIu64,
                            input->layers[layer].shape.layer, experts, slots);
    }
    ep_placer_heat(&input->layers[layer], b->heat);
    const ep_balance_input problem = {
        .experts = experts,
        .nodes = input->nodes_count,
        .heat = b->heat,
        .speeds = b->speeds,
        .slots = b->slots,
        .copies_min = slots / experts < copies ? (uint32_t)(slots / experts) : copies,
        .copies_total = (uint32_t)(total < slots ? total : slots),
        .hosts = &b->placer.hosts,
        .work_left = &b->work_left,
        .common_left = &b->common_left};
    const double bound = ep_balance_bound(&problem, false);
    ep_balance *balance = NULL;
    err = ep_balance_create(&problem, &balance, out_error);
    if (err == EP_OK) {
        err = rearrange(b, layer, balance, bound, out_error);
    }
    if (err == EP_OK) {
        take_over(b, layer, balance);
        b->placer.layers[layer].balance =
            ep_placer_certify(&problem, ep_balance_busiest(balance), bound);
        ep_placer_count_missing(&b->placer, layer, 0, copies);
    }
    ep_balance_destroy(balance);
    return err;
}

static ep_err prepare(balancer *b, ep_error *out_error)
{
    const ep_placement_input *input = b->input;
    ep_err err = ep_placer_init(&b->placer, input, input->nodes_count, out_error);
    if (err != EP_OK) {
        return err;
    }
    b->speeds = calloc(input->nodes_count + 1u, sizeof(*b->speeds));
    b->heat = calloc(EP_EXPERTS_MAX, sizeof(*b->heat));
    b->slots = calloc(input->nodes_count + 1u, sizeof(*b->slots));
    b->host_slots = calloc(input->nodes_count + 1u, sizeof(*b->host_slots));
    if (b->host_slots == NULL || b->speeds == NULL || b->heat == NULL || b->slots == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t n = 0; n < input->nodes_count; n++) {
        b->speeds[n] = ep_placer_speed(&input->nodes[n]);
    }
    for (uint32_t l = 0; l < input->layers_count; l++) {
        b->experts_all += experts_of(b, l);
        b->bytes_all += experts_of(b, l) * input->layers[l].expert_bytes;
    }
    return EP_OK;
}

/* The number of experts comes from nodes, so it must not take all memory, or all the time of a
 * caller that holds a lock. */
static bool is_too_large(const ep_placement_input *input)
{
    uint64_t cells = 0;
    for (uint32_t l = 0; l < input->layers_count; l++) {
        cells +=
            ((uint64_t)input->layers[l].shape.experts + input->layers[l].shape.shared_experts) *
            input->nodes_count;
    }
    return cells > EP_PLACEMENT_CELLS_MAX;
}

ep_err ep_placement_balanced(const ep_placement_input *input, ep_placement **out_placement,
                             ep_error *out_error)
{
    if (is_too_large(input)) {
        return ep_placement_uniform(input, out_placement, out_error);
    }
    balancer b = {.input = input,
                  .loads_left = input->moves_max,
                  .work_left = WORK_MAX,
                  .common_left = COMMON_MAX};
    ep_err err = check_numbers(input, out_error);
    if (err == EP_OK) {
        err = prepare(&b, out_error);
    }
    for (uint32_t l = 0; l < input->layers_count && err == EP_OK; l++) {
        err = place_layer(&b, l, out_error);
    }
    if (err == EP_OK) {
        err = ep_placer_finish(&b.placer, out_placement);
    }
    if (err == EP_OK) {
        (*out_placement)->is_cut = b.work_left == 0;
    }
    ep_placer_fini(&b.placer);
    free(b.speeds);
    free(b.heat);
    free(b.slots);
    free(b.host_slots);
    if (err == EP_ERR_RESOURCE_EXHAUSTED) { /* room is so short that ep_placement_uniform decides */
        return ep_placement_uniform(input, out_placement, out_error);
    }
    return err == EP_ERR_NO_MEMORY
               ? ep_error_set(out_error, err, "no memory to place %" PRIu32 " layers",
                              input->layers_count)
               : err;
}
