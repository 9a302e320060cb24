/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One direction of a shared-memory connection: a ring of bytes that one process fills and another
 * empties.
 *
 * The peer may overwrite any byte of it at any time. So each side keeps its own position in private
 * memory. It reads only the other's position from the shared memory, once per check, and checks
 * that it lies between the last value seen and the possible maximum. The two flags only decide who
 * wakes whom; a false one costs its writer a wake-up, or us a needless one.
 *
 * A producer that finds the ring empty begins again at its first byte (origin). So one frame at a
 * time uses the same few pages, which stay in the caches, and the system never has to provide the
 * rest of a large ring.
 *
 * Threads  a producer and a consumer, each one thread at a time.
 */
#ifndef EP_TRANSPORT_SHM_RING_H
#define EP_TRANSPORT_SHM_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In shared memory. Positions count bytes since the beginning; they would take ages to wrap. */
typedef struct shm_ring_shared {
    _Alignas(64) uint64_t head; /* written by the producer */
    /* by the producer: the position at the ring's first byte; changed only while it is empty */
    uint64_t origin;
    uint32_t cpu;               /* by the producer: the CPU it ran on at its last put; a hint */
    uint32_t wants_space;       /* set by the producer before it sleeps, cleared by the consumer */
    _Alignas(64) uint64_t tail; /* written by the consumer */
    uint32_t armed;             /* set by the consumer before it sleeps, cleared by the producer */
    uint32_t armed_cpu;         /* by the consumer: the CPU it ran on then; a hint */
} shm_ring_shared;

typedef struct shm_producer {
    shm_ring_shared *shared;
    uint8_t *data;
    size_t bytes; /* a power of two */
    uint64_t head;
    uint64_t origin;
    uint64_t tail_seen;
    uint32_t cpu;
} shm_producer;

typedef struct shm_consumer {
    shm_ring_shared *shared;
    const uint8_t *data;
    size_t bytes;
    uint64_t tail;
    uint64_t origin; /* as read from the peer; any value is safe */
    uint64_t head_seen;
    bool armed; /* we set the flag and have not cleared it */
    uint32_t cpu;
} shm_consumer;

/* How many bytes may be put in now; all earlier bytes must be published. When there is no room,
 * asks the consumer for a wake-up. False when the peer's position is impossible. */
bool ep_shm_producer_wait_room(shm_producer *p, size_t *out_bytes);
/* Whether the consumer last slept on another CPU than this one. */
bool ep_shm_producer_is_apart(const shm_producer *p);
/* Where to put bytes: at most two pieces, at the ring's end and beginning; bytes <= room. Returns
 * the first piece. */
uint8_t *ep_shm_producer_at(const shm_producer *p, size_t offset, size_t bytes, size_t *out_piece);
/* Makes bytes visible. True: the consumer sleeps, and the caller must wake it. */
bool ep_shm_producer_publish(shm_producer *p, size_t bytes);

/* How many bytes can be taken; false when the peer's position is impossible. */
bool ep_shm_consumer_available(shm_consumer *c, size_t *out_bytes);
/* Whether the producer ran on another CPU than this one when it put in the newest bytes. */
bool ep_shm_consumer_is_apart(const shm_consumer *c);
/* Copies bytes out and frees their space; bytes <= available. True: the producer waits for space
 * and must be woken. */
bool ep_shm_consumer_take(shm_consumer *c, uint8_t *out, size_t bytes);
/*
 * Before sleeping: asks for a wake-up. False: bytes arrived meanwhile, or the position is
 * impossible; check again.
 */
bool ep_shm_consumer_arm(shm_consumer *c);
/* After waking: asks for no more wake-ups. */
void ep_shm_consumer_disarm(shm_consumer *c);

#endif
