/* SPDX-License-Identifier: Apache-2.0 */
/* Histograms of answer times: one relaxed addition per answer, a new percentile after every few. */
#include "cluster/answer_times.h"

#include <math.h>

#define FIRST_OCTAVE 13u          /* 8,192 ns */
#define STEP (EP_PACE_OCTAVE / 4) /* of a histogram */
#define REFRESH 16u               /* answers between two updates of the percentile */
#define LATE_OF 20u               /* one in so many is late */
#define PACE_STEP (EP_PACE_OCTAVE / 16)
#define NORM_STEP (EP_PACE_OCTAVE / 32)
#define PASS_ROWS_MAX 256u /* the most that a node reports */
#define PACE_STEPS 128     /* bins for the median, from -EP_PACE_MAX to EP_PACE_MAX */

static uint32_t size_of(uint32_t slots)
{
    uint32_t bits = slots < 2 ? 0 : 31u - (uint32_t)__builtin_clz(slots);
    uint32_t size = bits / 2;
    return size < EP_ANSWER_SIZES ? size : EP_ANSWER_SIZES - 1;
}

/* The logarithm, straight within an octave. */
static int32_t octaves_of(uint64_t took_ns)
{
    took_ns = took_ns < EP_PACE_OCTAVE ? EP_PACE_OCTAVE : took_ns;
    uint32_t octave = 63u - (uint32_t)__builtin_clzll(took_ns);
    return (int32_t)(octave * EP_PACE_OCTAVE +
                     (uint32_t)((took_ns >> (octave - 10)) & (EP_PACE_OCTAVE - 1)));
}

static uint64_t step_end_ns(uint32_t step)
{
    return (uint64_t)(5 + step % 4) << (step / 4 + FIRST_OCTAVE - 2);
}

static uint32_t load(const uint32_t *value)
{
    return __atomic_load_n(value, __ATOMIC_RELAXED);
}

static void refresh(ep_answer_histogram *h)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < EP_ANSWER_STEPS; i++) {
        total += load(&h->counts[i]);
    }
    uint64_t above = 0;
    uint32_t step = EP_ANSWER_STEPS - 1;
    while (step > 0 && (above + load(&h->counts[step])) * LATE_OF <= total) {
        above += load(&h->counts[step]);
        step--;
    }
    __atomic_store_n(&h->late_ns, step_end_ns(step), __ATOMIC_RELAXED);
}

/* Called by the one thread that raised total to the limit. */
static void halve(ep_answer_histogram *h)
{
    for (uint32_t i = 0; i < EP_ANSWER_STEPS; i++) {
        __atomic_fetch_sub(&h->counts[i], (load(&h->counts[i]) + 1) / 2, __ATOMIC_RELAXED);
    }
    __atomic_fetch_sub(&h->total, EP_ANSWER_TIMES_KEPT / 2, __ATOMIC_RELAXED);
}

void ep_answer_times_add(ep_answer_times *times, uint32_t slots, uint64_t took_ns)
{
    ep_answer_histogram *h = &times->sizes[size_of(slots)];
    int32_t step = (octaves_of(took_ns) - (int32_t)FIRST_OCTAVE * EP_PACE_OCTAVE) / STEP;
    step = step < 0 ? 0 : step < EP_ANSWER_STEPS ? step : EP_ANSWER_STEPS - 1;
    __atomic_fetch_add(&h->counts[step], 1, __ATOMIC_RELAXED);
    uint32_t total = __atomic_add_fetch(&h->total, 1, __ATOMIC_RELAXED);
    if (total == EP_ANSWER_TIMES_KEPT) {
        halve(h);
    }
    if (total >= EP_ANSWER_TIMES_MIN && total % REFRESH == 0) {
        refresh(h);
    }
}

void ep_answer_times_add_lost(ep_answer_times *times, uint32_t slots, uint64_t waited_ns)
{
    uint64_t late_ns = ep_answer_times_late_ns(times, slots);
    if (late_ns != EP_ANSWER_TIMES_UNKNOWN && waited_ns >= late_ns) {
        ep_answer_times_add(times, slots, waited_ns);
    }
}

uint64_t ep_answer_times_late_ns(const ep_answer_times *times, uint32_t slots)
{
    uint64_t late_ns = __atomic_load_n(&times->sizes[size_of(slots)].late_ns, __ATOMIC_RELAXED);
    return late_ns != 0 ? late_ns : EP_ANSWER_TIMES_UNKNOWN;
}

