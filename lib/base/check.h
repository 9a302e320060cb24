/* SPDX-License-Identifier: Apache-2.0 */
/*
 * EP_ASSERT states what our own code guarantees. It stays on in release builds, except in kernels.
 * It never judges bytes from a peer, a file or a device: those get an error.
 */
#ifndef EP_BASE_CHECK_H
#define EP_BASE_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

_Noreturn void ep_assert_failed(const char *condition, const char *file, int line);

#define EP_ASSERT(condition)                                                                       \
    do {                                                                                           \
        if (__builtin_expect(!(condition), 0)) {                                                   \
            ep_assert_failed(#condition, __FILE__, __LINE__);                                      \
        }                                                                                          \
    } while (0)

#define EP_ARRAY_COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* out = a * b; false when it does not fit. */
static inline bool ep_mul_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool ep_add_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

/* Rounds up to a multiple of align (a power of two). The caller must know that the result fits. */
static inline size_t ep_align_up(size_t n, size_t align)
{
    return (n + align - 1) & ~(align - 1);
}

#endif
