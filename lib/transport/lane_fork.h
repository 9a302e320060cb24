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

#include <stdint.h>

/*
 * Before a lane's first descriptor and thread: from then on each child closes what is known here,
 * and calls forget, which lets the lane begin anew. As often as it likes.
 */
void ep_lane_fork_hook(void (*forget)(void));
/* How many forks lie between this process and the one that loaded the library: what was made at
 * another number belongs to an ancestor, and nothing of it works here. */
uint32_t ep_lane_forks(void);

/* The descriptor that a call makes, which must not wait: it is known from now on. -1 with errno. */
#define EP_LANE_FD(call) (ep_lane_fd_begin(), ep_lane_fd_end(call))
void ep_lane_fd_begin(void);
int ep_lane_fd_end(int taken_fd);
/* -1: nothing. */
void ep_lane_fd_close(int fd);

#endif
