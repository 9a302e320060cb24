/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fixed 64-byte part every frame begins with, wire version 1, little endian:
 *
 *     offset size                           offset size
 *       0     4   magic "EPD1"                28     4   header bytes
 *       4     1   version (1)                 32     4   tensor offset from frame start
 *       5     1   kind                        36     4   stream sequence
 *       6     2   flags                       40     8   tensor bytes
 *       8     8   call id                     48     4   CRC32C of bytes 64 to the end, 0 when off
 *      16     2   attempt                     52     8   reserved, 0
 *      18     2   method id                   60     4   CRC32C of bytes 0..59
 *      20     4   status (gRPC code)          64    ..   header, zeros to a multiple of 64, tensors
 *      24     4   deadline left, microseconds
 *
 * The tensor offset is always ep_frame_tensor_offset(header_bytes) and a frame ends with its last
 * tensor byte, so a frame of a kind without payload is 64 bytes long and has tensor offset 64.
 * Fields a kind does not use are 0; payload stands for header_bytes tensor_bytes payload_crc:
 *
 *     kind         flags               fields besides kind
 *     request      -                   call_id attempt method_id deadline_us payload
 *     reply        draining, end       call_id attempt method_id status stream_sequence payload
 *     reply_more   draining, end       call_id attempt method_id stream_sequence payload
 *     cancel       answered            call_id attempt
 *     ping, pong   draining            call_id (the pong repeats the ping's)
 *     credit       -                   header_bytes 16 (struct ep_frame_credit, raw), payload_crc
 *     goodbye      draining            status header_bytes payload_crc
 *
 * Threads  pure functions.
 */
#ifndef EP_WIRE_FRAME_H
#define EP_WIRE_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define EP_FRAME_FIXED_BYTES 64
#define EP_FRAME_VERSION 1
#define EP_FRAME_ALIGN 64
#define EP_FRAME_CREDIT_BYTES 16

#define EP_FRAME_FLAG_DRAINING 0x0001u
#define EP_FRAME_FLAG_END_OF_STREAM 0x0002u
/* only to peers whose Hello has the feature EP_RPC_FEATURE_ANSWERED */
#define EP_FRAME_FLAG_ANSWERED 0x0004u

#define EP_FRAME_DEADLINE_NONE 0xffffffffu

/* No configuration may allow more than these limits, which keep sums of lengths far from
 * overflow. */
#define EP_FRAME_BYTES_CEILING ((size_t)1 << 30)
#define EP_FRAME_HEADER_BYTES_CEILING ((size_t)16 << 20)

typedef enum ep_frame_kind {
    EP_FRAME_REQUEST = 1,
    EP_FRAME_REPLY,
    EP_FRAME_REPLY_MORE, /* one message of a stream that others follow */
    EP_FRAME_CANCEL,
    EP_FRAME_PING,
    EP_FRAME_PONG,
    EP_FRAME_CREDIT,
    EP_FRAME_GOODBYE,
    EP_FRAME_KIND_LAST = EP_FRAME_GOODBYE
} ep_frame_kind;

typedef struct ep_frame {
    ep_frame_kind kind;
    uint16_t flags;
    uint64_t call_id;
    uint16_t attempt;
    uint16_t method_id;
    uint32_t status;      /* gRPC code, 0..16 */
    uint32_t deadline_us; /* time left; EP_FRAME_DEADLINE_NONE: none; 0: already expired */
    uint32_t header_bytes;
    uint32_t tensor_offset; /* ep_frame_tensor_offset(header_bytes) */
    uint32_t stream_sequence;
    uint64_t tensor_bytes;
    uint32_t payload_crc;
} ep_frame;

/* Totals that a peer may have sent since the connection began. They are absolute, so a lost or late
 * credit frame does no harm. */
typedef struct ep_frame_credit {
    uint64_t tokens;
    uint64_t bytes;
} ep_frame_credit;

/* "request", "reply", ...; "unknown" for any other number. */
const char *ep_frame_kind_name(ep_frame_kind kind);

/* Where the tensor section of a frame begins. header_bytes <= EP_FRAME_HEADER_BYTES_CEILING. */
static inline uint32_t ep_frame_tensor_offset(uint32_t header_bytes)
{
    return (EP_FRAME_FIXED_BYTES + header_bytes + EP_FRAME_ALIGN - 1) &
           ~(uint32_t)(EP_FRAME_ALIGN - 1);
}

/* Writes the fixed part with its CRC. Asserts that frame keeps the rules above, since only our own
 * mistake could break them. */
void ep_frame_encode(const ep_frame *frame, uint8_t out[EP_FRAME_FIXED_BYTES]);

/*
 * Checks a fixed part completely (magic, version and CRC first) and reads it. *out_frame_bytes is
 * the length of the whole frame; out_frame and out_frame_bytes may be NULL.
 * Errors: PROTOCOL (close the connection), RESOURCE_EXHAUSTED (frame or header above its limit).
 * Outputs are then untouched.
 */
ep_err ep_frame_decode(const uint8_t bytes[EP_FRAME_FIXED_BYTES], size_t frame_bytes_max,
                       size_t header_bytes_max, ep_frame *out_frame, size_t *out_frame_bytes,
                       ep_error *out_error);

/* The length of the whole frame, checked only against the ceilings. For ep_lane_limits.frame_bytes;
 * the lane applies its own limit. */
ep_err ep_frame_read_bytes(const uint8_t fixed[EP_FRAME_FIXED_BYTES], size_t *out_frame_bytes,
                           ep_error *out_error);
/* Reads a fixed part that one of the two above has accepted, so that of every lane's frame. */
ep_frame ep_frame_read(const uint8_t checked[EP_FRAME_FIXED_BYTES]);
/* Errors: RESOURCE_EXHAUSTED. */
ep_err ep_frame_check_header_bytes(const ep_frame *frame, size_t header_bytes_max,
                                   ep_error *out_error);

/* The 16 header bytes of a credit frame: tokens, then bytes, little endian. */
void ep_frame_credit_encode(const ep_frame_credit *credit, uint8_t out[EP_FRAME_CREDIT_BYTES]);
void ep_frame_credit_decode(const uint8_t header[EP_FRAME_CREDIT_BYTES],
                            ep_frame_credit *out_credit);

/*
 * CRC32C (Castagnoli) of data appended to what crc covers so far; start with 0, so several parts
 * give the CRC of their concatenation. ep_crc32c(0, "123456789", 9) is 0xe3069283.
 */
uint32_t ep_crc32c(uint32_t crc, const void *data, size_t bytes);

#endif
