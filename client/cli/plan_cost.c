/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_cost.h"

#include <math.h>
#include <stdlib.h>

#define ENOUGH 1e-12

/* 1 - (1 - p)^n, of small p too. */
static double at_least_once(double p, double n)
{
    return p >= 1 ? 1 : -expm1(n * log1p(-p));
}

typedef struct {
    double slots;  /* q_n */
    double shared; /* part of the tokens whose shared expert is computed here */
    double read;
} node_sum;

ep_err ep_plan_cost_of(const ep_plan_layer *layer, const ep_plan_machine *machine, double tokens,
                       ep_plan_cost *out_cost)
{
    node_sum *sums = calloc(layer->nodes + 1u, sizeof(*sums));
    ep_plan_cost cost = {0};
    if (sums == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t e = 0; e < layer->experts + layer->has_shared; e++) {
        const uint32_t begin = layer->offsets[e], end = layer->offsets[e + 1];
        const bool is_shared = e == layer->experts;
        const double part = (is_shared ? 1 : layer->shares[e]) / (end - begin);
        for (uint32_t c = begin; c < end; c++) {
            node_sum *sum = &sums[layer->copies[c]];
            *(is_shared ? &sum->shared : &sum->slots) += part;
            sum->read += is_shared
                             ? layer->shared_bytes * at_least_once(part, tokens)
                             : layer->expert_bytes * at_least_once(part, tokens * layer->top_k);
        }
    }
    for (uint32_t n = 0; n < layer->nodes; n++) {
        const double visits =
            1 - (1 - at_least_once(sums[n].slots, layer->top_k)) * (1 - sums[n].shared);
        const double network_s = 2 * layer->row_bytes * tokens * visits / machine->link_bytes_per_s;
        cost.nodes_per_token += visits;
        cost.read_bytes = fmax(cost.read_bytes, sums[n].read);
        cost.time_s = fmax(cost.time_s, sums[n].read / machine->memory_bytes_per_s + network_s +
                                            machine->round_trip_s);
    }
    cost.network_bytes = layer->row_bytes * cost.nodes_per_token;
    free(sums);
    *out_cost = cost;
    return EP_OK;
}

void ep_plan_cap_shares(double *shares, uint32_t experts, uint32_t top_k)
{
    const double cap = 1.0 / top_k;
    for (uint32_t round = 0; round <= experts; round++) { /* each caps one more at least */
        double capped = 0, free_sum = 0, over = 0;
        for (uint32_t e = 0; e < experts; e++) {
            const bool is_full = shares[e] >= cap * (1 - ENOUGH) && round > 0;
            capped += is_full ? cap : 0;
            free_sum += is_full ? 0 : shares[e];
        }
        const double factor = free_sum > 0 ? fmax(1 - capped, 0) / free_sum : 0;
        for (uint32_t e = 0; e < experts; e++) {
            const bool is_full = shares[e] >= cap * (1 - ENOUGH) && round > 0;
            shares[e] = is_full ? cap : shares[e] * factor;
            over = fmax(over, shares[e] - cap);
        }
        if (over <= cap * ENOUGH) {
            return;
        }
    }
}
