/* SPDX-License-Identifier: Apache-2.0 */
/* Row conversions. Loads and stores go through memcpy: rows from a frame have any alignment. */
#include "moe/convert.h"

#include <stdint.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"

#define CHUNK 256
#define COUNT_CHUNK ((size_t)8192) /* so that a 16-bit count cannot overflow */

bool ep_dtype_is_float(ep_dtype dtype)
{
    return dtype == EP_DTYPE_BF16 || dtype == EP_DTYPE_F16 || dtype == EP_DTYPE_F32;
}

static void widen_bf16(const uint8_t *restrict row, size_t n, float *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t b;
        memcpy(&b, row + 2 * i, sizeof(b));
        out[i] = ep_bf16_to_f32(b);
    }
}

static void widen_f16(const uint8_t *restrict row, size_t n, float *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, row + 2 * i, sizeof(h));
        out[i] = ep_f16_to_f32(h);
    }
}

void ep_row_widen(const void *row, ep_dtype dtype, size_t n, float *out)
{
    EP_ASSERT(ep_dtype_is_float(dtype));
    if (n == 0) {
        return;
    }
    switch (dtype) {
    case EP_DTYPE_BF16:
        widen_bf16(row, n, out);
        break;
    case EP_DTYPE_F16:
        widen_f16(row, n, out);
        break;
    default:
        memcpy(out, row, n * sizeof(float));
        break;
    }
}

static void narrow_bf16(const float *restrict row, size_t n, uint8_t *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t b = ep_f32_to_bf16(row[i]);
        memcpy(out + 2 * i, &b, sizeof(b));
    }
}

static void narrow_f16(const float *restrict row, size_t n, uint8_t *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t h = ep_f32_to_f16(row[i]);
        memcpy(out + 2 * i, &h, sizeof(h));
    }
}

void ep_row_narrow(const float *row, size_t n, ep_dtype dtype, void *out)
{
    EP_ASSERT(ep_dtype_is_float(dtype));
    if (n == 0) {
        return;
    }
    switch (dtype) {
    case EP_DTYPE_BF16:
        narrow_bf16(row, n, out);
        break;
    case EP_DTYPE_F16:
        narrow_f16(row, n, out);
        break;
    default:
        memcpy(out, row, n * sizeof(float));
        break;
    }
}

static void add_weighted_bf16(const uint8_t *restrict row, float weight, size_t n,
                              float *restrict acc)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t b;
        memcpy(&b, row + 2 * i, sizeof(b));
        acc[i] = acc[i] + weight * ep_bf16_to_f32(b);
    }
}

void ep_floats_add(const float *restrict row, size_t n, float *restrict acc)
{
    for (size_t i = 0; i < n; i++) {
        acc[i] = acc[i] + row[i];
    }
}

void ep_floats_add_weighted(const float *restrict row, float weight, size_t n, float *restrict acc)
{
    for (size_t i = 0; i < n; i++) {
        acc[i] = acc[i] + weight * row[i];
    }
}

void ep_row_add_weighted(const void *row, ep_dtype dtype, float weight, size_t n, float *wide,
                         float *acc)
{
    if (dtype == EP_DTYPE_BF16) {
        add_weighted_bf16(row, weight, n, acc);
        return;
    }
    ep_row_widen(row, dtype, n, wide);
    ep_floats_add_weighted(wide, weight, n, acc);
}

void ep_row_convert(const void *row, ep_dtype dtype, size_t n, ep_dtype out_dtype, void *out)
{
    size_t in_bytes = ep_dtype_bytes(dtype);
    size_t out_bytes = ep_dtype_bytes(out_dtype);
    if (n == 0) {
        return;
    }
    if (dtype == out_dtype) {
        memcpy(out, row, n * in_bytes);
        return;
    }
    float wide[CHUNK];
    for (size_t done = 0; done < n; done += CHUNK) {
        size_t count = n - done < CHUNK ? n - done : CHUNK;
        ep_row_widen((const uint8_t *)row + done * in_bytes, dtype, count, wide);
        ep_row_narrow(wide, count, out_dtype, (uint8_t *)out + done * out_bytes);
    }
}

typedef uint16_t __attribute__((may_alias, aligned(1))) any_u16;
typedef uint32_t __attribute__((may_alias, aligned(1))) any_u32;

/* A counter as wide as elements lets the compiler count a whole register of them at once. */
static uint32_t count_16(const any_u16 *bits, size_t count, uint16_t exponent)
{
    uint16_t found = 0;
    for (size_t i = 0; i < count; i++) {
        found = (uint16_t)(found + ((bits[i] & exponent) == exponent));
    }
    return found;
}

static uint32_t count_32(const any_u32 *bits, size_t count)
{
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++) {
        found += (bits[i] & 0x7f800000u) == 0x7f800000u;
    }
    return found;
}

size_t ep_row_count_nonfinite(const void *row, ep_dtype dtype, size_t n)
{
    size_t found = 0;
    for (size_t done = 0; done < n; done += COUNT_CHUNK) {
        size_t part = n - done < COUNT_CHUNK ? n - done : COUNT_CHUNK;
        if (dtype == EP_DTYPE_F32) {
            found += count_32((const any_u32 *)row + done, part);
        } else {
            found += count_16((const any_u16 *)row + done, part,
                              dtype == EP_DTYPE_BF16 ? 0x7f80u : 0x7c00u);
        }
    }
    return found;
}
