/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that measure what the machine can do, pinned as those that compute are. */
#ifndef EP_BENCH_FFN_TEAM_H
#define EP_BENCH_FFN_TEAM_H

#include <stdint.h>

enum { FFN_TEAM_THREADS_MAX = 512 };

/* Runs task(arg, index) on each of the team's threads, index 0 to threads - 1, at once; returns
 * when all have. */
typedef struct ffn_team {
    uint32_t threads;
    void (*run)(struct ffn_team *team, void (*task)(void *arg, uint32_t index), void *arg);
    void *threads_of; /* of ffn_team_start */
} ffn_team;

/* Threads pinned one to each CPU this process may use; they sleep between runs. Ends the program
 * when there is no memory. */
void ffn_team_start(ffn_team *team, uint32_t threads);
void ffn_team_stop(ffn_team *team);

#endif
