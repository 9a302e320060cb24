/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tells whether this process was forked from the one that made a client; it then lacks the client's
 * threads and connections. A page that the kernel wipes on fork costs one load and needs no hook in
 * the process; on old kernels the pid is compared.
 */
#ifndef EP_CLIENT_FORK_GUARD_H
#define EP_CLIENT_FORK_GUARD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct ep_fork_guard {
    volatile uint8_t *page; /* 1, in a child 0; NULL: compare the pid */
    pid_t pid;
} ep_fork_guard;

void ep_fork_guard_init(ep_fork_guard *out_guard);
void ep_fork_guard_fini(ep_fork_guard *guard);
bool ep_fork_guard_in_child(const ep_fork_guard *guard);

#endif
