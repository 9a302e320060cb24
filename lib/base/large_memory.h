/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Large blocks that come and go: weights, and what they are read into. From EP_LARGE_BYTES on each
 * is a mapping of its own, aligned to huge pages and advised as such, and goes back to the system
 * when it is freed. malloc keeps freed blocks for the next one, but an aligned request needs more
 * than the hole that one of its size has left, so that each leaves another hole: replacing experts
 * of 75 MiB took seven times the memory of those that were there.
 */
#ifndef EP_BASE_LARGE_MEMORY_H
#define EP_BASE_LARGE_MEMORY_H

#include <stddef.h>

#define EP_LARGE_BYTES ((size_t)2 << 20)

/* bytes > 0, aligned to align (a power of two up to 4096) at least, contents anything. NULL: no
 * memory. From any thread. */
void *ep_large_alloc(size_t bytes, size_t align);
void ep_large_free(void *memory, size_t bytes); /* bytes as allocated; NULL allowed */

#endif
