/* SPDX-License-Identifier: Apache-2.0 */
/* CPUs and memory nodes, of this machine and of made-up ones. A plain program: it changes its own affinity and environment. */
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backends/cpu/cpu_topology.h"

static int failures;

static void expect(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "FAILED: %s\n", what);
        failures++;
    }
}

static ep_cpu_topology *load(const char *synthetic)
{
    ep_cpu_topology *topology;
    if (synthetic != NULL) {
        setenv("HWLOC_SYNTHETIC", synthetic, 1);
    } else {
        unsetenv("HWLOC_SYNTHETIC");
    }
    if (ep_cpu_topology_load(&topology) != EP_OK) {
        abort();
    }
    return topology;
}

static void check_made_up(void)
{
    ep_cpu_topology *t = load("numa:3 core:2 pu:2");
    expect(ep_cpu_topology_nodes(t) == 3, "three nodes");
    expect(ep_cpu_topology_cpus(t) == 12, "twelve CPUs");
    for (uint32_t i = 0; i < 12; i++) {
        expect(ep_cpu_topology_node(t, i, 12) == i / 4, "one worker per CPU, node by node");
        expect(ep_cpu_topology_node(t, i + 12, 24) == i / 4, "more workers go round");
    }
    for (uint32_t i = 0; i < 3; i++) {
        expect(ep_cpu_topology_node(t, i, 3) == i, "few workers are spread over the nodes");
    }
    ep_cpu_topology_place(t, 5, 12, true); /* does nothing to this machine's CPUs */
    ep_cpu_topology_free(t);
}

/* Two nodes of two CPUs, the memory of the first is not allowed: its CPUs are, without a node. */
static const char one_node_of_two[] =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\">\n"
    "<object type=\"Machine\" os_index=\"0\" cpuset=\"0xf\" complete_cpuset=\"0xf\" allowed_cpuset=\"0xf\" nodeset=\"0x3\""
    " complete_nodeset=\"0x3\" allowed_nodeset=\"0x2\" gp_index=\"1\">\n"
#define PU(cpu, cpus, nodes, id)                                                                                  \
    "<object type=\"PU\" os_index=\"" cpu "\" cpuset=\"" cpus "\" complete_cpuset=\"" cpus "\" nodeset=\"" nodes \
    "\" complete_nodeset=\"" nodes "\" gp_index=\"" id "\"/>\n"
#define NODE(node, cpus, nodes, id)                                                                                    \
    "<object type=\"Group\" cpuset=\"" cpus "\" complete_cpuset=\"" cpus "\" nodeset=\"" nodes "\" complete_nodeset=\"" \
    nodes "\" gp_index=\"1" id "\" kind=\"1001\" subkind=\"0\">\n<object type=\"NUMANode\" os_index=\"" node             \
    "\" cpuset=\"" cpus "\" complete_cpuset=\"" cpus "\" nodeset=\"" nodes "\" complete_nodeset=\"" nodes              \
    "\" gp_index=\"2" id "\" local_memory=\"1073741824\"><page_type size=\"4096\" count=\"262144\"/></object>\n"
    NODE("0", "0x3", "0x1", "1") PU("0", "0x1", "0x1", "31") PU("1", "0x2", "0x1", "32") "</object>\n"
    NODE("1", "0xc", "0x2", "2") PU("2", "0x4", "0x2", "33") PU("3", "0x8", "0x2", "34") "</object>\n"
    "</object>\n</topology>\n";

static ep_cpu_topology *load_text(const char *text)
{
    char path[] = "/tmp/ep-topology-XXXXXX";
    const int fd = mkstemp(path);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text)) {
        abort();
    }
    close(fd);
    setenv("HWLOC_XMLFILE", path, 1);
    ep_cpu_topology *t = load(NULL);
    unsetenv("HWLOC_XMLFILE");
    unlink(path);
    return t;
}

static void check_nodeless(void)
{
    ep_cpu_topology *t = load_text(one_node_of_two);
    expect(ep_cpu_topology_nodes(t) == 1, "one node is left");
    expect(ep_cpu_topology_cpus(t) == 4, "its CPUs and those without a node");
    for (uint32_t i = 0; i < 4; i++) {
        expect(ep_cpu_topology_node(t, i, 4) == 0, "all count to it");
    }
    ep_cpu_topology_free(t);
}

static cpu_set_t affinity(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    return set;
}

static void *check_here(void *arg)
{
    const cpu_set_t before = affinity();
    ep_cpu_topology *t = load(NULL);
    (void)arg;
    expect(ep_cpu_topology_cpus(t) == (uint32_t)CPU_COUNT(&before), "as many CPUs as the process may use");
    const uint32_t cpus = ep_cpu_topology_cpus(t);
    cpu_set_t all, one, several;
    CPU_ZERO(&all);
    for (uint32_t i = 0; i < cpus; i++) {
        ep_cpu_topology_place(t, i, cpus, true);
        one = affinity();
        expect(CPU_COUNT(&one) == 1, "tied to one CPU");
        CPU_OR(&all, &all, &one);
        ep_cpu_topology_place(t, i, cpus, false);
        several = affinity();
        CPU_AND(&one, &one, &several);
        expect(CPU_COUNT(&one) == 1, "the node's CPUs have the worker's own");
    }
    expect(CPU_EQUAL(&all, &before), "every CPU has its worker");
    ep_cpu_topology_free(t);
    return NULL;
}

