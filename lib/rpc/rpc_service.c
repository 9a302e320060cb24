/* SPDX-License-Identifier: Apache-2.0 */
/* From a request frame to its handler: every check a call must pass before it is dispatched. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "expert.pb-c.h"
#include "rpc/rpc_hello.h"
#include "rpc/rpc_server.h"

ProtobufCService *ep_rpc_service_find(const ep_rpc_server *server,
                                      const ProtobufCServiceDescriptor *descriptor)
{
    for (size_t i = 0; i < server->services_count; i++) {
        if (server->services[i]->descriptor == descriptor) {
            return server->services[i];
        }
    }
    return NULL;
}

static ep_err find_method(ep_rpc_call *call, ProtobufCService **out_service, ep_error *out_error)
{
    const ep_rpc_origin *origin = call->origin;
    const ep_rpc_method *method = ep_rpc_method_by_id(call->method_id);
    if (method == NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "method id 0x%04x is not known here",
                            call->method_id);
    }
    call->method = method;
    /* before others learn what is served here */
    if (method->role != EP_ROLE_CLIENT && method->role != origin->role) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "%s.%s needs role %s, the peer has role %s", method->service->name,
                            method->method->name, ep_rpc_role_name(method->role),
                            ep_rpc_role_name(origin->role));
    }
    *out_service = ep_rpc_service_find(origin->server, method->service);
    if (*out_service == NULL) {
        const ep_rpc_common *common = &origin->server->common;
        bool is_node = strcmp(common->role, "node") == 0;
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "service %s (method %s, id 0x%04x) is not served by this process, which is %s%s; by "
            "default a coordinator listens on port 7410, a node on 7420",
            method->service->name, method->method->name, method->id, is_node ? "node " : "a ",
            is_node ? common->node : common->role);
    }
    return EP_OK;
}

ep_err ep_rpc_call_check_draining(const ep_rpc_call *call, ep_error *out_error)
{
    const ep_rpc_server *server = call->origin->server;
    return !__atomic_load_n(&server->draining, __ATOMIC_SEQ_CST)
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_DRAINING, "%s is draining and takes no new work",
                              server->common.node[0] != 0 ? server->common.node : "the node");
}

static ep_err check_admission(const ep_rpc_call *call, const ep_frame *frame, uint32_t calls,
                              ep_error *out_error)
{
    const ep_rpc_origin *origin = call->origin;
    const ep_rpc_limits *limits = &origin->server->common.limits;
    const ep_rpc_method *method = call->method;
    if (origin->unary_only && method->stream != EP_RPC_UNARY) {
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "%s.%s streams its replies, and here one request has one reply; call it on a listen "
            "address",
            method->service->name, method->method->name);
    }
    if (calls > limits->calls_per_connection_max) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "connection has %u calls in flight, calls_per_connection_max is %u",
                            calls, limits->calls_per_connection_max);
    }
    if (frame->deadline_us == 0) {
        return ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED, "%s.%s arrived with no time left",
                            method->service->name, method->method->name);
    }
    const bool is_work = method->service == &expertd__v1__expert_service__descriptor ||
                         method->service == &expertd__v1__weight_files__descriptor;
    return is_work ? ep_rpc_call_check_draining(call, out_error) : EP_OK;
}

/* A line for everybody who asks what his role may not, and for everything an operator does. */
static void audit_call(const ep_rpc_call *call, bool allowed)
{
    const ep_rpc_origin *origin = call->origin;
    const ep_rpc_method *method = call->method;
    char name[128];
    ep_rpc_audit_event event = {.peer = origin->peer,
                                .node = origin->node,
                                .role = ep_rpc_role_name(origin->role),
                                .label = origin->label,
                                .method = name};
    snprintf(name, sizeof(name), "%s.%s", method->service->name, method->method->name);
    if (allowed) {
        ep_rpc_audit_admin(&event);
    } else {
        ep_rpc_audit_refused(&origin->server->audit, EP_REFUSED_METHOD, &event);
    }
}

void ep_rpc_service_dispatch(ep_rpc_call *call, const ep_frame *frame, uint32_t calls)
{
    ep_rpc_origin *origin = call->origin;
    ProtobufCService *service = NULL;
    ProtobufCMessage *input = NULL;
    ep_error error;
    ep_err err = ep_rpc_payload_check(frame, call->frame->data, origin->payload_crc, &error);
    if (err == EP_ERR_PROTOCOL) {
        origin->ops->misbehaved(origin, &error);
    }
    if (err == EP_OK && origin->ops->admit != NULL) {
        err = origin->ops->admit(origin, call, frame, &error);
    }
    if (err == EP_OK) {
        err = find_method(call, &service, &error);
        const bool is_refused = err == EP_ERR_PERMISSION_DENIED;
        if (is_refused || (call->method != NULL && call->method->role == EP_ROLE_OPERATOR)) {
            audit_call(call, !is_refused);
        }
    }
    if (err == EP_OK) {
        err = check_admission(call, frame, calls, &error);
    }
    if (err == EP_OK) {
        err = ep_rpc_request_unpack(&call->budget, call->method->method->input,
                                    call->frame->data + EP_FRAME_FIXED_BYTES, frame->header_bytes,
                                    &call->call_header, &input, &error);
    }
    if (err != EP_OK) {
        ep_rpc_call_finish(call, err, &error);
        return;
    }
    service->invoke(service, call->method->method_index, input, ep_rpc_call_closure, call);
}
