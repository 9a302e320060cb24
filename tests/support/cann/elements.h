/* SPDX-License-Identifier: Apache-2.0 */
/* Elements of tensors as f32; stored with one rounding to nearest even. */
#ifndef EP_TESTS_SUPPORT_CANN_ELEMENTS_H
#define EP_TESTS_SUPPORT_CANN_ELEMENTS_H

#include "base/numeric.h"
#include "support/cann/cann.h"

static inline bool cann_is_float(ep_acl_data_type type)
{
    return type == EP_ACL_FLOAT || type == EP_ACL_FLOAT16 || type == EP_ACL_BF16;
}

/* Device memory is aligned to nothing a host type may ask for beyond its element. */
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

#endif
