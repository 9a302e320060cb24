/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a node takes to answer, as one connection sees it: a histogram of the newest answers for each size of
 * request, and of it the 95th percentile, after which an answer counts as late. Pure.
 *
 * Sizes      slots of the frame, in powers of four: a frame of 4,096 slots computes longer than one of 8.
 * Steps      a quarter of an octave from 8 us on; the percentile is the upper end of its step, so that at most
 *            one answer in twenty is later. Older answers lose weight: at EP_ANSWER_TIMES_KEPT all counts halve.
 * Threads    any, without a lock. Two threads may lose an answer to each other, no more.
 */
#ifndef EP_CLIENT_ANSWER_TIMES_H
#define EP_CLIENT_ANSWER_TIMES_H

#include <stdbool.h>
#include <stdint.h>

#define EP_ANSWER_SIZES 9
#define EP_ANSWER_STEPS 88 /* up to 34 s */
/* Before so many answers nothing is known. */
#define EP_ANSWER_TIMES_MIN 64u
#define EP_ANSWER_TIMES_KEPT 1024u
#define EP_ANSWER_TIMES_UNKNOWN UINT64_MAX

typedef struct ep_answer_histogram { /* atomic */
    uint32_t counts[EP_ANSWER_STEPS];
    uint32_t total;   /* since the counts were last halved, with what was left then */
    uint64_t late_ns; /* 0: not known */
} ep_answer_histogram;

typedef struct ep_answer_times {
    ep_answer_histogram sizes[EP_ANSWER_SIZES];
} ep_answer_times;

/* Zeroed memory is a new one. */
void ep_answer_times_add(ep_answer_times *times, uint32_t slots, uint64_t took_ns);
/* An answer that did not come within waited_ns and is not waited for any more. Counted only where that is late
 * already: else it says nothing about how long it would have taken. Without this the slowest answers, which are the
 * ones that were overtaken, would be missing. */
void ep_answer_times_add_lost(ep_answer_times *times, uint32_t slots, uint64_t waited_ns);
/* 95 of 100 frames of this size were answered within this time; EP_ANSWER_TIMES_UNKNOWN. */
uint64_t ep_answer_times_late_ns(const ep_answer_times *times, uint32_t slots);

#endif
