/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Closes in a forked child what it must not keep of its parent's lanes. A child that held a socket
 * would hide its parent's end from the peer. Descriptors are known here from the moment they exist:
 * they are created under a lock that fork waits for.
 *
 * Threads  any.
 */
#ifndef EP_TRANSPORT_LANE_FORK_H
#define EP_TRANSPORT_LANE_FORK_H

#include <stdbool.h>
#include <stdint.h>

/* Call before anything that a child must forget. From then on, a child closes the descriptors known
 * here, and its count of ep_lane_hold is 0. May be called again. */
void ep_lane_fork_watch(void);
/* Call before a lane's first descriptor and thread. Does what ep_lane_fork_watch does; in a child
 * also calls forget, so that the lane can start anew there. May be called again; each forget is
 * stored once. */
void ep_lane_fork_hook(void (*forget)(void));
/* The number of forks between the process that loaded the library and this one. */
uint32_t ep_lane_forks(void);
/* Whether an object created at this number of forks belongs to this process. An ancestor's object
 * cannot be used: its descriptors may belong to other files now, and a thread that does not exist
 * here may have held its lock. Nothing of it may be touched. */
bool ep_lane_is_ours(uint32_t forks);

/* Registers a descriptor from the moment it exists. call creates it and must not wait, because a
 * fork waits for it. -1 with errno. */
#define EP_LANE_FD(call) (ep_lane_fd_begin(), ep_lane_fd_end(call))
void ep_lane_fd_begin(void);
int ep_lane_fd_end(int taken_fd);
/* Closes a registered descriptor. Ignores other numbers: in a child they may be other files. */
void ep_lane_fd_close(int fd);
/* Unregisters a descriptor that the caller then closes, since that close may wait. A child forked
 * in between keeps it. */
void ep_lane_fd_forget(int fd);

#endif