/* In a container or below taskset the process has some of the machine's CPUs. */
static void *check_restricted(void *arg)
{
    const cpu_set_t before = affinity();
    cpu_set_t last;
    int cpu = CPU_SETSIZE - 1;
    (void)arg;
    while (!CPU_ISSET(cpu, &before)) {
        cpu--;
    }
    CPU_ZERO(&last);
    CPU_SET(cpu, &last);
    sched_setaffinity(0, sizeof(last), &last);
    ep_cpu_topology *t = load(NULL);
    expect(ep_cpu_topology_cpus(t) == 1, "one usable CPU");
    ep_cpu_topology_place(t, 0, 1, false);
    const cpu_set_t after = affinity();
    expect(CPU_EQUAL(&after, &last), "not beyond the allowed CPUs");
    ep_cpu_topology_free(t);
    return NULL;
}

/* The machine's first two CPUs as two nodes, of which the second has the memory that every machine has and the first one no machine. */
static const char two_nodes[] =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\">\n"
    "<object type=\"Machine\" os_index=\"0\" cpuset=\"0x3\" complete_cpuset=\"0x3\" allowed_cpuset=\"0x3\" nodeset=\"0x80000001\""
    " complete_nodeset=\"0x80000001\" allowed_nodeset=\"0x80000001\" gp_index=\"1\">\n"
    NODE("31", "0x1", "0x80000000", "1") PU("0", "0x1", "0x80000000", "31") "</object>\n"
    NODE("0", "0x2", "0x1", "2") PU("1", "0x2", "0x1", "32") "</object>\n"
    "</object>\n</topology>\n";

/* Whether the kernel's policy for this memory is the node that every machine has. */
static bool is_on_first_node(void *memory)
{
    unsigned long mask[16] = {0};
    int mode = 0;
    return syscall(SYS_get_mempolicy, &mode, mask, 8 * sizeof(mask), memory, MPOL_F_ADDR) == 0 && mode != MPOL_DEFAULT && mask[0] == 1;
}

/* Containers often forbid it. */
static bool may_set_policies(void *memory, size_t bytes)
{
    const unsigned long first = 1;
    return syscall(SYS_mbind, memory, bytes, MPOL_PREFERRED, &first, 8 * sizeof(first), 0) == 0 && is_on_first_node(memory) &&
           syscall(SYS_mbind, memory, bytes, MPOL_DEFAULT, NULL, 0, 0) == 0 && !is_on_first_node(memory);
}

/* Threads and memory go where the topology says, as it calls itself this machine's. */
static void *check_tied(void *arg)
{
    enum { BYTES = 1 << 20 };
    const cpu_set_t before = affinity();
    (void)arg;
    if (!CPU_ISSET(0, &before) || !CPU_ISSET(1, &before)) {
        printf("not tied: the process may not use CPUs 0 and 1\n");
        return NULL;
    }
    setenv("HWLOC_THISSYSTEM", "1", 1);
    ep_cpu_topology *t = load_text(two_nodes);
    unsetenv("HWLOC_THISSYSTEM");
    expect(ep_cpu_topology_nodes(t) == 2 && ep_cpu_topology_cpus(t) == 2, "two nodes of one CPU");
    uint32_t real = 0; /* the node whose memory there is: hwloc orders them */
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t node = ep_cpu_topology_node(t, i, 2);
        ep_cpu_topology_place(t, i, 2, false);
        const cpu_set_t now = affinity();
        expect(CPU_COUNT(&now) == 1, "a worker is on its node's CPUs");
        real = CPU_ISSET(1, &now) ? node : real;
        expect(CPU_ISSET(i, &now), "node by node");
    }
    void *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (may_set_policies(memory, BYTES)) {
        ep_cpu_topology_bind(t, memory, BYTES, real);
        expect(is_on_first_node(memory), "memory lies on its node");
        memset(memory, 1, BYTES);
        ep_cpu_topology_bind(t, memory, BYTES, UINT32_MAX);
        expect(!is_on_first_node(memory), "memory that is given back lies anywhere");
        ep_cpu_topology_bind(t, memory, BYTES, 1 - real); /* which has none */
        memset(memory, 2, BYTES);
    } else {
        printf("memory policies cannot be set here\n");
    }
    munmap(memory, BYTES);
    ep_cpu_topology_free(t);
    return NULL;
}

int main(void)
{
    void *(*const checks[])(void *) = {check_here, check_restricted, check_tied};
    check_made_up();
    check_nodeless();
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, checks[i], NULL) != 0) {
            abort();
        }
        pthread_join(thread, NULL);
    }
    return failures != 0;
}
