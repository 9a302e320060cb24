/* SPDX-License-Identifier: Apache-2.0 */
/* Buffer pool: one free list per size class under one short lock. */
#include "base/buffer.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/check.h"

/* Powers of two up to 64 KiB, beyond four classes between one power and the next: with large buffers, up to half of a budget
 * would be rounding otherwise. */
#define CLASS_SHIFT_MIN 12u
#define CLASS_SHIFT_FINE 16u
#define CLASS_SHIFT_MAX 35u /* 32 GiB */
#define CLASSES_COARSE (CLASS_SHIFT_FINE - CLASS_SHIFT_MIN + 1)
#define CLASS_COUNT (CLASSES_COARSE + 4 * (CLASS_SHIFT_MAX - CLASS_SHIFT_FINE))
/* A kept buffer so many classes larger is lent rather than another one asked of the system. */
#define CLASSES_UP 2u
/* A class of which so many acquires took nothing is not in use: its kept buffers make room for those that are. */
#define IDLE_ACQUIRES 64u
#define LARGE_PAGE_BYTES ((size_t)2 << 20)

struct ep_buffer_pool {
    pthread_mutex_t lock;
    size_t limit_bytes;
    size_t keep_bytes;
    uint64_t holders; /* lent buffers, plus one until destroyed */
    ep_buffer *free_lists[CLASS_COUNT];
    uint64_t used[CLASS_COUNT]; /* stats.acquires when one was lent last */
    ep_buffer_pool_stats stats;
};

