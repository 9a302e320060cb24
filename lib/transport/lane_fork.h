/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a forked child must not keep of its parent's lanes. Their descriptors are known by number
 * from the moment they exist, since fork waits for the lock that they are made under; a child that
 * held a socket would hide its parent's end from the peer.
 *
 * Threads  any.
 */
#ifndef EP_TRANSPORT_LANE_FORK_H
#define EP_TRANSPORT_LANE_FORK_H

#include <stdbool.h>
#include <stdint.h>

/* Before anything that a child has to forget: from then on a child closes the descriptors that are
 * known here, and nothing is held in it (ep_lane_hold). May be called again. */
void ep_lane_fork_watch(void);
/* Before a lane's first descriptor and thread: the same, and a child calls forget, which lets the
 * lane begin anew. May be called again; each forget is kept once. */
void ep_lane_fork_hook(void (*forget)(void));
/* How many forks there were from the process that loaded the library down to this one. */
uint32_t ep_lane_forks(void);
/* An object that was made at this number is this process's. An ancestor's does not work here: its
 * descriptors are other files', and a thread that is not there may have held its lock. Nothing of
 * it is touched. */
bool ep_lane_is_ours(uint32_t forks);

/* Makes a descriptor known from the moment it exists. call makes it, and must not wait: a fork
 * waits for it. -1 with errno. */
#define EP_LANE_FD(call) (ep_lane_fd_begin(), ep_lane_fd_end(call))
void ep_lane_fd_begin(void);
int ep_lane_fd_end(int taken_fd);
/* Closes a descriptor that is known. Any other number is left alone: in a child it is another
 * file's. */
void ep_lane_fd_close(int fd);
/* The same without closing it: the caller does, since its close may wait. A child forked before
 * that has it. */
void ep_lane_fd_forget(int fd);

#endif
