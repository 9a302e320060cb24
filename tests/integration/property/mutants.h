/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proof that the comparison can fail. Two sets of deliberately wrong results, each of which must
 * differ from the service's in at least one case: the oracle itself, compiled with one line changed
 * (REF_MUTATE_x in reference_layer.c), and a small combine written here over the oracle's own rows.
 * The small combine done right must never differ. Each numerics family that occurs is a proof of
 * its own.
 */
#ifndef PROPERTY_MUTANTS_H
#define PROPERTY_MUTANTS_H

#include <pthread.h>

#include "layer_case.h"

/* One in this many cases is also given to the mutants, and every one over daemons. */
enum { MUTANT_CASE_EVERY = 5, MUTANTS_MAX = 20 };

typedef struct mutant_tally {
    uint64_t judged; /* cases */
    uint64_t caught; /* of them: the comparison saw a difference */
} mutant_tally;

typedef struct mutant_board {
    pthread_mutex_t lock;
    mutant_tally tallies[REF_FAMILIES][MUTANTS_MAX];
} mutant_board;

void mutant_board_init(mutant_board *board);
/* got: the service's packed rows of an accepted case. Threads: any. */
void mutants_judge(mutant_board *board, const layer_case *c, const uint8_t *got);
/* Prints the tallies; of the families that are due; true when each wrong one was caught and the
 * right one never differed. */
bool mutants_report(const mutant_board *board, const bool due[REF_FAMILIES]);

#endif
