/* SPDX-License-Identifier: Apache-2.0 */
/* Pool limits, reuse and lifetime. */
#include <criterion/criterion.h>

#include "base/buffer.h"

static ep_buffer_pool *pool;

static void open_pool(size_t limit_bytes, size_t keep_bytes)
{
    cr_assert_eq(ep_buffer_pool_create(limit_bytes, keep_bytes, &pool), EP_OK);
}

static void teardown(void)
{
    ep_buffer_pool_destroy(pool);
}

TestSuite(buffer, .fini = teardown);

static ep_buffer_pool_stats stats(void)
{
    ep_buffer_pool_stats now;
    ep_buffer_pool_read_stats(pool, &now);
    return now;
}

Test(buffer, is_aligned_and_reused_without_a_new_allocation)
{
    ep_buffer *buffer;
    open_pool(0, 1 << 20);
    for (int i = 0; i < 100; i++) {
        cr_assert_eq(ep_buffer_acquire(pool, 5000, &buffer), EP_OK);
        cr_assert_eq((uintptr_t)buffer->data % EP_BUFFER_ALIGN, 0u);
        cr_assert_eq(buffer->bytes, 5000u);
        ep_buffer_unref(buffer);
    }
    cr_assert_eq(stats().system_allocations, 1u);
    cr_assert_eq(stats().lent_bytes, 0u);
}

Test(buffer, limit_refuses_and_room_comes_back)
{
    ep_buffer *a, *b;
    open_pool(8192, 8192);
    cr_assert_eq(ep_buffer_acquire(pool, 8192, &a), EP_OK);
    cr_assert_eq(ep_buffer_acquire(pool, 1, &b), EP_ERR_RESOURCE_EXHAUSTED);
    ep_buffer_ref(a);
    ep_buffer_unref(a);
    cr_assert_eq(ep_buffer_acquire(pool, 1, &b), EP_ERR_RESOURCE_EXHAUSTED);
    ep_buffer_unref(a);
    cr_assert_eq(ep_buffer_acquire(pool, 1, &b), EP_OK);
    ep_buffer_unref(b);
    cr_assert_eq(stats().refusals, 2u);
}

/* Sizes around every power of two, and one in 37 between. */
Test(buffer, large_classes_are_at_most_a_quarter_above_what_is_asked_for)
{
    for (size_t bytes = 1; bytes < (size_t)1 << 33; bytes += bytes / 37 + 1) {
        const size_t around[] = {bytes, ep_buffer_class_bytes(bytes),
                                 ep_buffer_class_bytes(bytes) + 1};
        for (int i = 0; i < 3; i++) {
            size_t class_bytes = ep_buffer_class_bytes(around[i]);
            cr_assert_geq(class_bytes, around[i]);
            cr_assert_eq(class_bytes % EP_BUFFER_ALIGN, 0u);
            cr_assert(class_bytes <= 4096 || class_bytes < 2 * around[i]);
            cr_assert(around[i] <= 65536 || class_bytes - class_bytes / 5 <= around[i],
                      "%zu for %zu", class_bytes, around[i]);
        }
        cr_assert_eq(ep_buffer_class_bytes(around[1]), around[1], "a class is its own");
    }
}

/* Classes above the large pages' size are no multiples of it; a sanitizer's allocator minds. */
Test(buffer, every_class_is_allocated)
{
    ep_buffer *buffer;
    open_pool(0, 0);
    for (size_t bytes = 1; bytes <= (size_t)16 << 20; bytes = ep_buffer_class_bytes(bytes) + 1) {
        cr_assert_eq(ep_buffer_acquire(pool, bytes, &buffer), EP_OK);
        cr_assert_geq(buffer->capacity_bytes, bytes);
        buffer->data[buffer->capacity_bytes - 1] = 1;
        ep_buffer_unref(buffer);
    }
}

Test(buffer, a_kept_buffer_a_little_larger_is_lent_when_the_limit_allows)
{
    ep_buffer *large, *small, *other, *last;
    open_pool(1 << 20, 1 << 20);
    /* classes 320, 384, 448, 512 KiB */
    cr_assert_eq(ep_buffer_acquire(pool, 448 << 10, &large), EP_OK);
    ep_buffer_unref(large);
    cr_assert_eq(ep_buffer_acquire(pool, 300 << 10, &small), EP_OK);
    cr_assert_eq(small->capacity_bytes, (size_t)448 << 10);
    cr_assert_eq(stats().lent_bytes, (size_t)448 << 10);
    cr_assert_eq(stats().kept_bytes, 0u);
    cr_assert_eq(stats().system_allocations, 1u);
    ep_buffer_unref(small);
    cr_assert_eq(ep_buffer_acquire(pool, 256 << 10, &small), EP_OK);
    cr_assert_eq(small->capacity_bytes, (size_t)256 << 10, "three classes up is too much");
    cr_assert_eq(ep_buffer_acquire(pool, 256 << 10, &large), EP_OK);
    cr_assert_eq(ep_buffer_acquire(pool, 128 << 10, &other), EP_OK);
    cr_assert_eq(ep_buffer_acquire(pool, 384 << 10, &last), EP_OK);
    cr_assert_eq(last->capacity_bytes, (size_t)384 << 10, "the kept one would be above the limit");
    ep_buffer_unref(small);
    ep_buffer_unref(large);
    ep_buffer_unref(other);
    ep_buffer_unref(last);
}

