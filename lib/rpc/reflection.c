/* SPDX-License-Identifier: Apache-2.0 */
/* The built-in Reflection service: which services and methods this process serves. */
#include "base/check.h"
#include "rpc/rpc_server.h"

#define METHODS_MAX 64 /* rows of methods.def; asserted below */

static void fill_method(const ep_rpc_method *method, Expertd__V1__MethodInfo *out)
{
    expertd__v1__method_info__init(out);
    out->name = ep_rpc_unconst(method->method->name);
    out->id = method->id;
    out->input = ep_rpc_unconst(method->method->input->name);
    out->output = ep_rpc_unconst(method->method->output->name);
    out->server_stream = method->stream == EP_RPC_SERVER_STREAM;
    out->role = ep_rpc_unconst(ep_rpc_role_name(method->role));
    out->idempotent = method->idempotent;
}

static void reflection__list_services(Expertd__V1__Reflection_Service *service,
                                      const Expertd__V1__Empty *input,
                                      Expertd__V1__ListServicesReply_Closure closure,
                                      void *closure_data)
{
    const ep_rpc_server *server = ((ep_rpc_call *)closure_data)->origin->server;
    Expertd__V1__ListServicesReply reply = EXPERTD__V1__LIST_SERVICES_REPLY__INIT;
    Expertd__V1__ServiceInfo services[EP_RPC_SERVICES_MAX];
    Expertd__V1__ServiceInfo *service_list[EP_RPC_SERVICES_MAX];
    Expertd__V1__MethodInfo methods[METHODS_MAX];
    Expertd__V1__MethodInfo *method_list[METHODS_MAX];
    size_t used = 0;
    size_t count;
    const ep_rpc_method *all = ep_rpc_methods(&count);
    (void)service;
    (void)input;
    EP_ASSERT(count <= METHODS_MAX);
    for (size_t i = 0; i < server->services_count; i++) {
        Expertd__V1__ServiceInfo *info = &services[i];
        expertd__v1__service_info__init(info);
        info->name = ep_rpc_unconst(server->services[i]->descriptor->name);
        info->methods = &method_list[used];
        for (size_t m = 0; m < count; m++) {
            if (all[m].service == server->services[i]->descriptor) {
                fill_method(&all[m], &methods[used]);
                method_list[used] = &methods[used];
                info->n_methods++;
                used++;
            }
        }
        service_list[i] = info;
    }
    reply.services = service_list;
    reply.n_services = server->services_count;
    closure(&reply, closure_data);
    ep_rpc_call_finish(closure_data, EP_OK, NULL);
}

void ep_rpc_reflection_init(Expertd__V1__Reflection_Service *reflection)
{
    *reflection = (Expertd__V1__Reflection_Service)EXPERTD__V1__REFLECTION__INIT(reflection__);
}
