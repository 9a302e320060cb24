/* SPDX-License-Identifier: Apache-2.0 */
/* Removes a benchmark's directories however it ends: it may be killed, and they are gigabytes. */
#ifndef EP_BENCH_GUARD_H
#define EP_BENCH_GUARD_H

#include <stddef.h>

/*
 * Goes on in a child process. This one waits for it, removes the directories and exits with its
 * status; SIGINT, SIGTERM and SIGHUP end the child first. Called before any thread is started.
 */
void bench_guard(const char *const *dirs, size_t count);

#endif
