/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library that computes the same experts, in a program of its own so that none of it comes near the
 * product: PROGRAM H I M FORMAT It says "ready ERROR" when it has run a first pass, then answers each line
 * with "us_per_expert share read_gbs" of one take (ffn_meter.h) on the library's own OpenMP threads. share:
 * of the limit that holds for weights of FORMAT, as for the product. A library that has to use wider weights
 * pays for them.
 */
#ifndef EP_BENCH_FFN_RIVAL_H
#define EP_BENCH_FFN_RIVAL_H

#include "bench/ffn_case.h"

typedef struct ffn_rival {
    /* Packs the weights; rows are ffn_case_input. Returns 0 or prints why not. Kept for the life of the
     * program. */
    int (*open)(const ffn_case *c);
    /* All experts, one after the other. */
    void (*pass)(void);
    /* Weights of all experts as they lie in memory, at least as many bytes as those of the case's format. */
    const void *(*weights)(void);
    /* Output row 0 of the last expert. */
    const void *(*output)(ep_dtype *out_dtype);
} ffn_rival;

int ffn_rival_main(const ffn_rival *rival, int argc, char **argv);

#endif
