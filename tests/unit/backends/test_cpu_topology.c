/* SPDX-License-Identifier: Apache-2.0 */
/* CPUs and memory nodes, of this machine and of made-up ones. A plain program: it changes its own
 * affinity and environment. */
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
#include "unit/backends/made_up_machine.h"

static int failures;

static void expect(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "FAILED: %s\n", what);
        failures++;
    }
}

static ep_cpu_topology *load(void)
{
    ep_cpu_topology *topology;
    if (ep_cpu_topology_load(&topology) != EP_OK) {
        abort();
    }
    return topology;
}

static void check_made_up(void)
{
    made_up_machine("0-11", "0-2", "0:0-3 1:4,6-7,5 2:8-11");
    ep_cpu_topology *t = load();
    expect(ep_cpu_topology_nodes(t) == 3, "three nodes");
    expect(ep_cpu_topology_cpus(t) == 12, "twelve CPUs");
    for (uint32_t i = 0; i < 12; i++) {
        expect(ep_cpu_topology_node(t, i, 12) == i / 4, "one worker per CPU, node by node");
        expect(ep_cpu_topology_node(t, i + 12, 24) == i / 4, "more workers go round");
    }
    for (uint32_t i = 0; i < 3; i++) {
        expect(ep_cpu_topology_node(t, i, 3) == i, "few workers are spread over the nodes");
    }
    ep_cpu_topology_free(t);
    made_up_machine_remove();
}

/* Two nodes of two CPUs, the memory of the first is not allowed: its CPUs are, without a node. The
 * third has memory alone. */
static void check_nodeless(void)
{
    made_up_machine("0-3", "1-2", "0:0-1 1:2-3 2:-");
    ep_cpu_topology *t = load();
    expect(ep_cpu_topology_nodes(t) == 1, "one node is left");
    expect(ep_cpu_topology_cpus(t) == 4, "its CPUs and those without a node");
    for (uint32_t i = 0; i < 4; i++) {
        expect(ep_cpu_topology_node(t, i, 4) == 0, "all count to it");
    }
    ep_cpu_topology_free(t);
    made_up_machine_remove();
}

static cpu_set_t affinity(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    return set;
}

/* A kernel without memory nodes, of whose possible CPUs not all are on; then neither /proc nor
 * /sys. */
static void check_without_nodes(void)
{
    const cpu_set_t before = affinity();
    made_up_machine("0-3,500-1023", "0", "");
    ep_cpu_topology *t = load();
    expect(ep_cpu_topology_nodes(t) == 1 && ep_cpu_topology_cpus(t) == 16,
           "one node of the CPUs that are on");
    expect(ep_cpu_topology_node(t, 15, 16) == 0, "all of them");
    ep_cpu_topology_free(t);
    made_up_machine_remove();
    setenv(EP_CPU_TOPOLOGY_ROOT_VARIABLE, "/nonexistent", 1);
    t = load();
    expect(ep_cpu_topology_nodes(t) == 1 && ep_cpu_topology_cpus(t) == (uint32_t)CPU_COUNT(&before),
           "as many CPUs as the process may use");
    ep_cpu_topology_place(t, 0, CPU_SETSIZE, true);
    const cpu_set_t after = affinity();
    expect(CPU_EQUAL(&after, &before), "nothing is tied");
    ep_cpu_topology_free(t);
    unsetenv(EP_CPU_TOPOLOGY_ROOT_VARIABLE);
}

static void *check_here(void *arg)
{
    const cpu_set_t before = affinity();
    ep_cpu_topology *t = load();
    (void)arg;
    expect(ep_cpu_topology_cpus(t) == (uint32_t)CPU_COUNT(&before),
           "as many CPUs as the process may use");
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
    ep_cpu_topology *t = load();
    expect(ep_cpu_topology_cpus(t) == 1, "one usable CPU");
    ep_cpu_topology_place(t, 0, 1, false);
    const cpu_set_t after = affinity();
    expect(CPU_EQUAL(&after, &last), "not beyond the allowed CPUs");
    ep_cpu_topology_free(t);
    return NULL;
}

/* Whether the kernel's policy for this memory is the node that every machine has. */
static bool is_on_first_node(void *memory)
{
    unsigned long mask[16] = {0};
    int mode = 0;
    return syscall(SYS_get_mempolicy, &mode, mask, 8 * sizeof(mask), memory, MPOL_F_ADDR) == 0 &&
           mode != MPOL_DEFAULT && mask[0] == 1;
}

/* Containers often forbid it. */
static bool may_set_policies(void *memory, size_t bytes)
{
    const unsigned long first = 1;
    return syscall(SYS_mbind, memory, bytes, MPOL_PREFERRED, &first, 8 * sizeof(first), 0) == 0 &&
           is_on_first_node(memory) &&
           syscall(SYS_mbind, memory, bytes, MPOL_DEFAULT, NULL, 0, 0) == 0 &&
           !is_on_first_node(memory);
}

/* The machine's first two CPUs as two nodes: one is the node that every machine has, the other one
 * no machine. */
static void *check_tied(void *arg)
{
    enum { BYTES = 1 << 20 };
    const cpu_set_t before = affinity();
    (void)arg;
    if (!CPU_ISSET(0, &before) || !CPU_ISSET(1, &before)) {
        printf("not tied: the process may not use CPUs 0 and 1\n");
        return NULL;
    }
    made_up_machine("0-1", "0,1000", "0:1 1000:0");
    ep_cpu_topology *t = load();
    expect(ep_cpu_topology_nodes(t) == 2 && ep_cpu_topology_cpus(t) == 2, "two nodes of one CPU");
    const uint32_t real = ep_cpu_topology_node(t, 0, 2);
    for (uint32_t i = 0; i < 2; i++) {
        ep_cpu_topology_place(t, i, 2, false);
        const cpu_set_t now = affinity();
        expect(CPU_COUNT(&now) == 1 && CPU_ISSET(1 - i, &now),
               "a worker is on its node's CPUs, node by node");
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
    made_up_machine_remove();
    return NULL;
}

int main(void)
{
    void *(*const checks[])(void *) = {check_here, check_restricted, check_tied};
    check_made_up();
    check_nodeless();
    check_without_nodes();
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, checks[i], NULL) != 0) {
            abort();
        }
        pthread_join(thread, NULL);
    }
    return failures != 0;
}
