/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pooled, reference-counted, 64-byte aligned buffers: what frames are received into and sent from.
 *
 * A pool keeps freed buffers per size class (powers of two from 4 KiB to 64 KiB, then four classes from one power to the
 * next) up to keep_bytes, so that a steady state allocates nothing; a kept buffer of the next two larger classes does too, so
 * a large one is less than twice what was asked for. limit_bytes bounds what is lent out at once; beyond it ep_buffer_acquire
 * fails and the caller pushes back.
 * Buffers hold their pool: ep_buffer_pool_destroy may be called while some are lent; the last release frees the pool.
 *
 * Threads  all calls, any thread.
 */
#ifndef EP_BASE_BUFFER_H
#define EP_BASE_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "expertd/error.h"

#define EP_BUFFER_ALIGN 64

typedef struct ep_buffer_pool ep_buffer_pool;

typedef struct ep_buffer {
    uint8_t *data;           /* 64-byte aligned */
    size_t bytes;            /* asked for; the holder may lower it */
    size_t capacity_bytes;   /* >= bytes */
    /* private */
    ep_buffer_pool *pool;
    uint32_t refs;
    uint32_t class_index;
    struct ep_buffer *next;
} ep_buffer;

typedef struct ep_buffer_pool_stats {
    uint64_t lent_bytes;         /* capacity of buffers now lent */
    uint64_t lent_bytes_peak;
    uint64_t kept_bytes;         /* capacity of free buffers kept */
    uint64_t acquires;           /* calls that succeeded */
    uint64_t system_allocations; /* of them, served by the system allocator */
    uint64_t refusals;           /* calls refused by limit_bytes */
} ep_buffer_pool_stats;

/* limit_bytes 0: unlimited. Errors: NO_MEMORY. */
ep_err ep_buffer_pool_create(size_t limit_bytes, size_t keep_bytes, ep_buffer_pool **out_pool);
void ep_buffer_pool_destroy(ep_buffer_pool *pool);

/* A buffer with one reference; contents undefined. Errors: RESOURCE_EXHAUSTED (limit), NO_MEMORY. */
ep_err ep_buffer_acquire(ep_buffer_pool *pool, size_t bytes, ep_buffer **out_buffer);
/* What a buffer of so many bytes takes from limit_bytes at least: its size class. */
size_t ep_buffer_class_bytes(size_t bytes);
ep_buffer *ep_buffer_ref(ep_buffer *buffer);
/* Drops one reference; NULL is allowed. */
void ep_buffer_unref(ep_buffer *buffer);

void ep_buffer_pool_read_stats(ep_buffer_pool *pool, ep_buffer_pool_stats *out_stats);

#endif
