/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Large blocks that come and go: weights, and what they are read into. From EP_LARGE_BYTES on, each
 * block is a mapping of its own, aligned to huge pages and advised as such; it returns to the
 * system when it is freed. malloc keeps freed blocks for the next request, but an aligned request
 * needs more than the hole that a block of its size has left, so each one leaves another hole:
 * replacing experts of 75 MiB took seven times the memory of the experts present.
 */
#ifndef EP_BASE_LARGE_MEMORY_H
#define EP_BASE_LARGE_MEMORY_H

#include <stddef.h>

#define EP_LARGE_BYTES ((size_t)2 << 20)

/* bytes > 0; aligned at least to align (a power of two up to 4096); not initialised. NULL: no
 * memory. From any thread. */
void *ep_large_alloc(size_t bytes, size_t align);
void ep_large_free(void *memory, size_t bytes); /* bytes as allocated; NULL allowed */

#endif
