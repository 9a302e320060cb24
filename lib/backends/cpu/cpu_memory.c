/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/cpu_memory.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "base/large_memory.h"

#if defined(__SANITIZE_ADDRESS__)
/* marks holes as forbidden, as malloc does, so that a use of weights after their end is found */
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(bytes, count) ((void)(bytes), (void)(count))
#define ASAN_UNPOISON_MEMORY_REGION(bytes, count) ((void)(bytes), (void)(count))
#endif

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define CHUNK_BYTES ((size_t)256 << 20)
/* from this size on, malloc would take half as much again when experts replace each other */
#define PART_BYTES_MIN (CHUNK_BYTES / 1024)
/* for larger parts the last 2 MiB matter little, and chunks would get large holes */
#define PART_BYTES_MAX (CHUNK_BYTES / 4)
/* a part between any two holes, none below PART_BYTES_MIN */
#define HOLES_MAX (CHUNK_BYTES / PART_BYTES_MIN + 1)

typedef struct {
    size_t at;
    size_t bytes;
} hole;

typedef struct chunk {
    struct chunk *next;
    uint8_t *bytes;
    uint32_t node;
    uint32_t holes_count;
    /* ordered by place, with parts between them; room for one more before it joins its
     * neighbours */
    hole holes[HOLES_MAX + 1];
} chunk;

struct ep_cpu_memory {
    const ep_cpu_topology *topology;
    pthread_mutex_t lock;
    chunk *chunks;
};

ep_cpu_memory *ep_cpu_memory_create(const ep_cpu_topology *topology)
{
    ep_cpu_memory *memory = calloc(1, sizeof(*memory));
    if (memory != NULL) {
        memory->topology = topology;
        pthread_mutex_init(&memory->lock, NULL);
    }
    return memory;
}

void ep_cpu_memory_free(ep_cpu_memory *memory)
{
    if (memory != NULL) {
        EP_ASSERT(memory->chunks == NULL);
        pthread_mutex_destroy(&memory->lock);
        free(memory);
    }
}

static void *alloc_on(const ep_cpu_memory *memory, size_t bytes, uint32_t node)
{
    void *part = ep_large_alloc(bytes, EP_HOST_ALIGN);
    if (part != NULL) {
        ep_cpu_topology_bind(memory->topology, part, bytes, node);
    }
    return part;
}

static void free_on(const ep_cpu_memory *memory, void *part, size_t bytes)
{
    ep_cpu_topology_bind(memory->topology, part, bytes, UINT32_MAX);
    ep_large_free(part, bytes);
}

static bool is_of_chunk(size_t bytes)
{
    return bytes >= PART_BYTES_MIN && bytes <= PART_BYTES_MAX;
}

static void drop_hole(chunk *c, uint32_t index)
{
    c->holes_count--;
    memmove(&c->holes[index], &c->holes[index + 1], (c->holes_count - index) * sizeof(c->holes[0]));
}

/* Lock held. The chunk on this memory node with the smallest hole that is large enough, so that
 * memory in use is filled before untouched memory; *out_index: of the hole. NULL: none. */
static chunk *find_hole(const ep_cpu_memory *memory, size_t bytes, uint32_t node,
                        uint32_t *out_index)
{
    chunk *best = NULL;
    size_t best_bytes = SIZE_MAX;
    for (chunk *c = memory->chunks; c != NULL && best_bytes > bytes; c = c->next) {
        for (uint32_t i = 0; i < c->holes_count && c->node == node; i++) {
            if (c->holes[i].bytes >= bytes && c->holes[i].bytes < best_bytes) {
                best = c;
                best_bytes = c->holes[i].bytes;
                *out_index = i;
            }
        }
    }
    return best;
}

/* Lock held. Takes bytes from the hole. */
static void *take_of_hole(chunk *c, uint32_t index, size_t bytes)
{
    hole *h = &c->holes[index];
    void *part = c->bytes + h->at;
    ASAN_UNPOISON_MEMORY_REGION(part, bytes);
    h->at += bytes;
    h->bytes -= bytes;
    if (h->bytes == 0) {
        drop_hole(c, index);
    }
    return part;
}

