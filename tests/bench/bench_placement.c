/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placement by heat. Balance: the busiest node against the bound (lib/placement/balance_bound.c),
 * the worst of so many drawn layers. Time: of one thread, for the layers of a model, and for one
 * layer as experts and nodes grow.
 *
 *     bench_placement [JSON] [seeds=100]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/bench_report.h"
#include "bench/heat_draw.h"
#include "placement/balance.h"

enum { EXPERTS_MAX = 1024, NODES_MAX = 1024, LAYERS = 58, ROUNDS = 9 };
#define GOOD 1.001

typedef struct {
    ep_balance_input in;
    double heat[EXPERTS_MAX];
    double speeds[NODES_MAX];
    uint32_t slots[NODES_MAX];
} layer;

static layer layers[LAYERS];

static void draw(layer *l, heat_family family, double parameter, uint32_t experts, uint32_t nodes,
                 uint32_t copies, uint64_t seed)
{
    double logits[EXPERTS_MAX];
    heat_draw_logits(family, parameter, experts, &seed, logits);
    heat_draw(family, logits, experts, &seed, l->heat);
    for (uint32_t n = 0; n < nodes; n++) {
        l->speeds[n] = 1;
        l->slots[n] = copies / nodes + (n < copies % nodes);
    }
    l->in = (ep_balance_input){.experts = experts,
                               .nodes = nodes,
                               .heat = l->heat,
                               .speeds = l->speeds,
                               .slots = l->slots,
                               .copies_min = 1,
                               .copies_total = copies};
}

static double place(const layer *l)
{
    ep_balance *b = NULL;
    const ep_err created = ep_balance_create(&l->in, &b, NULL);
    EP_ASSERT(created == EP_OK);
    const ep_err filled = ep_balance_fill(b, NULL);
    EP_ASSERT(filled == EP_OK);
    ep_balance_search(b, GOOD);
    const double busiest = ep_balance_busiest(b);
    ep_balance_destroy(b);
    return busiest;
}

static void report_balance(bench_report *report, heat_family family, double parameter,
                           uint32_t seeds)
{
    double worst = 0;
    for (uint32_t seed = 0; seed < seeds; seed++) {
        layer *l = &layers[0];
        draw(l, family, parameter, 256, 32, 288, seed * 7919 + 1);
        worst = fmax(worst, place(l) / ep_balance_bound(&l->in, true));
    }
    bench_report_value(report, worst, "of the bound", BENCH_LOWER, 1.002,
                       "256 experts, 32 nodes, 288 slots, %s %.1f: worst of %u",
                       heat_family_name(family), parameter, seeds);
}

static void report_time(bench_report *report, const char *what, uint32_t count, uint32_t experts,
                        uint32_t nodes, uint32_t copies, double bar)
{
    double ms[ROUNDS];
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t l = 0; l < count; l++) {
            const heat_family family = l % 2 == 0 ? HEAT_LOGNORMAL : HEAT_ZIPF;
            draw(&layers[l], family, 1.0, experts, nodes, copies, round * 1009 + l);
        }
        const double begin = bench_now_us();
        for (uint32_t l = 0; l < count; l++) {
            place(&layers[l]);
        }
        ms[round] = (bench_now_us() - begin) * 1e-3;
    }
    bench_report_value(report, bench_quantile(ms, ROUNDS, 0.5), "ms", BENCH_LOWER, bar,
                       "%s of %u experts over %u nodes, %u slots", what, experts, nodes, copies);
}

int main(int argc, char **argv)
{
    uint32_t seeds = 100;
    for (int i = 2; i < argc; i++) {
        if (sscanf(argv[i], "seeds=%u", &seeds) != 1 || seeds == 0) {
            fprintf(stderr, "bench_placement: '%s' is no option; there is: seeds=N\n", argv[i]);
            return 2;
        }
    }
    bench_report *report = bench_report_create("placement by heat");
    const double parameters[][4] = {
        {0.5, 0.8, 1.0, 1.2}, {0.3, 0.6, 1.0, 1.5}, {1.0, 1.3, 1.6, 2.0}};
    for (heat_family family = HEAT_ZIPF; family <= HEAT_GUMBEL; family++) {
        for (uint32_t i = 0; i < 4; i++) {
            report_balance(report, family, parameters[family][i], seeds);
        }
    }
    report_time(report, "58 layers", LAYERS, 256, 32, 288, 10);
    report_time(report, "a layer", 1, 128, 32, 144, NAN);
    report_time(report, "a layer", 1, 256, 64, 288, NAN);
    report_time(report, "a layer", 1, 512, 128, 576, NAN);
    report_time(report, "a layer", 1, 1024, 256, 1152, 200);
    report_time(report, "a layer", 1, 1024, 1024, 2048, NAN);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
