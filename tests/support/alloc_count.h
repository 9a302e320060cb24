/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts every allocation of the process, in any thread and library, between begin and end. It
 * replaces malloc and the like, so it cannot be used with a sanitizer: see EP_TEST_ALLOC_COUNTED.
 */
#ifndef EP_TESTS_SUPPORT_ALLOC_COUNT_H
#define EP_TESTS_SUPPORT_ALLOC_COUNT_H

#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EP_TEST_ALLOC_COUNTED 0
#else
#define EP_TEST_ALLOC_COUNTED 1
#endif

/* Prints the stacks of the first three allocations to stderr. */
void ep_test_alloc_count_begin(void);
uint64_t ep_test_alloc_count_end(void);
/* Allocations of this thread between pause and resume are not counted: they belong to the test. */
void ep_test_alloc_count_pause(void);
void ep_test_alloc_count_resume(void);

#endif
