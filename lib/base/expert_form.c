/* SPDX-License-Identifier: Apache-2.0 */
#include "base/expert_form.h"

#include "base/check.h"

const char *ep_weight_format_name(ep_weight_format format)
{
    static const char *const names[] = {
#define NAME(name, number, text) [number] = (text),
        EP_WEIGHTS_MAP(NAME)};
    return (size_t)format < EP_ARRAY_COUNT(names) ? names[format] : "unknown";
}

const char *ep_activation_name(ep_activation activation)
{
    static const char *const names[] = {EP_ACTIVATION_MAP(NAME)};
#undef NAME
    return (size_t)activation < EP_ARRAY_COUNT(names) ? names[activation] : "unknown";
}

ep_weight_format ep_weight_format_of(ep_dtype dtype)
{
    return dtype == EP_DTYPE_BF16  ? EP_WEIGHTS_BF16
           : dtype == EP_DTYPE_F16 ? EP_WEIGHTS_F16
           : dtype == EP_DTYPE_F32 ? EP_WEIGHTS_F32
                                   : EP_WEIGHTS_NONE;
}

static size_t parts_of(uint32_t count, uint32_t part)
{
    return ((size_t)count + part - 1) / part;
}

size_t ep_weight_row_bytes(ep_weight_format format, uint32_t columns)
{
    switch (format) {
    case EP_WEIGHTS_BF16:
    case EP_WEIGHTS_F16:
        return 2 * (size_t)columns;
    case EP_WEIGHTS_F32:
        return 4 * (size_t)columns;
    case EP_WEIGHTS_MXFP4:
        return parts_of(columns, 2);
    case EP_WEIGHTS_INT4:
        return 4 * parts_of(columns, 8);
    case EP_WEIGHTS_F8_BLOCK:
    case EP_WEIGHTS_F8_CHANNEL:
    case EP_WEIGHTS_MXFP8:
    case EP_WEIGHTS_W8A8:
        return columns;
    default:
        return 0;
    }
}

size_t ep_weight_scales_bytes(ep_weight_format format, uint32_t rows, uint32_t columns)
{
    switch (format) {
    case EP_WEIGHTS_F8_BLOCK:
        return parts_of(rows, EP_F8_BLOCK) * parts_of(columns, EP_F8_BLOCK) * sizeof(float);
    case EP_WEIGHTS_F8_CHANNEL:
    case EP_WEIGHTS_W8A8:
        return rows * sizeof(float);
    case EP_WEIGHTS_MXFP4:
    case EP_WEIGHTS_MXFP8:
        return rows * parts_of(columns, EP_MX_GROUP);
    case EP_WEIGHTS_INT4:
        return 2 * rows * parts_of(columns, EP_MX_GROUP);
    default:
        return 0;
    }
}
