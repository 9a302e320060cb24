/* SPDX-License-Identifier: Apache-2.0 */
/* Checks for programs and threads outside of a Criterion test. */
#ifndef EP_TESTS_SUPPORT_CHECK_H
#define EP_TESTS_SUPPORT_CHECK_H

#include <stdio.h>
#include <stdlib.h>

/* Ends the program with the condition and a text, which may be left out. */
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                        \
            fprintf(stderr, " " __VA_ARGS__);                                                      \
            fprintf(stderr, "\n");                                                                 \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#endif
