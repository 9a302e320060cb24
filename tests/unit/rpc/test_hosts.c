/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of clients by address, see rpc/rpc_hosts.h. */
#include <criterion/criterion.h>

#include "rpc/rpc_hosts.h"

#define MIB ((size_t)1 << 20)

static ep_buffer_pool *share;
static ep_rpc_hosts hosts;

static void setup(size_t limit_bytes)
{
    cr_assert_eq(ep_buffer_pool_create(limit_bytes, 0, &share), EP_OK);
    ep_rpc_hosts_init(&hosts, share, 1 * MIB);
}

static ep_rpc_host *enter(const char *peer, ep_buffer_pool **out_pool)
{
    ep_rpc_host *host = ep_rpc_hosts_enter(&hosts, peer, out_pool);
    cr_assert_not_null(host);
    return host;
}

Test(hosts, an_address_has_three_quarters_whatever_its_connections)
{
    ep_buffer_pool *first, *second, *other;
    ep_buffer *held, *refused, *others;
    ep_rpc_share seen;
    setup(16 * MIB);
    ep_rpc_host *a = enter("10.0.0.1:5", &first);
    ep_rpc_host *b = enter("10.0.0.1:6", &second);
    ep_rpc_host *c = enter("10.0.0.11:5", &other);
    cr_assert_eq(first, second);
    cr_assert_neq(first, other);
    cr_assert_eq(ep_buffer_acquire(first, 12 * MIB, &held), EP_OK);
    cr_assert_eq(ep_buffer_acquire(second, 4096, &refused), EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_eq(ep_buffer_acquire(other, 4 * MIB, &others), EP_OK);
    ep_rpc_hosts_read(&hosts, &seen);
    cr_assert_str_eq(seen.address, "10.0.0.1");
    cr_assert(seen.lent_bytes == 12 * MIB && seen.limit_bytes == 12 * MIB && seen.refusals == 1);
    ep_rpc_hosts_leave(&hosts, a);
    ep_rpc_hosts_leave(&hosts, b);
    ep_rpc_hosts_leave(&hosts, c);
    ep_rpc_hosts_read(&hosts, &seen);
    cr_assert(seen.address[0] == 0 && seen.refusals == 1, "refusals of who left are forgotten");
    cr_assert_null(hosts.first);
    ep_buffer_unref(held); /* work that goes on after its connection */
    ep_buffer_unref(others);
    ep_buffer_pool_destroy(share);
}

static void expect_limit(size_t all_bytes, size_t address_bytes)
{
    ep_buffer_pool *pool;
    setup(all_bytes);
    ep_rpc_host *host = enter("this host", &pool);
    cr_assert_eq(ep_buffer_pool_limit(pool), address_bytes, "%zu of %zu",
                 ep_buffer_pool_limit(pool), all_bytes);
    ep_rpc_hosts_leave(&hosts, host);
    ep_buffer_pool_destroy(share);
}

Test(hosts, the_others_keep_two_frames_or_half)
{
    expect_limit(6 * MIB, 4 * MIB);
    expect_limit(4 * MIB, 2 * MIB);
    expect_limit(3 * MIB, 2 * MIB); /* a frame and its reply */
    expect_limit(1 * MIB, 1 * MIB);
}

Test(hosts, without_a_limit_there_is_none_for_an_address)
{
    ep_buffer_pool *pool;
    setup(0);
    ep_rpc_host *host = enter("[::1]:5", &pool);
    cr_assert_eq(ep_buffer_pool_limit(pool), 0);
    ep_rpc_hosts_leave(&hosts, host);
    ep_buffer_pool_destroy(share);
}
