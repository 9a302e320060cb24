/* SPDX-License-Identifier: Apache-2.0 */
/* The error table is whole: numbers are unique, names and texts are there, the wire mapping is its
 * own inverse. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

static const ep_err codes[] = {
#define EP_ERR_ROW(name, wire, grpc, broke, other, text) EP_ERR_##name,
    EP_ERR_MAP(EP_ERR_ROW)
#undef EP_ERR_ROW
};

Test(error, wire_numbers_are_unique_and_map_back)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(codes); i++) {
        for (size_t j = i + 1; j < EP_ARRAY_COUNT(codes); j++) {
            cr_assert_neq(codes[i], codes[j]);
        }
        cr_assert_eq(ep_err_from_wire((uint32_t)codes[i], ep_err_grpc_code(codes[i])), codes[i]);
        cr_assert_leq(ep_err_grpc_code(codes[i]), 16u);
        cr_assert_gt(strlen(ep_err_text(codes[i])), 5u);
    }
}

Test(error, unknown_reason_falls_back_to_the_grpc_code)
{
    cr_assert_eq(ep_err_from_wire(999, 14), EP_ERR_UNAVAILABLE);
    cr_assert_eq(ep_err_from_wire(0, 5), EP_ERR_NOT_FOUND);
    cr_assert_eq(ep_err_from_wire(999, 99), EP_ERR_UNKNOWN);
    cr_assert_eq(ep_err_from_wire(0, 0), EP_OK);
}

Test(error, set_fills_text_and_cuts_what_is_too_long)
{
    ep_error e;
    char text[2 * EP_ERROR_TEXT_BYTES];
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = 0;
    cr_assert_eq(ep_error_set(&e, EP_ERR_INVALID_ARGUMENT, "%s", text), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(strlen(e.text), EP_ERROR_TEXT_BYTES - 1u);
    cr_assert_eq(e.layer, -1);
    cr_assert_eq(ep_error_set(NULL, EP_ERR_IO, "no place to put it"), EP_ERR_IO);
}

Test(error, prefix_keeps_the_code_and_the_cause)
{
    ep_error e;
    ep_error_set(&e, EP_ERR_BAD_FILE, "short read");
    cr_assert_eq(ep_error_prefix(&e, EP_ERR_IO, "shard %d", 3), EP_ERR_BAD_FILE);
    cr_assert_str_eq(e.text, "shard 3: short read");
}
