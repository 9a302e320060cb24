/* SPDX-License-Identifier: Apache-2.0 */
/* Assertions on calls that fill an ep_error; a failed one prints the error's text. */
#ifndef EP_TEST_EXPECT_H
#define EP_TEST_EXPECT_H

#include <criterion/criterion.h>
#include <string.h>

#include "expertd/error.h"

#define ASSERT_OK(call, error) cr_assert_eq((call), EP_OK, "%s", (error).text)
#define EXPECT_OK(call, error) cr_expect_eq((call), EP_OK, "%s", (error).text)

/* The error's text contains `part`. */
#define ASSERT_TEXT(error, part)                                                                   \
    cr_assert_not_null(strstr((error).text, (part)), "expected \"%s\" in \"%s\"", (part),          \
                       (error).text)
#define EXPECT_TEXT(error, part)                                                                   \
    cr_expect_not_null(strstr((error).text, (part)), "expected \"%s\" in \"%s\"", (part),          \
                       (error).text)

/* The call fails with `code` and a text that contains `part`. */
#define ASSERT_FAILS(call, code, error, part)                                                      \
    do {                                                                                           \
        cr_assert_eq((call), (code), "%s", (error).text);                                          \
        ASSERT_TEXT(error, part);                                                                  \
    } while (0)
#define EXPECT_FAILS(call, code, error, part)                                                      \
    do {                                                                                           \
        cr_expect_eq((call), (code), "%s", (error).text);                                          \
        EXPECT_TEXT(error, part);                                                                  \
    } while (0)

#endif
