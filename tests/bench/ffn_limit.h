/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this machine allows an expert to take: the time of a plain read of the same weight bytes and the time of its arithmetic at the peak rate
 * of the instruction its numbers are made for, both on the threads that compute. Memory and clocks of a shared host drift within
 * seconds, so both are measured beside every repetition.
 */
#ifndef EP_BENCH_FFN_LIMIT_H
#define EP_BENCH_FFN_LIMIT_H

#include <stddef.h>
#include <stdint.h>

enum { FFN_LIMIT_THREADS_MAX = 512 };

/* Runs task(arg, index) on each of the team's threads, index 0 to threads - 1, at once; returns when all have. */
typedef struct ffn_team {
    uint32_t threads;
    void (*run)(struct ffn_team *team, void (*task)(void *arg, uint32_t index), void *arg);
    void *threads_of; /* of ffn_team_start */
} ffn_team;

/* Threads pinned one to each CPU this process may use; they sleep between runs. Ends the program when there is no memory. */
void ffn_team_start(ffn_team *team, uint32_t threads);
void ffn_team_stop(ffn_team *team);

typedef enum ffn_peak { FFN_PEAK_F32, FFN_PEAK_BF16, FFN_PEAK_INT8, FFN_PEAKS } ffn_peak;

typedef struct ffn_segment {
    const void *memory; /* aligned to 64 bytes */
    size_t bytes;
} ffn_segment;

/* Microseconds until all threads have read their slices of every segment, from when all are awake. */
double ffn_limit_read_us(ffn_team *team, const ffn_segment *segments, size_t count);
/*
 * Operations per microsecond of all threads together: multiplies and adds counted singly, in registers only, for some 3 ms.
 * f32: fused multiply-adds. bf16: vdpbf16ps. int8: vpdpbusd. What the CPU lacks falls back to f32. 0 where it is not known how (not x86).
 */
double ffn_limit_peak(ffn_team *team, ffn_peak peak);

/* The least microseconds, given both. */
static inline double ffn_limit_us(double read_us, double operations, double peak)
{
    double compute_us = peak > 0 ? operations / peak : 0;
    return read_us > compute_us ? read_us : compute_us;
}

#endif
