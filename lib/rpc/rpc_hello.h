/* SPDX-License-Identifier: Apache-2.0 */
/* The Hello exchange: what each side sends, and what it refuses. */
#ifndef EP_RPC_RPC_HELLO_H
#define EP_RPC_RPC_HELLO_H

#include "rpc/rpc.h"

#define EP_RPC_HELLO_METHOD 0x0000
#define EP_RPC_PROTOCOL_VERSION 1u
/* Optional feature: the peer understands the flag `answered` of cancel frames. */
#define EP_RPC_FEATURE_ANSWERED "cancel-answered"

/* Fills what every Hello has, without a token. The strings point into common and static text. */
void ep_rpc_hello_fill(const ep_rpc_common *common, bool payload_crc,
                       Expertd__V1__Hello *out_hello);

/*
 * The server checks a Hello on a listener for these roles, its token before anything else. An
 * unknown role is checked as a client, then refused. Errors: those of ep_rpc_credentials_judge;
 * UNIMPLEMENTED (version, required feature), FAILED_PRECONDITION (payload_crc), INVALID_ARGUMENT
 * (role, node name, host). *out_refusal is then the reason.
 */
ep_err ep_rpc_hello_check_client(const ep_rpc_common *common, unsigned roles, bool payload_crc,
                                 const Expertd__V1__Hello *hello, ep_rpc_role *out_role,
                                 ep_rpc_refusal *out_refusal, ep_error *out_error);
/* The client's check. Errors: UNIMPLEMENTED, FAILED_PRECONDITION, INVALID_ARGUMENT (host). */
ep_err ep_rpc_hello_check_server(bool payload_crc, const Expertd__V1__Hello *hello,
                                 ep_error *out_error);

/* The smaller of our limit and the one in the peer's Hello; peer 0: the peer gave none. */
static inline size_t ep_rpc_hello_bound(size_t own, uint64_t peer)
{
    return peer != 0 && peer < own ? (size_t)peer : own;
}
/* Whether the peer named this optional feature. */
bool ep_rpc_hello_has_feature(const Expertd__V1__Hello *hello, const char *feature);

/* Whether a connection needs the payload CRC. */
bool ep_rpc_hello_wants_crc(const ep_rpc_common *common, ep_conn *conn);

#endif
