/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The unfused form of a decode layer: ranks as processes, each with its share of the experts, over
 * the product's stream lane and kernels. Step after step, each over all ranks before the next
 * begins: exchange counts (each rank with each other), exchange rows (one for each slot, sorted by
 * expert), wait for all, compute, exchange results, wait for all, combine. Rank 0 is the caller and
 * has no experts.
 */
#ifndef EP_BENCH_DECODE_RANKS_H
#define EP_BENCH_DECODE_RANKS_H

#include "bench/decode_case.h"

typedef struct decode_ranks decode_ranks;

/* The program itself is started again for each rank, with the arguments that decode_rank_main
 * reads. Returns when all are loaded. */
decode_ranks *decode_ranks_start(uint32_t count, const char *dir, const char *checkpoint);
void decode_ranks_stop(decode_ranks *ranks);
void decode_ranks_call(decode_ranks *ranks, const ep_batch *batch, uint16_t *out);
/* Only what the ranks compute for the batch, of rows they have already, all at once; and a word to
 * each and back. */
void decode_ranks_compute(decode_ranks *ranks, const ep_batch *batch);
/* What a rank does; false when the arguments are not those of a rank. */
bool decode_rank_main(int argc, char **argv);

#endif
