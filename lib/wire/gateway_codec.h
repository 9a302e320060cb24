/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GatewayForwardRequest (proto/gateway.proto): where each tensor lies behind the header, and the
 * checked view of a request. Both sides use the same layout. Pure.
 *
 *   x | x_scales (i8) | expert_ids | expert_scales (both without gate) | logits (with gate) | bias
 *   (gate.has_bias) | active_mask each part that is present begins at the next multiple of 64 from
 *   the section's start. Little endian.
 */
#ifndef EP_WIRE_GATEWAY_CODEC_H
#define EP_WIRE_GATEWAY_CODEC_H

#include "base/error.h"
#include "expertd/gate.h"
#include "expertd/tensor.h"
#include "gateway.pb-c.h"

/* A reply names this many missing slots at most, the first ones; missing_count counts all. */
#define EP_GATEWAY_MISSING_MAX 4096

/* Offsets of parts that are absent mean nothing. */
typedef struct ep_gateway_layout {
    size_t x_offset;
    size_t x_scales_offset;
    size_t ids_offset;
    size_t scales_offset;
    size_t logits_offset;
    size_t bias_offset;
    size_t factors_offset;
    size_t chosen_offset;
    size_t mask_offset;
    size_t total_bytes;
    size_t reply_bytes; /* y [tokens, hidden] out_dtype */
} ep_gateway_layout;

/*
 * Checks every count and enumeration of the header by itself; what depends on the layer or the
 * gate's rule is checked by those who know it.
 * Errors: INVALID_ARGUMENT naming field, value, allowed range.
 */
ep_err ep_gateway_layout_make(const Expertd__V1__GatewayForwardRequest *header,
                              ep_gateway_layout *out_layout, ep_error *out_error);

/* A checked request. Pointers go into the frame; NULL where the part is absent. */
typedef struct ep_gateway_view {
    const uint8_t *x;
    const float *x_scales;
    const uint8_t *ids;
    const uint8_t *scales;
    const float *logits;
    const uint8_t *active_mask;
    ep_gate_config gate; /* with header->gate; its arrays set */
    size_t reply_bytes;
} ep_gateway_view;

/* tensors must be 64-byte aligned and exactly as long as the header says. Errors: as above. */
ep_err ep_gateway_view_make(const Expertd__V1__GatewayForwardRequest *header,
                            const uint8_t *tensors, size_t tensor_bytes, ep_gateway_view *out_view,
                            ep_error *out_error);

#endif
