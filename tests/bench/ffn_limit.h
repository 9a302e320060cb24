/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this machine allows an expert to take: the time of a plain read of the same weight bytes and
 * the time of its arithmetic at the peak rate of the instruction its numbers are made for, both on
 * the threads that compute. Memory and clocks of a shared host drift within seconds, so both are
 * measured beside every repetition.
 */
#ifndef EP_BENCH_FFN_LIMIT_H
#define EP_BENCH_FFN_LIMIT_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "bench/ffn_team.h"

typedef enum ffn_peak { FFN_PEAK_F32, FFN_PEAK_BF16, FFN_PEAK_INT8, FFN_PEAKS } ffn_peak;

typedef struct ffn_segment {
    const void *memory; /* aligned to 64 bytes */
    size_t bytes;
} ffn_segment;

/*
 * Tries some ways of reading all segments (vector loads of one to four streams, with and without
 * fetching ahead, each thread its own stretches or whoever is free the next piece) and keeps the
 * one that is quickest here for ffn_limit_read_us. Returns its name; writes what each reached to
 * show, unless that is NULL.
 */
const char *ffn_limit_choose_read(ffn_team *team, const ffn_segment *segments, size_t count,
                                  FILE *show);
/* Microseconds until all threads together have read every segment, from when all are awake. */
double ffn_limit_read_us(ffn_team *team, const ffn_segment *segments, size_t count);
/*
 * Operations per microsecond of all threads together: multiplies and adds counted singly, in
 * registers only, for some 3 ms. f32: fused multiply-adds. bf16: vdpbf16ps. int8: vpdpbusd. What
 * the CPU lacks falls back to f32. 0 where it is not known how (not x86).
 */
double ffn_limit_peak(ffn_team *team, ffn_peak peak);
/* Cycles per microsecond of a thread while all run; 0 where it is not known how (not x86). */
double ffn_limit_clock(ffn_team *team);

#endif
