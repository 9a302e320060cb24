/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/store_policies.h"

#include <math.h>
#include <stdio.h>

#include "base/check.h"
#include "bench/store_rivals.h"

#define SEEDS 3
#define FIRST_SEED 5200 /* of traces that nothing was chosen on */
#define DRAWS 10        /* of each family */
#define FIRST_DRAW 7300

static const trace_setting settings[] = {
    {"one user, 128 experts, 8 of them", 12, 128, 8, 1, 5, 1.1f, 0.35f, 0.0f, 64, 32, 6, 1500, 0,
     0},
    {"many users, 128 experts, 8 of them", 12, 128, 8, 16, 5, 0.64f, 0.35f, 0.1f, 64, 1, 0, 500, 0,
     0},
    {"a few users, 128 experts, 8 of them", 12, 128, 8, 4, 5, 1.2f, 0.35f, 0.05f, 64, 1, 0, 1200, 0,
     0},
    {"agents, 256 experts, 8 of them", 12, 256, 8, 2, 6, 1.28f, 0.3f, 0.05f, 100, 1, 3, 1500, 0, 0},
    {"small, 32 experts, 4 of them", 24, 32, 4, 1, 4, 0.87f, 0.45f, 0.0f, 200, 64, 2, 1500, 0, 0},
    {"drift, 64 experts, 6 of them", 16, 64, 6, 1, 5, 1.4f, 0.25f, 0.2f, 50, 16, 8, 1500, 0, 0},
};

typedef enum measure {
    OWN, /* %: hits */
    BELADY,
    RIVAL,  /* the best */
    CLOSED, /* with prefetch: a caller who comes back at once, ... */
    HALF,   /* ... needed loads take a half ... */
    QUARTER,
    OWN_OVER_RIVAL, /* points */
    HALF_OVER_RIVAL,
    HALF_OVER_OWN,
    QUARTER_OVER_OWN,
    HALF_USELESS, /* loads ahead per visit that nobody used */
    HALF_USEFUL,
    HALF_WAITED, /* time a visit waits for loads, of that without prefetch */
    MEASURES
} measure;

typedef struct results {
    double of[MEASURES][SEEDS > DRAWS ? SEEDS : DRAWS];
    size_t count;
    uint32_t best; /* rival, of the last trace */
} results;

static own_result run_paced(const store_trace *trace, uint32_t capacity, uint32_t from,
                            const store_clock *measured, double pace_us, double gap_us)
{
    store_clock clock = *measured;
    clock.pace_us = pace_us;
    clock.gap_us = gap_us;
    return own_run(trace, capacity, from, &clock, true);
}

static void measure_trace(const trace_setting *setting, uint64_t seed, const store_clock *clock,
                          results *r)
{
    store_trace *trace = store_trace_make(setting, seed);
    const uint32_t capacity = setting->layers * setting->experts / 4;
    const uint32_t from = trace->visits_count / 5;
    const size_t i = r->count++;
    double best = 0;
    for (uint32_t k = 0; k < RIVALS_COUNT; k++) {
        const double rate = rival_hit_rate((rival)k, trace, capacity, from) * 100;
        if (k == RIVAL_BELADY) {
            r->of[BELADY][i] = rate;
        } else if (rate > best) {
            best = rate;
            r->best = k;
        }
    }
    const own_result own = own_run(trace, capacity, from, clock, false);
    const double needed_us = own.misses * clock->load_us;
    const double computed_us = (double)trace->uses_count / trace->visits_count * clock->compute_us;
    const own_result closed = run_paced(trace, capacity, from, clock, 0, computed_us);
    const own_result half = run_paced(trace, capacity, from, clock, 2 * needed_us, 0);
    const own_result quarter = run_paced(trace, capacity, from, clock, 4 * needed_us, 0);
    r->of[OWN][i] = own.hits * 100;
    r->of[RIVAL][i] = best;
    r->of[CLOSED][i] = closed.hits * 100;
    r->of[HALF][i] = half.hits * 100;
    r->of[QUARTER][i] = quarter.hits * 100;
    r->of[OWN_OVER_RIVAL][i] = own.hits * 100 - best;
    r->of[HALF_OVER_RIVAL][i] = half.hits * 100 - best;
    r->of[HALF_OVER_OWN][i] = (half.hits - own.hits) * 100;
    r->of[QUARTER_OVER_OWN][i] = (quarter.hits - own.hits) * 100;
    r->of[HALF_USEFUL][i] = half.prefetches * half.useful;
    r->of[HALF_USELESS][i] = half.prefetches * (1 - half.useful);
    r->of[HALF_WAITED][i] = half.waited / own.waited;
    store_trace_free(trace);
}

