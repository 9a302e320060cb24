/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fixed 64 bytes at the begin of every frame between ranks, version 2, little endian:
 *
 *     offset size                               offset size
 *       0     4   magic "EPG1"                    32     8   payload bytes
 *       4     1   version (2)                     40     4   CRC32C of the payload, 0 when off
 *       5     1   kind                            44     4   origin: whose frame is passed on
 *       6     2   flags                           48    12   0
 *       8     8   membership                      60     4   CRC32C of bytes 0..59
 *                                                 64    ..   payload
 *      16     4   rank that sends it
 *      20     4   generation: how often the members changed (elastic_info)
 *      24     8   number of the call in its generation
 *
 *     kind      payload
 *     hello     struct ep_group_hello, encoded     first frame of the dialling side
 *     welcome   -                                  its answer; refused: text. Rank 0 sends it once
 *                                                  all ranks are there, others at once
 *     table     from rank 0: every rank's URL and host, each terminated by 0
 *     rows      record, zeros to a multiple of 64, body (group_rows.h)
 *     host rows the same with the body of group_host_rows.h: for all ranks of the receiver's host,
 *               to be passed on
 *     failed    text: this rank's own arguments are invalid; replaces its rows
 *     broken    text: this generation is given up
 *     bye       -
 *     lost      text: the origin is gone, and no more of its rows will be passed on. Sent to ranks
 *               of the same host
 *
 * Passed on  flag of rows, failed and lost that a gateway sends for the origin. All other frames
 *            are their sender's own.
 *
 * Threads    pure.
 */
#ifndef EP_GROUP_FRAME_H
#define EP_GROUP_FRAME_H

#include "base/host.h"
#include "group/group_call.h"

#define EP_GROUP_FRAME_FIXED_BYTES 64
#define EP_GROUP_FRAME_FLAG_CRC 1u
#define EP_GROUP_FRAME_FLAG_PASSED_ON 2u
/* Where the body of a rows frame begins. */
#define EP_GROUP_BODY_OFFSET ((EP_GROUP_FRAME_FIXED_BYTES + EP_GROUP_RECORD_BYTES + 63) / 64 * 64)

typedef enum ep_group_frame_kind {
    EP_GROUP_FRAME_HELLO = 1,
    EP_GROUP_FRAME_WELCOME,
    EP_GROUP_FRAME_REFUSED,
    EP_GROUP_FRAME_TABLE,
    EP_GROUP_FRAME_ROWS,
    EP_GROUP_FRAME_FAILED,
    EP_GROUP_FRAME_BROKEN,
    EP_GROUP_FRAME_BYE,
    EP_GROUP_FRAME_HOST_ROWS,
    EP_GROUP_FRAME_LOST,
    EP_GROUP_FRAME_KIND_LAST = EP_GROUP_FRAME_LOST
} ep_group_frame_kind;

typedef struct ep_group_frame {
    ep_group_frame_kind kind;
    uint16_t flags;
    uint64_t membership;
    uint32_t rank;
    uint32_t generation;
    uint64_t number;
    uint64_t payload_bytes;
    uint32_t payload_crc;
    uint32_t origin; /* with FLAG_PASSED_ON */
} ep_group_frame;

void ep_group_frame_encode(const ep_group_frame *frame, uint8_t out[EP_GROUP_FRAME_FIXED_BYTES]);
/* Errors: PROTOCOL (magic, version, CRC, kind, length). */
ep_err ep_group_frame_decode(const uint8_t fixed[EP_GROUP_FRAME_FIXED_BYTES],
                             ep_group_frame *out_frame, ep_error *out_error);
/* The length of the whole frame; for ep_lane_limits.frame_bytes. */
ep_err ep_group_frame_read_bytes(const uint8_t fixed[EP_GROUP_FRAME_FIXED_BYTES],
                                 size_t *out_frame_bytes, ep_error *out_error);

#define EP_GROUP_URL_BYTES 256
#define EP_GROUP_TOKEN_BYTES 1025
#define EP_GROUP_HELLO_BYTES                                                                       \
    (8 + (EP_GROUP_NAME_BYTES_MAX + 1) + EP_GROUP_URL_BYTES + EP_GROUP_TOKEN_BYTES + EP_HOST_BYTES)

typedef struct ep_group_hello {
    uint32_t world_size;
    uint32_t rank;
    char name[EP_GROUP_NAME_BYTES_MAX + 1];
    char url[EP_GROUP_URL_BYTES];     /* where the sender listens */
    char token[EP_GROUP_TOKEN_BYTES]; /* "" none */
    char host[EP_HOST_BYTES];         /* of the sender; "" unknown */
} ep_group_hello;

void ep_group_hello_encode(const ep_group_hello *hello, uint8_t out[EP_GROUP_HELLO_BYTES]);
/* Errors: PROTOCOL (length, unterminated strings). */
ep_err ep_group_hello_decode(const uint8_t *payload, size_t bytes, ep_group_hello *out_hello,
                             ep_error *out_error);

#endif
