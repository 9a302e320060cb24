/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/reply_layout.h"

#include "base/buffer.h"
#include "base/check.h"
#include "moe/quantize.h"

void ep_reply_layout_make(uint32_t slots, uint32_t hidden, ep_dtype reply_dtype,
                          ep_combine_quant quant, ep_reply_layout *out_layout)
{
    size_t element = ep_dtype_bytes(reply_dtype);
    ep_reply_layout layout = {.row_bytes = hidden * element};
    if (quant == EP_COMBINE_INT8) {
        layout.row_bytes = hidden;
        layout.scale_row_bytes = ep_quant_blocks(hidden, EP_QUANT_BLOCK_I8) * element;
        layout.scales_offset = ep_align_up(slots * layout.row_bytes, EP_BUFFER_ALIGN);
    }
    layout.total_bytes = layout.scale_row_bytes > 0
                             ? layout.scales_offset + slots * layout.scale_row_bytes
                             : slots * layout.row_bytes;
    *out_layout = layout;
}
