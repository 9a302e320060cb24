/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How often an expert is in memory when it is used, a quarter of the model's experts being there:
 * the node's own choice against LRU, LRU-2, SLRU and LFU with decay, and against Belady's, which
 * knows the future, on the same traces. Medians over seeds that no constant was chosen on, and over
 * loads drawn at random from two families.
 *
 * Loads ahead of time come when the way from disk to memory is free, so how many there are depends
 * on how much of its time the needed ones take without them: visits are paced so that it is a half
 * or a quarter; printed is also a caller who comes back as soon as a step is over and has as much
 * to do for it as the experts have. Points are percent of all uses:
 *   ratio column of the first row: own choice, nothing ahead, minus the best rival (bar -1)
 *   of the next: with prefetch, a half taken, minus the best rival (bar +2)
 *   of the others: with prefetch minus own choice without, a half taken (no bar) and a quarter (bar
 *   +2)
 */
#ifndef EP_BENCH_STORE_POLICIES_H
#define EP_BENCH_STORE_POLICIES_H

#include "bench/bench_report.h"
#include "bench/store_own.h"

/* clock: load_us, piece_us and compute_us as measured. */
void store_bench_policies(bench_report *report, const store_clock *clock);

#endif
