/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts every allocation of the process between begin and end, whoever makes it. Programs that use
 * it get malloc and the like from here, so not together with a sanitizer: see
 * EP_TEST_ALLOC_COUNTED.
 */
#ifndef EP_TESTS_SUPPORT_ALLOC_COUNT_H
#define EP_TESTS_SUPPORT_ALLOC_COUNT_H

#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EP_TEST_ALLOC_COUNTED 0
#else
#define EP_TEST_ALLOC_COUNTED 1
#endif

/* The first three are shown with their stack on stderr. */
void ep_test_alloc_count_begin(void);
uint64_t ep_test_alloc_count_end(void);
/* What this thread does between them is not counted: it is no part of what is tested. */
void ep_test_alloc_count_pause(void);
void ep_test_alloc_count_resume(void);

#endif