/* Traffic of another size comes, and the budget of kept memory is full of the former. */
Test(buffer, keeps_what_is_in_use_now)
{
    ep_buffer *former[4], *buffer;
    open_pool(0, 1 << 20);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(ep_buffer_acquire(pool, 256 << 10, &former[i]), EP_OK);
    }
    for (int i = 0; i < 4; i++) {
        ep_buffer_unref(former[i]);
    }
    uint64_t allocated = 0;
    for (int i = 0; i < 1000; i++) {
        cr_assert_eq(ep_buffer_acquire(pool, 640 << 10, &buffer), EP_OK);
        ep_buffer_unref(buffer);
        allocated = i == 499 ? stats().system_allocations : allocated;
        cr_assert_leq(stats().kept_bytes, 1u << 20);
    }
    cr_assert_eq(stats().system_allocations, allocated, "it still asks the system each time");
}

/* Two sizes in turn that do not fit together: the one that is kept stays, neither drives the other
 * out each time. */
Test(buffer, sizes_in_turn_do_not_evict_each_other)
{
    ep_buffer *buffer;
    open_pool(0, 1 << 20);
    for (int i = 0; i < 1000; i++) {
        cr_assert_eq(ep_buffer_acquire(pool, i % 2 == 0 ? 512 << 10 : 1 << 20, &buffer), EP_OK);
        ep_buffer_unref(buffer);
    }
    cr_assert_eq(stats().system_allocations, 501u);
}

Test(buffer, outlives_its_pool)
{
    ep_buffer *buffer;
    open_pool(0, 0);
    cr_assert_eq(ep_buffer_acquire(pool, 1 << 20, &buffer), EP_OK);
    ep_buffer_pool_destroy(pool);
    pool = NULL;
    buffer->data[(1 << 20) - 1] = 7;
    ep_buffer_unref(buffer);
}

Test(buffer, absurd_size_is_refused_before_allocation)
{
    ep_buffer *buffer;
    open_pool(0, 0);
    cr_assert_eq(ep_buffer_acquire(pool, SIZE_MAX, &buffer), EP_ERR_RESOURCE_EXHAUSTED);
}

/* What a peer announces is not charged, what has arrived is, several times over. */
Test(buffer, an_arriving_buffer_is_charged_as_bytes_come)
{
    ep_buffer *arriving, *other;
    open_pool(1 << 20, 0);
    cr_assert_eq(ep_buffer_acquire_arriving(pool, 16 << 20, 16, &arriving), EP_OK);
    cr_assert_eq(arriving->charged_bytes, EP_BUFFER_ARRIVING_BYTES);
    cr_assert_eq(stats().lent_bytes, EP_BUFFER_ARRIVING_BYTES);
    cr_assert_eq(ep_buffer_recharge(arriving, 64 << 10), EP_OK);
    cr_assert_eq(arriving->charged_bytes, 256u << 10);
    cr_assert_eq(ep_buffer_acquire(pool, 512 << 10, &other), EP_OK);
    cr_assert_eq(ep_buffer_recharge(arriving, 256 << 10), EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_eq(arriving->charged_bytes, 256u << 10, "a refused charge changes nothing");
    ep_buffer_unref(other);
    cr_assert_eq(ep_buffer_recharge(arriving, 256 << 10), EP_OK);
    cr_assert_eq(ep_buffer_recharge(arriving, 100), EP_OK, "less always succeeds");
    cr_assert_eq(arriving->charged_bytes, EP_BUFFER_ARRIVING_BYTES);
    ep_buffer_unref(arriving);
    cr_assert_eq(stats().lent_bytes, 0u);
}

/* A share bounds its own users, and leaves the rest to others. */
Test(buffer, a_child_pool_has_a_limit_of_its_own_and_counts_in_its_parent)
{
    ep_buffer_pool *share;
    ep_buffer *first, *second;
    open_pool(1 << 20, 1 << 20);
    cr_assert_eq(ep_buffer_pool_create_child(pool, 256 << 10, &share), EP_OK);
    cr_assert_eq(ep_buffer_acquire(share, 256 << 10, &first), EP_OK);
    cr_assert_eq(ep_buffer_acquire(share, 4096, &second), EP_ERR_RESOURCE_EXHAUSTED,
                 "the share is used up");
    cr_assert_eq(ep_buffer_acquire(pool, 768 << 10, &second), EP_OK, "the rest is not");
    cr_assert_eq(stats().lent_bytes, 1u << 20);
    ep_buffer_unref(first);
    ep_buffer_unref(second);
    cr_assert_eq(ep_buffer_acquire(pool, 1 << 20, &first), EP_OK);
    cr_assert_eq(ep_buffer_acquire(share, 4096, &second), EP_ERR_RESOURCE_EXHAUSTED,
                 "the parent is used up");
    ep_buffer_unref(first);
    cr_assert_eq(ep_buffer_acquire_arriving(share, 16 << 20, 0, &first), EP_OK);
    cr_assert_eq(ep_buffer_recharge(first, 128 << 10), EP_ERR_RESOURCE_EXHAUSTED);
    ep_buffer_pool_destroy(share); /* what is lent holds both */
    ep_buffer_pool_destroy(pool);
    pool = NULL;
    ep_buffer_unref(first);
}
