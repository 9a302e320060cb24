/* SPDX-License-Identifier: Apache-2.0 */
/* Defaults and ranges of the limits. */
#include <criterion/criterion.h>
#include <string.h>

#include "rpc/rpc_limits.h"

Test(rpc_limits, defaults_are_the_documented_ones_and_valid)
{
    ep_rpc_limits l;
    ep_rpc_limits_default(&l);
    cr_assert_eq(ep_rpc_limits_check(&l, NULL), EP_OK);
    cr_assert(l.frame_bytes_max == (size_t)16 << 20 && l.header_bytes_max == 65536 &&
              l.credit_bytes == (size_t)64 << 20);
    cr_assert(l.ping_ms == 500 && l.ping_dead_count == 3 && l.hello_timeout_ms == 5000);
    cr_assert(l.redial_min_ms == 10 && l.redial_max_ms == 200 &&
              l.calls_per_connection_max == 1024);
}

#define REFUSED(field, value)                                                                      \
    do {                                                                                           \
        ep_rpc_limits l;                                                                           \
        ep_error error;                                                                            \
        ep_rpc_limits_default(&l);                                                                 \
        l.field = (value);                                                                         \
        cr_assert_eq(ep_rpc_limits_check(&l, &error), EP_ERR_INVALID_ARGUMENT, #field);            \
        cr_assert_eq(strncmp(error.text, #field " is ", strlen(#field " is ")), 0, "%s",           \
                     error.text);                                                                  \
        cr_assert(strstr(error.text, "allowed") != NULL);                                          \
    } while (0)

Test(rpc_limits, each_value_out_of_range_is_named)
{
    REFUSED(frame_bytes_max, 0);
    REFUSED(frame_bytes_max, ((size_t)1 << 30) + 1);
    REFUSED(header_bytes_max, 0);
    REFUSED(header_bytes_max, (size_t)9 << 20);
    REFUSED(unpack_bytes_max, 0);
    REFUSED(credit_bytes, 0);
    REFUSED(send_queue_bytes_max, (size_t)16 << 19);
    REFUSED(connections_max, 0);
    REFUSED(calls_per_connection_max, 0);
    REFUSED(hello_timeout_ms, 0);
    REFUSED(ping_ms, 3600001);
    REFUSED(ping_dead_count, 0);
    REFUSED(redial_min_ms, 0);
    REFUSED(redial_max_ms, 9);
}

Test(rpc_limits, a_copy_owns_its_strings)
{
    ep_rpc_common c = {.token = NULL, .node = "n", .role = "node"};
    ep_rpc_common copy;
    char node[80];
    memset(node, 'x', sizeof(node) - 1);
    node[79] = 0;
    ep_rpc_limits_default(&c.limits);
    cr_assert_eq(ep_rpc_common_copy(&c, &copy, NULL), EP_OK);
    cr_assert_str_eq(copy.token, "");
    cr_assert_str_eq(copy.node, "n");
    cr_assert_neq(copy.node, c.node);
    ep_rpc_common_free(&copy);
    c.node = node;
    cr_assert_eq(ep_rpc_common_copy(&c, &copy, NULL), EP_ERR_INVALID_ARGUMENT);
}

Test(rpc_limits, control_connections_carry_whole_tables)
{
    ep_rpc_limits l;
    ep_rpc_limits_default(&l);
    l.frame_bytes_max = 1 << 20;
    l.header_bytes_max = 4096;
    ep_rpc_limits_raise_for_control(&l);
    cr_assert_eq(ep_rpc_limits_check(&l, NULL), EP_OK);
    cr_assert_geq(l.header_bytes_max, (size_t)4 << 20);
    ep_rpc_limits again = l;
    ep_rpc_limits_raise_for_control(&again);
    cr_assert_eq(memcmp(&l, &again, sizeof(l)), 0);
}
