/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ForwardRequest whose slots belong to several nodes of one host. It has one part per node, in
 * the order of the slots, the receiver's own first; together the parts cover all slots. A neighbour
 * gets its part as a plain request: the rows that it needs and its slots, without parts.
 */
#ifndef EP_WIRE_RELAY_CODEC_H
#define EP_WIRE_RELAY_CODEC_H

#include "wire/forward_codec.h"

#define EP_RELAY_PARTS_MAX 8 /* so that their names and URLs fit the header of a frame */

/*
 * Checks the parts of a request: 2..EP_RELAY_PARTS_MAX, each with a slot, contiguous, the first
 * named `self`, names distinct and not too long, URLs not too long. Errors: INVALID_ARGUMENT naming
 * part, field, value, allowed range.
 */
ep_err ep_relay_check(const Expertd__V1__ForwardRequest *header, const char *self,
                      ep_error *out_error);

/*
 * Builds the neighbour's request for slots [begin, begin + count) of a checked request. It asks for
 * a row per slot, never for sums. Sets in out_header rows, slots, hidden, x_dtype, reply_dtype,
 * weight_on_input. Errors: RESOURCE_EXHAUSTED, NO_MEMORY.
 */
ep_err ep_relay_pack(const ep_forward_view *view, uint32_t begin, uint32_t count,
                     ep_buffer_pool *pool, Expertd__V1__ForwardRequest *out_header,
                     ep_buffer **out_tensors);

/* The most that passing on `count` slots of a checked request needs besides the request itself:
 * rows copied, bytes of buffers. */
void ep_relay_bound(const ep_forward_view *view, uint32_t count, uint32_t *out_rows,
                    uint64_t *out_bytes);

#endif
