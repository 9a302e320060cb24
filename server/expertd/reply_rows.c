/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/reply_rows.h"

#include <string.h>

#include "base/check.h"
#include "moe/node_sum.h"
#include "moe/quantize.h"

void ep_reply_rows_plan(const ep_forward_view *view, ep_reply_rows *out_rows)
{
    const size_t row_bytes = view->hidden * ep_dtype_bytes(view->reply_dtype);
    ep_reply_rows rows = {.view = view,
                          .row_bytes = row_bytes,
                          .is_quantised = view->reply_quant != EP_COMBINE_PLAIN,
                          .count = view->node_sum ? view->rows : view->slots};
    ep_reply_layout_make(rows.count, view->hidden, view->reply_dtype, view->reply_quant,
                         &rows.layout);
    if (view->node_sum) {
        rows.begins_offset = ep_align_up(view->slots * row_bytes, EP_BUFFER_ALIGN);
        rows.order_offset = rows.begins_offset + ((size_t)view->rows + 1) * sizeof(uint32_t);
        rows.scratch_offset =
            ep_align_up(rows.order_offset + view->slots * sizeof(uint32_t), EP_BUFFER_ALIGN);
        rows.sums_offset = ep_align_up(
            rows.scratch_offset + 2 * (size_t)view->hidden * sizeof(float), EP_BUFFER_ALIGN);
        rows.beside_bytes = rows.sums_offset + (rows.is_quantised ? view->rows * row_bytes : 0);
    } else if (rows.is_quantised) {
        rows.beside_bytes = view->slots * row_bytes;
    }
    *out_rows = rows;
}

ep_err ep_reply_rows_acquire(ep_reply_rows *rows, ep_buffer_pool *pool)
{
    ep_err err = ep_buffer_acquire(pool, rows->layout.total_bytes, &rows->reply);
    if (err == EP_OK && rows->beside_bytes > 0) {
        err = ep_buffer_acquire(pool, rows->beside_bytes, &rows->beside);
    }
    if (err != EP_OK) {
        ep_reply_rows_release(rows);
        return err;
    }
    rows->rows = rows->beside_bytes > 0 ? rows->beside->data : rows->reply->data;
    if (rows->is_quantised) { /* zeroes the gap between codes and scales */
        size_t end = rows->count * rows->layout.row_bytes;
        memset(rows->reply->data + end, 0, rows->layout.scales_offset - end);
    }
    return EP_OK;
}

/* row: of the wire type; at: its number in the reply. */
static void quantise(const ep_reply_rows *rows, const void *row, size_t at)
{
    const ep_reply_layout *layout = &rows->layout;
    uint8_t *reply = rows->reply->data;
    ep_row_quantize_i8_blocks(row, rows->view->reply_dtype, rows->view->hidden,
                              (int8_t *)reply + at * layout->row_bytes,
                              reply + layout->scales_offset + at * layout->scale_row_bytes);
}

void ep_reply_rows_done(const ep_reply_rows *rows, const ep_job_row *done, uint32_t done_count)
{
    if (!rows->is_quantised || rows->view->node_sum) {
        return;
    }
    for (uint32_t r = 0; r < done_count; r++) {
        quantise(rows, done[r].out,
                 (size_t)((const uint8_t *)done[r].out - rows->rows) / rows->row_bytes);
    }
}

void ep_reply_rows_finish(const ep_reply_rows *rows)
{
    const ep_forward_view *view = rows->view;
    const ep_node_sum_slots slots = {
        .rows_count = view->rows,
        .slots_count = view->slots,
        .slot_rows = &view->wire_slots->row,
        .slot_stride = sizeof(ep_wire_slot) / sizeof(uint32_t),
        .places = view->slot_places,
        .scales = view->slot_scales,
    };
    uint8_t *base = rows->beside->data;
    uint8_t *sums = rows->is_quantised ? base + rows->sums_offset : rows->reply->data;
    uint32_t *begins = (uint32_t *)(void *)(base + rows->begins_offset);
    uint32_t *order = (uint32_t *)(void *)(base + rows->order_offset);
    ep_node_sum_order(&slots, begins, order);
    ep_node_sum(&slots, begins, order, rows->rows, view->reply_dtype, view->hidden,
                (float *)(void *)(base + rows->scratch_offset), sums);
    for (uint32_t r = 0; rows->is_quantised && r < view->rows; r++) {
        quantise(rows, sums + r * rows->row_bytes, r);
    }
}

void ep_reply_rows_release(ep_reply_rows *rows)
{
    ep_buffer_unref(rows->reply);
    ep_buffer_unref(rows->beside);
    rows->reply = NULL;
    rows->beside = NULL;
}
