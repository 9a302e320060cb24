/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "slow": a deliberately slow, asynchronous test backend with its own memory, a stand-in
 * for an accelerator.
 *
 * - Copies and jobs complete from its own thread, in an order shuffled by a seed.
 * - The addresses it gives out are PROT_NONE, so host code that touches its memory crashes. Its own
 *   thread reads and writes through a second, private mapping.
 * - The reference backend holds the weights and computes, so the rows are equal bit for bit.
 * - Faults can be planned: the n-th operation of a kind fails.
 *
 * Use: ep_backend_register(&ep_slow_backend_ops) before threads start, then
 * ep_backend_by_name("slow"). Faults and counters are process-wide, so that a test can reach a
 * backend that a server opened. Threads: any.
 */
#ifndef EP_TESTS_SUPPORT_SLOW_BACKEND_H
#define EP_TESTS_SUPPORT_SLOW_BACKEND_H

#include "backends/backend.h"

extern const ep_backend_ops ep_slow_backend_ops;

typedef enum ep_slow_operation {
    EP_SLOW_ALLOC,
    EP_SLOW_COPY_IN,
    EP_SLOW_SUBMIT,
    EP_SLOW_COPY_OUT,
    EP_SLOW_OPERATIONS
} ep_slow_operation;

typedef enum ep_slow_moment {
    EP_SLOW_AT_CALL, /* the slot returns the error, done() is not called */
    EP_SLOW_AT_DONE  /* accepted, then done() brings the error; not for ALLOC */
} ep_slow_moment;

/* Forgets planned faults and a lost device, sets counters to 0 and the shuffle seed. */
void ep_slow_backend_reset(uint64_t seed);
/* Plans that the nth operation of that kind (from 1, counted since reset) fails with err. One plan
 * per kind and moment. */
void ep_slow_backend_fail(ep_slow_operation operation, ep_slow_moment moment, uint64_t nth,
                          ep_err err);
/* From now on until reset everything fails with DEVICE_LOST: calls at once, accepted work in
 * done(). */
void ep_slow_backend_lose_device(void);
/* Returns the calls of that kind since reset. */
uint64_t ep_slow_backend_count(ep_slow_operation operation);
/* Returns the live memory blocks of all slow backends: 0 if nothing leaks. */
uint64_t ep_slow_backend_blocks_alive(void);
/* Returns the jobs and copies that completed before an earlier one, since reset. */
uint64_t ep_slow_backend_overtakings(void);

#endif
