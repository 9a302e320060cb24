/* SPDX-License-Identifier: Apache-2.0 */
#include "support/alloc_count.h"

#if EP_TEST_ALLOC_COUNTED

#include <execinfo.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

static bool counting;
static __thread uint32_t paused;
static uint64_t allocations;

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t align, size_t bytes);

/* Shows the stacks of the first allocations, to find the code that makes them. */
static void count(void)
{
    if (!__atomic_load_n(&counting, __ATOMIC_RELAXED) || paused > 0 ||
        __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED) >= 3) {
        return;
    }
    void *frames[16];
    backtrace_symbols_fd(frames, backtrace(frames, 16), STDERR_FILENO);
    if (write(STDERR_FILENO, "\n", 1) != 1) {
        abort();
    }
}

void *malloc(size_t bytes)
{
    count();
    return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    count();
    return __libc_calloc(n, bytes);
}

void *realloc(void *old, size_t bytes)
{
    count();
    return __libc_realloc(old, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    count();
    return __libc_memalign(align, bytes);
}

int posix_memalign(void **out, size_t align, size_t bytes)
{
    count();
    *out = __libc_memalign(align, bytes);
    return *out == NULL;
}

void ep_test_alloc_count_begin(void)
{
    void *frame;
    backtrace(&frame, 1); /* loads its library before counting */
    allocations = 0;
    __atomic_store_n(&counting, true, __ATOMIC_SEQ_CST);
}

void ep_test_alloc_count_pause(void)
{
    paused++;
}

void ep_test_alloc_count_resume(void)
{
    paused--;
}

uint64_t ep_test_alloc_count_end(void)
{
    __atomic_store_n(&counting, false, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
}
#else
/* Nothing is counted under a sanitizer, so there is nothing to pause. */
void ep_test_alloc_count_pause(void)
{
}

void ep_test_alloc_count_resume(void)
{
}
#endif
