/* SPDX-License-Identifier: Apache-2.0 */
#include "alloc_fail.h"

#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* An attempt that never gets through without a failure: allocations without end. */
#define SWEEP_MAX 200000

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
char *__real_strdup(const char *text);
char *__real_strndup(const char *text, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
int __real_posix_memalign(void **out_memory, size_t align, size_t bytes);

void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
char *__wrap_strdup(const char *text);
char *__wrap_strndup(const char *text, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
int __wrap_posix_memalign(void **out_memory, size_t align, size_t bytes);

static _Atomic uint64_t count;
static _Atomic uint64_t fails_at = UINT64_MAX;
static _Atomic bool failed;

static bool fails(void)
{
    uint64_t number = atomic_fetch_add(&count, 1) + 1;
    if (number != atomic_load(&fails_at)) {
        return false;
    }
    atomic_store(&failed, true);
    errno = ENOMEM;
    return true;
}

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t items, size_t bytes)
{
    return fails() ? NULL : __real_calloc(items, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    return fails() ? NULL : __real_realloc(memory, bytes);
}

char *__wrap_strdup(const char *text)
{
    return fails() ? NULL : __real_strdup(text);
}

char *__wrap_strndup(const char *text, size_t bytes)
{
    return fails() ? NULL : __real_strndup(text, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    return fails() ? NULL : __real_aligned_alloc(align, bytes);
}

int __wrap_posix_memalign(void **out_memory, size_t align, size_t bytes)
{
    return fails() ? ENOMEM : __real_posix_memalign(out_memory, align, bytes);
}

void alloc_fail_arm(uint64_t n)
{
    atomic_store(&failed, false);
    atomic_store(&fails_at, atomic_load(&count) + n);
}

bool alloc_fail_disarm(void)
{
    atomic_store(&fails_at, UINT64_MAX);
    return atomic_load(&failed);
}

uint64_t alloc_fail_count(void)
{
    return atomic_load(&count);
}

uint64_t alloc_fail_sweep(const char *name, void (*attempt)(void *arg), void (*recover)(void *arg),
                          void *arg)
{
    static bool is_set;
    /* once: the product may have told jansson of functions of its own since, which end here too */
    if (!is_set) {
        json_set_alloc_funcs(__wrap_malloc, free);
        is_set = true;
    }
    recover(arg);
    for (uint64_t n = 1; n < SWEEP_MAX; n++) {
        alloc_fail_arm(n);
        attempt(arg);
        bool was_hit = alloc_fail_disarm();
        recover(arg);
        if (!was_hit) {
            printf("%s: each of %llu allocations failed once\n", name, (unsigned long long)(n - 1));
            return n - 1;
        }
    }
    torture_broken("%s: still failing after %d allocations", name, SWEEP_MAX);
}

void torture_broken(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}
