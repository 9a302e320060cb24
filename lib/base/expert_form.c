/* SPDX-License-Identifier: Apache-2.0 */
#include "base/expert_form.h"

#include "base/check.h"

const char *ep_weight_format_name(ep_weight_format format)
{
    static const char *const names[] = {
#define FORMAT_NAME(name, number, text, codes, group, scales, offsets) [number] = (text),
        EP_WEIGHTS_MAP(FORMAT_NAME)};
#undef FORMAT_NAME
    return (size_t)format < EP_ARRAY_COUNT(names) ? names[format] : "unknown";
}

const char *ep_activation_name(ep_activation activation)
{
    static const char *const names[] = {
#define NAME(name, number, text) [number] = (text),
        EP_ACTIVATION_MAP(NAME)};
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
    switch (ep_weight_format_codes(format)) {
    case EP_CODES_E2M1:
        return parts_of(columns, 2);
    case EP_CODES_INT4:
    case EP_CODES_UINT4:
        return 4 * parts_of(columns, 8);
    case EP_CODES_E4M3:
    case EP_CODES_INT8:
        return columns;
    default:
        return format == EP_WEIGHTS_W8A8 ? columns
                                         : ep_dtype_bytes(ep_weight_format_dtype(format)) * columns;
    }
}

ep_scale_arrays ep_weight_scale_arrays(ep_weight_format format, uint32_t rows, uint32_t columns)
{
    ep_scale_arrays arrays = {0};
    const ep_weight_scales scales = ep_weight_format_scales(format);
    const ep_weight_offsets offsets = ep_weight_format_offsets(format);
    if (format == EP_WEIGHTS_F8_CHANNEL || format == EP_WEIGHTS_W8A8) {
        arrays.scales = rows * sizeof(float);
    } else if (scales != EP_SCALES_NONE) {
        const size_t groups = parts_of(columns, ep_weight_group_columns(format));
        const size_t all = rows * groups;
        const size_t factors = rows * parts_of(columns, EP_SCALE_BLOCK) * sizeof(float);
        arrays.scales = format == EP_WEIGHTS_F8_BLOCK
                            ? parts_of(rows, EP_F8_BLOCK) * groups * sizeof(float)
                            : all * ep_weight_scale_bytes(scales);
        arrays.offsets = offsets == EP_OFFSETS_NONE ? 0 : all;
        arrays.scale_factors = ep_weight_scales_have_levels(scales) ? factors : 0;
        arrays.offset_factors = offsets == EP_OFFSETS_MINIMUM ? factors : 0;
    }
    return arrays;
}

size_t ep_weight_scales_bytes(ep_weight_format format, uint32_t rows, uint32_t columns)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, rows, columns);
    return arrays.scales + arrays.offsets + arrays.scale_factors + arrays.offset_factors;
}
