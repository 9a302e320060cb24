/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a group as threads of this process. */
#ifndef EP_TESTS_GROUP_RANK_THREADS_H
#define EP_TESTS_GROUP_RANK_THREADS_H

#include <stdbool.h>

#include "expertd/group.h"

#define RANK_THREADS_MAX EP_GROUP_WORLD_MAX

typedef void (*rank_func)(void *arg, uint32_t rank, ep_group *group);
typedef bool (*rank_play)(void *arg, uint32_t rank, ep_group *group);

/*
 * Makes a group of world ranks and calls func on a thread per rank; returns when all have returned
 * and their groups are gone. scheme "loopback", "shm" or "tcp". A group that cannot be made ends
 * the process: the others would wait for it. deadline_us: the groups'.
 */
void rank_threads_run(const char *scheme, uint32_t world, uint64_t deadline_us, rank_func func,
                      void *arg);
/* The same with a host for each rank: hosts [world]. */
void rank_threads_run_on(const char *scheme, const char *const *hosts, uint32_t world,
                         uint64_t deadline_us, rank_func func, void *arg);
/* The same where a rank tells whether all is well: whether all are. hosts may be NULL. */
bool rank_threads_play(const char *scheme, const char *const *hosts, uint32_t world,
                       uint64_t deadline_us, rank_play play, void *arg);
/* As above, in two steps: a rank's config for a group called name that all threads of the process
 * can meet in. host NULL: this machine. */
ep_group *rank_group_create(const char *scheme, const char *name, uint32_t world, uint32_t rank,
                            uint64_t deadline_us);
ep_group *rank_group_create_on(const char *scheme, const char *host, const char *name,
                               uint32_t world, uint32_t rank, uint64_t deadline_us);
/* A group name that no other in this process has. */
void rank_group_name(char *out, size_t bytes);

#endif
