/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lets one allocation of this program's own code fail, the n-th from now, in whatever thread it
 * happens. Works by the linker's --wrap (see CMakeLists.txt), so also under sanitizers; libraries
 * keep their own allocations, except jansson, which is told to use ours.
 */
#ifndef EP_TESTS_ALLOC_FAIL_H
#define EP_TESTS_ALLOC_FAIL_H

#include <stdbool.h>
#include <stdint.h>

/* The n-th allocation from now fails, n >= 1; only that one. */
void alloc_fail_arm(uint64_t n);
/* No more failures. True when one happened since arming. */
bool alloc_fail_disarm(void);
/* Allocations since the program began. */
uint64_t alloc_fail_count(void);

/*
 * Runs attempt with the 1st, 2nd, 3rd ... allocation failing, each followed by recover without
 * failures, until an attempt went through without one (then all of them have failed once). attempt
 * says nothing: whatever it returns to its caller must be an error or success, recover must find
 * everything working. How many allocations failed; prints it.
 */
uint64_t alloc_fail_sweep(const char *name, void (*attempt)(void *arg), void (*recover)(void *arg),
                          void *arg);

/* Ends the program with a text. */
void torture_broken(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

#endif
