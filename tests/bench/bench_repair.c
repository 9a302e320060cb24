/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Repair: a layer is placed by heat, its router drifts, and copies are loaded elsewhere until the
 * busiest node is within a target of the bound. Printed: the 95th percentile of copies to load, of
 * 288.
 *
 *     bench_repair [JSON] [seeds=100]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "bench/bench_report.h"
#include "bench/heat_draw.h"
#include "placement/balance.h"

enum { EXPERTS = 256, NODES = 32, COPIES = 288, SEEDS_MAX = 10000 };

static double speeds[NODES];
static uint32_t slots[NODES];

static ep_balance *balance_of(const ep_balance_input *in)
{
    ep_balance *b = NULL;
    const ep_err err = ep_balance_create(in, &b, NULL);
    EP_ASSERT(err == EP_OK);
    return b;
}

/* Copies to load to `target`; all of them when it is not reached. */
static uint32_t repair(const ep_balance *placed, const ep_balance_input *now, double target)
{
    ep_balance *b = balance_of(now);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        for (uint32_t n = 0; n < NODES; n++) {
            if (ep_balance_holds(placed, e, n)) {
                ep_balance_put(b, e, n);
            }
        }
    }
    uint32_t loads = ep_balance_repair(b, target, COPIES);
    if (ep_balance_busiest(b) > target * (1 + 1e-6) * ep_balance_bound(now, true)) {
        loads = COPIES;
    }
    ep_balance_destroy(b);
    return loads;
}

static void report_family(bench_report *report, heat_family family, double drift, uint32_t seeds)
{
    static double loads[2][SEEDS_MAX];
    static const double targets[2] = {1.05, 1.02}, bars[2] = {31, 69};
    for (uint32_t seed = 0; seed < seeds; seed++) {
        double logits[EXPERTS], before[EXPERTS], after[EXPERTS];
        uint64_t random = seed * 7919 + 1;
        heat_draw_logits(family, 1.0, EXPERTS, &random, logits);
        heat_draw(family, logits, EXPERTS, &random, before);
        heat_drift(drift, EXPERTS, &random, logits);
        heat_draw(family, logits, EXPERTS, &random, after);
        ep_balance_input in = {.experts = EXPERTS,
                               .nodes = NODES,
                               .heat = before,
                               .speeds = speeds,
                               .slots = slots,
                               .copies_min = 1,
                               .copies_total = COPIES};
        ep_balance *placed = balance_of(&in);
        const ep_err err = ep_balance_fill(placed, NULL);
        EP_ASSERT(err == EP_OK);
        ep_balance_search(placed, 1.001);
        in.heat = after;
        for (uint32_t t = 0; t < 2; t++) {
            loads[t][seed] = repair(placed, &in, targets[t]);
        }
        ep_balance_destroy(placed);
    }
    for (uint32_t t = 0; t < 2; t++) {
        bench_report_value(report, bench_quantile(loads[t], seeds, 0.95), "loads", BENCH_LOWER,
                           drift == 0.3 ? bars[t] : NAN,
                           "%s 1.0, logits drift by %.1f, to %.2f: p95 of %u",
                           heat_family_name(family), drift, targets[t], seeds);
    }
}

int main(int argc, char **argv)
{
    uint32_t seeds = 100;
    for (int i = 2; i < argc; i++) {
        if (sscanf(argv[i], "seeds=%u", &seeds) != 1 || seeds == 0 || seeds > SEEDS_MAX) {
            fprintf(stderr, "bench_repair: '%s' is no option; there is: seeds=N, 1..%d\n", argv[i],
                    SEEDS_MAX);
            return 2;
        }
    }
    for (uint32_t n = 0; n < NODES; n++) {
        speeds[n] = 1;
        slots[n] = COPIES / NODES;
    }
    bench_report *report =
        bench_report_create("repair of a placement, 256 experts, 32 nodes, 288 slots");
    for (uint32_t i = 0; i < 3; i++) {
        report_family(report, HEAT_GUMBEL, i == 0 ? 0 : i == 1 ? 0.1 : 0.3, seeds);
        report_family(report, HEAT_LOGNORMAL, i == 0 ? 0 : i == 1 ? 0.1 : 0.3, seeds);
    }
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
