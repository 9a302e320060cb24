/* SPDX-License-Identifier: Apache-2.0 */
/* Which machine this is, and how much of it is ours. */
#ifndef EP_BASE_HOST_H
#define EP_BASE_HOST_H

#include <stdint.h>

#define EP_BOOT_ID_VARIABLE "EXPERTD_BOOT_ID"
#define EP_HOST_BYTES 64 /* a host's name with its end; "" not known */

/*
 * The kernel's boot id: equal for every process (and container) under one kernel, different on
 * every other machine and after a restart. A unit with ProcSubset=pid cannot read it: the service
 * manager says it in EXPERTD_BOOT_ID (systemd's %b). "" when neither is there; such a host has
 * nothing in common with any other.
 */
void ep_host_boot_id(char out_name[EP_HOST_BYTES]);
/* What it makes of the kernel's line ("" unreadable) and of the manager's 32 hexadecimal digits (""
 * none). Pure. */
void ep_host_choose_id(const char *kernels, const char *managers, char out_name[EP_HOST_BYTES]);

/* CPUs that this process may use, as its first thread was told; 1 at least. Which thread asks makes
 * no difference: it may be bound to one of them. A program that binds its first thread has said so
 * for all. */
uint32_t ep_host_cpus(void);

#endif
