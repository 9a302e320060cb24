/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/cpu_topology.h"

#include <linux/limits.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

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
    bool is_known;    /* false: nothing is tied */
    usable_cpu *cpus; /* [cpus_count], ordered by node */
    uint32_t cpus_count;
    unsigned nodes[EP_BACKEND_THREADS_MAX]; /* numbers of the kernel */
    uint32_t nodes_count;
};

uint64_t ep_cpu_preemptions(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? (uint64_t)usage.ru_nivcsw : 0;
}

/* Parses a list of the kernel like "0-3,8", of CPUs or of nodes. Neither has numbers above
 * CPU_SETSIZE here. */
static cpu_set_t parse_list(const char *text)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    while (*text >= '0' && *text <= '9') {
        char *end;
        const unsigned long first = strtoul(text, &end, 10);
        const unsigned long last = *end == '-' ? strtoul(end + 1, &end, 10) : first;
        for (unsigned long i = first; i <= last && i < CPU_SETSIZE; i++) {
            CPU_SET(i, &set);
        }
        text = end + (*end == ',');
    }
    return set;
}

/* Reads the list behind `key` and blanks, in the first line that begins with key. */
static bool read_list(const char *file, const char *key, cpu_set_t *out_set)
{
    const char *root = secure_getenv(EP_CPU_TOPOLOGY_ROOT_VARIABLE);
    char path[PATH_MAX];
    char *line = NULL;
    size_t size = 0;
    bool found = false;
    snprintf(path, sizeof(path), "%s%s", root != NULL ? root : "", file);
    FILE *stream = fopen(path, "re");
    while (stream != NULL && !found && getline(&line, &size, stream) > 0) {
        if (strncmp(line, key, strlen(key)) == 0) {
            *out_set = parse_list(line + strlen(key) + strspn(line + strlen(key), " \t"));
            found = true;
        }
    }
    if (stream != NULL) {
        fclose(stream);
    }
    free(line);
    return found;
}

static void add_cpus(ep_cpu_topology *t, const cpu_set_t *cpus, uint32_t node)
{
    for (unsigned cpu = 0; cpu < CPU_SETSIZE && t->cpus_count < EP_BACKEND_THREADS_MAX; cpu++) {
        if (CPU_ISSET(cpu, cpus)) {
            t->cpus[t->cpus_count++] = (usable_cpu){.os_index = cpu, .node = node};
        }
    }
}

static void read_nodes(ep_cpu_topology *t)
{
    cpu_set_t usable, online, memories, near;
    char path[64];
    if (!read_list("/proc/thread-self/status", "Cpus_allowed_list:", &usable) ||
        !read_list("/proc/thread-self/status", "Mems_allowed_list:", &memories) ||
        !read_list("/sys/devices/system/cpu/online", "", &online)) {
        return;
    }
    CPU_AND(&usable, &usable, &online);
    for (unsigned node = 0; node < CPU_SETSIZE && t->cpus_count < EP_BACKEND_THREADS_MAX; node++) {
        snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/cpulist", node);
        if (!CPU_ISSET(node, &memories) || !read_list(path, "", &near)) {
            continue;
        }
        CPU_AND(&near, &near, &usable);
        CPU_XOR(&usable, &usable, &near);
        /* otherwise the node has no CPUs, or only CPUs of other nodes */
        if (CPU_COUNT(&near) > 0) {
            add_cpus(t, &near, t->nodes_count);
            t->nodes[t->nodes_count++] = node;
        }
    }
    /* CPUs whose own node's memory is not allowed (cpuset.mems) have no near node; they count to
     * the last. */
    t->nodes_count += t->nodes_count == 0; /* a kernel without memory nodes */
    add_cpus(t, &usable, t->nodes_count - 1);
    t->is_known = t->cpus_count > 0;
}

ep_err ep_cpu_topology_load(ep_cpu_topology **out_topology)
{
    ep_cpu_topology *t = calloc(1, sizeof(*t));
    if (t == NULL || (t->cpus = calloc(EP_BACKEND_THREADS_MAX, sizeof(*t->cpus))) == NULL) {
        free(t);
        return EP_ERR_NO_MEMORY;
    }
    read_nodes(t);
    if (!t->is_known) {
        t->cpus_count = ep_host_cpus_count();
        t->nodes_count = 1;
    }
    *out_topology = t;
    return EP_OK;
}

void ep_cpu_topology_free(ep_cpu_topology *t)
{
    if (t != NULL) {
        free(t->cpus);
        free(t);
    }
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
    return &t->cpus[workers >= t->cpus_count ? index % t->cpus_count
                                             : (uint64_t)index * t->cpus_count / workers];
}

uint32_t ep_cpu_topology_node(const ep_cpu_topology *t, uint32_t index, uint32_t workers)
{
    return cpu_of(t, index, workers)->node;
}

void ep_cpu_topology_place(const ep_cpu_topology *t, uint32_t index, uint32_t workers, bool alone)
{
    const usable_cpu *cpu = cpu_of(t, index, workers);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (uint32_t i = 0; i < t->cpus_count; i++) {
        if (alone ? &t->cpus[i] == cpu : t->cpus[i].node == cpu->node) {
            CPU_SET(t->cpus[i].os_index, &set);
        }
    }
    if (t->is_known) {
        (void)sched_setaffinity(0, sizeof(set), &set);
    }
}

void ep_cpu_topology_bind(const ep_cpu_topology *t, void *memory, size_t bytes, uint32_t node)
{
    enum { BITS = 8 * sizeof(unsigned long) };
    unsigned long mask[CPU_SETSIZE / BITS] = {0};
    const size_t in_page = (uintptr_t)memory % (size_t)sysconf(_SC_PAGESIZE);
    if (t->nodes_count < 2) {
        return;
    }
    if (node != UINT32_MAX) {
        mask[t->nodes[node] / BITS] = 1UL << t->nodes[node] % BITS;
    }
    (void)syscall(SYS_mbind, (uint8_t *)memory - in_page, bytes + in_page,
                  node == UINT32_MAX ? MPOL_DEFAULT : MPOL_PREFERRED, mask, CPU_SETSIZE, 0);
}
