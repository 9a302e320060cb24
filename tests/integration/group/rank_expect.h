/* SPDX-License-Identifier: Apache-2.0 */
/* A check on a rank's thread. The test has `static bool failed`, the caller `rank`. */
#ifndef EP_TESTS_GROUP_RANK_EXPECT_H
#define EP_TESTS_GROUP_RANK_EXPECT_H

#include <stdio.h>

#include "rank_call.h"

#define EXPECT(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: rank %u: ", __FILE__, __LINE__, rank);                         \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fprintf(stderr, "\n");                                                                 \
            __atomic_store_n(&failed, true, __ATOMIC_RELAXED);                                     \
        }                                                                                          \
    } while (0)

/* `error` has the code and says each of the words. */
#define EXPECT_ERROR(err, code, ...)                                                               \
    EXPECT((err) == (code) && rank_error_says(&error, (const char *const[]){__VA_ARGS__, NULL}),   \
           "%s", error.text)

#endif
