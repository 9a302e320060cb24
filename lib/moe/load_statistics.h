/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How evenly a layer's slots fall on its routed experts. With counts c_e over E experts, C = sum
 * c_e:
 *
 *   f_e              c_e / C: share of slots
 *   p_e              mean over tokens of the gate's probability for e: softmax of the logits; for
 *                    sigmoid routers s_e / sum_j s_j (DeepSeek-V3 technical report, sequence-wise
 *                    balance loss)
 *   auxiliary loss   E * sum_e f_e * p_e (Switch Transformer, arXiv 2101.03961, equations 4-6,
 *                    without its factor alpha); 1 when p is uniform
 *   max over mean    max_e c_e / (C / E)
 *   Gini             2 * sum_i i * c_(i) / (E * C) - (E + 1) / E, c_(1) <= ... <= c_(E): 0 even, (E
 *                    - 1) / E all on one
 *
 * Everything is f64. Pure; any thread.
 */
#ifndef EP_MOE_LOAD_STATISTICS_H
#define EP_MOE_LOAD_STATISTICS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct ep_load_statistics {
    uint64_t slots;        /* C */
    double max_over_mean;  /* 0 without slots */
    uint32_t max_expert;   /* the fullest expert, the lowest index of equals; 0 without slots */
    double gini;           /* 0 without slots */
    double auxiliary_loss; /* 0 without slots or without tokens */
} ep_load_statistics;

/*
 * counts [experts], experts at least 1; their sum fits in 64 bits. probability_sums [experts]: sum
 * of p over `tokens` tokens; NULL when tokens is 0.
 * Errors: NO_MEMORY.
 */
ep_err ep_load_statistics_compute(const uint64_t *counts, uint32_t experts,
                                  const double *probability_sums, uint64_t tokens,
                                  ep_load_statistics *out_statistics);

/*
 * Adds one token's probabilities to sums [experts]. logits [experts] f32 that the gate accepts: no
 * NaN, and for a softmax a finite maximum. A sigmoid row whose scores are all 0 adds nothing.
 */
void ep_load_add_probabilities(bool sigmoid, const float *logits, uint32_t experts, double *sums);

#endif
