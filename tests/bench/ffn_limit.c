/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_limit.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/cpu_features.h"
#include "bench/bench_report.h"

/* ---- the team ---- */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t begin;
    pthread_cond_t end;
    uint64_t round;
    uint32_t running;
    int stopping;
    void (*task)(void *arg, uint32_t index);
    void *arg;
    struct {
        void *crew;
        uint32_t index;
        pthread_t thread;
    } member[FFN_LIMIT_THREADS_MAX];
    uint32_t threads;
} crew;

static void pin(uint32_t index)
{
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return;
    }
    index %= (uint32_t)CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && index-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            (void)pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
            return;
        }
    }
}

static void *member_main(void *arg)
{
    __typeof__(&((crew *)NULL)->member[0]) self = arg;
    crew *c = self->crew;
    uint64_t seen = 0;
    pin(self->index);
    pthread_mutex_lock(&c->lock);
    for (;;) {
        while (c->round == seen && !c->stopping) {
            pthread_cond_wait(&c->begin, &c->lock);
        }
        if (c->stopping) {
            break;
        }
        seen = c->round;
        pthread_mutex_unlock(&c->lock);
        c->task(c->arg, self->index);
        pthread_mutex_lock(&c->lock);
        if (--c->running == 0) {
            pthread_cond_signal(&c->end);
        }
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static void crew_run(ffn_team *team, void (*task)(void *arg, uint32_t index), void *arg)
{
    crew *c = team->threads_of;
    pthread_mutex_lock(&c->lock);
    c->task = task;
    c->arg = arg;
    c->running = c->threads;
    c->round++;
    pthread_cond_broadcast(&c->begin);
    while (c->running > 0) {
        pthread_cond_wait(&c->end, &c->lock);
    }
    pthread_mutex_unlock(&c->lock);
}

void ffn_team_start(ffn_team *team, uint32_t threads)
{
    crew *c = calloc(1, sizeof(*c));
    if (c == NULL || threads > FFN_LIMIT_THREADS_MAX) {
        abort();
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->begin, NULL);
    pthread_cond_init(&c->end, NULL);
    c->threads = threads;
    for (uint32_t i = 0; i < threads; i++) {
        c->member[i].crew = c;
        c->member[i].index = i;
        if (pthread_create(&c->member[i].thread, NULL, member_main, &c->member[i]) != 0) {
            abort();
        }
    }
    *team = (ffn_team){.threads = threads, .run = crew_run, .threads_of = c};
}

void ffn_team_stop(ffn_team *team)
{
    crew *c = team->threads_of;
    pthread_mutex_lock(&c->lock);
    c->stopping = 1;
    pthread_cond_broadcast(&c->begin);
    pthread_mutex_unlock(&c->lock);
    for (uint32_t i = 0; i < c->threads; i++) {
        pthread_join(c->member[i].thread, NULL);
    }
    free(c);
}

/* ---- timing: from when all are awake until the last has ended ---- */

typedef struct {
    ffn_team *team;
    atomic_uint arrived;
    double begin_us;
    double end_us[FFN_LIMIT_THREADS_MAX];
    const ffn_segment *segments;
    size_t segments_count;
    ffn_peak peak;
    uint64_t operations; /* of one thread */
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

static double duration_us(const measurement *m)
{
    double end = m->end_us[0];
    for (uint32_t i = 1; i < m->team->threads; i++) {
        end = m->end_us[i] > end ? m->end_us[i] : end;
    }
    return end - m->begin_us;
}

/* One cache line; each form reads it with vectors as wide as its CPU's. */
typedef uint64_t line __attribute__((vector_size(64)));

#define READ(name, target)                                                                                                                       \
    target static uint64_t name(const void *memory, size_t bytes)                                                                                \
    {                                                                                                                                            \
        const line *p = memory;                                                                                                                  \
        line a = {0}, b = {0}, c = {0}, d = {0};                                                                                                 \
        for (size_t i = 0; i + 4 <= bytes / sizeof(line); i += 4) {                                                                              \
            a += p[i];                                                                                                                           \
            b += p[i + 1];                                                                                                                       \
            c += p[i + 2];                                                                                                                       \
            d += p[i + 3];                                                                                                                       \
        }                                                                                                                                        \
        a += b + c + d;                                                                                                                          \
        return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];                                                                            \
    }

READ(read_any, )
#if defined(__x86_64__)
READ(read_256, __attribute__((target("avx2"))))
READ(read_512, __attribute__((target("avx512f"))))
#endif

static uint64_t read_lines(const void *memory, size_t bytes)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        return read_512(memory, bytes);
    }
    if (__builtin_cpu_supports("avx2")) {
        return read_256(memory, bytes);
    }
#endif
    return read_any(memory, bytes);
}

