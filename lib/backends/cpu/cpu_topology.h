/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPUs that this thread may use, and the memory node of each, from /proc and /sys. Nodes are
 * numbered 0 to nodes - 1 among those that have usable CPUs. Usable CPUs whose node is not allowed
 * (cpuset.mems) count to the last node.
 * Without /proc or /sys there is one node, and nothing is tied. For tests, EP_CPU_TOPOLOGY_ROOT
 * names a directory with the files of another machine; threads and memory are then tied as far as
 * this machine has those CPUs and nodes.
 *
 * Threads    all functions but load and free: any.
 */
#ifndef EP_BACKENDS_CPU_CPU_TOPOLOGY_H
#define EP_BACKENDS_CPU_CPU_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define EP_CPU_TOPOLOGY_ROOT_VARIABLE "EP_CPU_TOPOLOGY_ROOT"

typedef struct ep_cpu_topology ep_cpu_topology;

/* Errors: NO_MEMORY. */
ep_err ep_cpu_topology_load(ep_cpu_topology **out_topology);
/* NULL allowed. */
void ep_cpu_topology_free(ep_cpu_topology *topology);

uint32_t ep_cpu_topology_cpus(const ep_cpu_topology *topology);  /* >= 1 */
uint32_t ep_cpu_topology_nodes(const ep_cpu_topology *topology); /* >= 1 */
/* Memory node of worker `index`, where `workers` workers are spread evenly over the CPUs. */
uint32_t ep_cpu_topology_node(const ep_cpu_topology *topology, uint32_t index, uint32_t workers);
/* Ties the calling thread, which is that worker, to its CPU alone, or to all usable CPUs of its
 * node. Best effort. */
void ep_cpu_topology_place(const ep_cpu_topology *topology, uint32_t index, uint32_t workers,
                           bool alone);
/* Asks for untouched memory to be placed on this node; UINT32_MAX, before it is freed: anywhere.
 * Best effort. Does nothing with one node. */
void ep_cpu_topology_bind(const ep_cpu_topology *topology, void *memory, size_t bytes,
                          uint32_t node);

#endif
