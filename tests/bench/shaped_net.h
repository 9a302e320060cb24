/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hosts on one machine: network namespaces on a bridge, each with a full-duplex link whose rate is
 * set. Needs root and the programs `ip` and `tc`. Host i has the address 10.77.0.(i + 1).
 *
 * Threads    main thread only; shaped_net_enter before the process has threads.
 */
#ifndef EP_BENCH_SHAPED_NET_H
#define EP_BENCH_SHAPED_NET_H

#include <stdbool.h>
#include <stdint.h>

#define SHAPED_NET_HOSTS_MAX 16

/* Makes the hosts; false (said on stderr) when this machine does not allow it. Removed at exit of
 * the process that made it. */
bool shaped_net_create(uint32_t hosts);
void shaped_net_destroy(void);
/* Both directions of every link, in bytes per second; 0: as fast as it goes. */
bool shaped_net_set_rate(double bytes_per_s);
/* The same for what processes of one host send to each other. */
bool shaped_net_set_loopback(double bytes_per_s);
/* "epb1234n0": for `ip netns exec`. */
const char *shaped_net_name(uint32_t host);
/* "10.77.0.1" */
const char *shaped_net_address(uint32_t host);
/* This process goes on as that host. */
bool shaped_net_enter(uint32_t host);

/* Compute threads of a process (by their names, ep-cpu-*) to CPU 1, all its others to CPU 0. */
bool shaped_net_pin(int pid);

#endif
