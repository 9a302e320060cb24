/* SPDX-License-Identifier: Apache-2.0 */
/* Process-wide settings. Only programs call these, at the begin of main; libraries do not. */
#ifndef EP_SERVER_COMMON_PROCESS_SETUP_H
#define EP_SERVER_COMMON_PROCESS_SETUP_H

#include <stdint.h>

/*
 * Sets allocator, SIGPIPE, descriptors 0 to 2 and the file mode mask. The network library allocates
 * frames on its own threads. With glibc's defaults each thread has an arena and large blocks are
 * mapped per frame, so most of the time goes to page faults. One arena that keeps its memory avoids
 * that; ep_process_trim returns free memory to the system.
 */
void ep_process_setup(void);
void ep_process_trim(void);
/* Raises the soft limit of descriptors to the hard one; returns the new limit. */
uint64_t ep_process_raise_fd_limit(void);

/*
 * The limit of this process's memory in bytes: the least of the host's memory, RLIMIT_AS and the
 * limits of its control groups (v1 and v2). Above it the system ends the process or refuses memory.
 * root: "" (in tests: a prefix of /proc and /sys).
 */
uint64_t ep_process_memory_limit(const char *root);

#endif
