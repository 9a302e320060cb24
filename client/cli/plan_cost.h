/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a placement of one layer costs, by formulas, on machines that need not exist. Tokens choose
 * their experts one after another and each for itself, an expert's copies share it equally:
 *
 *   q_n          slots of node n:           sum over its copies of share / copies
 *   P_n          a token goes to node n:    1 - (1 - q_n)^K * (1 - 1 / copies of the shared expert,
 *                                           when n has one)
 *   network      bytes of a token each way: row * sum of P_n
 *   read         weights that node n reads: sum over its copies of
 *                                           bytes * (1 - (1 - share / copies)^(T * K)), T tokens of
 *                                           a step
 *   time         of the slowest node:       read / memory bandwidth + 2 * row * T * P_n / link
 *                                           bandwidth + round trip
 *
 * Computing is not counted: what few tokens cost is reading weights.
 *
 * Threads  pure.
 */
#ifndef EP_CLI_PLAN_COST_H
#define EP_CLI_PLAN_COST_H

#include "base/error.h"

/* Each node alike. */
typedef struct ep_plan_machine {
    double memory_bytes_per_s;
    double link_bytes_per_s; /* each way */
    double round_trip_s;
} ep_plan_machine;

typedef struct ep_plan_layer {
    uint32_t nodes;
    uint32_t experts; /* E; a shared expert stands behind them */
    bool has_shared;
    uint32_t top_k;          /* K */
    const double *shares;    /* [E] of all slots; their sum is 1 */
    const uint32_t *offsets; /* [E (+ 1) + 1] */
    const uint32_t *copies;  /* nodes */
    double expert_bytes;
    double shared_bytes;
    double row_bytes; /* of a token's x, and of its y */
} ep_plan_layer;

typedef struct ep_plan_cost {
    double nodes_per_token;
    double network_bytes; /* of a token, each way */
    double read_bytes;    /* of the node that reads most in a step */
    double time_s;
} ep_plan_cost;

/* Errors: NO_MEMORY. */
ep_err ep_plan_cost_of(const ep_plan_layer *layer, const ep_plan_machine *machine, double tokens,
                       ep_plan_cost *out_cost);

/* A token chooses an expert once: what is above 1 / top_k goes to the others in proportion. Their
 * sum becomes 1. top_k <= experts; some top_k of them are above 0. */
void ep_plan_cap_shares(double *shares, uint32_t experts, uint32_t top_k);

#endif
