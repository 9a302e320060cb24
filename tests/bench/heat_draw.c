/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/heat_draw.h"

#include <math.h>
#include <string.h>

#include "base/random.h"

#define TAU 6.283185307179586

static double uniform(uint64_t *random)
{
    return ((double)(ep_splitmix64(random) >> 11) + 0.5) / 9007199254740992.0;
}

static double normal(uint64_t *random)
{
    const double radius = sqrt(-2 * log(uniform(random)));
    return radius * cos(TAU * uniform(random));
}

void heat_draw_logits(heat_family family, double parameter, uint32_t experts, uint64_t *random,
                      double *out_logits)
{
    for (uint32_t e = 0; e < experts; e++) {
        out_logits[e] =
            family == HEAT_LOGNORMAL ? parameter * normal(random) : -parameter * log(e + 1.0);
    }
    for (uint32_t e = experts - 1; e > 0; e--) {
        const uint32_t at = (uint32_t)(ep_splitmix64(random) % (e + 1));
        const double moved = out_logits[e];
        out_logits[e] = out_logits[at];
        out_logits[at] = moved;
    }
}

void heat_drift(double sigma, uint32_t experts, uint64_t *random, double *io_logits)
{
    for (uint32_t e = 0; e < experts; e++) {
        io_logits[e] += sigma * normal(random);
    }
}

static void choose(const double *logits, uint32_t experts, uint64_t *random, double *io_heat)
{
    float best[HEAT_TOP_K];
    uint32_t expert[HEAT_TOP_K];
    for (uint32_t k = 0; k < HEAT_TOP_K; k++) {
        best[k] = -INFINITY;
        expert[k] = 0;
    }
    for (uint32_t e = 0; e < experts; e++) {
        const float value = (float)logits[e] - logf(-logf((float)uniform(random) * 0.999999f));
        if (value <= best[HEAT_TOP_K - 1]) {
            continue;
        }
        uint32_t k = HEAT_TOP_K - 1;
        for (; k > 0 && value > best[k - 1]; k--) {
            best[k] = best[k - 1];
            expert[k] = expert[k - 1];
        }
        best[k] = value;
        expert[k] = e;
    }
    for (uint32_t k = 0; k < HEAT_TOP_K; k++) {
        io_heat[expert[k]]++;
    }
}

void heat_draw(heat_family family, const double *logits, uint32_t experts, uint64_t *random,
               double *out_heat)
{
    for (uint32_t e = 0; e < experts; e++) {
        out_heat[e] = family == HEAT_GUMBEL ? 0 : exp(logits[e]);
    }
    for (uint32_t t = 0; family == HEAT_GUMBEL && t < HEAT_TOKENS; t++) {
        choose(logits, experts, random, out_heat);
    }
}

const char *heat_family_name(heat_family family)
{
    return family == HEAT_ZIPF        ? "zipf"
           : family == HEAT_LOGNORMAL ? "log-normal"
                                      : "Gumbel top-8 zipf";
}
