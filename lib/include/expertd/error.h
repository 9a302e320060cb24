/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Error codes of expertd. One row per error keeps its name, numbers and text together.
 *
 * X(name, wire number, gRPC code, what broke, may another copy help, text)
 *   wire number   travels in message Status, field reason; never reused
 *   gRPC code     travels in the frame (offset 20); 0..16 as in gRPC
 *   what broke    REQUEST: the caller's input; PEER: one node; PROCESS: this process; DEVICE: an
 *                 accelerator
 *   another copy  true when sending the same rows to another copy of the expert may succeed
 */
#ifndef EXPERTD_ERROR_H
#define EXPERTD_ERROR_H

#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef EP_API
#define EP_API __attribute__((visibility("default")))
#endif

#define EP_ERR_MAP(X)                                                                              \
    X(OK, 0, 0, NOTHING, false, "success")                                                         \
    X(CANCELLED, 1, 1, REQUEST, false, "the call was cancelled by its caller")                     \
    X(UNKNOWN, 2, 2, PEER, true, "unknown error")                                                  \
    X(INVALID_ARGUMENT, 3, 3, REQUEST, false, "a value is outside its allowed range")              \
    X(DEADLINE_EXCEEDED, 4, 4, REQUEST, false, "no answer before the deadline")                    \
    X(NOT_FOUND, 5, 5, REQUEST, false, "no such model, layer, method or file")                     \
    X(ALREADY_EXISTS, 6, 6, REQUEST, false, "the name is already taken")                           \
    X(PERMISSION_DENIED, 7, 7, REQUEST, false, "this peer may not call this method")               \
    X(RESOURCE_EXHAUSTED, 8, 8, PEER, true, "a configured limit is reached")                       \
    X(FAILED_PRECONDITION, 9, 9, REQUEST, false, "the object is not in a state that allows this")  \
    X(ABORTED, 10, 10, PEER, true, "the operation was aborted")                                    \
    X(OUT_OF_RANGE, 11, 11, REQUEST, false, "past the valid range")                                \
    X(UNIMPLEMENTED, 12, 12, REQUEST, false, "not implemented by this build or peer")              \
    X(INTERNAL, 13, 13, PROCESS, true, "an internal invariant was broken")                         \
    X(UNAVAILABLE, 14, 14, PEER, true, "the service cannot be reached now")                        \
    X(DATA_LOSS, 15, 15, PEER, true, "bytes were lost or damaged")                                 \
    X(UNAUTHENTICATED, 16, 16, REQUEST, false, "the token is missing or wrong")                    \
    X(NO_MEMORY, 32, 8, PROCESS, true, "allocation failed")                                        \
    X(NOT_OWNER, 33, 9, PEER, true, "the node does not hold that expert")                          \
    X(STALE_EPOCH, 34, 9, PEER, true, "the routing table is older than the node's")                \
    X(DRAINING, 35, 14, PEER, true, "the node is draining and takes no new work")                  \
    X(CONNECTION_LOST, 36, 14, PEER, true, "the connection ended without goodbye")                 \
    X(DEVICE_LOST, 37, 14, DEVICE, true, "the accelerator stopped answering")                      \
    X(PROTOCOL, 38, 15, PEER, true, "the peer's bytes break the protocol")                         \
    X(CLOSED, 39, 14, REQUEST, false, "the object is closed")                                      \
    X(IO, 40, 13, PROCESS, true, "an operating system call failed")                                \
    X(BAD_FILE, 41, 3, REQUEST, false, "a file breaks its format")                                 \
    X(BAD_CONFIG, 42, 3, REQUEST, false, "a configuration value is wrong")

typedef enum ep_err {
#define EP_ERR_ROW(name, wire, grpc, broke, other, text) EP_ERR_##name = wire,
    EP_ERR_MAP(EP_ERR_ROW)
#undef EP_ERR_ROW
} ep_err;
#define EP_OK EP_ERR_OK

typedef enum ep_broke {
    EP_BROKE_NOTHING,
    EP_BROKE_REQUEST,
    EP_BROKE_PEER,
    EP_BROKE_PROCESS,
    EP_BROKE_DEVICE
} ep_broke;

#define EP_ERROR_TEXT_BYTES 512
#define EP_NODE_NAME_BYTES 64

/*
 * What is known about a failure. Every field but code and text is optional: -1 or "" when it does
 * not apply.
 * Threads: a plain value; copy it freely.
 */
typedef struct ep_error {
    ep_err code;
    int32_t layer;                  /* -1 none */
    int32_t expert;                 /* -1 none */
    int64_t waited_us;              /* -1 none */
    uint64_t retry_after_us;        /* 0 none */
    uint64_t current_epoch;         /* 0 none; number part of the peer's epoch */
    char node[EP_NODE_NAME_BYTES];  /* "" none */
    char text[EP_ERROR_TEXT_BYTES]; /* names the thing, the value and the allowed range */
} ep_error;

/* Name of a code without its prefix, "INVALID_ARGUMENT"; "UNKNOWN" for a number not in the list.
 * Never NULL. */
EP_API const char *ep_err_name(ep_err err);
/* The fixed sentence of a code. Never NULL. */
EP_API const char *ep_err_text(ep_err err);
/* gRPC canonical code, 0..16. */
EP_API uint32_t ep_err_grpc_code(ep_err err);
EP_API ep_broke ep_err_broke(ep_err err);
/* True when the same rows sent to another copy may succeed. */
EP_API bool ep_err_other_copy_may_help(ep_err err);
/* Maps a wire number (and, for numbers we do not know, its gRPC code) to a code. */
EP_API ep_err ep_err_from_wire(uint32_t reason, uint32_t grpc_code);

#ifdef __cplusplus
}
#endif
#endif
