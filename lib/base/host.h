/* SPDX-License-Identifier: Apache-2.0 */
/* Which machine this is, and how many of its CPUs this process may use. */
#ifndef EP_BASE_HOST_H
#define EP_BASE_HOST_H

#include <stdint.h>

#define EP_BOOT_ID_VARIABLE "EXPERTD_BOOT_ID"
#define EP_HOST_BYTES 64 /* size of a host's name with its terminator; "" unknown */

/*
 * The kernel's boot id: equal for all processes (and containers) under one kernel, different on
 * every other machine and after a restart. A unit with ProcSubset=pid cannot read it; there the
 * service manager passes it in EXPERTD_BOOT_ID (systemd's %b). "" when neither is available; such a
 * host shares nothing with any other.
 */
void ep_host_boot_id(char out_name[EP_HOST_BYTES]);
/* Chooses from the kernel's line ("" unreadable) and the manager's 32 hex digits ("" none).
 * Pure. */
void ep_host_choose_id(const char *kernels, const char *managers, char out_name[EP_HOST_BYTES]);

/* How many CPUs this process may use, by the affinity of its first thread; at least 1. The calling
 * thread makes no difference, since it may be bound to one CPU. A program that binds its first
 * thread thereby limits all. */
uint32_t ep_host_cpus(void);

#endif
