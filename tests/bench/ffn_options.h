/* SPDX-License-Identifier: Apache-2.0 */
/* What the benchmarks ffn, formats and skew take as arguments, and the shapes and numbers of rows
 * they go through when nothing is named. */
#ifndef EP_BENCH_FFN_OPTIONS_H
#define EP_BENCH_FFN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "backends/backend.h"

enum { FFN_OPTIONS_SHAPES = 3, FFN_OPTIONS_LIST = 16 };

extern const uint32_t ffn_shapes[FFN_OPTIONS_SHAPES][2];

typedef struct ffn_options {
    const char *json;
    uint32_t shapes_count;
    uint32_t shapes[FFN_OPTIONS_SHAPES][2]; /* hidden, inner */
    uint32_t rows_count;
    uint32_t rows[FFN_OPTIONS_LIST];
    uint32_t formats_count;
    ep_weight_format formats[FFN_OPTIONS_LIST];
    double seconds;
    uint32_t threads;
    uint32_t experts; /* 0: not named */
    bool portable;    /* the family every CPU has, not the fastest here */
    uint32_t families_count;
    ep_numerics families[FFN_OPTIONS_LIST]; /* to be compared; bench_formats only */
    bool rivals;
} ffn_options;

/*
 * options holds what is to be when nothing is named; no shapes become ffn_shapes, threads 0 the
 * CPUs of this process. Arguments: a file name for the JSON, and
 *     shape=HxI  m=1,4,16  format=w8a8,mxfp4  seconds=S  threads=N  experts=N
 *     numerics=portable  family=auto,w4a8  rivals=no
 * Formats are named as in numerics ids. False, with the reason on stderr, when one is wrong.
 */
bool ffn_options_read(int argc, char **argv, ffn_options *options);
/* The family that is fastest here, or the one every CPU has. */
ep_numerics ffn_options_numerics(const ffn_options *options);

#endif
