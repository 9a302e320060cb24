/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tensor section of ForwardReply (proto/expert.proto): a row per slot, in the request's order.
 *
 *   plain    [slots,H] of reply_dtype
 *   int8     [slots,H] i8 | scales [slots,ceil(H/8)] of reply_dtype, at the next multiple of 64;
 *            zeros between
 */
#ifndef EP_WIRE_REPLY_LAYOUT_H
#define EP_WIRE_REPLY_LAYOUT_H

#include <stdbool.h>

#include "moe/batch.h"

typedef struct ep_reply_layout {
    size_t row_bytes;
    size_t scale_row_bytes; /* 0: plain */
    size_t scales_offset;
    size_t total_bytes;
} ep_reply_layout;

/* slots up to EP_TOKENS_MAX * 2 * EP_TOP_K_MAX, hidden up to EP_HIDDEN_MAX: fits 64 bits. */
void ep_reply_layout_make(uint32_t slots, uint32_t hidden, ep_dtype reply_dtype,
                          ep_combine_quant quant, ep_reply_layout *out_layout);

#endif
