/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of one expert from row-major matrices into panels; the layout is stated in ffn_kernel.h and
 * ffn_pass.h. */
#include <string.h>

#include "base/check.h"
#include "kernels/ffn_element.h"
#include "kernels/ffn_pass.h"

typedef struct {
    size_t gate_up_bytes;
    size_t down_bytes;
    size_t shared_gate_bytes;
} packed_sizes;

static uint32_t panels_of(uint32_t outputs, uint32_t width)
{
    return (outputs + width - 1) / width;
}

static packed_sizes sizes_of(const ep_ffn_source *source)
{
    const size_t line_bytes = EP_FFN_PANEL * ep_dtype_bytes(source->dtype);
    packed_sizes sizes;
    sizes.gate_up_bytes = panels_of(source->inner, EP_FFN_HALF_PANEL) * line_bytes * source->hidden;
    sizes.down_bytes = panels_of(source->hidden, EP_FFN_PANEL) * line_bytes * source->inner;
    sizes.shared_gate_bytes = source->shared_gate == NULL ? 0 : (size_t)source->hidden * sizeof(float);
    return sizes;
}

size_t ep_ffn_packed_bytes(const ep_ffn_source *source)
{
    packed_sizes sizes = sizes_of(source);
    return ep_align_up(sizes.gate_up_bytes + sizes.down_bytes + sizes.shared_gate_bytes, EP_FFN_ALIGN);
}

/* The matrix rows that become one panel's outputs; missing ones are NULL and packed as zeros. */
typedef struct {
    const uint8_t *rows[EP_FFN_PANEL]; /* by slot */
} panel_rows;

/* Outputs first_output..first_output + width - 1 of the panel are matrix rows first_row.. as far as there are
 * any. */
static void set_rows(panel_rows *panel, const ep_ffn_source *source, const void *matrix, uint32_t k_count,
                     uint32_t rows_count, uint32_t first_row, uint32_t first_output, uint32_t width)
{
    const size_t row_bytes = k_count * ep_dtype_bytes(source->dtype);
    for (uint32_t j = 0; j < width; j++) {
        uint32_t row = first_row + j;
        panel->rows[ep_ffn_panel_slot(source->dtype, first_output + j)] =
            row < rows_count ? (const uint8_t *)matrix + row * row_bytes : NULL;
    }
}

/* Lines are written one after the other; the 64 rows read beside each other stay in the nearest cache. */
static void write_panel(const panel_rows *panel, size_t element, uint32_t k_count, uint8_t *to)
{
    for (size_t k = 0; k < k_count; k++) {
        for (uint32_t slot = 0; slot < EP_FFN_PANEL; slot++, to += element) {
            const uint8_t *row = panel->rows[slot];
            if (row == NULL) {
                memset(to, 0, element);
            } else if (element == 2) {
                memcpy(to, row + 2 * k, 2);
            } else {
                memcpy(to, row + 4 * k, 4);
            }
        }
    }
}

void ep_ffn_packed_place(const ep_ffn_source *source, void *memory, ep_ffn_packed *out_packed)
{
    const packed_sizes sizes = sizes_of(source);
    const uint8_t *gate_up = memory;
    const uint8_t *down = gate_up + sizes.gate_up_bytes;
    *out_packed = (ep_ffn_packed){
        .hidden = source->hidden,
        .inner = source->inner,
        .dtype = source->dtype,
        .gate_up_panels = panels_of(source->inner, EP_FFN_HALF_PANEL),
        .down_panels = panels_of(source->hidden, EP_FFN_PANEL),
        .gate_up = gate_up,
        .down = down,
        .shared_gate = source->shared_gate == NULL ? NULL : (const float *)(const void *)(down + sizes.down_bytes),
    };
}

void ep_ffn_pack(const ep_ffn_source *source, void *memory, ep_ffn_packed *out_packed)
{
    const packed_sizes sizes = sizes_of(source);
    const uint32_t hidden = source->hidden;
    const uint32_t inner = source->inner;
    const size_t element = ep_dtype_bytes(source->dtype);
    const size_t line_bytes = EP_FFN_PANEL * element;
    uint8_t *gate_up = memory;
    uint8_t *down = gate_up + sizes.gate_up_bytes;
    float *shared_gate = (float *)(void *)(down + sizes.down_bytes);

    for (uint32_t row = 0; row < inner; row += EP_FFN_HALF_PANEL) {
        panel_rows panel;
        set_rows(&panel, source, source->gate, hidden, inner, row, 0, EP_FFN_HALF_PANEL);
        set_rows(&panel, source, source->up, hidden, inner, row, EP_FFN_HALF_PANEL, EP_FFN_HALF_PANEL);
        write_panel(&panel, element, hidden, gate_up + row / EP_FFN_HALF_PANEL * line_bytes * hidden);
    }
    for (uint32_t row = 0; row < hidden; row += EP_FFN_PANEL) {
        panel_rows panel;
        set_rows(&panel, source, source->down, inner, hidden, row, 0, EP_FFN_PANEL);
        write_panel(&panel, element, inner, down + row / EP_FFN_PANEL * line_bytes * inner);
    }
    if (source->shared_gate != NULL) {
        for (uint32_t i = 0; i < hidden; i++) {
            shared_gate[i] = ep_ffn_read_float(source->shared_gate, source->shared_gate_dtype, i);
        }
    }
    ep_ffn_packed_place(source, memory, out_packed);
}
