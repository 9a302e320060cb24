/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a request's rows are written and what becomes of them: straight into the reply, or beside
 * it: to be summed into it at the end with node_sum, to be quantised into it as they are finished
 * with reply_quant, or both (the sums are quantised).
 *
 * Threads  plan, acquire, finish and release by one thread each, in this order; rows are written by
 * any in between, and each is told to be done once.
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
    size_t beside_bytes;   /* what is needed beside the reply, as it begins in there: */
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
/* These rows are there; out of each is its place in rows->rows. */
void ep_reply_rows_done(const ep_reply_rows *rows, const ep_job_row *done, uint32_t done_count);
/* With node_sum: every row is there; makes the reply of them. */
void ep_reply_rows_finish(const ep_reply_rows *rows);
void ep_reply_rows_release(ep_reply_rows *rows);

#endif
