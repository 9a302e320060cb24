/* SPDX-License-Identifier: Apache-2.0 */
/* Buffer pool: one free list per size class under one short lock. */
#include "base/buffer.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/check.h"

/* Powers of two up to 64 KiB, then four classes per power of two: otherwise rounding would waste up
 * to half of a budget of large buffers. */
#define CLASS_SHIFT_MIN 12u
#define CLASS_SHIFT_FINE 16u
#define CLASS_SHIFT_MAX 35u /* 32 GiB */
#define CLASSES_COARSE (CLASS_SHIFT_FINE - CLASS_SHIFT_MIN + 1)
#define CLASS_COUNT (CLASSES_COARSE + 4 * (CLASS_SHIFT_MAX - CLASS_SHIFT_FINE))
/* A kept buffer that is up to this many classes larger is lent before the system is asked for
 * memory. */
#define CLASSES_UP 2u
/* A class that none of this many acquires used counts as idle: its kept buffers make room for those
 * of other classes. */
#define IDLE_ACQUIRES 64u
#define LARGE_PAGE_BYTES ((size_t)2 << 20)

struct ep_buffer_pool {
    /* NULL: none. With a parent, only limit_bytes, holders and the counters of stats are used */
    ep_buffer_pool *parent;
    pthread_mutex_t lock;
    size_t limit_bytes;
    size_t keep_bytes;
    uint64_t holders; /* lent buffers, plus one until the pool is destroyed */
    ep_buffer *free_lists[CLASS_COUNT];
    uint64_t used[CLASS_COUNT]; /* stats.acquires when a buffer of the class was last lent */
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

static void free_all(ep_buffer *buffers)
{
    while (buffers != NULL) {
        ep_buffer *buffer = buffers;
        buffers = buffer->next;
        free(buffer->data);
        free(buffer);
    }
}

/* Drops a holder that has no buffer lent. */
static void pool_unhold(ep_buffer_pool *pool);

static void pool_free(ep_buffer_pool *pool)
{
    ep_buffer_pool *parent = pool->parent;
    for (uint32_t i = 0; i < CLASS_COUNT; i++) {
        free_all(pool->free_lists[i]);
    }
    pthread_mutex_destroy(&pool->lock);
    free(pool);
    if (parent != NULL) {
        pool_unhold(parent);
    }
}

static void pool_unhold(ep_buffer_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    bool last = --pool->holders == 0;
    pthread_mutex_unlock(&pool->lock);
    if (last) {
        pool_free(pool);
    }
}

void ep_buffer_pool_destroy(ep_buffer_pool *pool)
{
    if (pool != NULL) {
        pool_unhold(pool);
    }
}

ep_err ep_buffer_pool_create_child(ep_buffer_pool *parent, size_t limit_bytes,
                                   ep_buffer_pool **out_pool)
{
    ep_buffer_pool *pool;
    ep_err err = ep_buffer_pool_create(limit_bytes, 0, &pool);
    if (err != EP_OK) {
        return err;
    }
    pthread_mutex_lock(&parent->lock);
    parent->holders++;
    pthread_mutex_unlock(&parent->lock);
    pool->parent = parent;
    *out_pool = pool;
    return EP_OK;
}

size_t ep_buffer_pool_limit(const ep_buffer_pool *pool)
{
    return pool->limit_bytes;
}

/* CLASS_COUNT: larger than the largest class. */
static uint32_t class_of(size_t bytes)
{
    if (bytes <= (size_t)1 << CLASS_SHIFT_MIN) {
        return 0;
    }
    if (bytes > (size_t)1 << CLASS_SHIFT_MAX) {
        return CLASS_COUNT;
    }
    /* 2^shift < bytes <= 2^(shift + 1) */
    uint32_t shift = 63 - (uint32_t)__builtin_clzll(bytes - 1);
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
 * Large buffers ask for huge pages: filling a fresh one then takes a fault per 2 MiB instead of one
 * per 4 KiB, and every pass over it needs fewer address translations. If the kernel has none,
 * nothing is lost.
 */
static uint8_t *data_alloc(size_t capacity)
{
    void *data;
    const bool is_large = capacity >= LARGE_PAGE_BYTES;
    return posix_memalign(&data, is_large ? LARGE_PAGE_BYTES : EP_BUFFER_ALIGN, capacity) == 0
               ? data
               : NULL;
}

/* A huge page is allocated at its first byte, so huge pages are used only within the charge:
 * otherwise a peer's few bytes would take 2 MiB. */
static void choose_pages(const ep_buffer *buffer)
{
    if (buffer->capacity_bytes >= LARGE_PAGE_BYTES) {
        bool large = buffer->charged_bytes >= LARGE_PAGE_BYTES;
        madvise(buffer->data, buffer->capacity_bytes, large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
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

static bool has_room(const ep_buffer_pool *pool, size_t charge)
{
    return pool->limit_bytes == 0 || pool->stats.lent_bytes + charge <= pool->limit_bytes;
}

/* Lock held. NULL: no kept buffer of about that size, or no room for all of it if charged whole. */
static ep_buffer *take_kept(ep_buffer_pool *pool, uint32_t class_index, bool whole)
{
    uint32_t up = class_index < CLASSES_COARSE ? 0 : CLASSES_UP;
    for (uint32_t i = class_index; i <= class_index + up && i < CLASS_COUNT; i++) {
        ep_buffer *buffer = pool->free_lists[i];
        if (buffer != NULL && (!whole || has_room(pool, buffer->capacity_bytes))) {
            pool->free_lists[i] = buffer->next;
            pool->stats.kept_bytes -= buffer->capacity_bytes;
            return buffer;
        }
    }
    return NULL;
}

static void count_lent(ep_buffer_pool *pool, size_t charge)
{
    pool->stats.lent_bytes += charge;
    if (pool->stats.lent_bytes > pool->stats.lent_bytes_peak) {
        pool->stats.lent_bytes_peak = pool->stats.lent_bytes;
    }
}

/* Charges one pool only. */
static ep_err charge_one(ep_buffer_pool *pool, size_t charge)
{
    pthread_mutex_lock(&pool->lock);
    bool room = has_room(pool, charge);
    if (room) {
        count_lent(pool, charge);
    } else {
        pool->stats.refusals++;
    }
    pthread_mutex_unlock(&pool->lock);
    return room ? EP_OK : EP_ERR_RESOURCE_EXHAUSTED;
}

static void discharge_one(ep_buffer_pool *pool, size_t charge)
{
    pthread_mutex_lock(&pool->lock);
    pool->stats.lent_bytes -= charge;
    pthread_mutex_unlock(&pool->lock);
}

/* Charges a pool and all pools above it. */
static ep_err charge_all(ep_buffer_pool *pool, size_t charge)
{
    ep_err err = charge_one(pool, charge);
    if (err == EP_OK && pool->parent != NULL) {
        err = charge_all(pool->parent, charge);
        if (err != EP_OK) {
            discharge_one(pool, charge);
        }
    }
    return err;
}

/* Charges the pool, and takes a kept buffer if there is one; charge is at most
 * class_bytes(class_index). */
static ep_err reserve(ep_buffer_pool *pool, size_t charge, uint32_t class_index,
                      ep_buffer **out_buffer)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&pool->lock);
    if (!has_room(pool, charge)) {
        pool->stats.refusals++;
        err = EP_ERR_RESOURCE_EXHAUSTED;
    } else {
        bool whole = charge == class_bytes(class_index);
        *out_buffer = take_kept(pool, class_index, whole);
        if (*out_buffer != NULL) {
            charge = whole ? (*out_buffer)->capacity_bytes : charge;
            (*out_buffer)->charged_bytes = charge;
        } else {
            pool->stats.system_allocations++;
        }
        pool->holders++;
        pool->used[*out_buffer != NULL ? (*out_buffer)->class_index : class_index] =
            pool->stats.acquires;
        pool->stats.acquires++;
        count_lent(pool, charge);
    }
    pthread_mutex_unlock(&pool->lock);
    return err;
}

/* Lock held. The class with kept buffers that was unused for longest; CLASS_COUNT: no class is
 * idle. */
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
 * Lock held: makes room for one more kept buffer by taking buffers of idle classes. Returns what
 * must be freed. The room may still not suffice.
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

/* Discharges a pool without a parent, which keeps the buffer if it may. */
static void give_back(ep_buffer_pool *pool, ep_buffer *buffer)
{
    size_t capacity = buffer->capacity_bytes;
    pthread_mutex_lock(&pool->lock);
    pool->stats.lent_bytes -= buffer->charged_bytes;
    ep_buffer *unkept = evict(pool, capacity);
    if (pool->stats.kept_bytes + capacity <= pool->keep_bytes) {
        buffer->next = pool->free_lists[buffer->class_index];
        pool->free_lists[buffer->class_index] = buffer;
        pool->stats.kept_bytes += capacity;
    } else {
        buffer->next = unkept;
        unkept = buffer;
    }
    bool last = --pool->holders == 0;
    pthread_mutex_unlock(&pool->lock);
    free_all(unkept);
    if (last) {
        pool_free(pool);
    }
}

/* Acquires from a pool without a parent. */
static ep_err acquire_root(ep_buffer_pool *pool, uint32_t class_index, size_t charge,
                           ep_buffer **out_buffer)
{
    ep_buffer *buffer = NULL;
    ep_err err = reserve(pool, charge, class_index, &buffer);
    if (err == EP_OK && buffer == NULL) {
        err = buffer_create(class_bytes(class_index), class_index, &buffer);
        if (err != EP_OK) {
            discharge_one(pool, charge);
            pool_unhold(pool);
            return err;
        }
        buffer->charged_bytes = charge;
        choose_pages(buffer);
    }
    *out_buffer = buffer;
    return err;
}

static ep_err acquire(ep_buffer_pool *pool, uint32_t class_index, size_t charge,
                      ep_buffer **out_buffer)
{
    if (pool->parent == NULL) {
        return acquire_root(pool, class_index, charge, out_buffer);
    }
    ep_err err = charge_one(pool, charge);
    if (err != EP_OK) {
        return err;
    }
    err = acquire(pool->parent, class_index, charge, out_buffer);
    if (err != EP_OK) {
        discharge_one(pool, charge);
        return err;
    }
    pthread_mutex_lock(&pool->lock);
    pool->holders++;
    pool->stats.acquires++;
    /* a kept buffer may be slightly larger than asked for */
    count_lent(pool, (*out_buffer)->charged_bytes - charge);
    pthread_mutex_unlock(&pool->lock);
    return EP_OK;
}

static size_t arriving_charge(size_t bytes, size_t have_bytes)
{
    size_t capacity = ep_buffer_class_bytes(bytes);
    size_t charge = EP_BUFFER_ARRIVING_BYTES;
    while (charge < capacity && charge < EP_BUFFER_ARRIVING_STEPS * have_bytes) {
        charge *= EP_BUFFER_ARRIVING_STEPS;
    }
    return charge < capacity ? charge : capacity;
}

static ep_err acquire_charged(ep_buffer_pool *pool, size_t bytes, size_t charge,
                              ep_buffer **out_buffer)
{
    ep_buffer *buffer = NULL;
    uint32_t class_index = class_of(bytes);
    ep_err err = class_index == CLASS_COUNT ? EP_ERR_RESOURCE_EXHAUSTED
                                            : acquire(pool, class_index, charge, &buffer);
    if (err != EP_OK) {
        return err;
    }
    buffer->pool = pool;
    buffer->bytes = bytes;
    buffer->next = NULL;
    __atomic_store_n(&buffer->refs, 1, __ATOMIC_RELEASE);
    *out_buffer = buffer;
    return EP_OK;
}

ep_err ep_buffer_acquire(ep_buffer_pool *pool, size_t bytes, ep_buffer **out_buffer)
{
    return acquire_charged(pool, bytes, ep_buffer_class_bytes(bytes), out_buffer);
}

ep_err ep_buffer_acquire_arriving(ep_buffer_pool *pool, size_t bytes, size_t have_bytes,
                                  ep_buffer **out_buffer)
{
    return acquire_charged(pool, bytes, arriving_charge(bytes, have_bytes), out_buffer);
}

ep_err ep_buffer_recharge(ep_buffer *buffer, size_t have_bytes)
{
    size_t charge = arriving_charge(buffer->bytes, have_bytes);
    if (have_bytes == buffer->bytes || charge >= ep_buffer_class_bytes(buffer->bytes)) {
        charge = buffer->capacity_bytes;
    }
    if (charge > buffer->charged_bytes) {
        ep_err err = charge_all(buffer->pool, charge - buffer->charged_bytes);
        if (err != EP_OK) {
            return err;
        }
    } else if (charge < buffer->charged_bytes) {
        for (ep_buffer_pool *pool = buffer->pool; pool != NULL; pool = pool->parent) {
            discharge_one(pool, buffer->charged_bytes - charge);
        }
    } else {
        return EP_OK;
    }
    bool grew = charge > buffer->charged_bytes;
    buffer->charged_bytes = charge;
    if (grew && charge >= LARGE_PAGE_BYTES) {
        choose_pages(buffer);
    }
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
    while (pool->parent != NULL) {
        /* the root counts this buffer as a holder, which keeps it alive */
        ep_buffer_pool *parent = pool->parent;
        discharge_one(pool, buffer->charged_bytes);
        pool_unhold(pool);
        pool = parent;
    }
    give_back(pool, buffer);
}

void ep_buffer_pool_read_stats(ep_buffer_pool *pool, ep_buffer_pool_stats *out_stats)
{
    pthread_mutex_lock(&pool->lock);
    *out_stats = pool->stats;
    pthread_mutex_unlock(&pool->lock);
}
