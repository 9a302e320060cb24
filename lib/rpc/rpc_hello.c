/* SPDX-License-Identifier: Apache-2.0 */
/* The Hello exchange: what each side sends, and what it refuses. */
#include "rpc/rpc_hello.h"

#include <string.h>

#include "base/check.h"
#include "base/host.h"
#include "base/printable.h"
#include "rpc/rpc_status.h"

#ifndef EP_WIRE_TEST_OLDER
static char *features[] = {(char *)(uintptr_t)EP_RPC_FEATURE_ANSWERED};
#endif

void ep_rpc_hello_fill(const ep_rpc_common *common, bool payload_crc, Expertd__V1__Hello *out_hello)
{
    expertd__v1__hello__init(out_hello);
    out_hello->protocol_min = EP_RPC_PROTOCOL_VERSION;
    out_hello->protocol_max = EP_RPC_PROTOCOL_VERSION;
    out_hello->incarnation = common->incarnation;
    out_hello->node = ep_rpc_unconst(common->node);
    out_hello->role = ep_rpc_unconst(common->role);
    out_hello->frame_bytes_max = common->limits.frame_bytes_max;
    out_hello->header_bytes_max = common->limits.header_bytes_max;
    out_hello->credit_bytes = common->limits.credit_bytes;
    out_hello->ping_ms = common->limits.ping_ms;
    out_hello->payload_crc = payload_crc;
    out_hello->software = ep_rpc_unconst(EP_RPC_SOFTWARE);
#ifndef EP_WIRE_TEST_OLDER
    out_hello->host = ep_rpc_unconst(common->host != NULL ? common->host : "");
    out_hello->optional_features = features;
    out_hello->n_optional_features = EP_ARRAY_COUNT(features);
#endif
}

bool ep_rpc_hello_has_feature(const Expertd__V1__Hello *hello, const char *feature)
{
    size_t i = 0;
    while (i < hello->n_optional_features && strcmp(hello->optional_features[i], feature) != 0) {
        i++;
    }
    return i < hello->n_optional_features;
}

bool ep_rpc_hello_wants_crc(const ep_rpc_common *common, ep_conn *conn)
{
    return common->payload_crc && !ep_conn_is_trusted(conn);
}

ep_err ep_rpc_hello_check_server(bool payload_crc, const Expertd__V1__Hello *hello,
                                 ep_error *out_error)
{
    if (hello->protocol_min > EP_RPC_PROTOCOL_VERSION ||
        hello->protocol_max < EP_RPC_PROTOCOL_VERSION) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "peer speaks protocol versions %u to %u, this build speaks %u",
                            hello->protocol_min, hello->protocol_max, EP_RPC_PROTOCOL_VERSION);
    }
    if (hello->n_required_features > 0) { /* this version knows no required features */
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "peer requires feature \"%.100s\", which this build does not know",
                            hello->required_features[0]);
    }
    if ((hello->payload_crc != 0) != payload_crc) {
        return ep_error_set(
            out_error, EP_ERR_FAILED_PRECONDITION,
            "payload_crc is %s at the peer and %s here; both ends of a connection must agree",
            hello->payload_crc ? "on" : "off", payload_crc ? "on" : "off");
    }
    if (strlen(hello->host) >= EP_HOST_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "peer's host has %zu bytes, allowed up to %d", strlen(hello->host),
                            EP_HOST_BYTES - 1);
    }
    return EP_OK;
}

ep_err ep_rpc_hello_check_client(const ep_rpc_common *common, unsigned roles, bool payload_crc,
                                 const Expertd__V1__Hello *hello, ep_rpc_role *out_role,
                                 ep_rpc_refusal *out_refusal, ep_error *out_error)
{
    ep_error role_error;
    ep_err role_err = ep_rpc_role_read(hello->role, out_role, &role_error);
    *out_refusal = EP_REFUSED_HELLO;
    ep_err err = ep_rpc_credentials_judge(common->credentials, roles, *out_role, hello->token,
                                          out_refusal, out_error);
    /* what the other side checks too */
    if (err != EP_OK || (err = ep_rpc_hello_check_server(payload_crc, hello, out_error)) != EP_OK) {
        return err;
    }
    if (strlen(hello->node) >= EP_NODE_NAME_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "peer's node name has %zu bytes, allowed up to %d", strlen(hello->node),
                            EP_NODE_NAME_BYTES - 1);
    }
    const size_t good = ep_text_printable_bytes(hello->node, false);
    if (hello->node[good] != 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "peer's node name has byte 0x%02x at offset %zu, allowed UTF-8 without "
                            "blanks and control characters",
                            (unsigned char)hello->node[good], good);
    }
    return role_err == EP_OK ? EP_OK : ep_error_set(out_error, role_err, "%s", role_error.text);
}
