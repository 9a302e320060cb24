/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads of the experts of a layer, drawn: what routers are seen to give.
 *
 * ZIPF        heat of rank r is r ^ -parameter, experts in any order
 * LOGNORMAL   exp(parameter * N(0,1))
 * GUMBEL      tokens choose their top_k by logits of -parameter * ln(rank) and Gumbel noise: no
 *             expert is above 1 / top_k
 */
#ifndef EP_BENCH_HEAT_DRAW_H
#define EP_BENCH_HEAT_DRAW_H

#include <stdint.h>

typedef enum { HEAT_ZIPF, HEAT_LOGNORMAL, HEAT_GUMBEL } heat_family;

enum { HEAT_TOP_K = 8, HEAT_TOKENS = 4096 };

/* logits [experts] of a layer; then the heat they give, as often as wanted. */
void heat_draw_logits(heat_family family, double parameter, uint32_t experts, uint64_t *random,
                      double *out_logits);
/* adds sigma * N(0,1) to each */
void heat_drift(double sigma, uint32_t experts, uint64_t *random, double *io_logits);
void heat_draw(heat_family family, const double *logits, uint32_t experts, uint64_t *random,
               double *out_heat);
const char *heat_family_name(heat_family family);

#endif