ep_err ep_buffer_pool_create(size_t limit_bytes, size_t keep_bytes, ep_buffer_pool **out_pool)
{
    ep_buffer_pool *pool = calloc(1, sizeof(*pool));
    if (pool == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pool->limit_bytes = limit_bytes;
    pool->keep_bytes = keep_bytes;
    pool->holders = 1;
    *out_pool = pool;
    return EP_OK;
}

static void buffer_free(ep_buffer *buffer)
{
    free(buffer->data);
    free(buffer);
}

static void free_all(ep_buffer *buffers)
{
    while (buffers != NULL) {
        ep_buffer *buffer = buffers;
        buffers = buffer->next;
        buffer_free(buffer);
    }
}

static void pool_free(ep_buffer_pool *pool)
{
    for (uint32_t i = 0; i < CLASS_COUNT; i++) {
        free_all(pool->free_lists[i]);
    }
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void ep_buffer_pool_destroy(ep_buffer_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->lock);
    bool last = --pool->holders == 0;
    pthread_mutex_unlock(&pool->lock);
    if (last) {
        pool_free(pool);
    }
}

/* CLASS_COUNT: above the largest. */
static uint32_t class_of(size_t bytes)
{
    if (bytes <= (size_t)1 << CLASS_SHIFT_MIN) {
        return 0;
    }
    if (bytes > (size_t)1 << CLASS_SHIFT_MAX) {
        return CLASS_COUNT;
    }
    uint32_t shift = 63 - (uint32_t)__builtin_clzll(bytes - 1); /* 2^shift < bytes <= 2^(shift + 1) */
    if (shift < CLASS_SHIFT_FINE) {
        return shift + 1 - CLASS_SHIFT_MIN;
    }
    uint32_t quarter = (uint32_t)((bytes - 1 - ((size_t)1 << shift)) >> (shift - 2));
    return CLASSES_COARSE + 4 * (shift - CLASS_SHIFT_FINE) + quarter;
}

static size_t class_bytes(uint32_t index)
{
    if (index < CLASSES_COARSE) {
        return (size_t)1 << (CLASS_SHIFT_MIN + index);
    }
    index -= CLASSES_COARSE;
    return (size_t)(5 + index % 4) << (CLASS_SHIFT_FINE - 2 + index / 4);
}

size_t ep_buffer_class_bytes(size_t bytes)
{
    return class_bytes(class_of(bytes));
}

/*
 * Large buffers ask for large pages: filling a fresh one then takes a fault per 2 MiB instead of one per 4 KiB, and every
 * pass over it, by us or by the network stack, fewer translations. What the kernel does not give costs nothing.
 */
static uint8_t *data_alloc(size_t capacity)
{
    void *data;
    if (capacity < LARGE_PAGE_BYTES) {
        return aligned_alloc(EP_BUFFER_ALIGN, capacity);
    }
    if (posix_memalign(&data, LARGE_PAGE_BYTES, capacity) != 0) { /* aligned_alloc may want a multiple of the alignment */
        return NULL;
    }
    madvise(data, capacity, MADV_HUGEPAGE);
    return data;
}

static ep_err buffer_create(size_t capacity, uint32_t class_index, ep_buffer **out_buffer)
{
    ep_buffer *buffer = calloc(1, sizeof(*buffer));
    if (buffer == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    buffer->data = data_alloc(capacity);
    if (buffer->data == NULL) {
        free(buffer);
        return EP_ERR_NO_MEMORY;
    }
    buffer->capacity_bytes = capacity;
    buffer->class_index = class_index;
    *out_buffer = buffer;
    return EP_OK;
}

static bool has_room(const ep_buffer_pool *pool, size_t capacity)
{
    return pool->limit_bytes == 0 || pool->stats.lent_bytes + capacity <= pool->limit_bytes;
}

/* Lock held. NULL: none of about that size is kept. */
static ep_buffer *take_kept(ep_buffer_pool *pool, uint32_t class_index)
{
    uint32_t up = class_index < CLASSES_COARSE ? 0 : CLASSES_UP;
    for (uint32_t i = class_index; i <= class_index + up && i < CLASS_COUNT; i++) {
        ep_buffer *buffer = pool->free_lists[i];
        if (buffer != NULL && has_room(pool, buffer->capacity_bytes)) {
            pool->free_lists[i] = buffer->next;
            pool->stats.kept_bytes -= buffer->capacity_bytes;
            return buffer;
        }
    }
    return NULL;
}

/* Takes room under the limit, and a kept buffer if there is one. */
static ep_err reserve(ep_buffer_pool *pool, size_t capacity, uint32_t class_index, ep_buffer **out_buffer)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&pool->lock);
    if (!has_room(pool, capacity)) {
        pool->stats.refusals++;
        err = EP_ERR_RESOURCE_EXHAUSTED;
    } else {
        *out_buffer = take_kept(pool, class_index);
        if (*out_buffer != NULL) {
            capacity = (*out_buffer)->capacity_bytes;
        } else {
            pool->stats.system_allocations++;
        }
        pool->holders++;
        pool->used[*out_buffer != NULL ? (*out_buffer)->class_index : class_index] = pool->stats.acquires;
        pool->stats.acquires++;
        pool->stats.lent_bytes += capacity;
        if (pool->stats.lent_bytes > pool->stats.lent_bytes_peak) {
            pool->stats.lent_bytes_peak = pool->stats.lent_bytes;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return err;
}

/* Lock held. The class with kept buffers that was used the longest time ago; CLASS_COUNT: all are in use. */
static uint32_t idle_class(const ep_buffer_pool *pool)
{
    uint32_t oldest = CLASS_COUNT;
    for (uint32_t i = 0; i < CLASS_COUNT; i++) {
        if (pool->free_lists[i] != NULL && pool->stats.acquires - pool->used[i] > IDLE_ACQUIRES &&
            (oldest == CLASS_COUNT || pool->used[i] < pool->used[oldest])) {
            oldest = i;
        }
    }
    return oldest;
}

/*
 * Lock held: makes room for one more kept buffer, at the cost of classes that are not in use any more. Returns what is to be
 * freed. It may not suffice.
 */
static ep_buffer *evict(ep_buffer_pool *pool, size_t capacity)
{
    ep_buffer *evicted = NULL;
    uint32_t class_index = CLASS_COUNT;
    while (capacity <= pool->keep_bytes && pool->stats.kept_bytes + capacity > pool->keep_bytes) {
        if (class_index == CLASS_COUNT || pool->free_lists[class_index] == NULL) {
            class_index = idle_class(pool);
        }
        if (class_index == CLASS_COUNT) {
            break;
        }
        ep_buffer *buffer = pool->free_lists[class_index];
        pool->free_lists[class_index] = buffer->next;
        pool->stats.kept_bytes -= buffer->capacity_bytes;
        buffer->next = evicted;
        evicted = buffer;
    }
    return evicted;
}

/* Gives back room, and the buffer when it may be kept. True when the pool itself is to be freed. */
static bool give_back(ep_buffer_pool *pool, size_t capacity, ep_buffer *buffer, bool *out_kept)
{
    ep_buffer *evicted = NULL;
    pthread_mutex_lock(&pool->lock);
    pool->stats.lent_bytes -= capacity;
    if (buffer != NULL) {
        evicted = evict(pool, capacity);
    }
    *out_kept = buffer != NULL && pool->stats.kept_bytes + capacity <= pool->keep_bytes;
    if (*out_kept) {
        buffer->next = pool->free_lists[buffer->class_index];
        pool->free_lists[buffer->class_index] = buffer;
        pool->stats.kept_bytes += capacity;
    }
    bool last = --pool->holders == 0;
    pthread_mutex_unlock(&pool->lock);
    free_all(evicted);
    return last;
}

ep_err ep_buffer_acquire(ep_buffer_pool *pool, size_t bytes, ep_buffer **out_buffer)
{
    uint32_t class_index = class_of(bytes);
    if (class_index >= CLASS_COUNT) {
        return EP_ERR_RESOURCE_EXHAUSTED;
    }
    size_t capacity = class_bytes(class_index);
    ep_buffer *buffer = NULL;
    ep_err err = reserve(pool, capacity, class_index, &buffer);
    if (err != EP_OK) {
        return err;
    }
    if (buffer == NULL) {
        err = buffer_create(capacity, class_index, &buffer);
        if (err != EP_OK) {
            bool kept;
            if (give_back(pool, capacity, NULL, &kept)) {
                pool_free(pool);
            }
            return err;
        }
    }
    buffer->pool = pool;
    buffer->bytes = bytes;
    buffer->next = NULL;
    __atomic_store_n(&buffer->refs, 1, __ATOMIC_RELEASE);
    *out_buffer = buffer;
    return EP_OK;
}

ep_buffer *ep_buffer_ref(ep_buffer *buffer)
{
    uint32_t before = __atomic_fetch_add(&buffer->refs, 1, __ATOMIC_RELAXED);
    EP_ASSERT(before > 0);
    return buffer;
}

void ep_buffer_unref(ep_buffer *buffer)
{
    if (buffer == NULL) {
        return;
    }
    uint32_t before = __atomic_fetch_sub(&buffer->refs, 1, __ATOMIC_ACQ_REL);
    EP_ASSERT(before > 0);
    if (before > 1) {
        return;
    }
    ep_buffer_pool *pool = buffer->pool;
    bool kept;
    bool last = give_back(pool, buffer->capacity_bytes, buffer, &kept);
    if (!kept) {
        buffer_free(buffer);
    }
    if (last) {
        pool_free(pool);
    }
}

void ep_buffer_pool_read_stats(ep_buffer_pool *pool, ep_buffer_pool_stats *out_stats)
{
    pthread_mutex_lock(&pool->lock);
    *out_stats = pool->stats;
    pthread_mutex_unlock(&pool->lock);
}