/* Lock held. */
static chunk *add_chunk(ep_cpu_memory *memory, uint32_t node)
{
    chunk *c = malloc(sizeof(*c));
    void *bytes = alloc_on(memory, CHUNK_BYTES, node);
    if (c == NULL || bytes == NULL) {
        free(c);
        ep_large_free(bytes, CHUNK_BYTES);
        return NULL;
    }
    *c = (chunk){.next = memory->chunks,
                 .bytes = bytes,
                 .node = node,
                 .holes_count = 1,
                 .holes = {{.bytes = CHUNK_BYTES}}};
    memory->chunks = c;
    ASAN_POISON_MEMORY_REGION(bytes, CHUNK_BYTES);
    return c;
}

void *ep_cpu_memory_take(ep_cpu_memory *memory, size_t bytes, uint32_t node)
{
    void *part = NULL;
    bytes = ep_align_up(bytes, EP_HOST_ALIGN);
    if (is_of_chunk(bytes)) {
        pthread_mutex_lock(&memory->lock);
        uint32_t index = 0;
        chunk *c = find_hole(memory, bytes, node, &index);
        c = c != NULL ? c : add_chunk(memory, node);
        part = c != NULL ? take_of_hole(c, index, bytes) : NULL;
        pthread_mutex_unlock(&memory->lock);
    }
    /* a whole chunk of address space may be refused where this part is not */
    return part != NULL ? part : alloc_on(memory, bytes, node);
}

/* Returns whole huge pages to the system. Others hold bytes of neighbours and would be split. */
static void discard(const chunk *c, const hole *h)
{
    const size_t first = ep_align_up(h->at, HUGE_PAGE_BYTES);
    const size_t end = (h->at + h->bytes) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if (end > first) {
        (void)madvise(c->bytes + first, end - first, MADV_DONTNEED);
    }
}

static void give_to_chunk(chunk *c, size_t at, size_t bytes)
{
    uint32_t i = 0;
    ASAN_POISON_MEMORY_REGION(c->bytes + at, bytes);
    while (i < c->holes_count && c->holes[i].at < at) {
        i++;
    }
    memmove(&c->holes[i + 1], &c->holes[i], (c->holes_count - i) * sizeof(c->holes[0]));
    c->holes[i] = (hole){.at = at, .bytes = bytes};
    c->holes_count++;
    if (i + 1 < c->holes_count && at + bytes == c->holes[i + 1].at) {
        c->holes[i].bytes += c->holes[i + 1].bytes;
        drop_hole(c, i + 1);
    }
    if (i > 0 && c->holes[i - 1].at + c->holes[i - 1].bytes == at) {
        i--;
        c->holes[i].bytes += c->holes[i + 1].bytes;
        drop_hole(c, i + 1);
    }
    discard(c, &c->holes[i]);
}

void ep_cpu_memory_give(ep_cpu_memory *memory, void *part, size_t bytes)
{
    const uintptr_t place = (uintptr_t)part;
    bytes = ep_align_up(bytes, EP_HOST_ALIGN);
    if (!is_of_chunk(bytes)) {
        free_on(memory, part, bytes);
        return;
    }
    pthread_mutex_lock(&memory->lock);
    chunk **at = &memory->chunks;
    while (*at != NULL &&
           (place < (uintptr_t)(*at)->bytes || place >= (uintptr_t)(*at)->bytes + CHUNK_BYTES)) {
        at = &(*at)->next;
    }
    chunk *c = *at;
    if (c == NULL) {
        free_on(memory, part, bytes);
    } else {
        give_to_chunk(c, place - (uintptr_t)c->bytes, bytes);
        if (c->holes[0].bytes == CHUNK_BYTES) {
            *at = c->next;
            ASAN_UNPOISON_MEMORY_REGION(c->bytes, CHUNK_BYTES);
            free_on(memory, c->bytes, CHUNK_BYTES);
            free(c);
        }
    }
    pthread_mutex_unlock(&memory->lock);
}
