/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a request's rows are written and what becomes of them: straight into the reply, or beside
 * it: to be summed into it at the end with node_sum, to be quantised into it as they are finished
 * with reply_quant, or both (the sums are quantised).
 *
 * Threads  acquire, finish and release by one thread each, in this order; rows are written by any
 *          in between, and each is told to be done once.
 */
#ifndef EP_EXPERTD_REPLY_ROWS_H
#define EP_EXPERTD_REPLY_ROWS_H

#include "backends/backend.h"
#include "base/buffer.h"
#include "wire/forward_codec.h"

typedef struct ep_reply_rows {
    ep_buffer *reply;  /* tensors of the reply */
    ep_buffer *beside; /* node_sum, reply_quant; else NULL */
    uint8_t *rows;     /* [slots,H] of the reply's type */
} ep_reply_rows;

/* Bytes of the reply's tensors, and of what is needed beside them. */
size_t ep_reply_rows_reply_bytes(const ep_forward_view *view);
size_t ep_reply_rows_beside_bytes(const ep_forward_view *view);

/* Errors: RESOURCE_EXHAUSTED, NO_MEMORY; nothing is held then. */
ep_err ep_reply_rows_acquire(const ep_forward_view *view, ep_buffer_pool *pool,
                             ep_reply_rows *out_rows);
/* These rows are there; out of each is its place in rows->rows. */
void ep_reply_rows_done(const ep_reply_rows *rows, const ep_forward_view *view,
                        const ep_job_row *done, uint32_t done_count);
/* Every row is there: makes the reply. */
void ep_reply_rows_finish(ep_reply_rows *rows, const ep_forward_view *view);
void ep_reply_rows_release(ep_reply_rows *rows);

#endif
