/* SPDX-License-Identifier: Apache-2.0 */
/* What Hello says and what it refuses, without a connection. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/host.h"
#include "rpc/rpc_hello.h"
#include "support/expect.h"

static ep_rpc_common common(void)
{
    ep_rpc_common c = {.node = "n", .host = "here", .role = "node", .incarnation = 77};
    ep_rpc_limits_default(&c.limits);
    return c;
}

Test(rpc_hello, our_own_hello_is_accepted)
{
    ep_rpc_common c = common();
    Expertd__V1__Hello hello;
    ep_rpc_role role;
    ep_rpc_refusal refusal;
    ep_error error;
    ep_rpc_hello_fill(&c, true, &hello);
    ASSERT_OK(ep_rpc_hello_check_client(&c, EP_ROLES_ALL, true, &hello, &role, &refusal, &error),
              error);
    cr_assert_eq(role, EP_ROLE_NODE);
    cr_assert_eq(ep_rpc_hello_check_server(true, &hello, &error), EP_OK);
    cr_assert_eq(ep_rpc_hello_check_server(false, &hello, &error), EP_ERR_FAILED_PRECONDITION);
    cr_assert(hello.incarnation == 77 && hello.frame_bytes_max == c.limits.frame_bytes_max);
    cr_assert_eq(strncmp(hello.software, "expertd ", 8), 0);
#ifdef EP_WIRE_TEST_OLDER
    cr_assert_str_eq(hello.host, "");
    cr_assert_not(ep_rpc_hello_has_feature(&hello, EP_RPC_FEATURE_ANSWERED));
#else
    cr_assert_str_eq(hello.host, "here");
    cr_assert(ep_rpc_hello_has_feature(&hello, EP_RPC_FEATURE_ANSWERED));
    cr_assert_not(ep_rpc_hello_has_feature(&hello, "cancel"));
#endif
}

Test(rpc_hello, roles_have_their_rank)
{
    const struct {
        const char *name;
        ep_rpc_role role;
        ep_err err;
    } rows[] = {
        {"", EP_ROLE_CLIENT, EP_OK},          {"client", EP_ROLE_CLIENT, EP_OK},
        {"node", EP_ROLE_NODE, EP_OK},        {"operator", EP_ROLE_OPERATOR, EP_OK},
        {"coordinator", EP_ROLE_NODE, EP_OK}, {"Node", EP_ROLE_CLIENT, EP_ERR_INVALID_ARGUMENT},
    };
    ep_rpc_common c = common();
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        Expertd__V1__Hello hello;
        ep_rpc_role role = EP_ROLE_CLIENT;
        ep_rpc_refusal refusal;
        ep_rpc_hello_fill(&c, false, &hello);
        hello.role = (char *)(uintptr_t)rows[i].name;
        cr_assert_eq(
            ep_rpc_hello_check_client(&c, EP_ROLES_ALL, false, &hello, &role, &refusal, NULL),
            rows[i].err, "%s", rows[i].name);
        cr_assert_eq(role, rows[i].role);
    }
}

Test(rpc_hello, a_long_node_name_is_refused)
{
    ep_rpc_common c = common();
    Expertd__V1__Hello hello;
    ep_rpc_role role;
    ep_rpc_refusal refusal;
    char name[EP_NODE_NAME_BYTES + 1];
    memset(name, 'n', EP_NODE_NAME_BYTES);
    name[EP_NODE_NAME_BYTES] = 0;
    ep_rpc_hello_fill(&c, false, &hello);
    hello.node = name;
    cr_assert_eq(ep_rpc_hello_check_client(&c, EP_ROLES_ALL, false, &hello, &role, &refusal, NULL),
                 EP_ERR_INVALID_ARGUMENT);
    name[EP_NODE_NAME_BYTES - 1] = 0;
    cr_assert_eq(ep_rpc_hello_check_client(&c, EP_ROLES_ALL, false, &hello, &role, &refusal, NULL),
                 EP_OK);
}

Test(rpc_hello, a_long_host_is_refused_by_both_sides)
{
    ep_rpc_common c = common();
    Expertd__V1__Hello hello;
    ep_rpc_role role;
    ep_rpc_refusal refusal;
    ep_error error;
    char host[EP_HOST_BYTES + 1];
    memset(host, 'h', EP_HOST_BYTES);
    host[EP_HOST_BYTES] = 0;
    ep_rpc_hello_fill(&c, false, &hello);
    hello.host = host;
    ASSERT_FAILS(
        ep_rpc_hello_check_client(&c, EP_ROLES_ALL, false, &hello, &role, &refusal, &error),
        EP_ERR_INVALID_ARGUMENT, error, "host has 64 bytes, allowed up to 63");
    cr_assert_eq(ep_rpc_hello_check_server(false, &hello, NULL), EP_ERR_INVALID_ARGUMENT);
    host[EP_HOST_BYTES - 1] = 0;
    cr_assert_eq(ep_rpc_hello_check_client(&c, EP_ROLES_ALL, false, &hello, &role, &refusal, NULL),
                 EP_OK);
    cr_assert_eq(ep_rpc_hello_check_server(false, &hello, NULL), EP_OK);
}
