/* SPDX-License-Identifier: Apache-2.0 */
#include "base/large_memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/check.h"

#define PAGE_BYTES ((size_t)65536) /* no system has larger ones */

static void *map_aligned(size_t bytes)
{
    const size_t span = bytes + EP_LARGE_BYTES;
    uint8_t *map =
        span > bytes ? mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                     : MAP_FAILED;
    if (map == MAP_FAILED) {
        return NULL;
    }
    uint8_t *begin = (uint8_t *)ep_align_up((uintptr_t)map, EP_LARGE_BYTES);
    uint8_t *end = begin + bytes;
    if (begin > map) {
        (void)munmap(map, (size_t)(begin - map));
    }
    if (map + span > end) {
        (void)munmap(end, (size_t)(map + span - end));
    }
    /* only advice: kernels without huge pages refuse it */
    (void)madvise(begin, bytes, MADV_HUGEPAGE);
    return begin;
}

void *ep_large_alloc(size_t bytes, size_t align)
{
    void *memory = NULL;
    if (bytes > SIZE_MAX - PAGE_BYTES) {
        return NULL;
    }
    if (bytes >= EP_LARGE_BYTES) {
        return map_aligned(ep_align_up(bytes, PAGE_BYTES));
    }
    return posix_memalign(&memory, align, bytes) == 0 ? memory : NULL;
}

void ep_large_free(void *memory, size_t bytes)
{
    if (memory == NULL) {
        return;
    }
    if (bytes < EP_LARGE_BYTES) {
        free(memory);
    } else if (munmap(memory, ep_align_up(bytes, PAGE_BYTES)) != 0) {
        /* the system may not allow one more mapping, which a hole needs */
        (void)madvise(memory, ep_align_up(bytes, PAGE_BYTES), MADV_DONTNEED);
    }
}