/* Sorts, as bench_quantile does; p 0: the least. */
static double at(results *r, measure m, double p)
{
    return bench_quantile(r->of[m], r->count, p);
}

static void add_row(bench_report *report, results *r, const char *name, const char *what,
                    measure value, measure other, measure points, double bar)
{
    bench_row row = bench_value(at(r, value, 0.5), "% hits", BENCH_HIGHER, bar);
    row.limit = at(r, BELADY, 0.5);
    row.rival = at(r, other, 0.5);
    row.ratio = at(r, points, 0.5);
    bench_report_add(report, &row, "%s%s", name, what);
}

static void add_rows(bench_report *report, results *r, const char *name)
{
    char what[64];
    snprintf(what, sizeof(what), "; points over best rival (%s)", rival_names[r->best]);
    add_row(report, r, name, what, OWN, RIVAL, OWN_OVER_RIVAL, -1);
    add_row(report, r, name, ", prefetch (link half taken); points over best rival", HALF, RIVAL,
            HALF_OVER_RIVAL, 2);
    add_row(report, r, name, ", prefetch (link half taken); points over own without", HALF, OWN,
            HALF_OVER_OWN, 2);
    add_row(report, r, name, ", prefetch (link a quarter taken); points over own without", QUARTER,
            OWN, QUARTER_OVER_OWN, 2);
    printf("    with prefetch %.1f %% (caller at once), %.1f %% (needed loads take half), %.1f %% "
           "(a quarter)\n"
           "    at half: %.2f loads ahead per visit in time and used, %.2f wasted; visits wait "
           "%.2f of the time without prefetch\n",
           at(r, CLOSED, 0.5), at(r, HALF, 0.5), at(r, QUARTER, 0.5), at(r, HALF_USEFUL, 0.5),
           at(r, HALF_USELESS, 0.5), at(r, HALF_WAITED, 0.5));
    fflush(stdout);
}

void store_bench_policies(bench_report *report, const store_clock *clock)
{
    printf("a load takes %.2f ms, an expert's rows %.2f ms\n", clock->load_us / 1e3,
           clock->compute_us / 1e3);
    for (size_t s = 0; s < EP_ARRAY_COUNT(settings); s++) {
        results r = {.count = 0};
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            measure_trace(&settings[s], FIRST_SEED + 10 * s + seed, clock, &r);
        }
        add_rows(report, &r, settings[s].name);
    }
    for (int has_types = 0; has_types < 2; has_types++) {
        results r = {.count = 0};
        for (uint64_t d = 0; d < DRAWS; d++) {
            const trace_setting drawn =
                store_trace_draw(FIRST_DRAW + 100 * (uint64_t)has_types + d, has_types);
            measure_trace(&drawn, FIRST_DRAW + 1000 + d, clock, &r);
        }
        add_rows(report, &r, has_types ? "10 drawn loads with kinds of tokens" : "10 drawn loads");
        printf("    worst of them: %+.1f points over the best rival without prefetch, %+.1f with; "
               "%+.1f over own without\n",
               at(&r, OWN_OVER_RIVAL, 0), at(&r, HALF_OVER_RIVAL, 0), at(&r, QUARTER_OVER_OWN, 0));
    }
}
