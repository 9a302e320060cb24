/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks of a benchmark as forked processes that all do one step at a time: the parent says which,
 * and times it between two barriers.
 *
 * A rank that ends before it is told to would leave the others at a barrier: the program ends then,
 * and says so.
 *
 * Threads    one of the parent and one of each rank.
 */
#ifndef EP_BENCH_RANK_BOARD_H
#define EP_BENCH_RANK_BOARD_H

#include <stddef.h>
#include <stdint.h>

#define RANK_BOARD_RANKS_MAX 16
#define RANK_BOARD_END (-1) /* the step after which a rank leaves */

typedef struct rank_board rank_board;

/* Ends the program when there is no memory. */
rank_board *rank_board_create(uint32_t ranks);
/* Zeroed memory that the parent and its ranks see; before they are forked. Stays until the program
 * ends. */
void *rank_board_memory(size_t bytes);
/* Forks the ranks, each of which runs rank_main and ends. Before the program has threads. */
void rank_board_fork(rank_board *board, void (*rank_main)(uint32_t rank, void *arg), void *arg);
/* Lets all ranks do the step, 0 or above; microseconds. */
double rank_board_time(rank_board *board, int step);
/* Tells the ranks to end, waits for them and frees the board. */
void rank_board_end(rank_board *board);

/* In a rank: waits for the next step and returns it. */
int rank_board_next(rank_board *board);
/* In a rank: the step is done, END too; waits for the others. */
void rank_board_done(rank_board *board);
/* In a rank: waits until all ranks are here. */
void rank_board_meet(rank_board *board);

#endif
