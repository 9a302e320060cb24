/* SPDX-License-Identifier: Apache-2.0 */
/* A program built against an older, smaller header must not get bytes behind its struct. */
#include <criterion/criterion.h>

#include "common/struct_out.h"

typedef struct ours {
    uint32_t struct_bytes;
    uint32_t a;
    uint32_t b;
} ours;

static const ours full = {sizeof(full), 1, 2};

Test(struct_out, writes_no_more_than_the_caller_has)
{
    uint32_t out[3] = {8, 77, 77};
    ep_struct_out(out, &full, sizeof(full));
    cr_assert(out[0] == 8 && out[1] == 1 && out[2] == 77);
}

Test(struct_out, writes_no_more_than_there_is)
{
    uint32_t out[5] = {20, 77, 77, 77, 77};
    ep_struct_out(out, &full, sizeof(full));
    cr_assert(out[0] == 20 && out[1] == 1 && out[2] == 2 && out[3] == 77 && out[4] == 77);
}

Test(struct_out, zero_means_this_versions_size)
{
    ours out = {0, 77, 77};
    ep_struct_out(&out, &full, sizeof(full));
    cr_assert(out.struct_bytes == sizeof(full) && out.a == 1 && out.b == 2);
}
