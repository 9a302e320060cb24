/* SPDX-License-Identifier: Apache-2.0 */
/* One end of a lane connection that sends whatever bytes a test wants: the peer that breaks the
 * rules. */
#ifndef EP_TESTS_RAW_PEER_H
#define EP_TESTS_RAW_PEER_H

#include <pthread.h>

#include "rpc/rpc.h"
#include "rpc_fixture.h"
#include "wire/frame.h"

#define RAW_FRAMES_MAX 4096

typedef struct raw_peer {
    ep_conn *conn;
    ep_dial *dial;
    ep_listener *listener;
    ep_buffer_pool *pool;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ep_buffer *frames[RAW_FRAMES_MAX];
    uint32_t frames_count;
    uint32_t frames_read;
    uint32_t sends_open;
    bool dialled;
    bool closed;
    ep_error why;     /* of the end */
    ep_error refusal; /* of Hello */
    char url[EP_ADDRESS_BYTES];
} raw_peer;

/* Dials url. */
void raw_peer_dial(raw_peer *p, const char *url);
/* The same, with memory for only so many bytes of frames: then it stops reading, since it keeps
 * what it got.
 */
void raw_peer_dial_limited(raw_peer *p, const char *url, size_t memory_bytes);
/* Listens; raw_peer_accept waits for the first connection. */
void raw_peer_listen(raw_peer *p, const char *url);
void raw_peer_accept(raw_peer *p);
void raw_peer_fini(raw_peer *p);

/* Bytes that are a whole frame; false when the lane refused them here. */
bool raw_peer_send_bytes(raw_peer *p, const void *bytes, size_t count);
/* header and tensors may be NULL when their length in frame is 0. Offsets, lengths and CRCs are
 * made right.
 */
void raw_peer_send(raw_peer *p, ep_frame frame, const void *header, const void *tensors,
                   bool payload_crc);
/* The request header section of message. Freed by the caller. */
uint8_t *raw_request_header(const ProtobufCMessage *message, size_t *out_bytes);
void raw_peer_send_message(raw_peer *p, ep_frame frame, const ProtobufCMessage *message,
                           bool as_request, bool payload_crc);

/* The next frame, decoded; NULL once the connection ended. The caller unrefs it. */
ep_buffer *raw_peer_receive(raw_peer *p, ep_frame *out_frame);
/* Waits for the end; frames before it are dropped and counted. */
uint32_t raw_peer_wait_closed(raw_peer *p);

void raw_hello_init(Expertd__V1__Hello *hello);
/* Sends this Hello (NULL: a good one) and waits for the answer: its gRPC code, or -1 when the
 * connection ended. */
int raw_peer_hello(raw_peer *p, const Expertd__V1__Hello *hello);
/* Dials, and is welcome. */
void raw_peer_meet(raw_peer *p, const char *url);
/* The frame of a request without deadline. */
ep_frame raw_request(uint64_t call_id, uint16_t method_id);
/* Reads the Status of a reply. */
void raw_status(const ep_buffer *buffer, const ep_frame *frame, ep_error *out_error);

#endif
