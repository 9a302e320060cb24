/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Named points at which a test ends, stops or fails the coordinator. Without EP_FAILPOINTS they
 * have no code.
 *
 * The variable EP_FAILPOINT selects one: "name=kill" or "name=stop", with ":n" for the n-th pass of
 * the point (default 1), or "name=error:PATH", which fails as long as the file PATH exists.
 */
#ifndef EP_COORDINATOR_FAILPOINT_H
#define EP_COORDINATOR_FAILPOINT_H

#include <stdbool.h>

#ifdef EP_FAILPOINTS
/* True: the caller must fail here. Any thread. */
bool ep_failpoint_hit(const char *name);
enum ep_failpoint_names {
#define X(name) EP_FAILPOINT_##name,
#include "coordinator/failpoints.def"
#undef X
};
#define EP_FAILPOINT(name) ((void)EP_FAILPOINT_##name, ep_failpoint_hit(#name))
#else
#define EP_FAILPOINT(name) false
#endif

#endif
