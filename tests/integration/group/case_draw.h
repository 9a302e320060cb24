/* SPDX-License-Identifier: Apache-2.0 */
/* Random cases from a seed. */
#ifndef EP_TESTS_GROUP_CASE_DRAW_H
#define EP_TESTS_GROUP_CASE_DRAW_H

#include "group_oracle.h"

typedef struct case_limits {
    int ranks_max;
    int ranks; /* 0: drawn, up to ranks_max */
    int tokens_max;
    int hidden_max;
} case_limits;

/* True where constant experts use the kernel's rule: their exp is not the oracle's, so sums agree
 * to rounding only. */
bool case_is_approximate(const oracle_case *c);
void case_draw(uint64_t seed, const case_limits *limits, oracle_case *out_case);
/* One rank's batch of a case whose shape is set. */
void case_draw_batch(uint64_t *state, const oracle_case *c, int tokens, oracle_batch *out_batch);
/* The same, all of it active. */
void case_draw_unmasked(uint64_t *state, const oracle_case *c, int tokens, oracle_batch *out_batch);
void case_free_batch(oracle_batch *batch);
void case_free(oracle_case *c);
int case_random(uint64_t *state, int low, int high);

#endif
