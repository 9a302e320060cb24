/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_rival.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_report.h"
#include "bench/ffn_meter.h"

static void omp_run(ffn_team *team, void (*task)(void *arg, uint32_t index), void *arg)
{
#pragma omp parallel num_threads((int)team->threads)
    task(arg, (uint32_t)omp_get_thread_num());
}

static double run_pass(void *arg)
{
    const ffn_rival *rival = arg;
    const double begin_us = bench_now_us();
    rival->pass();
    return bench_now_us() - begin_us;
}

static ep_weight_format format_named(const char *name)
{
    int f = EP_WEIGHTS_NONE + 1;
    while (f < EP_WEIGHTS_COUNT && strcmp(name, ep_weight_format_name((ep_weight_format)f)) != 0) {
        f++;
    }
    return (ep_weight_format)(f % EP_WEIGHTS_COUNT);
}

/* Of the last expert's output, against a calculation in double. */
static double error_of(const ffn_rival *rival, const ffn_case *c)
{
    ffn_matrix matrices[FFN_MATRICES];
    ffn_probe probe;
    ep_dtype dtype;
    for (int m = 0; m < FFN_MATRICES; m++) {
        ffn_case_matrix(c, m, &matrices[m]);
    }
    ffn_case_probe(c, matrices, &probe);
    for (int m = 0; m < FFN_MATRICES; m++) {
        ffn_matrix_free(&matrices[m]);
    }
    const void *y = rival->output(&dtype);
    return ffn_case_error(&probe, y, dtype);
}

int ffn_rival_main(const ffn_rival *rival, int argc, char **argv)
{
    static ffn_meter meter;
    if (argc != 5 || format_named(argv[4]) == EP_WEIGHTS_NONE) {
        fprintf(stderr, "usage: %s H I M FORMAT\n", argv[0]);
        return 2;
    }
    ffn_case c = ffn_case_make((uint32_t)atoi(argv[1]), (uint32_t)atoi(argv[2]), (uint32_t)atoi(argv[3]),
                               format_named(argv[4]));
    ffn_team team = {.threads = (uint32_t)omp_get_max_threads(), .run = omp_run};
    if (rival->open(&c) != 0) {
        return 1;
    }
    const ffn_segment all = {.memory = rival->weights(), .bytes = ffn_case_expert_bytes(&c) * c.experts};
    meter = (ffn_meter){.team = &team,
                        .segments = &all,
                        .segments_count = 1,
                        .experts = c.experts,
                        .operations = ffn_case_operations(&c),
                        .peak = ffn_case_peak(c.format),
                        .run = run_pass,
                        .arg = (void *)(uintptr_t)rival};
    (void)ffn_limit_choose_read(&team, &all, 1, NULL);
    rival->pass();
    printf("ready %.3e\n", error_of(rival, &c));
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof(line), stdin) != NULL) {
        meter.count = 0;
        (void)ffn_meter_take(&meter);
        const ffn_figures f = ffn_meter_figures(&meter);
        printf("%.3f %.5f %.3f\n", (meter.times[0] + meter.times[1]) / 2,
               (ffn_meter_share(&meter, 0) + ffn_meter_share(&meter, 1)) / 2, f.read_gbs);
        fflush(stdout);
    }
    return 0;
}
