/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One caller of the soak, as a process of its own: so many calls a second whatever becomes of them
 * (an open loop: a stall does not lessen the load), each result compared with the oracle's bits.
 */
#ifndef SOAK_CALLER_H
#define SOAK_CALLER_H

/*
 * Arguments: coordinator's URL, checkpoint, "stream", "any", or "sums" (stream, hierarchy, sums at
 * nodes), clock's zero in ns, seed. Runs until SIGTERM, waits for what is in flight and prints one
 * line of each:
 *   begun                                      the first call has come back
 *   slow SECONDS MS REROUTED HEDGED FRAMES     a call of 250 ms and more, with when it began
 *   failed SECONDS MS TEXT
 *   total CALLS FAILED P50_US P99_US LONGEST_US LONGEST_BEGAN_S OVERSLEPT_US RSS_KIB RSS_KIB_BEGIN
 * A wrong bit ends it with 1.
 */
int soak_caller(int argc, char **argv);

#endif
