/* SPDX-License-Identifier: Apache-2.0 */
/* A program built against an older, smaller header, or a newer, larger one. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/struct_size.h"

typedef struct ours {
    uint32_t struct_bytes;
    uint32_t a;
    uint32_t b;
} ours;

static const ours full = {sizeof(full), 1, 2};
static ep_error error;

Test(struct_size, init_writes_no_more_than_the_caller_has)
{
    uint32_t out[3] = {66, 77, 77};
    ep_struct_init(out, 8, &full, sizeof(full));
    cr_assert(out[0] == 8 && out[1] == 1 && out[2] == 77);
    ep_struct_init(out, 3, &full, sizeof(full));
    cr_assert(out[0] == 8);
}

Test(struct_size, init_clears_what_the_caller_has_more)
{
    uint32_t out[5] = {66, 77, 77, 77, 77};
    ep_struct_init(out, 16, &full, sizeof(full));
    cr_assert(out[0] == 16 && out[1] == 1 && out[2] == 2 && out[3] == 0 && out[4] == 77);
}

Test(struct_size, in_keeps_defaults_of_what_the_caller_lacks)
{
    const uint32_t given[3] = {8, 5, 77};
    ours out = {0, 0, 9};
    cr_assert_eq(ep_struct_in("x", given, 8, &out, sizeof(out), &error), EP_OK);
    cr_assert(out.struct_bytes == sizeof(out) && out.a == 5 && out.b == 9);
}

Test(struct_size, in_refuses_what_it_does_not_know)
{
    uint32_t given[5] = {20, 5, 6, 0, 0};
    ours out = {0};
    cr_assert_eq(ep_struct_in("x", given, 8, &out, sizeof(out), &error), EP_OK);
    cr_assert(out.struct_bytes == sizeof(out) && out.a == 5 && out.b == 6);
    given[4] = 1 << 24;
    cr_assert_eq(ep_struct_in("x", given, 8, &out, sizeof(out), &error), EP_ERR_UNIMPLEMENTED);
    cr_assert(strstr(error.text, "x has a value at byte 19 of 20") != NULL, "%s", error.text);
}

Test(struct_size, in_refuses_sizes_that_are_none)
{
    uint32_t given[3] = {7, 5, 6};
    ours out = {0};
    cr_assert_eq(ep_struct_in("x", given, 8, &out, sizeof(out), &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert(strstr(error.text, "struct_bytes of x is 7") != NULL, "%s", error.text);
    given[0] = UINT32_MAX;
    cr_assert_eq(ep_struct_in("x", given, 8, &out, sizeof(out), &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_struct_in("x", NULL, 8, &out, sizeof(out), &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text, "x is NULL");
}

Test(struct_size, out_writes_no_more_than_the_caller_has)
{
    uint32_t out[3] = {8, 77, 77};
    ep_struct_out(out, &full, sizeof(full));
    cr_assert(out[0] == 8 && out[1] == 1 && out[2] == 77);
}

Test(struct_size, out_writes_no_more_than_there_is)
{
    uint32_t out[5] = {20, 77, 77, 77, 77};
    ep_struct_out(out, &full, sizeof(full));
    cr_assert(out[0] == 20 && out[1] == 1 && out[2] == 2 && out[3] == 77 && out[4] == 77);
}

Test(struct_size, out_zero_means_this_versions_size)
{
    ours out = {0, 77, 77};
    ep_struct_out(&out, &full, sizeof(full));
    cr_assert(out.struct_bytes == sizeof(full) && out.a == 1 && out.b == 2);
}
