/* SPDX-License-Identifier: Apache-2.0 */
/* Histograms of answer times: one relaxed addition for each answer, a percentile every few. */
#include "answer_times.h"

#define FIRST_OCTAVE 13u /* 8,192 ns */
#define REFRESH 16u      /* answers between two looks at the percentile */
#define LATE_OF 20u      /* one in so many is late */

static uint32_t size_of(uint32_t slots)
{
    uint32_t bits = slots < 2 ? 0 : 31u - (uint32_t)__builtin_clz(slots);
    uint32_t size = bits / 2;
    return size < EP_ANSWER_SIZES ? size : EP_ANSWER_SIZES - 1;
}

static uint32_t step_of(uint64_t took_ns)
{
    if (took_ns >> FIRST_OCTAVE == 0) {
        return 0;
    }
    uint32_t octave = 63u - (uint32_t)__builtin_clzll(took_ns);
    uint32_t step = (octave - FIRST_OCTAVE) * 4 + (uint32_t)(took_ns >> (octave - 2) & 3);
    return step < EP_ANSWER_STEPS ? step : EP_ANSWER_STEPS - 1;
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

/* By the one thread that brought total to the limit. */
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
    __atomic_fetch_add(&h->counts[step_of(took_ns)], 1, __ATOMIC_RELAXED);
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
