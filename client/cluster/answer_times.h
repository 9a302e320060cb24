/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a node takes to answer on one connection: for each size of request a histogram of recent
 * answers, and its 95th percentile, after which an answer counts as late. Pure.
 *
 * Sizes      classes by the frame's slots, in powers of four, since larger frames take longer.
 * Steps      bins of a quarter of an octave, from 8 us. The percentile is the upper end of its bin,
 *            so that at most one answer in twenty is later. At EP_ANSWER_TIMES_KEPT answers all
 *            counts are halved, so that older ones lose weight.
 * Pace       logarithm of the median of answer time / usual time for that size (ep_answer_norm, of
 *            a model, shared by a client's connections). It compares nodes whatever sizes they are
 *            sent. Each answer moves it by a sixteenth of an octave, so that a few extreme or lost
 *            answers do not matter; a slow node's, which is asked seldom, moves down by an eighth.
 * Threads    any, without a lock. Two threads at once may lose an answer, no more.
 */
#ifndef EP_CLIENT_ANSWER_TIMES_H
#define EP_CLIENT_ANSWER_TIMES_H

#include <stdbool.h>
#include <stdint.h>

#define EP_ANSWER_SIZES 9
#define EP_ANSWER_STEPS 88 /* up to 34 s */
/* With fewer answers the percentile is not known. */
#define EP_ANSWER_TIMES_MIN 64u
#define EP_ANSWER_TIMES_KEPT 1024u
#define EP_ANSWER_TIMES_UNKNOWN UINT64_MAX

typedef struct ep_answer_histogram { /* atomic */
    uint32_t counts[EP_ANSWER_STEPS];
    uint32_t total;   /* sum of the counts */
    uint64_t late_ns; /* 0: not known */
} ep_answer_histogram;

typedef struct ep_answer_times {
    ep_answer_histogram sizes[EP_ANSWER_SIZES];
    /* atomic: in units of 1 / EP_PACE_OCTAVE octaves; 0: as quick as others, or not known */
    int32_t pace;
} ep_answer_times;

#define EP_PACE_OCTAVE 1024
#define EP_PACE_MAX (4 * EP_PACE_OCTAVE)
/* below this a node counts as quick, so that noise does not move calls */
#define EP_SLOWNESS_MIN 2.0f

/* The usual time for each size: the median over quick nodes. */
typedef struct ep_answer_norm { /* atomic: logarithms of ns, in the unit of pace; 0: not known */
    int32_t sizes[EP_ANSWER_SIZES];
    /* a node's cost of reading an expert's weights, in sixteenths of a slot; 0: not known */
    uint32_t pass;
} ep_answer_norm;

/* A new one is zeroed memory. */
void ep_answer_times_add(ep_answer_times *times, uint32_t slots, uint64_t took_ns);
/* Adds an answer that had not come after waited_ns, when the wait was given up. It counts only if
 * that is late already, as it says nothing else. Without this the slowest answers, which hedges
 * overtake, would be missing. */
void ep_answer_times_add_lost(ep_answer_times *times, uint32_t slots, uint64_t waited_ns);
/* Adds an answer to the node's pace. is_in_step: the node counted as quick when the frame was
 * sent. */
void ep_answer_pace_add(ep_answer_times *times, ep_answer_norm *norm, uint32_t slots,
                        uint64_t took_ns, bool is_in_step);
/* Updates the mean of ForwardReply.pass_rows. */
void ep_answer_pass_add(ep_answer_norm *norm, uint32_t pass_rows);
/* Counts an answer as slow, because a copy's answer overtook it. */
void ep_answer_pace_add_lost(ep_answer_times *times);
/*
 * Turns paces into ep_copy_choice.slowness: relative to the lower median of the usable nodes; 1
 * below EP_SLOWNESS_MIN. io_values[nodes]: paces in, slowness out. False, with nothing written: all
 * are 1.
 */
bool ep_answer_slowness(float *io_values, const uint8_t *usable, uint32_t nodes);
/* Time within which 95 of 100 frames of this size were answered, or EP_ANSWER_TIMES_UNKNOWN. */
uint64_t ep_answer_times_late_ns(const ep_answer_times *times, uint32_t slots);

#endif
