/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer that breaks the rules, on a plain TCP socket: it shares only the frame's encoder and the
 * messages with the product.
 *
 * Sending ignores that the other side has closed already; that is what it should do. A connection
 * that is not closed within the patience of support/cluster.h fails the test.
 */
#ifndef HOSTILE_PEER_H
#define HOSTILE_PEER_H

#include <protobuf-c/protobuf-c.h>

#include "common.pb-c.h"
#include "wire/frame.h"

enum { HOSTILE_FRAME_BYTES_MAX = 128 << 10 };

typedef struct hostile_frame {
    size_t bytes;
    uint8_t data[HOSTILE_FRAME_BYTES_MAX];
} hostile_frame;

/* Port of "scheme://127.0.0.1:port". */
int hostile_connect(const char *url);
void hostile_send(int fd, const void *bytes, size_t count);
/* No more bytes will come from us. */
void hostile_end(int fd);
/* Waits for the peer's end, drops what it says before, closes. */
void hostile_wait_closed(int fd, const char *what);
/* True when the peer has ended; never waits. */
bool hostile_is_closed(int fd);
/* Refused: closed, or answered with a status other than OK (pings and credits are passed over).
 * Closes. */
void hostile_expect_refused(int fd, const char *what);
/* The same of an HTTP server: closed, with no 200 before. */
void hostile_expect_http_refused(int fd, const char *what);

/* A whole right frame: lengths, offsets and both CRCs are made to fit. header and tensors may be
 * NULL with 0 bytes. */
void hostile_frame_make(hostile_frame *out, ep_frame frame, const void *header, size_t header_bytes,
                        const void *tensors, size_t tensor_bytes);
/* A request for message, with an empty CallHeader. */
void hostile_frame_request(hostile_frame *out, uint16_t method_id, uint64_t call_id,
                           const ProtobufCMessage *message);
/* A right Hello in this role. */
void hostile_frame_hello(hostile_frame *out, const char *role);
/* The CRC of the fixed part again, after a change to it. */
void hostile_frame_seal(hostile_frame *frame);
/* Fills in a right Hello. */
void hostile_hello_init(Expertd__V1__Hello *hello, const char *role);
/* The next reply; its header's bytes (valid until the next call) at *out_header. False when the
 * connection ended. */
bool hostile_receive_reply(int fd, ep_frame *out_frame, const uint8_t **out_header,
                           const char *what);
/* Connects and has its Hello accepted. */
int hostile_connect_hello(const char *url, const char *role);

#endif
