/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls from any nng client (REQ): one request frame in one message, one reply frame in one
 * message. A request passes the same checks and dispatch as a session's. The differences:
 *
 *   There is no Hello. The token comes as metadata "authorization" = "Bearer TOKEN" in CallHeader.
 *   Callers have role client whatever their token is good for, so methods of nodes and operators
 *   are always refused. Only unary methods: others get UNIMPLEMENTED.
 *   Payload CRC as the server is configured; never under TLS.
 *   Every request is answered, even if it is no frame, was cancelled or came too late: a Status in
 *   the reply frame says why. The reply to a request that could not be read has call id 0 and
 *   method id 0. There are no credits: at most `contexts` requests are in work at once, and four
 *   times as many wait (`contexts` from one caller). The rest is refused with RESOURCE_EXHAUSTED
 *   and retry_after_us.
 *
 * A caller that goes away cancels its calls; its slot is free once their handlers have finished.
 */
#ifndef EP_RPC_RPC_DOOR_H
#define EP_RPC_RPC_DOOR_H

#include "rpc/rpc.h"

#define EP_RPC_DOOR_CONTEXTS_MAX 4096
#define EP_RPC_DOOR_TOKEN_KEY "authorization"
#define EP_RPC_DOOR_TOKEN_PREFIX "Bearer "

/* Why a request was refused before its handler ran. */
typedef enum ep_rpc_door_refusal {
    EP_DOOR_NOT_A_FRAME, /* no request frame, damaged, or above a limit */
    EP_DOOR_NO_MEMORY,   /* no buffer for it */
    EP_DOOR_TOKEN,       /* missing or wrong */
    EP_DOOR_OVERLOAD,    /* too many requests wait */
    EP_DOOR_REFUSALS     /* how many there are */
} ep_rpc_door_refusal;

/* "not_a_frame", "no_memory", "token", "overload": label values. */
const char *ep_rpc_door_refusal_name(ep_rpc_door_refusal refusal);

typedef struct ep_rpc_door_stats {
    uint64_t requests_total;
    uint64_t refused_total[EP_DOOR_REFUSALS];
    uint64_t requests_in_flight;
    uint64_t connections;
    uint64_t replies_dropped; /* the caller did not read them */
} ep_rpc_door_stats;

/*
 * Opens the server's door; once, after the services were added. address: tcp:// or tls+tcp://.
 * ep_rpc_server_destroy closes it. Errors: INVALID_ARGUMENT, ALREADY_EXISTS, UNAVAILABLE (address
 * in use), BAD_FILE, NO_MEMORY.
 */
ep_err ep_rpc_server_open_door(ep_rpc_server *server, const ep_lane_address *address,
                               uint32_t contexts, ep_error *out_error);
/* The door's URL with its real port; "" without a door. Not while the server is destroyed. */
void ep_rpc_server_door_url(ep_rpc_server *server, char *out_url, size_t bytes);
/* All 0 without a door. */
void ep_rpc_server_read_door_stats(ep_rpc_server *server, ep_rpc_door_stats *out_stats);

#endif
