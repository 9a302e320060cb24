/* SPDX-License-Identifier: Apache-2.0 */
/* Invalid values for the fields of a frame's fixed part, in a Hello and in a request. */
#ifndef EP_TESTS_SUPPORT_WRONG_FIELDS_H
#define EP_TESTS_SUPPORT_WRONG_FIELDS_H

#include <stddef.h>
#include <stdint.h>

#include "wire/frame.h"

typedef struct ep_test_wrong_field {
    const char *name;
    size_t at;
    size_t bytes;
    uint64_t value;
} ep_test_wrong_field;

/* Rows of an array. */
#define EP_TEST_WRONG_FIELDS                                                                       \
    {"magic", 0, 4, 0x31445046}, {"magic 0", 0, 4, 0}, {"magic of HTTP", 0, 4, 0x20544547},        \
        {"version 0", 4, 1, 0}, {"version 2", 4, 1, 2}, {"version 255", 4, 1, 255},                \
        {"kind 0", 5, 1, 0}, {"kind 9", 5, 1, 9}, {"kind 255", 5, 1, 255},                         \
        {"kind reply", 5, 1, EP_FRAME_REPLY}, {"kind reply_more", 5, 1, EP_FRAME_REPLY_MORE},      \
        {"kind cancel", 5, 1, EP_FRAME_CANCEL}, {"kind ping", 5, 1, EP_FRAME_PING},                \
        {"kind pong", 5, 1, EP_FRAME_PONG}, {"kind credit", 5, 1, EP_FRAME_CREDIT},                \
        {"flag draining", 6, 2, 1}, {"flag end of stream", 6, 2, 2},                               \
        {"flag unknown", 6, 2, 0x8000}, {"flags all", 6, 2, 0xffff}, {"status 1", 20, 4, 1},       \
        {"status 17", 20, 4, 17}, {"status all ones", 20, 4, 0xffffffff},                          \
        {"header_bytes 0", 28, 4, 0}, {"header_bytes above its limit", 28, 4, 65537},              \
        {"header_bytes 2^31-1", 28, 4, 0x7fffffff}, {"header_bytes 2^32-1", 28, 4, 0xffffffff},    \
        {"tensor offset 0", 32, 4, 0}, {"tensor offset 1", 32, 4, 1},                              \
        {"tensor offset 65", 32, 4, 65}, {"tensor offset 2^32-64", 32, 4, 0xffffffc0},             \
        {"stream sequence 1", 36, 4, 1}, {"stream sequence all ones", 36, 4, 0xffffffff},          \
        {"tensor_bytes 2^31", 40, 8, (uint64_t)1 << 31},                                           \
        {"tensor_bytes 2^32", 40, 8, (uint64_t)1 << 32},                                           \
        {"tensor_bytes 2^63", 40, 8, (uint64_t)1 << 63},                                           \
        {"tensor_bytes 2^64-1", 40, 8, UINT64_MAX},                                                \
        {"tensor_bytes 2^64-128", 40, 8, UINT64_MAX - 127}, {"reserved 1", 52, 8, 1},              \
    {                                                                                              \
        "reserved, last bit", 52, 8, (uint64_t)1 << 63                                             \
    }

#endif
