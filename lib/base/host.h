/* SPDX-License-Identifier: Apache-2.0 */
/* Which machine this is. */
#ifndef EP_BASE_HOST_H
#define EP_BASE_HOST_H

#define EP_HOST_BYTES 64 /* a host's name with its end; "" not known */

/*
 * The kernel's boot id: equal for every process (and container) under one kernel, different on every other
 * machine and after a restart. "" when it cannot be read; such a host has nothing in common with any other.
 */
void ep_host_boot_id(char out_name[EP_HOST_BYTES]);

#endif
