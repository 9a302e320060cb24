/* SPDX-License-Identifier: Apache-2.0 */
/* What /proc and /sys say of another machine, for cpu_topology.h, until made_up_machine_remove or
 * the next one. Aborts when it cannot. */
#ifndef EP_TESTS_UNIT_BACKENDS_MADE_UP_MACHINE_H
#define EP_TESTS_UNIT_BACKENDS_MADE_UP_MACHINE_H

/* Lists as the kernel writes them: CPUs and memory nodes that this process may use, and the CPUs of
 * each node ("0:0-1 1:2-3"). */
void made_up_machine(const char *cpus, const char *memories, const char *nodes);
void made_up_machine_remove(void);

#endif
