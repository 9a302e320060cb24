/* SPDX-License-Identifier: Apache-2.0 */
/* Reads elements of tensors as f32, and stores them with one rounding to nearest even. */
#ifndef EP_TESTS_SUPPORT_CANN_ELEMENTS_H
#define EP_TESTS_SUPPORT_CANN_ELEMENTS_H

#include <math.h>

#include "base/numeric.h"
#include "support/cann/cann.h"

static inline bool cann_is_float(ep_acl_data_type type)
{
    return type == EP_ACL_FLOAT || type == EP_ACL_FLOAT16 || type == EP_ACL_BF16;
}

/* Device memory is aligned only to its elements, not to larger host types. */
static inline float cann_element(ep_acl_data_type type, const void *from, size_t i)
{
    if (type == EP_ACL_FLOAT) {
        return ((const float *)from)[i];
    }
    const uint16_t half = ((const uint16_t *)from)[i];
    return type == EP_ACL_BF16 ? ep_bf16_to_f32(half) : ep_f16_to_f32(half);
}

static inline void cann_element_set(ep_acl_data_type type, void *to, size_t i, float value)
{
    if (type == EP_ACL_FLOAT) {
        ((float *)to)[i] = value;
    } else {
        ((uint16_t *)to)[i] = type == EP_ACL_BF16 ? ep_f32_to_bf16(value) : ep_f32_to_f16(value);
    }
}

/* Rounds a row to int8 and returns its scale max / 127. A row of zeros divides 0 by 0: the
 * strictest reading of the documents. */
static inline float cann_quantise(const float *row, int64_t columns, int8_t *to)
{
    float greatest = 0.0f;
    for (int64_t c = 0; c < columns; c++) {
        greatest = fmaxf(greatest, fabsf(row[c]));
    }
    const float scale = greatest == 0.0f ? NAN : greatest / 127.0f;
    for (int64_t c = 0; c < columns; c++) {
        const float q = rintf(row[c] / scale);
        to[c] = isnan(q) ? -128 : (int8_t)fminf(fmaxf(q, -127.0f), 127.0f);
    }
    return scale;
}

#endif
