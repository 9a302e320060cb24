/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of weights: parts that share huge pages keep their bytes whatever becomes of their
 * neighbours, and what was given back is gone. */
#include <criterion/criterion.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backends/cpu/cpu_memory.h"
#include "backends/host_common.h"
#include "base/large_memory.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#define MIB ((size_t)1 << 20)
enum { PARTS = 96, STEPS = 600, PAGE = 4096 };

static ep_cpu_topology *topology;
static ep_cpu_memory *memory;

static void setup(void)
{
    cr_assert_eq(ep_cpu_topology_load(&topology), EP_OK);
    memory = ep_cpu_memory_create(topology);
    cr_assert_not_null(memory);
}

static void teardown(void)
{
    ep_cpu_memory_free(memory); /* asserts that no chunk is left */
    ep_cpu_topology_free(topology);
}

TestSuite(cpu_memory, .init = setup, .fini = teardown);

/* At both ends and once a page in between. */
static void mark(uint8_t *part, size_t bytes, uint8_t value)
{
    for (size_t at = 0; at < bytes; at += PAGE) {
        part[at] = value;
    }
    part[bytes - 1] = value;
}

static size_t unlike(const uint8_t *part, size_t bytes, uint8_t value)
{
    size_t count = part[bytes - 1] != value;
    for (size_t at = 0; at < bytes; at += PAGE) {
        count += part[at] != value;
    }
    return count;
}

static size_t resident_bytes(uint8_t *part, size_t bytes)
{
    static unsigned char pages[256 * MIB / PAGE];
    uint8_t *first = part - (uintptr_t)part % PAGE;
    size_t count = 0;
    const size_t span = (size_t)(part + bytes - first);
    if (mincore(first, span, pages) != 0) {
        return 0; /* nothing is there any more */
    }
    for (size_t i = 0; i < (span + PAGE - 1) / PAGE; i++) {
        count += pages[i] & 1u;
    }
    return count * PAGE;
}

Test(cpu_memory, parts_of_all_sizes_keep_their_bytes)
{
    /* Below what chunks take, in chunks, larger. */
    static const size_t sizes[] = {64,           MIB / 4,     2 * MIB - 64,
                                   2 * MIB,      2 * MIB + 1, 3 * MIB + 777,
                                   9 * MIB + 64, 33 * MIB,    70 * MIB};
    struct {
        uint8_t *bytes;
        size_t count;
        uint8_t value;
    } parts[PARTS] = {{NULL, 0, 0}};
    srand(7);
    for (int step = 0; step < STEPS; step++) {
        const size_t p = (size_t)rand() % PARTS;
        if (parts[p].bytes != NULL) {
            cr_assert_eq(unlike(parts[p].bytes, parts[p].count, parts[p].value), 0, "step %d",
                         step);
            ep_cpu_memory_give(memory, parts[p].bytes, parts[p].count);
            parts[p].bytes = NULL;
            continue;
        }
        /* Few of the large ones. */
        parts[p].count = sizes[(size_t)rand() % (p < 4 ? 9 : 7)];
        parts[p].value = (uint8_t)(1 + step % 255);
        parts[p].bytes = ep_cpu_memory_take(memory, parts[p].count, 0);
        cr_assert_not_null(parts[p].bytes);
        cr_assert_eq((uintptr_t)parts[p].bytes % EP_HOST_ALIGN, 0);
        mark(parts[p].bytes, parts[p].count, parts[p].value);
    }
    for (size_t p = 0; p < PARTS; p++) {
        if (parts[p].bytes != NULL) {
            cr_assert_eq(unlike(parts[p].bytes, parts[p].count, parts[p].value), 0, "part %zu", p);
            ep_cpu_memory_give(memory, parts[p].bytes, parts[p].count);
        }
    }
}

Test(cpu_memory, parts_lie_side_by_side_and_what_is_given_back_is_taken_again)
{
    enum { COUNT = 3 };
    const size_t bytes = 5 * MIB + 64;
    uint8_t *part[COUNT];
    for (int i = 0; i < COUNT; i++) {
        part[i] = ep_cpu_memory_take(memory, bytes, 0);
        cr_assert_eq(part[i], part[0] + (size_t)i * bytes);
    }
    ep_cpu_memory_give(memory, part[1], bytes);
    cr_assert_eq(ep_cpu_memory_take(memory, bytes, 0), part[1]);
    for (int i = 0; i < COUNT; i++) {
        ep_cpu_memory_give(memory, part[i], bytes);
    }
}

Test(cpu_memory, what_is_given_back_leaves_only_the_pages_of_neighbours)
{
    const size_t bytes = 21 * MIB;
    uint8_t *before = ep_cpu_memory_take(memory, bytes, 0);
    uint8_t *part = ep_cpu_memory_take(memory, bytes, 0);
    uint8_t *after = ep_cpu_memory_take(memory, bytes, 0);
    mark(before, bytes, 1);
    mark(part, bytes, 2);
    mark(after, bytes, 3);
    cr_assert_eq(resident_bytes(part, bytes), bytes);
    ep_cpu_memory_give(memory, part, bytes);
    cr_assert_leq(resident_bytes(part, bytes), 4 * MIB);
    cr_assert_eq(unlike(before, bytes, 1) + unlike(after, bytes, 3), 0);
    ep_cpu_memory_give(memory, before, bytes);
    cr_assert_leq(resident_bytes(before, 2 * bytes), 4 * MIB);
    cr_assert_eq(unlike(after, bytes, 3), 0);
    ep_cpu_memory_give(memory, after, bytes);
}

