/* SPDX-License-Identifier: Apache-2.0 */
/* The ring: checked positions, copies, and who must be woken. */
#include "transport/shm/shm_ring.h"

#include <sched.h>
#include <string.h>

static bool take_tail(shm_producer *p, uint64_t tail, size_t *out_bytes)
{
    if (tail - p->tail_seen > p->head - p->tail_seen) {
        return false; /* behind the last value seen, or ahead of us */
    }
    p->tail_seen = tail;
    if (tail == p->head && p->origin != tail) {
        p->origin = tail;
        /* the consumer reads it together with the next head */
        __atomic_store_n(&p->shared->origin, tail, __ATOMIC_RELAXED);
    }
    *out_bytes = p->bytes - (size_t)(p->head - tail);
    return true;
}

bool ep_shm_producer_wait_room(shm_producer *p, size_t *out_bytes)
{
    if (!take_tail(p, __atomic_load_n(&p->shared->tail, __ATOMIC_ACQUIRE), out_bytes)) {
        return false;
    }
    if (*out_bytes > 0) {
        return true;
    }
    __atomic_store_n(&p->shared->wants_space, 1, __ATOMIC_SEQ_CST);
    /* A load with acquire order could pass the store on some CPUs, and each side could miss the
     * other's. */
    return take_tail(p, __atomic_load_n(&p->shared->tail, __ATOMIC_SEQ_CST), out_bytes);
    /* the flag stays set, which costs at most a needless wake-up */
}

bool ep_shm_producer_is_apart(const shm_producer *p)
{
    int cpu = sched_getcpu();
    return cpu >= 0 && __atomic_load_n(&p->shared->armed_cpu, __ATOMIC_RELAXED) != (uint32_t)cpu;
}

uint8_t *ep_shm_producer_at(const shm_producer *p, size_t offset, size_t bytes, size_t *out_piece)
{
    size_t at = (size_t)(p->head - p->origin + offset) & (p->bytes - 1);
    *out_piece = bytes < p->bytes - at ? bytes : p->bytes - at;
    return p->data + at;
}

bool ep_shm_producer_publish(shm_producer *p, size_t bytes)
{
    uint32_t cpu = (uint32_t)sched_getcpu();
    if (cpu != p->cpu) {
        p->cpu = cpu;
        __atomic_store_n(&p->shared->cpu, cpu, __ATOMIC_RELAXED);
    }
    p->head += bytes;
    __atomic_store_n(&p->shared->head, p->head, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&p->shared->armed, __ATOMIC_SEQ_CST) != 0 &&
           __atomic_exchange_n(&p->shared->armed, 0, __ATOMIC_SEQ_CST) != 0;
}

bool ep_shm_consumer_available(shm_consumer *c, size_t *out_bytes)
{
    uint64_t head = __atomic_load_n(&c->shared->head, __ATOMIC_ACQUIRE);
    if (head - c->tail > c->bytes || head - c->tail < c->head_seen - c->tail) {
        return false; /* more than the ring holds, or less than before */
    }
    c->head_seen = head;
    /* it does not change while bytes are in the ring */
    c->origin = __atomic_load_n(&c->shared->origin, __ATOMIC_RELAXED);
    *out_bytes = (size_t)(head - c->tail);
    return true;
}

bool ep_shm_consumer_is_apart(const shm_consumer *c)
{
    int cpu = sched_getcpu();
    return cpu >= 0 && __atomic_load_n(&c->shared->cpu, __ATOMIC_RELAXED) != (uint32_t)cpu;
}

bool ep_shm_consumer_take(shm_consumer *c, uint8_t *out, size_t bytes)
{
    size_t at = (size_t)(c->tail - c->origin) & (c->bytes - 1);
    size_t first = bytes < c->bytes - at ? bytes : c->bytes - at;
    memcpy(out, c->data + at, first);
    memcpy(out + first, c->data, bytes - first);
    c->tail += bytes;
    __atomic_store_n(&c->shared->tail, c->tail, __ATOMIC_SEQ_CST);
    /* Wake at half empty: one wake-up moves much, and the producer fills while we empty the
     * rest. */
    return c->head_seen - c->tail <= c->bytes / 2 &&
           __atomic_load_n(&c->shared->wants_space, __ATOMIC_SEQ_CST) != 0 &&
           __atomic_exchange_n(&c->shared->wants_space, 0, __ATOMIC_SEQ_CST) != 0;
}

bool ep_shm_consumer_arm(shm_consumer *c)
{
    if (!c->armed) {
        uint32_t cpu = (uint32_t)sched_getcpu();
        if (cpu != c->cpu) {
            c->cpu = cpu;
            __atomic_store_n(&c->shared->armed_cpu, cpu, __ATOMIC_RELAXED);
        }
        c->armed = true;
        __atomic_store_n(&c->shared->armed, 1, __ATOMIC_SEQ_CST);
    }
    return __atomic_load_n(&c->shared->head, __ATOMIC_SEQ_CST) == c->tail;
}

void ep_shm_consumer_disarm(shm_consumer *c)
{
    if (c->armed) {
        c->armed = false;
        __atomic_store_n(&c->shared->armed, 0, __ATOMIC_SEQ_CST);
    }
}
