/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a node takes to answer, as one connection sees it: a histogram of the newest answers for
 * each size of request, and of it the 95th percentile, after which an answer counts as late. Pure.
 *
 * Sizes      slots of the frame, in powers of four: a frame of 4,096 slots computes longer than one
 *            of 8.
 * Steps      a quarter of an octave from 8 us on; the percentile is the upper end of its step, so
 *            that at most one answer in twenty is later. Older answers lose weight: at
 *            EP_ANSWER_TIMES_KEPT all counts halve.
 * Pace       the median of an answer's time against what other nodes take for that size
 *            (ep_answer_norm, of a model and shared by a client's connections), as a logarithm:
 *            nodes are compared by it, whatever sizes each of them is sent. It goes up or down by a
 *            sixteenth of an octave with each answer, so that a few that took for ever, or never
 *            came, do not matter; of a slow node, which is asked seldom, down by an eighth.
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
    int32_t pace; /* atomic: in EP_PACE_OCTAVE; 0 like the quick ones, or not known */
} ep_answer_times;

#define EP_PACE_OCTAVE 1024
#define EP_PACE_MAX (4 * EP_PACE_OCTAVE)
/* below, a node is as quick as the others: noise shall not move calls */
#define EP_SLOWNESS_MIN 2.0f

/* The median of what nodes that are in step with the others take for each size. */
typedef struct ep_answer_norm { /* atomic: logarithms of ns in EP_PACE_OCTAVE; 0 not known */
    int32_t sizes[EP_ANSWER_SIZES];
    /* what reading an expert's weights takes a node, in sixteenths of a slot; 0 not known */
    uint32_t pass;
} ep_answer_norm;

/* Zeroed memory is a new one. */
void ep_answer_times_add(ep_answer_times *times, uint32_t slots, uint64_t took_ns);
/* An answer that did not come within waited_ns and is not waited for any more. Counted only where
 * that is late already: else it says nothing about how long it would have taken. Without this the
 * slowest answers, which are the ones that were overtaken, would be missing. */
void ep_answer_times_add_lost(ep_answer_times *times, uint32_t slots, uint64_t waited_ns);
/* The same answer for the node's pace. is_in_step: the node counted as quick when the frame was
 * sent. */
void ep_answer_pace_add(ep_answer_times *times, ep_answer_norm *norm, uint32_t slots,
                        uint64_t took_ns, bool is_in_step);
/* The mean of what nodes tell in their answers (ForwardReply.pass_rows). */
void ep_answer_pass_add(ep_answer_norm *norm, uint32_t pass_rows);
/* A copy's answer was quicker, however late this one would have been. */
void ep_answer_pace_add_lost(ep_answer_times *times);
/*
 * From paces to what copies are chosen by (ep_copy_choice.slowness): against the lower median of
 * those with usable 1, 1 up to EP_SLOWNESS_MIN. *io_values: [nodes] paces, then slowness. False,
 * and nothing is written: all are 1.
 */
bool ep_answer_slowness(float *io_values, const uint8_t *usable, uint32_t nodes);
/* 95 of 100 frames of this size were answered within this time; EP_ANSWER_TIMES_UNKNOWN. */
uint64_t ep_answer_times_late_ns(const ep_answer_times *times, uint32_t slots);

#endif
