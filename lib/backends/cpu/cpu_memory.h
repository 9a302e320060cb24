/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of weights, in huge pages up to the last byte. The rest of an expert's last huge page
 * holds the beginning of the next expert. Otherwise up to 2 MiB of each expert would be in small
 * pages, where a panel takes half as long again. So experts share chunks of 256 MiB. Experts above
 * a quarter of a chunk, or below 256 KiB, get memory of their own.
 *
 * Ownership  a part is the caller's until it is given back. Its memory then returns to the system,
 *            except huge pages that it shares with its neighbours; a chunk without parts returns as
 *            a whole.
 * Threads    any.
 */
#ifndef EP_BACKENDS_CPU_CPU_MEMORY_H
#define EP_BACKENDS_CPU_CPU_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "backends/cpu/cpu_topology.h"

typedef struct ep_cpu_memory ep_cpu_memory;

/* topology is borrowed until free. NULL: no memory. */
ep_cpu_memory *ep_cpu_memory_create(const ep_cpu_topology *topology);
/* All parts must have been given back. NULL allowed. */
void ep_cpu_memory_free(ep_cpu_memory *memory);

/* A part on this memory node, aligned to EP_HOST_ALIGN, uninitialised; bytes > 0. NULL: no
 * memory. */
void *ep_cpu_memory_take(ep_cpu_memory *memory, size_t bytes, uint32_t node);
/* bytes as taken. */
void ep_cpu_memory_give(ep_cpu_memory *memory, void *part, size_t bytes);

#endif
