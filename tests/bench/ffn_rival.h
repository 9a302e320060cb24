/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library that computes the same experts, in a program of its own so that none of it comes near
 * the product: PROGRAM H I M FORMAT It says "ready ERROR" when it has run a first pass, then
 * answers each line with the microseconds per expert of two more.
 */
#ifndef EP_BENCH_FFN_RIVAL_H
#define EP_BENCH_FFN_RIVAL_H

#include "bench/ffn_case.h"

typedef struct ffn_rival {
    /* Packs the weights; rows are ffn_case_input. Returns 0 or prints why not. Kept for the life of
     * the program. */
    int (*open)(const ffn_case *c);
    /* All experts, one after the other. */
    void (*pass)(void);
    /* Output row 0 of the last expert. */
    const void *(*output)(ep_dtype *out_dtype);
} ffn_rival;

int ffn_rival_main(const ffn_rival *rival, int argc, char **argv);

#endif
