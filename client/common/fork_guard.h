/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tells whether this process is a child of the one that made a client: its threads and connections
 * are not here then. A page that the kernel wipes on fork answers with one load and hooks nothing
 * into the process; old kernels compare the pid.
 */
#ifndef EP_CLIENT_FORK_GUARD_H
#define EP_CLIENT_FORK_GUARD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct ep_fork_guard {
    volatile uint8_t *page; /* 1 here, 0 in a child; NULL: compare the pid */
    pid_t pid;
} ep_fork_guard;

void ep_fork_guard_init(ep_fork_guard *out_guard);
void ep_fork_guard_fini(ep_fork_guard *guard);
bool ep_fork_guard_in_child(const ep_fork_guard *guard);

#endif
