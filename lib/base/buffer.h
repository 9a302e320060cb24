/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pooled, reference-counted, 64-byte aligned buffers, in which frames are received and sent.
 *
 * A pool keeps freed buffers per size class, up to keep_bytes, so that a steady state allocates
 * nothing. Classes are powers of two from 4 KiB to 64 KiB, then four per power of two. A kept
 * buffer of the next two larger classes is used too, so a large buffer is less than twice the size
 * asked for. limit_bytes bounds what is lent at one time; beyond it ep_buffer_acquire fails and the
 * caller pushes back.
 *
 * A buffer for bytes that have yet to arrive may be acquired for less than its size
 * (ep_buffer_acquire_arriving): only the charged part counts against the limits, and only that part
 * may be written. So a peer takes memory from others only by what it sent, not by what it
 * announced.
 *
 * A child pool is a share of another pool: its buffers count against its own limit and the
 * parent's, and the parent keeps free memory. It prevents one kind of user from taking all that
 * others need.
 *
 * Buffers hold their pool: ep_buffer_pool_destroy may be called while some are lent; the last
 * release frees the pool.
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
    uint8_t *data;         /* 64-byte aligned */
    size_t bytes;          /* size asked for; the holder may lower it */
    size_t capacity_bytes; /* >= bytes */
    /* how much counts against the limits and may be written; capacity_bytes unless arriving */
    size_t charged_bytes;
    /* private */
    ep_buffer_pool *pool;
    uint32_t refs;
    uint32_t class_index;
    struct ep_buffer *next;
} ep_buffer;

typedef struct ep_buffer_pool_stats {
    uint64_t lent_bytes; /* charged for buffers now lent */
    uint64_t lent_bytes_peak;
    uint64_t kept_bytes;         /* capacity of kept free buffers */
    uint64_t acquires;           /* calls that succeeded */
    uint64_t system_allocations; /* of these, served by the system allocator */
    uint64_t refusals;           /* acquires refused because of limit_bytes */
} ep_buffer_pool_stats;

/* limit_bytes 0: unlimited. Errors: NO_MEMORY. */
ep_err ep_buffer_pool_create(size_t limit_bytes, size_t keep_bytes, ep_buffer_pool **out_pool);
/* A share of parent, with at most limit_bytes lent. Holds its parent. Errors: NO_MEMORY. */
ep_err ep_buffer_pool_create_child(ep_buffer_pool *parent, size_t limit_bytes,
                                   ep_buffer_pool **out_pool);
void ep_buffer_pool_destroy(ep_buffer_pool *pool);
/* The limit of what is lent at one time; 0: unlimited. */
size_t ep_buffer_pool_limit(const ep_buffer_pool *pool);

/* A buffer with one reference, content undefined. Errors: RESOURCE_EXHAUSTED (limit), NO_MEMORY. */
ep_err ep_buffer_acquire(ep_buffer_pool *pool, size_t bytes, ep_buffer **out_buffer);
/*
 * The same for bytes that are still arriving; have_bytes of them are there already. Charged and
 * writable is EP_BUFFER_ARRIVING_STEPS times have_bytes, at least EP_BUFFER_ARRIVING_BYTES.
 */
ep_err ep_buffer_acquire_arriving(ep_buffer_pool *pool, size_t bytes, size_t have_bytes,
                                  ep_buffer **out_buffer);
/* Sets the charge as if acquired with have_bytes now: more as bytes arrive, less when fewer are
 * there than expected. Only for the single holder of the buffer. Errors: RESOURCE_EXHAUSTED (the
 * charge is unchanged). */
ep_err ep_buffer_recharge(ep_buffer *buffer, size_t have_bytes);
#define EP_BUFFER_ARRIVING_BYTES ((size_t)64 << 10)
#define EP_BUFFER_ARRIVING_STEPS 4u
/* The least that a buffer of this size takes from limit_bytes: its size class. */
size_t ep_buffer_class_bytes(size_t bytes);
ep_buffer *ep_buffer_ref(ep_buffer *buffer);
/* Drops one reference; NULL is allowed. */
void ep_buffer_unref(ep_buffer *buffer);

void ep_buffer_pool_read_stats(ep_buffer_pool *pool, ep_buffer_pool_stats *out_stats);

#endif
