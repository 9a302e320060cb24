/* SPDX-License-Identifier: Apache-2.0 */
/* Streaming stores, a whole cache line at a time where the CPU can: a line in four pieces stays
 * incomplete for longer. */
#include "moe/row_stream.h"

#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>

#include "base/cpu_features.h"

#define LINE 64

typedef void (*copy_func)(uint8_t *restrict to, const uint8_t *restrict from, size_t bytes,
                          const char *next);

static void copy_sse2(uint8_t *restrict to, const uint8_t *restrict from, size_t bytes,
                      const char *next)
{
    for (size_t i = 0; i < bytes; i += LINE) {
        const __m128i *in = (const __m128i *)(const void *)(from + i);
        __m128i *out = (__m128i *)(void *)(to + i);
        _mm_prefetch(next + i, _MM_HINT_T0);
        __m128i a = _mm_loadu_si128(in);
        __m128i b = _mm_loadu_si128(in + 1);
        __m128i c = _mm_loadu_si128(in + 2);
        __m128i d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
}

__attribute__((target("avx512f"))) static void
copy_avx512(uint8_t *restrict to, const uint8_t *restrict from, size_t bytes, const char *next)
{
    for (size_t i = 0; i < bytes; i += LINE) {
        _mm_prefetch(next + i, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)(void *)(to + i), _mm512_loadu_si512(from + i));
    }
}

static copy_func choose(void)
{
    static copy_func chosen; /* several threads may set it; all set the same value */
    copy_func copy = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (copy == NULL) {
        copy = ep_cpu_features_read().avx512f ? copy_avx512 : copy_sse2;
        __atomic_store_n(&chosen, copy, __ATOMIC_RELAXED);
    }
    return copy;
}

void ep_row_stream(void *restrict to, const void *restrict from, size_t bytes, const void *next)
{
    if (((uintptr_t)to | bytes) % LINE != 0) {
        memcpy(to, from, bytes);
        return;
    }
    choose()(to, from, bytes, next != NULL ? next : from);
}

void ep_row_stream_end(void)
{
    _mm_sfence();
}
#else
void ep_row_stream(void *restrict to, const void *restrict from, size_t bytes, const void *next)
{
    (void)next;
    memcpy(to, from, bytes);
}

void ep_row_stream_end(void)
{
}
#endif
