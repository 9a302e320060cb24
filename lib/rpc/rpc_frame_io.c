/* SPDX-License-Identifier: Apache-2.0 */
/* Building outgoing frames in one pooled buffer, and checking the payload of incoming ones. */
#include "rpc/rpc_frame_io.h"

#include <endian.h>
#include <string.h>

#include "base/check.h"

#define LENGTH_BYTES 4 /* length of the packed CallHeader, which follows */

/* The frame begins at the first aligned byte after the struct. */
static const size_t out_offset =
    (sizeof(ep_rpc_out) + EP_FRAME_ALIGN - 1) & ~(size_t)(EP_FRAME_ALIGN - 1);

ep_err ep_rpc_out_create(ep_buffer_pool *pool, size_t header_bytes, ep_buffer *taken_tensors,
                         ep_rpc_out **out_frame)
{
    EP_ASSERT(header_bytes <= EP_FRAME_HEADER_BYTES_CEILING);
    uint32_t tensor_offset = ep_frame_tensor_offset((uint32_t)header_bytes);
    ep_buffer *self;
    ep_err err = ep_buffer_acquire(pool, out_offset + tensor_offset, &self);
    if (err != EP_OK) {
        return err;
    }
    ep_rpc_out *out = (ep_rpc_out *)(void *)self->data;
    memset(out, 0, sizeof(*out));
    size_t tensor_bytes = taken_tensors != NULL ? taken_tensors->bytes : 0;
    out->self = self;
    out->bytes = self->data + out_offset;
    out->header = out->bytes + EP_FRAME_FIXED_BYTES;
    out->tensors = taken_tensors;
    out->frame.header_bytes = (uint32_t)header_bytes;
    out->frame.tensor_offset = tensor_offset;
    out->frame.tensor_bytes = tensor_bytes;
    out->frame_bytes = tensor_offset + tensor_bytes;
    out->memory_bytes =
        self->capacity_bytes + (taken_tensors != NULL ? taken_tensors->capacity_bytes : 0);
    size_t used = EP_FRAME_FIXED_BYTES + header_bytes;
    memset(out->bytes + used, 0, tensor_offset - used);
    out->send.parts[0] = (ep_send_part){.data = out->bytes, .bytes = tensor_offset};
    out->send.parts_count = 1;
    if (tensor_bytes > 0) {
        out->send.parts[1] = (ep_send_part){.data = taken_tensors->data, .bytes = tensor_bytes};
        out->send.parts_count = 2;
    }
    *out_frame = out;
    return EP_OK;
}

void ep_rpc_out_destroy(ep_rpc_out *out)
{
    if (out != NULL) {
        ep_buffer_unref(out->tensors);
        ep_buffer_unref(out->self);
    }
}

ep_err ep_rpc_out_create_message(ep_buffer_pool *pool, const ProtobufCMessage *message,
                                 ep_buffer *taken_tensors, ep_rpc_out **out_frame)
{
    size_t bytes = message != NULL ? protobuf_c_message_get_packed_size(message) : 0;
    if (bytes > EP_FRAME_HEADER_BYTES_CEILING) {
        return EP_ERR_RESOURCE_EXHAUSTED;
    }
    ep_err err = ep_rpc_out_create(pool, bytes, taken_tensors, out_frame);
    if (err == EP_OK && bytes > 0) {
        protobuf_c_message_pack(message, (*out_frame)->header);
    }
    return err;
}

/* Packed size of one Metadata inside CallHeader. Written by hand, because then packing needs no
 * array of pointers. */
static size_t varint_bytes(size_t value)
{
    size_t n = 1;
    while (value >= 0x80) {
        value >>= 7;
        n++;
    }
    return n;
}

static size_t text_field_bytes(const char *text)
{
    size_t bytes = strlen(text);
    return 1 + varint_bytes(bytes) + bytes;
}

static size_t metadata_bytes(const ep_rpc_metadata *item)
{
    return text_field_bytes(item->key) + text_field_bytes(item->value);
}

