/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pooled, reference-counted, 64-byte aligned buffers: what frames are received into and sent from.
 *
 * A pool keeps freed buffers per size class (powers of two from 4 KiB to 64 KiB, then four classes
 * from one power to the next) up to keep_bytes, so that a steady state allocates nothing; a kept
 * buffer of the next two larger classes does too, so a large one is less than twice what was asked
 * for. limit_bytes bounds what is lent out at once; beyond it ep_buffer_acquire fails and the
 * caller pushes back.
 *
 * A buffer that bytes are still to arrive in may be taken for less than its size
 * (ep_buffer_acquire_arriving): only what is charged counts against the limits, and only so much of
 * it may be written. So what a peer announces takes nothing from others, only what it has sent
 * does.
 *
 * A child pool is a share of another pool: what its buffers take counts against its own limit and
 * the parent's, memory is kept by the parent. It keeps one kind of user from taking all that others
 * need.
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
    size_t bytes;          /* asked for; the holder may lower it */
    size_t capacity_bytes; /* >= bytes */
    /* what it takes from the limits, and may be written; capacity_bytes unless it is arriving */
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
    uint64_t kept_bytes;         /* capacity of free buffers kept */
    uint64_t acquires;           /* calls that succeeded */
    uint64_t system_allocations; /* of them, served by the system allocator */
    uint64_t refusals;           /* calls refused by limit_bytes */
} ep_buffer_pool_stats;

/* limit_bytes 0: unlimited. Errors: NO_MEMORY. */
ep_err ep_buffer_pool_create(size_t limit_bytes, size_t keep_bytes, ep_buffer_pool **out_pool);
/* A share of parent, of at most limit_bytes at once. Holds its parent. Errors: NO_MEMORY. */
ep_err ep_buffer_pool_create_child(ep_buffer_pool *parent, size_t limit_bytes,
                                   ep_buffer_pool **out_pool);
void ep_buffer_pool_destroy(ep_buffer_pool *pool);
/* What may be lent at once; 0: unlimited. */
size_t ep_buffer_pool_limit(const ep_buffer_pool *pool);

/* A buffer with one reference; contents undefined. Errors: RESOURCE_EXHAUSTED (limit),
 * NO_MEMORY. */
ep_err ep_buffer_acquire(ep_buffer_pool *pool, size_t bytes, ep_buffer **out_buffer);
/*
 * The same for bytes that arrive bit by bit: have_bytes of them are there already. It is charged
 * EP_BUFFER_ARRIVING_STEPS times those, EP_BUFFER_ARRIVING_BYTES at least, and may be written up to
 * there.
 */
ep_err ep_buffer_acquire_arriving(ep_buffer_pool *pool, size_t bytes, size_t have_bytes,
                                  ep_buffer **out_buffer);
/* Charges it as if acquired with have_bytes now: more as they arrive, less when fewer are there
 * than were expected. Only its one holder calls it. Errors: RESOURCE_EXHAUSTED (the charge is as it
 * was). */
ep_err ep_buffer_recharge(ep_buffer *buffer, size_t have_bytes);
#define EP_BUFFER_ARRIVING_BYTES ((size_t)64 << 10)
#define EP_BUFFER_ARRIVING_STEPS 4u
/* What a buffer of so many bytes takes from limit_bytes at least: its size class. */
size_t ep_buffer_class_bytes(size_t bytes);
ep_buffer *ep_buffer_ref(ep_buffer *buffer);
/* Drops one reference; NULL is allowed. */
void ep_buffer_unref(ep_buffer *buffer);

void ep_buffer_pool_read_stats(ep_buffer_pool *pool, ep_buffer_pool_stats *out_stats);

#endif
