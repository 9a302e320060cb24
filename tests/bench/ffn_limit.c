/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_limit.h"

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/cpu_features.h"
#include "bench/bench_report.h"

/* ---- timing: from when all are awake until the last has ended ---- */

typedef struct {
    ffn_team *team;
    atomic_uint arrived;
    double begin_us;
    double end_us[FFN_TEAM_THREADS_MAX];
    const ffn_segment *segments;
    size_t segments_count;
    const struct read_form *form;
    atomic_size_t claimed; /* pieces of the segments */
    ffn_peak peak;
} measurement;

static void meet(measurement *m, uint32_t index)
{
    atomic_fetch_add(&m->arrived, 1);
    while (atomic_load(&m->arrived) < m->team->threads) {
        ep_cpu_relax();
    }
    if (index == 0) {
        m->begin_us = bench_now_us();
    }
}

static double run_measured(measurement *m, void (*task)(void *arg, uint32_t index))
{
    /* Threads that computed may still be spinning; then both would want the CPU. */
    const struct timespec settle = {.tv_nsec = 300000};
    nanosleep(&settle, NULL);
    m->team->run(m->team, task, m);
    double end = m->end_us[0];
    for (uint32_t i = 1; i < m->team->threads; i++) {
        end = m->end_us[i] > end ? m->end_us[i] : end;
    }
    return end - m->begin_us;
}

/* ---- reading ---- */

/* One cache line; each form reads it with vectors as wide as its CPU's. */
typedef uint64_t line __attribute__((vector_size(64)));

enum { STEP_BYTES = 4 * (int)sizeof(line), PIECE_BYTES = 512 << 10 };

/*
 * Sums all lines of `streams` stretches of `bytes` each, one behind the other in memory; from each
 * in turn a few lines. fetch(p): what is done about the line at p, which lies `ahead` bytes after
 * one that is read.
 */
#define READ_LOOP(name, target, streams, fetch)                                                    \
    target static uint64_t name(const char *memory, size_t bytes, size_t ahead)                    \
    {                                                                                              \
        line a = {0}, b = {0}, c = {0}, d = {0};                                                   \
        for (size_t at = 0; at + STEP_BYTES <= bytes; at += STEP_BYTES) {                          \
            _Pragma("GCC unroll 8") for (size_t s = 0; s < (streams); s++)                         \
            {                                                                                      \
                const char *p = memory + s * bytes + at;                                           \
                fetch(p + ahead);                                                                  \
                fetch(p + ahead + 64);                                                             \
                fetch(p + ahead + 128);                                                            \
                fetch(p + ahead + 192);                                                            \
                a += *(const line *)(const void *)p;                                               \
                b += *(const line *)(const void *)(p + 64);                                        \
                c += *(const line *)(const void *)(p + 128);                                       \
                d += *(const line *)(const void *)(p + 192);                                       \
            }                                                                                      \
        }                                                                                          \
        (void)ahead;                                                                               \
        a += b + c + d;                                                                            \
        return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];                              \
    }
#define NO_FETCH(p) (void)(p)
#define FETCH_L1(p) __builtin_prefetch((p), 0, 3)
#define FETCH_L2(p) __builtin_prefetch((p), 0, 2)

typedef enum read_loop { PLAIN, TO_L2, PLAIN4, TO_L2_4, TO_L1_4, TO_L2_8, READ_LOOPS } read_loop;
typedef uint64_t read_function(const char *memory, size_t bytes, size_t ahead);

