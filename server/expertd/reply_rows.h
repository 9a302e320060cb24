/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory for a request's rows and the way from there into the reply. Rows are written straight into
 * the reply or into a second buffer. From there they are summed at the end (node_sum), quantised as
 * they are finished (reply_quant), or both: then the sums are quantised.
 *
 * Threads  plan, acquire, finish and release one after the other, in this order. In between any
 * thread may write rows and call done, once per row.
 */
#ifndef EP_EXPERTD_REPLY_ROWS_H
#define EP_EXPERTD_REPLY_ROWS_H

#include "backends/backend.h"
#include "base/buffer.h"
#include "wire/forward_codec.h"

typedef struct ep_reply_rows {
    const ep_forward_view *view; /* borrowed */
    ep_reply_layout layout;
    size_t row_bytes; /* of a computed row */
    uint32_t count;   /* rows of the reply */
    bool is_quantised;
    size_t beside_bytes;   /* size of the second buffer; the offsets of its parts: */
    size_t begins_offset;  /* node_sum: [rows + 1] u32 */
    size_t order_offset;   /* [slots] u32 */
    size_t scratch_offset; /* [2 * H] f32 */
    size_t sums_offset;    /* [rows,H] of the wire type, to be quantised */
    ep_buffer *reply;      /* tensors of the reply */
    ep_buffer *beside;     /* node_sum, reply_quant; else NULL */
    uint8_t *rows;         /* [slots,H] of the reply's type */
} ep_reply_rows;

/* Counts come from a checked frame: 64-bit sums cannot overflow. Pure. */
void ep_reply_rows_plan(const ep_forward_view *view, ep_reply_rows *out_rows);
/* Errors: RESOURCE_EXHAUSTED, NO_MEMORY; nothing is held then. */
ep_err ep_reply_rows_acquire(ep_reply_rows *rows, ep_buffer_pool *pool);
/* Rows are finished; each one's out is its place in rows->rows. */
void ep_reply_rows_done(const ep_reply_rows *rows, const ep_job_row *done, uint32_t done_count);
/* With node_sum, once every row is finished: makes the reply of them. */
void ep_reply_rows_finish(const ep_reply_rows *rows);
void ep_reply_rows_release(ep_reply_rows *rows);

#endif