static void read_slices(void *arg, uint32_t index)
{
    measurement *m = arg;
    volatile uint64_t sum = 0;
    meet(m, index);
    for (size_t s = 0; s < m->segments_count; s++) {
        size_t slice = m->segments[s].bytes / m->team->threads / 256 * 256;
        sum += read_lines((const char *)m->segments[s].memory + slice * index, slice);
    }
    m->end_us[index] = bench_now_us();
}

double ffn_limit_read_us(ffn_team *team, const ffn_segment *segments, size_t count)
{
    static measurement m;
    m = (measurement){.team = team, .segments = segments, .segments_count = count};
    team->run(team, read_slices, &m);
    return duration_us(&m);
}

#if defined(__x86_64__)
/* 24 accumulators in registers, as a kernel's tile has; nothing is loaded. */
#define STEP4(ins, width, a, b, c, d)                                                                                                           \
    ins " %%" width "14,%%" width "15,%%" width a "\n" ins " %%" width "14,%%" width "15,%%" width b "\n" ins " %%" width "14,%%" width     \
        "15,%%" width c "\n" ins " %%" width "14,%%" width "15,%%" width d "\n"
#define STEP24(ins)                                                                                                                              \
    STEP4(ins, "zmm", "0", "1", "2", "3")                                                                                                        \
    STEP4(ins, "zmm", "4", "5", "6", "7")                                                                                                        \
    STEP4(ins, "zmm", "8", "9", "10", "11")                                                                                                      \
    STEP4(ins, "zmm", "16", "17", "18", "19")                                                                                                    \
    STEP4(ins, "zmm", "20", "21", "22", "23")                                                                                                    \
    STEP4(ins, "zmm", "24", "25", "26", "27")
#define LOW "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"
#define HIGH "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27"
#define PEAK512(name, ins)                                                                                                                       \
    __attribute__((target("avx512f"))) static void name(uint64_t rounds)                                                                         \
    {                                                                                                                                            \
        __asm__ volatile("vpxor %%xmm14,%%xmm14,%%xmm14\nvpxor %%xmm15,%%xmm15,%%xmm15\n" ::: "xmm14", "xmm15");                                  \
        for (uint64_t i = 0; i < rounds; i++) {                                                                                                  \
            __asm__ volatile(STEP24(ins)::: LOW, HIGH, "xmm14", "xmm15");                                                                        \
        }                                                                                                                                        \
    }
PEAK512(peak_f32_512, "vfmadd231ps")
PEAK512(peak_bf16_512, "vdpbf16ps")
PEAK512(peak_int8_512, "vpdpbusd")

__attribute__((target("avx2,fma"))) static void peak_f32_256(uint64_t rounds)
{
    __asm__ volatile("vpxor %%xmm14,%%xmm14,%%xmm14\nvpxor %%xmm15,%%xmm15,%%xmm15\n" ::: "xmm14", "xmm15");
    for (uint64_t i = 0; i < 2 * rounds; i++) {
        __asm__ volatile(STEP4("vfmadd231ps", "ymm", "0", "1", "2", "3") STEP4("vfmadd231ps", "ymm", "4", "5", "6", "7")
                             STEP4("vfmadd231ps", "ymm", "8", "9", "10", "11")::: LOW, "xmm14", "xmm15");
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

enum { PEAK_ROUNDS = 250000 }; /* some 3 ms at two instructions a cycle and twice that at one */

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
    team->run(team, run_peak, &m);
    return (double)operations * PEAK_ROUNDS * team->threads / duration_us(&m);
}
