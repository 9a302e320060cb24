/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pass over experts against what the machine allows it. Memory and clocks of a shared host drift
 * within seconds, so a take is limit, pass, pass, limit, and each pass is judged by the limit
 * beside it; what is reported are medians over all takes.
 */
#ifndef EP_BENCH_FFN_METER_H
#define EP_BENCH_FFN_METER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bench/ffn_limit.h"

enum { FFN_METER_SAMPLES_MAX = 2000 };

typedef struct ffn_meter {
    ffn_team *team;
    const ffn_segment *segments; /* of all experts of a pass; read in one piece */
    size_t segments_count;
    uint32_t experts;
    double operations; /* of a pass */
    ffn_peak peak;
    /* of a pass, which no quad or pair does: at the rate of f32 multiply-adds, after the others */
    double f32_operations;
    double (*run)(void *arg); /* one pass, in microseconds */
    void *arg;
    size_t count;
    double times[FFN_METER_SAMPLES_MAX]; /* of an expert, as all below */
    double reads[FFN_METER_SAMPLES_MAX];
    double computes[FFN_METER_SAMPLES_MAX];
} ffn_meter;

typedef struct ffn_figures {
    double us; /* of an expert */
    double limit_us;
    double share;      /* limit / time */
    double sum_share;  /* the same when nothing is read while something is computed */
    bool memory_binds; /* reading takes longer than computing */
    double read_gbs;
    double peak_gops;
} ffn_figures;

/* Two samples: meter->times[count] and [count + 1]. False when there is no room for more. */
bool ffn_meter_take(ffn_meter *meter);
/* The limit over the time of one sample. */
double ffn_meter_share(const ffn_meter *meter, size_t sample);
ffn_figures ffn_meter_figures(const ffn_meter *meter);

#endif
