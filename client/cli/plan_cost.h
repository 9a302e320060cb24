/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Estimates what a placement of one layer costs on given machines. A step of T tokens is drawn
 * several times, and its time is the mean over the draws. Averages would be too low: a layer ends
 * with its slowest node, which in a random step has more work than the most loaded node has on
 * average.
 *
 *   a draw       each token takes K different experts, expert e with probability K * share, by
 *                systematic sampling (Madow 1949) in an order shuffled per token. Copies are chosen
 *                as by clients (ep_choose_copies). For more than 1,024 tokens a draw of so many is
 *                scaled, deviations from the mean by the root of T
 *   an expert    reads for r = bytes / memory bandwidth and computes for c = 2 * weights * rows /
 *                compute rate. Both overlap: (r^p + c^p)^(1/p), a smooth roofline (Williams,
 *                Waterman, Patterson 2009). p is 3 for plain weights and 2 for codes, which must be
 *                widened (tests/bench/run formats: within a third, but codes with 6 to 16 rows take
 *                up to 1.7 times as long)
 *   a host       the greater of the time of all its experts at its full rates, and the time of its
 *                busiest node at a node's part of the rates (McNaughton 1959: work cannot leave its
 *                node but uses what others leave free)
 *   P_n          probability that a token goes to node n: 1 - (1 - q_n)^K * (1 - 1 / copies of the
 *                shared expert, if n has one), with q_n = sum over its copies of share / copies
 *   the network  a token's row is sent once to each of its nodes, and a row per slot comes back:
 *                row * sum of P_n, and row * (K + 1 with a shared expert)
 *   a step       round trip + the time of the slowest host: computing + bytes in and out / link
 *                bandwidth
 *
 * Attention is not counted.
 *
 * Threads  pure; draws are a function of the input.
 */
#ifndef EP_CLI_PLAN_COST_H
#define EP_CLI_PLAN_COST_H

#include "base/error.h"

/* Allowed figures of a machine, from any source. */
#define EP_PLAN_BANDWIDTH_MIN (UINT64_C(1) << 10)
#define EP_PLAN_BANDWIDTH_MAX (UINT64_C(1) << 50)
#define EP_PLAN_COMPUTE_RATE_MIN 1e6f
#define EP_PLAN_COMPUTE_RATE_MAX 1e18f
#define EP_PLAN_ROUND_TRIP_US_MAX 60000000 /* at least 1 */

/* All hosts are alike. */
typedef struct ep_plan_machine {
    double memory_bytes_per_s; /* at which a host reads weights */
    double compute_per_s;      /* of a host; operations, two for each weight and row */
    double link_bytes_per_s;   /* of a host, each way */
    double round_trip_s;       /* of a call without its bytes */
    uint32_t nodes_per_host;
    /* number of nodes that use a host's full rates together; 1..nodes_per_host */
    uint32_t nodes_at_once;
} ep_plan_machine;

typedef struct ep_plan_layer {
    uint32_t nodes;   /* host h has nodes_per_host of them, from node h * nodes_per_host on */
    uint32_t experts; /* E; a shared expert stands behind them */
    bool has_shared;
    uint32_t top_k;        /* K */
    const double *shares;  /* [E] share of all slots, none above 1 / K; the sum is 1 */
    uint32_t *offsets;     /* [E (+ 1) + 1]; only read, the next too */
    uint32_t *copies;      /* nodes */
    double expert_weights; /* number of weights of an expert */
    double shared_weights;
    double weight_bytes; /* of one weight */
    double row_bytes;    /* of a token's x, and of an expert's row */
} ep_plan_layer;

typedef struct ep_plan_cost {
    double nodes_per_token;
    double dispatch_bytes; /* of a token, to the nodes */
    double combine_bytes;  /* and back */
    double read_bytes;     /* by the node that reads most in a step */
    double time_s;
} ep_plan_cost;

/* Errors: NO_MEMORY. */
ep_err ep_plan_cost_of(const ep_plan_layer *layer, const ep_plan_machine *machine, double tokens,
                       ep_plan_cost *out_cost);

/* The time of an expert's job from its two times; is_plain: weights are numbers, not codes. */
double ep_plan_expert_s(double read_s, double compute_s, bool is_plain);
/* The inverse: read_s or compute_s from the job's time and the other one; NAN: impossible. */
double ep_plan_expert_part_s(double job_s, double other_s, bool is_plain);

/* Caps shares at 1 / top_k, since a token chooses an expert once; the excess goes to the others in
 * proportion, and the sum becomes 1. top_k <= experts; at least top_k shares are above 0. */
void ep_plan_cap_shares(double *shares, uint32_t experts, uint32_t top_k);

/* Draws tokens as described above and counts the slots of each expert. order [experts]: a
 * permutation, which is shuffled. */
void ep_plan_draw(const double *shares, uint32_t experts, uint32_t top_k, uint32_t tokens,
                  uint64_t *random, uint32_t *order, uint32_t *out_slots);

#endif
