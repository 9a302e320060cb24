/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GatewayForwardRequest (proto/gateway.proto) in both directions: from a caller's arguments to the
 * message and the tensor section behind it, and back. moe_parameters.h converts the numbers, the
 * rows here the tensors; each part that is present begins at the next multiple of 64 from the
 * section's start. Little endian. Pure.
 */
#ifndef EP_WIRE_GATEWAY_CODEC_H
#define EP_WIRE_GATEWAY_CODEC_H

#include "expertd/client.h"
#include "gateway.pb-c.h"

/* A reply lists this many missing slots at most, the first ones; missing_count counts all. */
#define EP_GATEWAY_MISSING_MAX 4096
#define EP_GATEWAY_PARTS 16

/* A tensor of ep_moe_args. A tensor with two forms, [T] and [T,K], has two rows. */
typedef struct ep_moe_tensor {
    const char *name;
    size_t at; /* offset in ep_moe_args */
    /* its dimensions: T tokens, K slots, H elements of a row, C constant experts, S rows of
     * smooth_scales; 0: no more */
    char dims[3];
} ep_moe_tensor;

/* The next row in the order of the section; false past the end. *at is 0 before the first row; it
 * grows, up to EP_GATEWAY_PARTS. */
bool ep_moe_tensor_next(uint32_t *at, ep_moe_tensor *out_row);
/* The tensor of a row in args. */
ep_tensor *ep_moe_tensor_of(const ep_moe_tensor *row, ep_moe_args *args);
/* Makes all tensors absent. */
void ep_moe_tensors_none(ep_moe_args *args);
/* Whether no slot of the token is active, by a mask of either form. */
bool ep_moe_token_is_masked(const ep_moe_args *args, int64_t token);

typedef struct ep_gateway_layout {
    size_t offset[EP_GATEWAY_PARTS];
    size_t bytes[EP_GATEWAY_PARTS]; /* 0: absent, or empty */
    size_t total_bytes;
    size_t reply_bytes; /* y [tokens, hidden] out_dtype, uncombined [tokens, top_k, hidden] */
} ep_gateway_layout;

/*
 * Checks each count and enumeration of the header separately. What depends on the layer or the
 * gate's rule is checked elsewhere.
 * Errors: INVALID_ARGUMENT naming field, value, allowed range; UNIMPLEMENTED (a field of a newer
 * version).
 */
ep_err ep_gateway_layout_make(const Expertd__V1__GatewayForwardRequest *header,
                              ep_gateway_layout *out_layout, ep_error *out_error);

/*
 * On the caller's side. gate NULL: ids and scales of args are used, otherwise logits. Initialises
 * both messages; header points to gate_message and to the strings of args. Errors:
 * INVALID_ARGUMENT, also for what a gateway does not accept.
 */
ep_err ep_gateway_request_fill(const ep_moe_args *args, const ep_gate_config *gate,
                               const ep_tensor *logits, ep_dtype out_dtype,
                               Expertd__V1__GatewayForwardRequest *out_header,
                               Expertd__V1__GateConfig *out_gate_message, ep_error *out_error);
/* Writes the section of layout->total_bytes, from the tensors that the header was filled with. */
void ep_gateway_request_pack(const ep_moe_args *args, const ep_gate_config *gate,
                             const ep_tensor *logits, const ep_gateway_layout *layout,
                             uint8_t *out_section);

/* On the gateway's side: a checked request. Tensors lie in the frame. */
typedef struct ep_gateway_view {
    ep_moe_args args;    /* all but deadline_us, traceparent and tenant */
    ep_gate_config gate; /* with header->gate */
    ep_tensor logits;
    ep_tensor out; /* data is NULL: point it at reply_bytes bytes */
    size_t reply_bytes;
} ep_gateway_view;

/* tensors must be 64-byte aligned and exactly as long as the header says. Errors: those of
 * ep_gateway_layout_make. */
ep_err ep_gateway_view_make(const Expertd__V1__GatewayForwardRequest *header,
                            const uint8_t *tensors, size_t tensor_bytes, ep_gateway_view *out_view,
                            ep_error *out_error);

#endif
