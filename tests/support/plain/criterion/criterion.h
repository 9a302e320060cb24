/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of Criterion's interface that the unit tests of base, moe and kernels use, for builds
 * without Criterion (EP_CORES_ONLY). A test that uses more does not compile there. Each test is a
 * process of its own, as with Criterion.
 */
#ifndef EP_TESTS_SUPPORT_PLAIN_CRITERION_H
#define EP_TESTS_SUPPORT_PLAIN_CRITERION_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

typedef struct ep_plain_options {
    int timeout; /* accepted; ctest's time limit is the one that counts */
    /* in the test's process, before it and, when it came to its end, after it */
    void (*init)(void);
    void (*fini)(void);
} ep_plain_options;

typedef struct ep_plain_test {
    const char *suite;
    const char *name;
    void (*run)(void);
    ep_plain_options options;
    struct ep_plain_test *next;
} ep_plain_test;

typedef struct ep_plain_suite {
    const char *name;
    ep_plain_options options;
    struct ep_plain_suite *next;
} ep_plain_suite;

void ep_plain_add(ep_plain_test *test);
void ep_plain_add_suite(ep_plain_suite *suite);
/* Prints place, what was expected and the text; ends the test when fatal. */
void ep_plain_failed(bool fatal, const char *file, int line, const char *expected,
                     const char *format, ...) __attribute__((format(printf, 5, 6)));

#define Test(test_suite, test_name, ...)                                                           \
    static void ep_plain_##test_suite##_##test_name(void);                                         \
    __attribute__((constructor)) static void ep_plain_add_##test_suite##_##test_name(void)         \
    {                                                                                              \
        static ep_plain_test test = {.suite = #test_suite,                                         \
                                     .name = #test_name,                                           \
                                     .run = ep_plain_##test_suite##_##test_name,                   \
                                     .options = {__VA_ARGS__}};                                    \
        ep_plain_add(&test);                                                                       \
    }                                                                                              \
    static void ep_plain_##test_suite##_##test_name(void)

#define TestSuite(test_suite, ...)                                                                 \
    __attribute__((constructor)) static void ep_plain_suite_##test_suite(void)                     \
    {                                                                                              \
        static ep_plain_suite suite = {.name = #test_suite, .options = {__VA_ARGS__}};             \
        ep_plain_add_suite(&suite);                                                                \
    }                                                                                              \
    _Static_assert(true, "takes the semicolon")

/* The text is a literal or absent: " " before it makes both one literal. */
#define EP_PLAIN_CHECK(fatal, condition, expected, ...)                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            ep_plain_failed(fatal, __FILE__, __LINE__, expected, " " __VA_ARGS__);                 \
        }                                                                                          \
    } while (0)

#define cr_assert_fail(...) EP_PLAIN_CHECK(true, false, "never reached", __VA_ARGS__)
#define cr_assert(condition, ...) EP_PLAIN_CHECK(true, condition, #condition, __VA_ARGS__)
#define cr_assert_not(condition, ...)                                                              \
    EP_PLAIN_CHECK(true, !(condition), "not " #condition, __VA_ARGS__)
#define cr_assert_eq(a, b, ...) EP_PLAIN_CHECK(true, (a) == (b), #a " == " #b, __VA_ARGS__)
#define cr_assert_neq(a, b, ...) EP_PLAIN_CHECK(true, (a) != (b), #a " != " #b, __VA_ARGS__)
#define cr_assert_lt(a, b, ...) EP_PLAIN_CHECK(true, (a) < (b), #a " < " #b, __VA_ARGS__)
#define cr_assert_leq(a, b, ...) EP_PLAIN_CHECK(true, (a) <= (b), #a " <= " #b, __VA_ARGS__)
#define cr_assert_gt(a, b, ...) EP_PLAIN_CHECK(true, (a) > (b), #a " > " #b, __VA_ARGS__)
#define cr_assert_geq(a, b, ...) EP_PLAIN_CHECK(true, (a) >= (b), #a " >= " #b, __VA_ARGS__)
#define cr_assert_float_eq(a, b, epsilon, ...)                                                     \
    EP_PLAIN_CHECK(true, (a) - (b) <= (epsilon) && (b) - (a) <= (epsilon), #a " ~ " #b, __VA_ARGS__)
#define cr_assert_null(a, ...) EP_PLAIN_CHECK(true, (a) == NULL, #a " is NULL", __VA_ARGS__)
#define cr_assert_not_null(a, ...) EP_PLAIN_CHECK(true, (a) != NULL, #a " is not NULL", __VA_ARGS__)
#define cr_assert_str_eq(a, b, ...)                                                                \
    EP_PLAIN_CHECK(true, strcmp(a, b) == 0, #a " and " #b " are equal texts", __VA_ARGS__)
#define cr_assert_str_neq(a, b, ...)                                                               \
    EP_PLAIN_CHECK(true, strcmp(a, b) != 0, #a " and " #b " are different texts", __VA_ARGS__)
#define cr_assert_arr_eq(a, b, bytes, ...)                                                         \
    EP_PLAIN_CHECK(true, memcmp(a, b, bytes) == 0, #a " and " #b " are equal", __VA_ARGS__)

#define cr_expect(condition, ...) EP_PLAIN_CHECK(false, condition, #condition, __VA_ARGS__)
#define cr_expect_not(condition, ...)                                                              \
    EP_PLAIN_CHECK(false, !(condition), "not " #condition, __VA_ARGS__)
#define cr_expect_eq(a, b, ...) EP_PLAIN_CHECK(false, (a) == (b), #a " == " #b, __VA_ARGS__)
#define cr_expect_neq(a, b, ...) EP_PLAIN_CHECK(false, (a) != (b), #a " != " #b, __VA_ARGS__)
#define cr_expect_lt(a, b, ...) EP_PLAIN_CHECK(false, (a) < (b), #a " < " #b, __VA_ARGS__)
#define cr_expect_leq(a, b, ...) EP_PLAIN_CHECK(false, (a) <= (b), #a " <= " #b, __VA_ARGS__)
#define cr_expect_gt(a, b, ...) EP_PLAIN_CHECK(false, (a) > (b), #a " > " #b, __VA_ARGS__)
#define cr_expect_geq(a, b, ...) EP_PLAIN_CHECK(false, (a) >= (b), #a " >= " #b, __VA_ARGS__)
#define cr_expect_null(a, ...) EP_PLAIN_CHECK(false, (a) == NULL, #a " is NULL", __VA_ARGS__)
#define cr_expect_not_null(a, ...)                                                                 \
    EP_PLAIN_CHECK(false, (a) != NULL, #a " is not NULL", __VA_ARGS__)
#define cr_expect_str_eq(a, b, ...)                                                                \
    EP_PLAIN_CHECK(false, strcmp(a, b) == 0, #a " and " #b " are equal texts", __VA_ARGS__)
#define cr_expect_str_neq(a, b, ...)                                                               \
    EP_PLAIN_CHECK(false, strcmp(a, b) != 0, #a " and " #b " are different texts", __VA_ARGS__)
#define cr_expect_arr_eq(a, b, bytes, ...)                                                         \
    EP_PLAIN_CHECK(false, memcmp(a, b, bytes) == 0, #a " and " #b " are equal", __VA_ARGS__)

#endif
