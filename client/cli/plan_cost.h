/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a placement of one layer costs on machines that need not exist. A step of T tokens is drawn
 * several times, and its time is the mean over the draws: a layer ends with its slowest node, and
 * in a random step that one has more to do than the node with the most load has on average.
 *
 *   a draw       each token takes K experts, each at most once, expert e with the chance K *
 *                share: systematic sampling (Madow 1949) in an order shuffled for each token.
 *                Copies are chosen as clients choose them (ep_choose_copies). Steps beyond 1,024
 *                tokens stretch a draw of so many: deviations from the mean grow with the root of
 *                T
 *   an expert    reads for r = bytes / memory bandwidth and computes for c = 2 * weights * rows /
 *                compute rate. Both overlap: (r^p + c^p)^(1/p), a roofline (Williams, Waterman,
 *                Patterson 2009) without its edge. p is 3 for plain weights, and 2 for codes,
 *                which are widened in between (tests/bench/run formats: within a third, but codes
 *                with 6 to 16 rows take up to 1.7 times as long)
 *   a host       the longer of all its experts at its full rates, and those of its busiest node
 *                at a node's part of them: what work takes that may not leave its node, but fills
 *                what others leave free (McNaughton 1959)
 *   P_n          a token goes to node n: 1 - (1 - q_n)^K * (1 - 1 / copies of the shared expert,
 *                when n has one); q_n, its slots: sum over its copies of share / copies
 *   the network  a token's row goes once to each of its nodes, and each of its slots' rows comes
 *                back: row * sum of P_n, and row * (K + 1 with a shared expert)
 *   a step       round trip + the longest host: its computing + its bytes in and out / link
 *                bandwidth
 *
 * Attention is not counted.
 *
 * Threads  pure; draws are a function of the input.
 */
#ifndef EP_CLI_PLAN_COST_H
#define EP_CLI_PLAN_COST_H

#include "base/error.h"

/* What the figures of a machine may be, from wherever they come. */
#define EP_PLAN_BANDWIDTH_MIN (UINT64_C(1) << 10)
#define EP_PLAN_BANDWIDTH_MAX (UINT64_C(1) << 50)
#define EP_PLAN_COMPUTE_RATE_MIN 1e6f
#define EP_PLAN_COMPUTE_RATE_MAX 1e18f
#define EP_PLAN_ROUND_TRIP_US_MAX 60000000 /* and 1 at least */

/* Each host alike. */
typedef struct ep_plan_machine {
    double memory_bytes_per_s; /* that a host reads weights with */
    double compute_per_s;      /* of a host; operations, two for each weight and row */
    double link_bytes_per_s;   /* of a host, each way */
    double round_trip_s;       /* of a call without its bytes */
    uint32_t nodes_per_host;
    uint32_t nodes_at_once; /* so many keep a host busy: a node has this part of its
                               rates; 1..nodes_per_host */
} ep_plan_machine;

typedef struct ep_plan_layer {
    uint32_t nodes;   /* host h has nodes_per_host of them, from h * nodes_per_host on */
    uint32_t experts; /* E; a shared expert stands behind them */
    bool has_shared;
    uint32_t top_k;        /* K */
    const double *shares;  /* [E] of all slots, none above 1 / K; their sum is 1 */
    uint32_t *offsets;     /* [E (+ 1) + 1]; not written, as the next */
    uint32_t *copies;      /* nodes */
    double expert_weights; /* numbers, of one expert */
    double shared_weights;
    double weight_bytes; /* of one of them */
    double row_bytes;    /* of a token's x, and of an expert's row */
} ep_plan_layer;

typedef struct ep_plan_cost {
    double nodes_per_token;
    double dispatch_bytes; /* of a token, to the nodes */
    double combine_bytes;  /* and back */
    double read_bytes;     /* of the node that reads most in a step */
    double time_s;
} ep_plan_cost;

/* Errors: NO_MEMORY. */
ep_err ep_plan_cost_of(const ep_plan_layer *layer, const ep_plan_machine *machine, double tokens,
                       ep_plan_cost *out_cost);

/* A job of one expert, from its two times; is_plain: weights are numbers, not codes. */
double ep_plan_expert_s(double read_s, double compute_s, bool is_plain);
/* The other way round: read_s or compute_s from the time of the job and the other one; NAN: there
 * is none. */
double ep_plan_expert_part_s(double job_s, double other_s, bool is_plain);

/* A token chooses an expert once: what is above 1 / top_k goes to the others in proportion. Their
 * sum becomes 1. top_k
 * <= experts; some top_k of them are above 0. */
void ep_plan_cap_shares(double *shares, uint32_t experts, uint32_t top_k);

/* Slots of each expert, [experts], in tokens drawn as said above. order [experts]: a permutation,
 * which it shuffles. */
void ep_plan_draw(const double *shares, uint32_t experts, uint32_t top_k, uint32_t tokens,
                  uint64_t *random, uint32_t *order, uint32_t *out_slots);

#endif
