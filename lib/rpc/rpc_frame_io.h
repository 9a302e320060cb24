/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Outgoing frames of the RPC layer, and the payload of incoming ones.
 *
 * An outgoing frame is one pooled buffer with the ep_send, the fixed part and the header section,
 * and a reference to the tensor buffer. The lane gathers both. Nothing else is allocated for a
 * frame.
 */
#ifndef EP_RPC_RPC_FRAME_IO_H
#define EP_RPC_RPC_FRAME_IO_H

#include <protobuf-c/protobuf-c.h>

#include "base/buffer.h"
#include "rpc/rpc.h"
#include "rpc/rpc_budget.h"
#include "transport/transport.h"
#include "wire/frame.h"

typedef struct ep_rpc_out {
    ep_send send;
    ep_frame frame;      /* the creator sets kind, ids and status; the lengths are already set */
    ep_buffer *tensors;  /* a reference, or NULL */
    size_t frame_bytes;  /* the whole frame */
    size_t memory_bytes; /* memory that it holds while it is queued */
    /* the header section, to be written by the creator: frame.header_bytes bytes */
    uint8_t *header;
    bool last;         /* the link closes after handing this frame to the network */
    bool is_traced;    /* its send span has begun */
    ep_trace_id trace; /* of that span; may be none */
    /* private */
    ep_buffer *self;
    uint8_t *bytes; /* fixed part, then the header section */
    bool has_crc;
} ep_rpc_out;

/* taken_tensors may be NULL; it is taken on success only. Errors: as ep_buffer_acquire. */
ep_err ep_rpc_out_create(ep_buffer_pool *pool, size_t header_bytes, ep_buffer *taken_tensors,
                         ep_rpc_out **out_frame);
void ep_rpc_out_destroy(ep_rpc_out *out);

/* A frame whose header section is message alone (replies, goodbye). message may be NULL. */
ep_err ep_rpc_out_create_message(ep_buffer_pool *pool, const ProtobufCMessage *message,
                                 ep_buffer *taken_tensors, ep_rpc_out **out_frame);
/* Bytes of a request's header section: the length of CallHeader, CallHeader, message. */
size_t ep_rpc_request_header_bytes(const ep_rpc_metadata *metadata, size_t metadata_count,
                                   const ProtobufCMessage *message);
/* A frame with that section; header_bytes: result of ep_rpc_request_header_bytes. */
ep_err ep_rpc_out_create_request(ep_buffer_pool *pool, size_t header_bytes,
                                 const ep_rpc_metadata *metadata, size_t metadata_count,
                                 const ProtobufCMessage *message, ep_buffer *taken_tensors,
                                 ep_rpc_out **out_frame);

/* Writes the fixed part and, when asked, computes the payload CRC (once). */
void ep_rpc_out_seal(ep_rpc_out *out, bool payload_crc);

/*
 * Checks the payload against the fixed part. Errors: DATA_LOSS (CRC differs: the frame is damaged,
 * but the connection can go on), PROTOCOL (CRC given though off, padding not 0).
 */
ep_err ep_rpc_payload_check(const ep_frame *frame, const uint8_t *bytes, bool payload_crc,
                            ep_error *out_error);

/* The CallHeader in a request's header section; *out_used_bytes (may be NULL) is where the message
 * begins. Errors: INVALID_ARGUMENT. */
ep_err ep_rpc_call_header_unpack(ep_rpc_budget *budget, const uint8_t *header, size_t bytes,
                                 Expertd__V1__CallHeader **out_call_header, size_t *out_used_bytes,
                                 ep_error *out_error);
/* Splits a request's header section. Errors: INVALID_ARGUMENT. */
ep_err ep_rpc_request_unpack(ep_rpc_budget *budget, const ProtobufCMessageDescriptor *type,
                             const uint8_t *header, size_t bytes,
                             Expertd__V1__CallHeader **out_call_header,
                             ProtobufCMessage **out_message, ep_error *out_error);

#endif
