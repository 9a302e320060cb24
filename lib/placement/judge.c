/* SPDX-License-Identifier: Apache-2.0 */
/* How good any placement is. */
#include <stdlib.h>

#include "placement/placement.h"
#include "placement/placer.h"

#define IN_DOUBT 1.05 /* relative to the bound */

void ep_placer_heat(const ep_placement_layer *layer, double *out_heat)
{
    const uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
    double sum = 0;
    for (uint32_t e = 0; layer->heat != NULL && e < layer->shape.experts; e++) {
        out_heat[e] = layer->heat[e];
        sum += layer->heat[e];
    }
    for (uint32_t e = sum > 0 ? layer->shape.experts : 0; e < experts; e++) {
        out_heat[e] = sum > 0 ? sum / (layer->shape.top_k > 0 ? layer->shape.top_k : 1) : 1;
    }
}

double ep_placer_speed(const ep_placement_node *node)
{
    return node->speed > 0 ? node->speed : 1;
}

ep_layer_balance ep_placer_certify(const ep_balance_input *problem, double busiest, double bound)
{
    double heat = 0, speed = 0;
    for (uint32_t e = 0; e < problem->experts; e++) {
        heat += problem->heat[e];
    }
    for (uint32_t n = 0; n < problem->nodes; n++) {
        speed += problem->speeds[n];
    }
    return (ep_layer_balance){.busiest = busiest,
                              .mean = heat / speed,
                              .bound = busiest > IN_DOUBT * bound ? ep_balance_bound(problem, true)
                                                                  : bound};
}

/* Computes what each node has to do and how many copies it holds; returns the busiest time.
 * copies_min becomes the least of the experts', if that is less. */
static double add_up(const uint32_t *offsets, const uint32_t *copies, ep_balance_input *problem,
                     double *busy, uint32_t *held)
{
    double busiest = 0;
    for (uint32_t e = 0; e < problem->experts; e++) {
        const uint32_t count = offsets[e + 1] - offsets[e];
        double speeds = 0;
        problem->copies_min = count < problem->copies_min ? count : problem->copies_min;
        for (uint32_t c = offsets[e]; c < offsets[e + 1]; c++) {
            speeds += problem->speeds[copies[c]];
            held[copies[c]]++;
        }
        for (uint32_t c = offsets[e]; c < offsets[e + 1]; c++) {
            busy[copies[c]] += problem->heat[e] / speeds;
            busiest = busy[copies[c]] > busiest ? busy[copies[c]] : busiest;
        }
    }
    return busiest;
}

/* Gives slots as ep_placement_balanced does where nodes have room for all. */
static void give_slots(const ep_placement_input *input, uint32_t held_all,
                       ep_balance_input *io_problem, uint32_t *io_held)
{
    const uint64_t experts = io_problem->experts, nodes = io_problem->nodes;
    const uint64_t copies = input->copies < nodes ? input->copies : nodes;
    const uint64_t asked = experts * copies + input->spare_copies;
    const uint64_t total = asked < experts * nodes ? asked : experts * nodes;
    const uint32_t level = (uint32_t)((total + nodes - 1) / nodes);
    for (uint32_t n = 0; n < nodes; n++) {
        io_held[n] = io_held[n] > level ? io_held[n] : level;
    }
    io_problem->slots = io_held;
    io_problem->copies_total = held_all > total ? held_all : (uint32_t)total;
}

ep_err ep_placement_judge(const ep_placement_input *input, uint32_t layer, const uint32_t *offsets,
                          const uint32_t *copies, ep_layer_balance *out_balance)
{
    const uint32_t experts =
        input->layers[layer].shape.experts + input->layers[layer].shape.shared_experts;
    const uint32_t nodes = input->nodes_count;
    double *heat = calloc(experts + 1u, sizeof(*heat));
    double *speeds = calloc(nodes + 1u, sizeof(*speeds));
    double *busy = calloc(nodes + 1u, sizeof(*busy));
    uint32_t *held = calloc(nodes + 1u, sizeof(*held));
    ep_layer_balance balance = {0};
    ep_err err =
        heat != NULL && speeds != NULL && busy != NULL && held != NULL ? EP_OK : EP_ERR_NO_MEMORY;
    if (err == EP_OK && experts > 0 && nodes > 0) {
        ep_placer_heat(&input->layers[layer], heat);
        for (uint32_t n = 0; n < nodes; n++) {
            speeds[n] = ep_placer_speed(&input->nodes[n]);
        }
        ep_balance_input problem = {.experts = experts,
                                    .nodes = nodes,
                                    .heat = heat,
                                    .speeds = speeds,
                                    .copies_min = input->copies};
        const double busiest = add_up(offsets, copies, &problem, busy, held);
        if (problem.copies_min > 0) { /* every expert has a copy */
            give_slots(input, offsets[experts], &problem, held);
            balance = ep_placer_certify(&problem, busiest, ep_balance_bound(&problem, false));
        }
    }
    free(heat);
    free(speeds);
    free(busy);
    free(held);
    if (err == EP_OK) {
        *out_balance = balance;
    }
    return err;
}
