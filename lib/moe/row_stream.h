/* SPDX-License-Identifier: Apache-2.0 */
/* Copying rows to memory that is not read again soon: past the caches, so that a line is not first fetched to be overwritten. */
#ifndef EP_MOE_ROW_STREAM_H
#define EP_MOE_ROW_STREAM_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

/* From this size on outputs do not fit the nearer caches anyway. */
#define EP_ROW_STREAM_BYTES_MIN ((uint64_t)8 << 20)

static inline void ep_row_stream(void *restrict to, const void *restrict from, size_t bytes)
{
    if (((uintptr_t)to | bytes) % 64 != 0) {
        memcpy(to, from, bytes);
        return;
    }
    __m128i *out = to;
    const __m128i *in = from;
    for (size_t i = 0; i < bytes / sizeof(*out); i += 4) {
        __m128i a = _mm_loadu_si128(in + i);
        __m128i b = _mm_loadu_si128(in + i + 1);
        __m128i c = _mm_loadu_si128(in + i + 2);
        __m128i d = _mm_loadu_si128(in + i + 3);
        _mm_stream_si128(out + i, a);
        _mm_stream_si128(out + i + 1, b);
        _mm_stream_si128(out + i + 2, c);
        _mm_stream_si128(out + i + 3, d);
    }
}

/* After the last one: other threads then see the rows in order. */
static inline void ep_row_stream_end(void)
{
    _mm_sfence();
}
#else
#define EP_ROW_STREAM_BYTES_MIN UINT64_MAX

static inline void ep_row_stream(void *restrict to, const void *restrict from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static inline void ep_row_stream_end(void)
{
}
#endif

#endif
