/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of weights, in huge pages to its last byte. What an expert leaves of its last huge page
 * holds the beginning of the next one: alone, up to 2 MiB of each would lie in small pages, where a
 * panel takes half as long again. So experts share chunks of 256 MiB; those above a quarter of one,
 * and those below 256 KiB, have memory of their own.
 *
 * Ownership  a part is the caller's until it gives it back. What it filled goes back to the system
 *            then, but for the huge pages it shares with its neighbours; a chunk without parts goes
 *            back as a whole.
 * Threads    any.
 */
#ifndef EP_BACKENDS_CPU_CPU_MEMORY_H
#define EP_BACKENDS_CPU_CPU_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "backends/cpu/cpu_topology.h"

typedef struct ep_cpu_memory ep_cpu_memory;

/* topology stays the caller's, and stays. NULL: no memory. */
ep_cpu_memory *ep_cpu_memory_create(const ep_cpu_topology *topology);
/* All parts were given back. NULL allowed. */
void ep_cpu_memory_free(ep_cpu_memory *memory);

/* A part on this memory node, aligned to EP_HOST_ALIGN, its contents anything; bytes > 0. NULL: no
 * memory. */
void *ep_cpu_memory_take(ep_cpu_memory *memory, size_t bytes, uint32_t node);
/* bytes as taken. */
void ep_cpu_memory_give(ep_cpu_memory *memory, void *part, size_t bytes);

#endif
