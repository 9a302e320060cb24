/* SPDX-License-Identifier: Apache-2.0 */
/* CPUs and memory nodes, of this machine and of made-up ones. A plain program: it changes its own affinity and environment. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

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

int main(void)
{
    void *(*const checks[])(void *) = {check_here, check_restricted};
    check_made_up();
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, checks[i], NULL) != 0) {
            abort();
        }
        pthread_join(thread, NULL);
    }
    return failures != 0;
}
