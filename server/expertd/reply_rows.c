/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/reply_rows.h"

#include <string.h>

#include "base/check.h"
#include "moe/node_sum.h"
#include "moe/quantize.h"
#include "wire/reply_layout.h"

/* Parts of the buffer beside the reply. Counts come from a checked frame: 64-bit sums cannot
 * overflow. */
typedef struct beside_layout {
    size_t begins_offset;  /* [rows + 1] u32 */
    size_t order_offset;   /* [slots] u32 */
    size_t scratch_offset; /* [2 * H] f32 */
    size_t sums_offset;    /* [rows,H] of the wire type, to be quantised */
    size_t total_bytes;
} beside_layout;

static size_t row_bytes_of(const ep_forward_view *view)
{
    return view->hidden * ep_dtype_bytes(view->reply_dtype);
}

static bool is_quantised(const ep_forward_view *view)
{
    return view->reply_quant != EP_COMBINE_PLAIN;
}

static beside_layout layout_of(const ep_forward_view *view)
{
    beside_layout layout = {.total_bytes = view->slots * row_bytes_of(view)};
    if (view->node_sum) {
        layout.begins_offset = ep_align_up(layout.total_bytes, EP_BUFFER_ALIGN);
        layout.order_offset = layout.begins_offset + ((size_t)view->rows + 1) * sizeof(uint32_t);
        layout.scratch_offset =
            ep_align_up(layout.order_offset + view->slots * sizeof(uint32_t), EP_BUFFER_ALIGN);
        layout.sums_offset = ep_align_up(
            layout.scratch_offset + 2 * (size_t)view->hidden * sizeof(float), EP_BUFFER_ALIGN);
        layout.total_bytes =
            layout.sums_offset + (is_quantised(view) ? view->rows * row_bytes_of(view) : 0);
    }
    return layout;
}

static ep_reply_layout reply_layout_of(const ep_forward_view *view)
{
    ep_reply_layout layout;
    ep_reply_layout_make(view->node_sum ? view->rows : view->slots, view->hidden, view->reply_dtype,
                         view->reply_quant, &layout);
    return layout;
}

size_t ep_reply_rows_reply_bytes(const ep_forward_view *view)
{
    return reply_layout_of(view).total_bytes;
}

size_t ep_reply_rows_beside_bytes(const ep_forward_view *view)
{
    return view->node_sum || is_quantised(view) ? layout_of(view).total_bytes : 0;
}

ep_err ep_reply_rows_acquire(const ep_forward_view *view, ep_buffer_pool *pool,
                             ep_reply_rows *out_rows)
{
    ep_reply_rows rows = {0};
    size_t beside_bytes = ep_reply_rows_beside_bytes(view);
    ep_reply_layout layout = reply_layout_of(view);
    ep_err err = ep_buffer_acquire(pool, layout.total_bytes, &rows.reply);
    if (err == EP_OK && beside_bytes > 0) {
        err = ep_buffer_acquire(pool, beside_bytes, &rows.beside);
    }
    if (err != EP_OK) {
        ep_reply_rows_release(&rows);
        return err;
    }
    rows.rows = beside_bytes > 0 ? rows.beside->data : rows.reply->data;
    if (is_quantised(view)) { /* between codes and scales */
        size_t end = (view->node_sum ? view->rows : view->slots) * layout.row_bytes;
        memset(rows.reply->data + end, 0, layout.scales_offset - end);
    }
    *out_rows = rows;
    return EP_OK;
}

/* row: of the wire type; at: its number in the reply. */
static void quantise(const ep_reply_rows *rows, const ep_forward_view *view,
                     const ep_reply_layout *layout, const void *row, size_t at)
{
    uint8_t *reply = rows->reply->data;
    ep_row_quantize_i8_blocks(row, view->reply_dtype, view->hidden,
                              (int8_t *)reply + at * layout->row_bytes,
                              reply + layout->scales_offset + at * layout->scale_row_bytes);
}

void ep_reply_rows_done(const ep_reply_rows *rows, const ep_forward_view *view,
                        const ep_job_row *done, uint32_t done_count)
{
    if (!is_quantised(view) || view->node_sum) {
        return;
    }
    ep_reply_layout layout = reply_layout_of(view);
    for (uint32_t r = 0; r < done_count; r++) {
        size_t slot = (size_t)((const uint8_t *)done[r].out - rows->rows) / row_bytes_of(view);
        quantise(rows, view, &layout, done[r].out, slot);
    }
}

static void sum_rows(const ep_reply_rows *rows, const ep_forward_view *view, void *out)
{
    const beside_layout layout = layout_of(view);
    uint8_t *base = rows->beside->data;
    const ep_node_sum_slots slots = {
        .rows_count = view->rows,
        .slots_count = view->slots,
        .slot_rows = &view->wire_slots->row,
        .slot_stride = sizeof(ep_wire_slot) / sizeof(uint32_t),
        .places = view->slot_places,
        .scales = view->slot_scales,
    };
    uint32_t *begins = (uint32_t *)(void *)(base + layout.begins_offset);
    uint32_t *order = (uint32_t *)(void *)(base + layout.order_offset);
    ep_node_sum_order(&slots, begins, order);
    ep_node_sum(&slots, begins, order, rows->rows, view->reply_dtype, view->hidden,
                (float *)(void *)(base + layout.scratch_offset), out);
}

void ep_reply_rows_finish(ep_reply_rows *rows, const ep_forward_view *view)
{
    if (!view->node_sum) {
        return;
    }
    if (!is_quantised(view)) {
        sum_rows(rows, view, rows->reply->data);
        return;
    }
    uint8_t *sums = rows->beside->data + layout_of(view).sums_offset;
    ep_reply_layout layout = reply_layout_of(view);
    sum_rows(rows, view, sums);
    for (uint32_t r = 0; r < view->rows; r++) {
        quantise(rows, view, &layout, sums + r * row_bytes_of(view), r);
    }
}

void ep_reply_rows_release(ep_reply_rows *rows)
{
    ep_buffer_unref(rows->reply);
    ep_buffer_unref(rows->beside);
    *rows = (ep_reply_rows){0};
}
