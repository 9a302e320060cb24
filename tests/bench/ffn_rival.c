/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_rival.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_report.h"

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
    enum { PASSES = 2 };
    char line[16];
    if (argc != 5 || format_named(argv[4]) == EP_WEIGHTS_NONE) {
        fprintf(stderr, "usage: %s H I M FORMAT\n", argv[0]);
        return 2;
    }
    const ffn_case c = ffn_case_make((uint32_t)atoi(argv[1]), (uint32_t)atoi(argv[2]),
                                     (uint32_t)atoi(argv[3]), format_named(argv[4]));
    if (rival->open(&c) != 0) {
        return 1;
    }
    rival->pass();
    printf("ready %.3e\n", error_of(rival, &c));
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin) != NULL) {
        const double begin_us = bench_now_us();
        for (int i = 0; i < PASSES; i++) {
            rival->pass();
        }
        printf("%.3f\n", (bench_now_us() - begin_us) / PASSES / c.experts);
        fflush(stdout);
    }
    return 0;
}
