/* SPDX-License-Identifier: Apache-2.0 */
/* Process-wide settings. Only our programs call these, first thing in main; no library does. */
#ifndef EP_SERVER_COMMON_PROCESS_SETUP_H
#define EP_SERVER_COMMON_PROCESS_SETUP_H

#include <stdint.h>

/*
 * Allocator, SIGPIPE, descriptors 0 to 2, file mode mask. Allocator: the network library allocates
 * frames on its own threads; with glibc's defaults each thread has an arena, large blocks are
 * mapped and unmapped per frame, and most of the time goes to page faults. One arena that keeps its
 * memory cures that. Memory we are done with for good is given back with ep_process_trim.
 */
void ep_process_setup(void);
void ep_process_trim(void);
/* Raises the soft limit of descriptors to the hard one; returns what is then allowed. */
uint64_t ep_process_raise_fd_limit(void);

/*
 * The most memory that this process may have, in bytes: the least of what the host has, of
 * RLIMIT_AS and of the limits of its control groups (v1 and v2). Beyond it the system ends the
 * process or refuses memory. root: "" (tests: where /proc and /sys are looked for).
 */
uint64_t ep_process_memory_limit(const char *root);

#endif