static void step_pace(ep_answer_times *times, int32_t step)
{
    int32_t pace = __atomic_load_n(&times->pace, __ATOMIC_RELAXED) + step;
    if (pace >= -EP_PACE_MAX && pace <= EP_PACE_MAX) {
        __atomic_store_n(&times->pace, pace, __ATOMIC_RELAXED);
    }
}

/*
 * Keeps the norms ascending with size, as larger frames take no less time. Otherwise the norm of a
 * size that only a slow node is sent would be that node's time, and the node would count as quick.
 * Larger sizes that are below had no answer since all nodes slowed down; they follow by steps.
 */
static void keep_order(ep_answer_norm *norm, uint32_t size)
{
    int32_t here = __atomic_load_n(&norm->sizes[size], __ATOMIC_RELAXED);
    for (uint32_t s = size + 1; s < EP_ANSWER_SIZES; s++) {
        int32_t larger = __atomic_load_n(&norm->sizes[s], __ATOMIC_RELAXED);
        if (larger != 0 && larger < here) {
            here = larger + NORM_STEP < here ? larger + NORM_STEP : here;
            __atomic_store_n(&norm->sizes[s], here, __ATOMIC_RELAXED);
        }
    }
    for (uint32_t s = 0; s <= size; s++) {
        if (__atomic_load_n(&norm->sizes[s], __ATOMIC_RELAXED) > here) {
            __atomic_store_n(&norm->sizes[s], here, __ATOMIC_RELAXED);
        }
    }
}

void ep_answer_pace_add(ep_answer_times *times, ep_answer_norm *norm, uint32_t slots,
                        uint64_t took_ns, bool is_in_step)
{
    const uint32_t size = size_of(slots);
    int32_t *normal = &norm->sizes[size];
    int32_t before = __atomic_load_n(normal, __ATOMIC_RELAXED);
    int32_t octaves = octaves_of(took_ns);
    if (before != 0) {
        bool is_slower = octaves - before > __atomic_load_n(&times->pace, __ATOMIC_RELAXED);
        step_pace(times, is_slower ? PACE_STEP : is_in_step ? -PACE_STEP : -2 * PACE_STEP);
    }
    if (is_in_step) {
        int32_t step = octaves > before ? NORM_STEP : -NORM_STEP;
        __atomic_store_n(normal, before == 0 ? octaves : before + step, __ATOMIC_RELAXED);
        keep_order(norm, size);
    }
}

void ep_answer_pass_add(ep_answer_norm *norm, uint32_t pass_rows)
{
    const int64_t before = __atomic_load_n(&norm->pass, __ATOMIC_RELAXED);
    const int64_t told = (int64_t)(pass_rows < PASS_ROWS_MAX ? pass_rows : PASS_ROWS_MAX) * 16;
    if (told > 0) {
        __atomic_store_n(&norm->pass,
                         (uint32_t)(before == 0 ? told : before + (told - before) / 16),
                         __ATOMIC_RELAXED);
    }
}

void ep_answer_pace_add_lost(ep_answer_times *times)
{
    step_pace(times, PACE_STEP);
}

/* The lower median of the usable nodes' paces, exact to a sixteenth of an octave. */
static float median_of(const float *paces, const uint8_t *usable, uint32_t nodes)
{
    uint32_t counts[PACE_STEPS + 1] = {0};
    uint32_t total = 0;
    for (uint32_t n = 0; n < nodes; n++) {
        if (usable[n] == 1) {
            counts[(uint32_t)((paces[n] + EP_PACE_MAX) * (PACE_STEPS / (2.0f * EP_PACE_MAX)))]++;
            total++;
        }
    }
    uint32_t step = 0;
    for (uint32_t below = counts[0]; step < PACE_STEPS && 2 * below < total;) {
        below += counts[++step];
    }
    return (float)step * (2.0f * EP_PACE_MAX / PACE_STEPS) - EP_PACE_MAX;
}

bool ep_answer_slowness(float *io_values, const uint8_t *usable, uint32_t nodes)
{
    float least = EP_PACE_MAX;
    float most = -EP_PACE_MAX;
    for (uint32_t n = 0; n < nodes; n++) {
        if (usable[n] == 1) {
            least = io_values[n] < least ? io_values[n] : least;
            most = io_values[n] > most ? io_values[n] : most;
        }
    }
    if (most - least < EP_PACE_OCTAVE) {
        return false;
    }
    float median = median_of(io_values, usable, nodes);
    for (uint32_t n = 0; n < nodes; n++) {
        float slowness = exp2f((io_values[n] - median) / EP_PACE_OCTAVE);
        io_values[n] = slowness < EP_SLOWNESS_MIN ? 1 : slowness;
    }
    return true;
}
