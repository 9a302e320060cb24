/* SPDX-License-Identifier: Apache-2.0 */
/* Pool limits, reuse and lifetime. */
#include <criterion/criterion.h>

#include "base/buffer.h"

Test(buffer, is_aligned_and_reused_without_a_new_allocation)
{
    ep_buffer_pool *pool;
    ep_buffer *buffer;
    ep_buffer_pool_stats stats;
    cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &pool), EP_OK);
    for (int i = 0; i < 100; i++) {
        cr_assert_eq(ep_buffer_acquire(pool, 5000, &buffer), EP_OK);
        cr_assert_eq((uintptr_t)buffer->data % EP_BUFFER_ALIGN, 0u);
        cr_assert_eq(buffer->bytes, 5000u);
        ep_buffer_unref(buffer);
    }
    ep_buffer_pool_read_stats(pool, &stats);
    cr_assert_eq(stats.system_allocations, 1u);
    cr_assert_eq(stats.lent_bytes, 0u);
    ep_buffer_pool_destroy(pool);
}

Test(buffer, limit_refuses_and_room_comes_back)
{
    ep_buffer_pool *pool;
    ep_buffer *a, *b;
    ep_buffer_pool_stats stats;
    cr_assert_eq(ep_buffer_pool_create(8192, 8192, &pool), EP_OK);
    cr_assert_eq(ep_buffer_acquire(pool, 8192, &a), EP_OK);
    cr_assert_eq(ep_buffer_acquire(pool, 1, &b), EP_ERR_RESOURCE_EXHAUSTED);
    ep_buffer_ref(a);
    ep_buffer_unref(a);
    cr_assert_eq(ep_buffer_acquire(pool, 1, &b), EP_ERR_RESOURCE_EXHAUSTED);
    ep_buffer_unref(a);
    cr_assert_eq(ep_buffer_acquire(pool, 1, &b), EP_OK);
    ep_buffer_unref(b);
    ep_buffer_pool_read_stats(pool, &stats);
    cr_assert_eq(stats.refusals, 2u);
    ep_buffer_pool_destroy(pool);
}

Test(buffer, outlives_its_pool)
{
    ep_buffer_pool *pool;
    ep_buffer *buffer;
    cr_assert_eq(ep_buffer_pool_create(0, 0, &pool), EP_OK);
    cr_assert_eq(ep_buffer_acquire(pool, 1 << 20, &buffer), EP_OK);
    ep_buffer_pool_destroy(pool);
    buffer->data[(1 << 20) - 1] = 7;
    ep_buffer_unref(buffer);
}

Test(buffer, absurd_size_is_refused_before_allocation)
{
    ep_buffer_pool *pool;
    ep_buffer *buffer;
    cr_assert_eq(ep_buffer_pool_create(0, 0, &pool), EP_OK);
    cr_assert_eq(ep_buffer_acquire(pool, SIZE_MAX, &buffer), EP_ERR_RESOURCE_EXHAUSTED);
    ep_buffer_pool_destroy(pool);
}