#define READ_LOOPS_OF(isa, target)                                                                 \
    READ_LOOP(read_plain_##isa, target, 1, NO_FETCH)                                               \
    READ_LOOP(read_l2_##isa, target, 1, FETCH_L2)                                                  \
    READ_LOOP(read_plain4_##isa, target, 4, NO_FETCH)                                              \
    READ_LOOP(read_l2_4_##isa, target, 4, FETCH_L2)                                                \
    READ_LOOP(read_l1_4_##isa, target, 4, FETCH_L1)                                                \
    READ_LOOP(read_l2_8_##isa, target, 8, FETCH_L2)                                                \
    static read_function *const loops_##isa[READ_LOOPS] = {read_plain_##isa,  read_l2_##isa,       \
                                                           read_plain4_##isa, read_l2_4_##isa,     \
                                                           read_l1_4_##isa,   read_l2_8_##isa};

READ_LOOPS_OF(any, )
#if defined(__x86_64__)
READ_LOOPS_OF(avx2, __attribute__((target("avx2"))))
READ_LOOPS_OF(avx512, __attribute__((target("avx512f"))))
#endif

static read_function *loop_of(read_loop loop)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        return loops_avx512[loop];
    }
    if (__builtin_cpu_supports("avx2")) {
        return loops_avx2[loop];
    }
#endif
    return loops_any[loop];
}

/* How a team reads. */
typedef struct read_form {
    const char *name;
    read_loop loop;
    uint32_t streams;
    uint32_t ahead; /* bytes */
    /* each thread has its own stretch of each segment; else whoever is free takes the next piece,
     * as tasks are taken */
    bool slices;
} read_form;

static const read_form forms[] = {
    {"slices", PLAIN, 1, 0, true},
    {"pieces", PLAIN, 1, 0, false},
    {"2 KiB ahead into L2", TO_L2, 1, 2048, false},
    {"4 streams", PLAIN4, 4, 0, false},
    {"4 streams, 1 KiB ahead into L2", TO_L2_4, 4, 1024, false},
    {"4 streams, 2 KiB ahead into L2", TO_L2_4, 4, 2048, false},
    {"4 streams, 1 KiB ahead into L1", TO_L1_4, 4, 1024, false},
    {"8 streams, 1 KiB ahead into L2", TO_L2_8, 8, 1024, false},
};
enum { FORMS = sizeof(forms) / sizeof(forms[0]), FORM_ROUNDS = 7, FORM_SAMPLES_MAX = 210 };

/* bytes in streams; what does not divide is left out. */
static uint64_t read_bytes(const read_form *form, const char *memory, size_t bytes)
{
    return loop_of(form->loop)(memory, bytes / form->streams / STEP_BYTES * STEP_BYTES,
                               form->ahead);
}

static void read_slices(void *arg, uint32_t index)
{
    measurement *m = arg;
    volatile uint64_t sum = 0;
    meet(m, index);
    for (size_t s = 0; s < m->segments_count; s++) {
        const size_t slice = m->segments[s].bytes / m->team->threads / STEP_BYTES * STEP_BYTES;
        sum += read_bytes(m->form, (const char *)m->segments[s].memory + slice * index, slice);
    }
    m->end_us[index] = bench_now_us();
}

static void read_pieces(void *arg, uint32_t index)
{
    measurement *m = arg;
    volatile uint64_t sum = 0;
    size_t segment = 0, first = 0; /* number of the segment's first piece */
    meet(m, index);
    for (;;) {
        const size_t piece = atomic_fetch_add(&m->claimed, 1);
        size_t pieces;
        while (segment < m->segments_count &&
               piece >= first + (pieces = (m->segments[segment].bytes + PIECE_BYTES - 1) /
                                          PIECE_BYTES)) {
            first += pieces;
            segment++;
        }
        if (segment == m->segments_count) {
            break;
        }
        const size_t at = (piece - first) * PIECE_BYTES;
        const size_t left = m->segments[segment].bytes - at;
        sum += read_bytes(m->form, (const char *)m->segments[segment].memory + at,
                          left < PIECE_BYTES ? left : PIECE_BYTES);
    }
    m->end_us[index] = bench_now_us();
}

static double read_us(ffn_team *team, const ffn_segment *segments, size_t count,
                      const read_form *form)
{
    static measurement m;
    m = (measurement){.team = team, .segments = segments, .segments_count = count, .form = form};
    return run_measured(&m, form->slices ? read_slices : read_pieces);
}

static const read_form *chosen = &forms[0];

const char *ffn_limit_choose_read(ffn_team *team, const ffn_segment *segments, size_t count,
                                  FILE *show)
{
    /* Of all calls: a form's time against the mean of its round. Memory's speed changes between
     * rounds, and which form is best does not. */
    static double against[FORMS][FORM_SAMPLES_MAX];
    static size_t samples = 0;
    double times[FORMS][FORM_ROUNDS], sorted[FORM_SAMPLES_MAX], best = INFINITY, bytes = 0;
    for (size_t s = 0; s < count; s++) {
        bytes += (double)segments[s].bytes;
    }
    for (int round = 0; round < FORM_ROUNDS; round++) {
        double sum = 0;
        for (int f = 0; f < FORMS; f++) {
            times[f][round] = read_us(team, segments, count, &forms[f]);
            sum += times[f][round];
        }
        for (int f = 0; f < FORMS && samples < FORM_SAMPLES_MAX; f++) {
            against[f][samples] = times[f][round] * FORMS / sum;
        }
        samples += samples < FORM_SAMPLES_MAX ? 1 : 0;
    }
    for (int f = 0; f < FORMS; f++) {
        memcpy(sorted, against[f], samples * sizeof(sorted[0]));
        const double score = bench_quantile(sorted, samples, 0.5);
        if (score < best) {
            best = score;
            chosen = &forms[f];
        }
        if (show != NULL) {
            fprintf(show, "    %-40s %6.1f GB/s\n", forms[f].name,
                    bytes / bench_quantile(times[f], FORM_ROUNDS, 0.5) * 1e-3);
        }
    }
    return chosen->name;
}

double ffn_limit_read_us(ffn_team *team, const ffn_segment *segments, size_t count)
{
    return read_us(team, segments, count, chosen);
}

#if defined(__x86_64__)
/* 24 accumulators in registers, as a kernel's tile has; nothing is loaded. */
#define STEP4(ins, width, a, b, c, d)                                                              \
    ins " %%" width "14,%%" width "15,%%" width a "\n" ins " %%" width "14,%%" width               \
        "15,%%" width b "\n" ins " %%" width "14,%%" width "15,%%" width c "\n" ins " %%" width    \
        "14,%%" width "15,%%" width d "\n"
#define STEP24(ins)                                                                                \
    STEP4(ins, "zmm", "0", "1", "2", "3")                                                          \
    STEP4(ins, "zmm", "4", "5", "6", "7")                                                          \
    STEP4(ins, "zmm", "8", "9", "10", "11")                                                        \
    STEP4(ins, "zmm", "16", "17", "18", "19")                                                      \
    STEP4(ins, "zmm", "20", "21", "22", "23")                                                      \
    STEP4(ins, "zmm", "24", "25", "26", "27")
#define LOW                                                                                        \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"
#define HIGH                                                                                       \
    "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",      \
        "xmm26", "xmm27"
#define PEAK512(name, ins)                                                                         \
    __attribute__((target("avx512f"))) static void name(uint64_t rounds)                           \
    {                                                                                              \
        __asm__ volatile("vpxor %%xmm14,%%xmm14,%%xmm14\nvpxor %%xmm15,%%xmm15,%%xmm15\n" ::       \
                             : "xmm14", "xmm15");                                                  \
        for (uint64_t i = 0; i < rounds; i++) {                                                    \
            __asm__ volatile(STEP24(ins)::: LOW, HIGH, "xmm14", "xmm15");                          \
        }                                                                                          \
    }
PEAK512(peak_f32_512, "vfmadd231ps")
PEAK512(peak_bf16_512, "vdpbf16ps")
PEAK512(peak_int8_512, "vpdpbusd")

__attribute__((target("avx2,fma"))) static void peak_f32_256(uint64_t rounds)
{
    __asm__ volatile("vpxor %%xmm14,%%xmm14,%%xmm14\nvpxor %%xmm15,%%xmm15,%%xmm15\n" ::
                         : "xmm14", "xmm15");
    for (uint64_t i = 0; i < 2 * rounds; i++) {
        __asm__ volatile(STEP4("vfmadd231ps", "ymm", "0", "1", "2", "3")
                             STEP4("vfmadd231ps", "ymm", "4", "5", "6", "7")
                                 STEP4("vfmadd231ps", "ymm", "8", "9", "10", "11")::
                                     : LOW, "xmm14", "xmm15");
    }
}

/* The loop for a peak and the operations of one of its rounds. */
static void (*peak_loop(ffn_peak peak, uint64_t *out_operations))(uint64_t)
{
    const uint64_t lanes = 24 * 16 * 2; /* multiply and add */
    if (__builtin_cpu_supports("avx512f")) {
        if (peak == FFN_PEAK_BF16 && __builtin_cpu_supports("avx512bf16")) {
            *out_operations = 2 * lanes;
            return peak_bf16_512;
        }
        if (peak == FFN_PEAK_INT8 && __builtin_cpu_supports("avx512vnni")) {
            *out_operations = 4 * lanes;
            return peak_int8_512;
        }
        *out_operations = lanes;
        return peak_f32_512;
    }
    *out_operations = lanes / 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? peak_f32_256 : NULL;
}
#else
static void (*peak_loop(ffn_peak peak, uint64_t *out_operations))(uint64_t)
{
    (void)peak;
    *out_operations = 0;
    return NULL;
}
#endif

enum { PEAK_ROUNDS = 500000 }; /* some 3 ms at one instruction a cycle */

static void run_peak(void *arg, uint32_t index)
{
    measurement *m = arg;
    uint64_t operations;
    void (*loop)(uint64_t) = peak_loop(m->peak, &operations);
    loop(PEAK_ROUNDS / 50);
    meet(m, index);
    loop(PEAK_ROUNDS);
    m->end_us[index] = bench_now_us();
}

double ffn_limit_peak(ffn_team *team, ffn_peak peak)
{
    static measurement m;
    uint64_t operations;
    if (peak_loop(peak, &operations) == NULL) {
        return 0;
    }
    m = (measurement){.team = team, .peak = peak};
    return (double)operations * PEAK_ROUNDS * team->threads / run_measured(&m, run_peak);
}

#if defined(__x86_64__)
enum { CLOCK_ROUNDS = 500000, CLOCK_CHAIN = 8 };

/* Additions that wait for each other, one a cycle. */
static void run_clock(void *arg, uint32_t index)
{
    measurement *m = arg;
    uint64_t x = 1;
    meet(m, index);
    for (int i = 0; i < CLOCK_ROUNDS; i++) {
        __asm__ volatile("add $3,%0\nadd $3,%0\nadd $3,%0\nadd $3,%0\nadd $3,%0\nadd $3,%0\nadd "
                         "$3,%0\nadd $3,%0\n"
                         : "+r"(x));
    }
    m->end_us[index] = bench_now_us();
}

double ffn_limit_clock(ffn_team *team)
{
    static measurement m;
    m = (measurement){.team = team};
    return (double)CLOCK_CHAIN * CLOCK_ROUNDS / run_measured(&m, run_clock);
}
#else
double ffn_limit_clock(ffn_team *team)
{
    (void)team;
    return 0;
}
#endif
