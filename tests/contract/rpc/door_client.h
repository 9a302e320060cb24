/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Foreign callers of the door: nng's own REQ client, and one that speaks the SP protocol by hand on
 * a bare socket, so that it may break every rule and vanish at any time. Functions that fail end
 * the test.
 */
#ifndef EP_TESTS_RPC_DOOR_CLIENT_H
#define EP_TESTS_RPC_DOOR_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#include "rpc/rpc.h"
#include "support/check.h"
#include "wire/frame.h"

#define SP_PROTOCOL_REQ 0x30
#define SP_PROTOCOL_REP 0x31

typedef struct bytes {
    uint8_t *data; /* malloc'ed */
    size_t count;
} bytes;

typedef struct request_options {
    uint16_t method_id;
    const char *token;    /* NULL: no metadata */
    uint32_t deadline_us; /* 0 in the options: none; EXPIRED: 0 on the wire */
    size_t tensor_bytes;  /* each = fill */
    uint8_t fill;
    size_t extra_metadata; /* bytes of a long value */
    uint64_t call_id;
} request_options;
#define EXPIRED 0xfffffffeu

/* A whole request frame with payload CRC. */
bytes request_make(ep_buffer_pool *pool, const ProtobufCMessage *message,
                   const request_options *options);
/* Forward with this model name: see rpc_fixture.h. */
bytes forward_make(ep_buffer_pool *pool, const char *model, const request_options *options);

typedef struct reply_view {
    ep_frame frame;
    ep_error status;        /* code EP_OK on success */
    const uint8_t *tensors; /* into the reply */
} reply_view;
/* Checks both CRCs and reads a reply frame. */
void reply_read(ep_buffer_pool *pool, bytes reply, reply_view *out_view);

/* By hand. -1 when the connection is refused. */
int sp_connect(const char *url, uint16_t protocol);
/* The SP header of a message with this announced length. */
void sp_send_length(int fd, uint64_t length);
void sp_send_raw(int fd, const void *data, size_t count);
/* A REQ message. */
void sp_send(int fd, uint32_t request_id, bytes body);
/* The next reply's body; the connection must live. */
bytes sp_receive(int fd, uint32_t *out_request_id);
/* Until the peer has closed; what came before is dropped. */
void sp_wait_closed(int fd);

/* nng's REQ: one socket per URL for the whole process, one context per call. */
bytes nng_ask(const char *url, bytes body);

#endif
