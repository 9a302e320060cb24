/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Libraries that compute the same cell, each in a program of its own (ffn_rival.h) that waits while
 * others measure: their takes come between ours, so that drift of memory and clocks falls on all.
 */
#ifndef EP_BENCH_FFN_RIVALS_H
#define EP_BENCH_FFN_RIVALS_H

#include <sys/types.h>

#include "bench/ffn_options.h"
#include "bench/ffn_rows.h"

enum { FFN_RIVALS = 2 };

typedef struct ffn_rival_process {
    const char *name;
    pid_t pid; /* 0: not asked for, or it has ended */
    FILE *to;
    FILE *from;
    double error;
    double used_us;
    size_t count; /* takes, each beside our take of the same number */
    double times[FFN_METER_SAMPLES_MAX];
} ffn_rival_process;

typedef struct ffn_rivals {
    uint32_t count;
    ffn_rival_process process[FFN_RIVALS];
} ffn_rivals;

/*
 * Starts those that know the case's format and waits until they are ready; none when
 * options->rivals is not set. A build without them (no --rivals) misses all. rivals is large.
 */
void ffn_rivals_open(ffn_rivals *rivals, const ffn_case *c, const ffn_options *options);
/* To be called after each take of ours. One that has had seconds passes by. */
void ffn_rivals_take(ffn_rivals *rivals, double seconds);
/*
 * Ends them and adds a row for each: our share of the limit and theirs of the same one, ours to be
 * at least as great. A library that has to use wider weights pays for them. One that is missing or
 * has failed makes a row that fails.
 */
void ffn_rivals_close(ffn_rivals *rivals, bench_report *report, const ffn_case *c,
                      const ffn_meter *ours);

#endif
