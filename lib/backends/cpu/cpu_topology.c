/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/cpu_topology.h"

#include <hwloc.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "backends/backend.h"
#include "backends/cpu/cpu_spin.h"
#include "backends/host_common.h"

#ifndef RUSAGE_THREAD
#define RUSAGE_THREAD 1
#endif

typedef struct {
    unsigned os_index;
    uint32_t node;
} usable_cpu;

struct ep_cpu_topology {
    hwloc_topology_t hwloc; /* NULL: hwloc did not answer */
    usable_cpu *cpus;       /* [cpus_count], node by node */
    uint32_t cpus_count;
    hwloc_obj_t nodes[EP_BACKEND_THREADS_MAX];
    uint32_t nodes_count;
};

uint64_t ep_cpu_preemptions(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? (uint64_t)usage.ru_nivcsw : 0;
}

/* Usable CPUs of one node follow those of the nodes before. */
static void add_node(ep_cpu_topology *t, hwloc_obj_t node, hwloc_const_cpuset_t usable)
{
    int cpu;
    const uint32_t before = t->cpus_count;
    hwloc_bitmap_t set = hwloc_bitmap_dup(node->cpuset);
    if (set == NULL) {
        return;
    }
    hwloc_bitmap_and(set, set, usable);
    for (cpu = hwloc_bitmap_first(set); cpu >= 0 && t->cpus_count < EP_BACKEND_THREADS_MAX; cpu = hwloc_bitmap_next(set, cpu)) {
        bool known = false; /* memory of several kinds may be near the same CPUs */
        for (uint32_t i = 0; i < before; i++) {
            known |= t->cpus[i].os_index == (unsigned)cpu;
        }
        if (!known) {
            t->cpus[t->cpus_count++] = (usable_cpu){.os_index = (unsigned)cpu, .node = t->nodes_count};
        }
    }
    hwloc_bitmap_free(set);
    if (t->cpus_count > before) {
        t->nodes[t->nodes_count++] = node;
    }
}

static int by_node(const void *a, const void *b)
{
    const usable_cpu *x = a;
    const usable_cpu *y = b;
    return x->node != y->node ? (x->node < y->node ? -1 : 1) : x->os_index < y->os_index ? -1 : x->os_index > y->os_index;
}

/* CPUs whose own node's memory is not allowed (cpuset.mems) are near no node that is left. They count to the first. */
static void add_nodeless(ep_cpu_topology *t, hwloc_bitmap_t usable)
{
    int cpu;
    if (t->nodes_count == 0) {
        return;
    }
    for (uint32_t i = 0; i < t->cpus_count; i++) {
        hwloc_bitmap_clr(usable, t->cpus[i].os_index);
    }
    for (cpu = hwloc_bitmap_first(usable); cpu >= 0 && t->cpus_count < EP_BACKEND_THREADS_MAX;
         cpu = hwloc_bitmap_next(usable, cpu)) {
        t->cpus[t->cpus_count++] = (usable_cpu){.os_index = (unsigned)cpu, .node = 0};
    }
    qsort(t->cpus, t->cpus_count, sizeof(*t->cpus), by_node);
}

static void read_nodes(ep_cpu_topology *t)
{
    hwloc_bitmap_t usable = hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(t->hwloc));
    hwloc_bitmap_t bound = hwloc_bitmap_alloc();
    if (usable != NULL && bound != NULL) {
        if (hwloc_topology_is_thissystem(t->hwloc) && hwloc_get_cpubind(t->hwloc, bound, HWLOC_CPUBIND_THREAD) == 0) {
            hwloc_bitmap_and(usable, usable, bound);
        }
        for (hwloc_obj_t node = NULL; (node = hwloc_get_next_obj_by_type(t->hwloc, HWLOC_OBJ_NUMANODE, node)) != NULL;) {
            add_node(t, node, usable);
        }
        add_nodeless(t, usable);
    }
    hwloc_bitmap_free(usable);
    hwloc_bitmap_free(bound);
}

ep_err ep_cpu_topology_load(ep_cpu_topology **out_topology)
{
    ep_cpu_topology *t = calloc(1, sizeof(*t));
    if (t == NULL || (t->cpus = calloc(EP_BACKEND_THREADS_MAX, sizeof(*t->cpus))) == NULL) {
        free(t);
        return EP_ERR_NO_MEMORY;
    }
    if (hwloc_topology_init(&t->hwloc) == 0) {
        if (hwloc_topology_load(t->hwloc) == 0) {
            read_nodes(t);
        }
    } else {
        t->hwloc = NULL;
    }
    if (t->cpus_count == 0) {
        if (t->hwloc != NULL) {
            hwloc_topology_destroy(t->hwloc);
            t->hwloc = NULL;
        }
        t->cpus_count = ep_host_cpus_count();
        t->nodes_count = 1;
    }
    *out_topology = t;
    return EP_OK;
}

void ep_cpu_topology_free(ep_cpu_topology *t)
{
    if (t == NULL) {
        return;
    }
    if (t->hwloc != NULL) {
        hwloc_topology_destroy(t->hwloc);
    }
    free(t->cpus);
    free(t);
}

uint32_t ep_cpu_topology_cpus(const ep_cpu_topology *t)
{
    return t->cpus_count;
}

uint32_t ep_cpu_topology_nodes(const ep_cpu_topology *t)
{
    return t->nodes_count;
}

static const usable_cpu *cpu_of(const ep_cpu_topology *t, uint32_t index, uint32_t workers)
{
    return &t->cpus[workers >= t->cpus_count ? index % t->cpus_count : (uint64_t)index * t->cpus_count / workers];
}

uint32_t ep_cpu_topology_node(const ep_cpu_topology *t, uint32_t index, uint32_t workers)
{
    return cpu_of(t, index, workers)->node;
}

void ep_cpu_topology_place(const ep_cpu_topology *t, uint32_t index, uint32_t workers, bool alone)
{
    const usable_cpu *cpu = cpu_of(t, index, workers);
    if (t->hwloc == NULL) {
        return;
    }
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    if (set == NULL) {
        return;
    }
    for (uint32_t i = 0; i < t->cpus_count; i++) {
        if (alone ? &t->cpus[i] == cpu : t->cpus[i].node == cpu->node) {
            hwloc_bitmap_set(set, t->cpus[i].os_index);
        }
    }
    (void)hwloc_set_cpubind(t->hwloc, set, HWLOC_CPUBIND_THREAD);
    hwloc_bitmap_free(set);
}

void ep_cpu_topology_bind(const ep_cpu_topology *t, void *memory, size_t bytes, uint32_t node)
{
    if (t->hwloc == NULL || t->nodes_count < 2) {
        return;
    }
    if (node == UINT32_MAX) {
        (void)hwloc_set_area_membind(t->hwloc, memory, bytes, hwloc_topology_get_allowed_nodeset(t->hwloc), HWLOC_MEMBIND_DEFAULT,
                                     HWLOC_MEMBIND_BYNODESET);
        return;
    }
    (void)hwloc_set_area_membind(t->hwloc, memory, bytes, t->nodes[node]->nodeset, HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET);
}
