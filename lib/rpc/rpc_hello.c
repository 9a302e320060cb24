/* SPDX-License-Identifier: Apache-2.0 */
/* The Hello exchange: what both sides say, and what each refuses. */
#include "rpc/rpc_hello.h"

#include <string.h>

static char *unconst(const char *text)
{
    return (char *)(uintptr_t)text; /* message fields are char *; packing only reads them */
}

void ep_rpc_hello_fill(const ep_rpc_common *common, bool payload_crc, Expertd__V1__Hello *out_hello)
{
    expertd__v1__hello__init(out_hello);
    out_hello->protocol_min = EP_RPC_PROTOCOL_VERSION;
    out_hello->protocol_max = EP_RPC_PROTOCOL_VERSION;
    out_hello->token = unconst(common->token);
    out_hello->incarnation = common->incarnation;
    out_hello->node = unconst(common->node);
    out_hello->role = unconst(common->role);
    out_hello->frame_bytes_max = common->limits.frame_bytes_max;
    out_hello->header_bytes_max = common->limits.header_bytes_max;
    out_hello->credit_bytes = common->limits.credit_bytes;
    out_hello->ping_ms = common->limits.ping_ms;
    out_hello->payload_crc = payload_crc;
#ifndef EP_WIRE_TEST_OLDER
    out_hello->software = unconst(EP_RPC_SOFTWARE);
#endif
}

bool ep_rpc_token_equal(const char *expected, const char *given)
{
    size_t expected_bytes = strlen(expected);
    size_t given_bytes = strlen(given);
    volatile unsigned char differ = expected_bytes != given_bytes;
    for (size_t i = 0; i < given_bytes; i++) {
        /* beyond the expected token compare with its terminator, so that no length is special */
        unsigned char want = (unsigned char)expected[i < expected_bytes ? i : expected_bytes];
        differ = (unsigned char)(differ | (want ^ (unsigned char)given[i]));
    }
    return differ == 0;
}

bool ep_rpc_hello_wants_crc(const ep_rpc_common *common, ep_conn *conn)
{
    return common->payload_crc && !conn->ops->conn_is_trusted(conn);
}

static ep_err check_versions(const Expertd__V1__Hello *hello, ep_error *out_error)
{
    if (hello->protocol_min > EP_RPC_PROTOCOL_VERSION || hello->protocol_max < EP_RPC_PROTOCOL_VERSION) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "peer speaks protocol versions %u to %u, this build speaks %u",
                            hello->protocol_min, hello->protocol_max, EP_RPC_PROTOCOL_VERSION);
    }
    if (hello->n_required_features > 0) { /* this version knows none */
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "peer requires feature \"%.100s\", which this build does not know",
                            hello->required_features[0]);
    }
    return EP_OK;
}

static ep_err check_crc(bool payload_crc, const Expertd__V1__Hello *hello, ep_error *out_error)
{
    if ((hello->payload_crc != 0) != payload_crc) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "payload_crc is %s at the peer and %s here; both ends of a connection must agree",
                            hello->payload_crc ? "on" : "off", payload_crc ? "on" : "off");
    }
    return EP_OK;
}

static ep_err read_role(const char *name, ep_rpc_role *out_role, ep_error *out_error)
{
    if (name[0] == 0 || strcmp(name, "client") == 0) {
        *out_role = EP_ROLE_CLIENT;
    } else if (strcmp(name, "node") == 0) {
        *out_role = EP_ROLE_NODE;
    } else if (strcmp(name, "operator") == 0 || strcmp(name, "coordinator") == 0) {
        *out_role = EP_ROLE_OPERATOR;
    } else {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "peer's role is \"%.100s\", allowed are client, node, operator and coordinator", name);
    }
    return EP_OK;
}

ep_err ep_rpc_hello_check_client(const ep_rpc_common *common, bool payload_crc, const Expertd__V1__Hello *hello,
                                 ep_rpc_role *out_role, ep_error *out_error)
{
    if (!ep_rpc_token_equal(common->token, hello->token)) {
        return ep_error_set(out_error, EP_ERR_UNAUTHENTICATED, "the token is %s", hello->token[0] == 0 ? "missing" : "wrong");
    }
    ep_err err = check_versions(hello, out_error);
    if (err == EP_OK) {
        err = check_crc(payload_crc, hello, out_error);
    }
    if (err == EP_OK && strlen(hello->node) >= EP_NODE_NAME_BYTES) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "peer's node name has %zu bytes, allowed up to %d",
                           strlen(hello->node), EP_NODE_NAME_BYTES - 1);
    }
    return err == EP_OK ? read_role(hello->role, out_role, out_error) : err;
}

ep_err ep_rpc_hello_check_server(bool payload_crc, const Expertd__V1__Hello *hello, ep_error *out_error)
{
    ep_err err = check_versions(hello, out_error);
    return err == EP_OK ? check_crc(payload_crc, hello, out_error) : err;
}