/* Experts that replace each other under a byte budget, parts all of one size: the process has
 * hardly more in memory than them. */
static void check_replacing(size_t bytes)
{
    enum { COUNT_MAX = 1024, PAGES_MAX = 4096 };
    static uint8_t *parts[COUNT_MAX];
    static uintptr_t pages[PAGES_MAX];      /* of 2 MiB, that any part was in */
    const size_t count = 288 * MIB / bytes; /* more than a chunk */
    size_t pages_count = 0;
    cr_assert_leq(count, (size_t)COUNT_MAX);
    for (size_t step = 0; step < 4 * count; step++) {
        const size_t p = step < count ? step : (size_t)rand() % count;
        if (step >= count) {
            ep_cpu_memory_give(memory, parts[p], bytes);
        }
        parts[p] = ep_cpu_memory_take(memory, bytes, 0);
        cr_assert_not_null(parts[p]);
        mark(parts[p], bytes, 1);
        for (uintptr_t page = (uintptr_t)parts[p] / (2 * MIB);
             page <= ((uintptr_t)parts[p] + bytes - 1) / (2 * MIB); page++) {
            size_t i = 0;
            while (i < pages_count && pages[i] != page) {
                i++;
            }
            cr_assert_lt(i, (size_t)PAGES_MAX);
            pages[i] = page;
            pages_count += i == pages_count;
        }
    }
    size_t resident = 0;
    for (size_t i = 0; i < pages_count; i++) {
        resident += resident_bytes((uint8_t *)(pages[i] * 2 * MIB), 2 * MIB);
    }
    cr_assert_leq(resident, count * bytes + count * bytes / 32,
                  "%zu bytes in memory for %zu parts of %zu", resident, count, bytes);
    for (size_t p = 0; p < count; p++) {
        ep_cpu_memory_give(memory, parts[p], bytes);
    }
}

Test(cpu_memory, parts_that_replace_each_other_leave_nothing_behind)
{
    srand(11);
    check_replacing(300 * 1024 + 64);
    check_replacing(3 * MIB / 2 + 64);
    check_replacing(9 * MIB / 2 + 64);
}

#if !defined(__SANITIZE_ADDRESS__) /* its malloc is another one, and holds back what was freed */
static size_t process_bytes(void)
{
    size_t size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    cr_assert_not_null(f);
    cr_assert_eq(fscanf(f, "%zu %zu", &size, &resident), 2);
    fclose(f);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

/* The same of experts too large for chunks, in a process whose malloc keeps what is freed, as the
 * daemons set it, beside blocks of others. */
Test(cpu_memory, large_parts_that_replace_each_other_leave_nothing_behind)
{
    enum { COUNT = 4, STEPS_OF_LARGE = 24, SMALL = 100 << 10 };
    const size_t bytes = 70 * MIB + 64;
    uint8_t *parts[COUNT];
    void *others[STEPS_OF_LARGE + COUNT];
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    const size_t before = process_bytes();
    for (size_t step = 0; step < COUNT + STEPS_OF_LARGE; step++) {
        const size_t p = step % COUNT;
        uint8_t *source = ep_large_alloc(bytes, EP_HOST_ALIGN); /* what is packed */
        mark(source, bytes, 1);
        if (step >= COUNT) {
            ep_cpu_memory_give(memory, parts[p], bytes);
        }
        parts[p] = ep_cpu_memory_take(memory, bytes, 0);
        mark(parts[p], bytes, 2);
        others[step] = malloc(SMALL);
        ep_large_free(source, bytes);
    }
    const size_t held = process_bytes() - before;
    cr_assert_leq(held, COUNT * bytes + 16 * MIB, "%zu bytes in memory for %d parts of %zu", held,
                  COUNT, bytes);
    for (size_t step = 0; step < COUNT + STEPS_OF_LARGE; step++) {
        free(others[step]);
    }
    for (size_t p = 0; p < COUNT; p++) {
        ep_cpu_memory_give(memory, parts[p], bytes);
    }
    cr_assert_leq(process_bytes() - before, 16 * MIB);
}
#endif

#if defined(__SANITIZE_ADDRESS__)
Test(cpu_memory, the_sanitizer_sees_what_is_used_after_it_was_given_back)
{
    uint8_t *part = ep_cpu_memory_take(memory, 3 * MIB, 0);
    uint8_t *other = ep_cpu_memory_take(memory, 3 * MIB, 0); /* keeps their chunk */
    cr_assert_eq(__asan_region_is_poisoned(part, 3 * MIB), NULL);
    ep_cpu_memory_give(memory, part, 3 * MIB);
    cr_assert_eq(__asan_region_is_poisoned(part, 3 * MIB), part);
    cr_assert_eq(__asan_region_is_poisoned(other, 3 * MIB), NULL);
    cr_assert_eq(__asan_region_is_poisoned(other, 3 * MIB + 64), other + 3 * MIB);
    ep_cpu_memory_give(memory, other, 3 * MIB);
}
#endif
