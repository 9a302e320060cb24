/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_rival.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_report.h"

enum { REPETITIONS_MIN = 3, REPETITIONS_MAX = 1000 };

static void omp_run(ffn_team *team, void (*task)(void *arg, uint32_t index), void *arg)
{
#pragma omp parallel num_threads((int)team->threads)
    task(arg, (uint32_t)omp_get_thread_num());
}

int ffn_rival_main(const ffn_rival *rival, int argc, char **argv)
{
    static double times[REPETITIONS_MAX], shares[REPETITIONS_MAX];
    if (argc != 6) {
        fprintf(stderr, "usage: %s H I M bf16|f32 SECONDS\n", argv[0]);
        return 2;
    }
    ffn_case c = ffn_case_make((uint32_t)atoi(argv[1]), (uint32_t)atoi(argv[2]), (uint32_t)atoi(argv[3]),
                               strcmp(argv[4], "bf16") == 0 ? EP_DTYPE_BF16 : EP_DTYPE_F32);
    ffn_team team = {.threads = (uint32_t)omp_get_max_threads(), .run = omp_run};
    if (rival->open(&c) != 0) {
        return 1;
    }
    const ffn_segment all = {.memory = rival->weights(), .bytes = ffn_case_expert_bytes(&c) * c.experts};
    double end_us = 0;
    size_t n = 0;
    rival->pass();
    for (end_us = bench_now_us() + 1e6 * atof(argv[5]); n < REPETITIONS_MAX && (n < REPETITIONS_MIN || bench_now_us() < end_us); n++) {
        double read_us = ffn_limit_read_us(&team, &all, 1);
        double peak = ffn_limit_peak(&team, ffn_case_peak(c.dtype));
        double begin_us = bench_now_us();
        rival->pass();
        times[n] = (bench_now_us() - begin_us) / c.experts;
        shares[n] = ffn_limit_us(read_us, ffn_case_operations(&c), peak) / c.experts / times[n];
    }
    ffn_probe probe;
    ep_dtype dtype;
    ffn_case_probe(&c, &probe);
    const void *y = rival->output(&dtype);
    printf("%.3f %.5f %.3e\n", bench_quantile(times, n, 0.5), bench_quantile(shares, n, 0.5), ffn_case_error(&probe, y, dtype));
    return 0;
}
