/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/reply_rows.h"

#include "base/check.h"
#include "moe/node_sum.h"

/* Parts of the buffer beside the reply. Counts come from a checked frame: 64-bit sums cannot overflow. */
typedef struct beside_layout {
    size_t begins_offset;  /* [rows + 1] u32 */
    size_t order_offset;   /* [slots] u32 */
    size_t scratch_offset; /* [2 * H] f32 */
    size_t total_bytes;
} beside_layout;

static size_t row_bytes_of(const ep_forward_view *view)
{
    return view->hidden * ep_dtype_bytes(view->reply_dtype);
}

static beside_layout layout_of(const ep_forward_view *view)
{
    beside_layout layout;
    layout.begins_offset = ep_align_up(view->slots * row_bytes_of(view), EP_BUFFER_ALIGN);
    layout.order_offset = layout.begins_offset + ((size_t)view->rows + 1) * sizeof(uint32_t);
    layout.scratch_offset =
        ep_align_up(layout.order_offset + view->slots * sizeof(uint32_t), EP_BUFFER_ALIGN);
    layout.total_bytes = layout.scratch_offset + 2 * (size_t)view->hidden * sizeof(float);
    return layout;
}

size_t ep_reply_rows_reply_bytes(const ep_forward_view *view)
{
    return (view->node_sum ? view->rows : view->slots) * row_bytes_of(view);
}

size_t ep_reply_rows_beside_bytes(const ep_forward_view *view)
{
    return view->node_sum ? layout_of(view).total_bytes : 0;
}

ep_err ep_reply_rows_acquire(const ep_forward_view *view, ep_buffer_pool *pool, ep_reply_rows *out_rows)
{
    ep_reply_rows rows = {0};
    ep_err err = ep_buffer_acquire(pool, ep_reply_rows_reply_bytes(view), &rows.reply);
    if (err == EP_OK && view->node_sum) {
        err = ep_buffer_acquire(pool, ep_reply_rows_beside_bytes(view), &rows.beside);
    }
    if (err != EP_OK) {
        ep_reply_rows_release(&rows);
        return err;
    }
    rows.rows = view->node_sum ? rows.beside->data : rows.reply->data;
    *out_rows = rows;
    return EP_OK;
}

void ep_reply_rows_finish(ep_reply_rows *rows, const ep_forward_view *view)
{
    if (!view->node_sum) {
        return;
    }
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
                (float *)(void *)(base + layout.scratch_offset), rows->reply->data);
}

void ep_reply_rows_release(ep_reply_rows *rows)
{
    ep_buffer_unref(rows->reply);
    ep_buffer_unref(rows->beside);
    *rows = (ep_reply_rows){0};
}
