/* SPDX-License-Identifier: Apache-2.0 */
/* The method registry: rows of methods.def joined with the generated descriptors, once per
 * process. */
#include <pthread.h>
#include <string.h>

#include "admin.pb-c.h"
#include "base/check.h"
#include "coordinator.pb-c.h"
#include "expert.pb-c.h"
#include "gateway.pb-c.h"
#include "health.pb-c.h"
#include "rpc/rpc.h"

static const ProtobufCServiceDescriptor *const services[] = {
    &expertd__v1__expert_service__descriptor, &expertd__v1__node_info__descriptor,
    &expertd__v1__coordinator__descriptor,    &expertd__v1__health__descriptor,
    &expertd__v1__reflection__descriptor,     &expertd__v1__gateway__descriptor,
    &expertd__v1__admin__descriptor,          &expertd__v1__weight_files__descriptor,
};

static const struct {
    uint16_t id;
    const char *service;
    const char *method;
    ep_rpc_stream stream;
    ep_rpc_role role;
    bool idempotent;
} rows[] = {
#define EP_METHOD(service_number, method_number, service, method, stream, role, idempotent)        \
    {(service_number) << 8 | (method_number),                                                      \
     service,                                                                                      \
     method,                                                                                       \
     EP_RPC_##stream,                                                                              \
     EP_ROLE_##role,                                                                               \
     idempotent},
#include "methods.def"
#undef EP_METHOD
};

static ep_rpc_method methods[EP_ARRAY_COUNT(rows)];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void join_row(size_t index)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(services); i++) {
        if (strcmp(services[i]->name, rows[index].service) != 0) {
            continue;
        }
        const ProtobufCMethodDescriptor *method =
            protobuf_c_service_descriptor_get_method_by_name(services[i], rows[index].method);
        EP_ASSERT(method != NULL); /* methods.def names a method that its .proto does not have */
        methods[index] = (ep_rpc_method){
            .id = rows[index].id,
            .service = services[i],
            .method = method,
            .method_index = (uint32_t)(method - services[i]->methods),
            .stream = rows[index].stream,
            .role = rows[index].role,
            .idempotent = rows[index].idempotent,
        };
        return;
    }
    EP_ASSERT(!"methods.def names a service that is not generated");
}

static void join(void)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(rows); i++) {
        join_row(i);
    }
}

const ep_rpc_method *ep_rpc_methods(size_t *out_count)
{
    pthread_once(&once, join);
    *out_count = EP_ARRAY_COUNT(methods);
    return methods;
}

const ep_rpc_method *ep_rpc_method_by_id(uint16_t id)
{
    pthread_once(&once, join);
    for (size_t i = 0; i < EP_ARRAY_COUNT(methods); i++) {
        if (methods[i].id == id) {
            return &methods[i];
        }
    }
    return NULL;
}

const ep_rpc_method *ep_rpc_method_by_name(const char *service, const char *method)
{
    pthread_once(&once, join);
    for (size_t i = 0; i < EP_ARRAY_COUNT(methods); i++) {
        if (strcmp(methods[i].service->name, service) == 0 &&
            strcmp(methods[i].method->name, method) == 0) {
            return &methods[i];
        }
    }
    return NULL;
}
