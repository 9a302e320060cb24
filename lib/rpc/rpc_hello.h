/* SPDX-License-Identifier: Apache-2.0 */
/* The Hello exchange: what both sides say, and what each refuses. */
#ifndef EP_RPC_RPC_HELLO_H
#define EP_RPC_RPC_HELLO_H

#include "rpc/rpc.h"

#define EP_RPC_HELLO_METHOD 0x0000
#define EP_RPC_PROTOCOL_VERSION 1u

/* Fills what every Hello says; hello's strings point into common and static text. */
void ep_rpc_hello_fill(const ep_rpc_common *common, bool payload_crc, Expertd__V1__Hello *out_hello);

/*
 * The server's judgement of a Hello. The token is looked at before anything else, in time that does not depend on it.
 * Errors: UNAUTHENTICATED, UNIMPLEMENTED (version, required feature), FAILED_PRECONDITION (payload_crc),
 * INVALID_ARGUMENT (role, node name).
 */
ep_err ep_rpc_hello_check_client(const ep_rpc_common *common, bool payload_crc, const Expertd__V1__Hello *hello,
                                 ep_rpc_role *out_role, ep_error *out_error);
/* The client's judgement of the reply. Errors: UNIMPLEMENTED, FAILED_PRECONDITION. */
ep_err ep_rpc_hello_check_server(bool payload_crc, const Expertd__V1__Hello *hello, ep_error *out_error);

/* Time depends on the length of what was given, never on where it differs. */
bool ep_rpc_token_equal(const char *expected, const char *given);

/* Whether a connection needs the payload CRC. */
bool ep_rpc_hello_wants_crc(const ep_rpc_common *common, ep_conn *conn);

#endif