static uint8_t *put_length(uint8_t *at, uint8_t field, size_t value)
{
    *at++ = (uint8_t)(field << 3 | 2); /* wire type 2: length-delimited */
    while (value >= 0x80) {
        *at++ = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    *at++ = (uint8_t)value;
    return at;
}

static uint8_t *put_text(uint8_t *at, uint8_t field, const char *text)
{
    size_t bytes = strlen(text);
    at = put_length(at, field, bytes);
    memcpy(at, text, bytes);
    return at + bytes;
}

size_t ep_rpc_request_header_bytes(const ep_rpc_metadata *metadata, size_t metadata_count,
                                   const ProtobufCMessage *message)
{
    size_t bytes = LENGTH_BYTES + protobuf_c_message_get_packed_size(message);
    for (size_t i = 0; i < metadata_count; i++) {
        const size_t inner = metadata_bytes(&metadata[i]);
        bytes += 1 + varint_bytes(inner) + inner;
    }
    return bytes;
}

ep_err ep_rpc_out_create_request(ep_buffer_pool *pool, size_t header_bytes,
                                 const ep_rpc_metadata *metadata, size_t metadata_count,
                                 const ProtobufCMessage *message, ep_buffer *taken_tensors,
                                 ep_rpc_out **out_frame)
{
    if (header_bytes > EP_FRAME_HEADER_BYTES_CEILING) {
        return EP_ERR_RESOURCE_EXHAUSTED;
    }
    ep_err err = ep_rpc_out_create(pool, header_bytes, taken_tensors, out_frame);
    if (err != EP_OK) {
        return err;
    }
    uint8_t *call_header = (*out_frame)->header + LENGTH_BYTES;
    uint8_t *at = call_header;
    for (size_t i = 0; i < metadata_count; i++) {
        at = put_length(at, 1, metadata_bytes(&metadata[i]));
        at = put_text(at, 1, metadata[i].key);
        at = put_text(at, 2, metadata[i].value);
    }
    const uint32_t length = htole32((uint32_t)(at - call_header));
    memcpy((*out_frame)->header, &length, LENGTH_BYTES);
    protobuf_c_message_pack(message, at);
    return EP_OK;
}

void ep_rpc_out_seal(ep_rpc_out *out, bool payload_crc)
{
    if (!payload_crc) {
        out->frame.payload_crc = 0;
        out->has_crc = false;
    } else if (!out->has_crc) {
        uint32_t crc = ep_crc32c(0, out->bytes + EP_FRAME_FIXED_BYTES,
                                 out->frame.tensor_offset - EP_FRAME_FIXED_BYTES);
        if (out->tensors != NULL) {
            crc = ep_crc32c(crc, out->tensors->data, (size_t)out->frame.tensor_bytes);
        }
        out->frame.payload_crc = crc;
        out->has_crc = true;
    }
    ep_frame_encode(&out->frame, out->bytes);
}

ep_err ep_rpc_payload_check(const ep_frame *frame, const uint8_t *bytes, bool payload_crc,
                            ep_error *out_error)
{
    if (payload_crc) {
        size_t payload = frame->tensor_offset - EP_FRAME_FIXED_BYTES + (size_t)frame->tensor_bytes;
        uint32_t crc = ep_crc32c(0, bytes + EP_FRAME_FIXED_BYTES, payload);
        if (crc != frame->payload_crc) {
            return ep_error_set(
                out_error, EP_ERR_DATA_LOSS,
                "%s frame's payload of %zu bytes has CRC32C %08x, its bytes give %08x",
                ep_frame_kind_name(frame->kind), payload, frame->payload_crc, crc);
        }
    } else if (frame->payload_crc != 0) {
        return ep_error_set(
            out_error, EP_ERR_PROTOCOL,
            "%s frame has payload CRC %08x though payload_crc is off on this connection",
            ep_frame_kind_name(frame->kind), frame->payload_crc);
    }
    for (size_t i = EP_FRAME_FIXED_BYTES + frame->header_bytes; i < frame->tensor_offset; i++) {
        if (bytes[i] != 0) {
            return ep_error_set(out_error, EP_ERR_PROTOCOL,
                                "%s frame's padding byte at %zu is %u, must be 0",
                                ep_frame_kind_name(frame->kind), i, bytes[i]);
        }
    }
    return EP_OK;
}

ep_err ep_rpc_call_header_unpack(ep_rpc_budget *budget, const uint8_t *header, size_t bytes,
                                 Expertd__V1__CallHeader **out_call_header, size_t *out_used_bytes,
                                 ep_error *out_error)
{
    uint32_t length = 0;
    if (bytes < LENGTH_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "request header has %zu bytes, its CallHeader length alone needs %d",
                            bytes, LENGTH_BYTES);
    }
    memcpy(&length, header, LENGTH_BYTES);
    length = le32toh(length);
    if (length > bytes - LENGTH_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "request header has %zu bytes, its CallHeader claims %u of them", bytes,
                            length);
    }
    ProtobufCMessage *call_header;
    ep_err err = ep_rpc_unpack(budget, &expertd__v1__call_header__descriptor, header + LENGTH_BYTES,
                               length, &call_header, out_error);
    if (err != EP_OK) {
        return err;
    }
    *out_call_header = (Expertd__V1__CallHeader *)call_header;
    if (out_used_bytes != NULL) {
        *out_used_bytes = LENGTH_BYTES + (size_t)length;
    }
    return EP_OK;
}

ep_err ep_rpc_request_unpack(ep_rpc_budget *budget, const ProtobufCMessageDescriptor *type,
                             const uint8_t *header, size_t bytes,
                             Expertd__V1__CallHeader **out_call_header,
                             ProtobufCMessage **out_message, ep_error *out_error)
{
    Expertd__V1__CallHeader *call_header;
    ProtobufCMessage *message;
    size_t used;
    ep_err err = ep_rpc_call_header_unpack(budget, header, bytes, &call_header, &used, out_error);
    if (err == EP_OK) {
        err = ep_rpc_unpack(budget, type, header + used, bytes - used, &message, out_error);
    }
    if (err == EP_OK) {
        *out_call_header = call_header;
        *out_message = message;
    }
    return err;
}
