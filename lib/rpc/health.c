/* SPDX-License-Identifier: Apache-2.0 */
/* The built-in Health service: the state of ep_rpc_server_set_state, once or as a stream. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "rpc/rpc_server.h"

static const char *const states[] = {"starting", "serving", "draining", "degraded"};

static void send_state(ep_rpc_call *call, const char *state)
{
    Expertd__V1__HealthCheckReply reply = EXPERTD__V1__HEALTH_CHECK_REPLY__INIT;
    /* as in gRPC: 0 unknown, 1 serving, 2 not serving; a degraded process still serves */
    reply.status = strcmp(state, "serving") == 0 || strcmp(state, "degraded") == 0 ? 1 : 2;
    reply.detail = ep_rpc_unconst(state);
    ep_rpc_call_closure(&reply.base, call);
}

/* Finishes the call with NOT_FOUND when the service it names is unknown: "" is the whole process,
 * other names are full names of registered services. */
static bool refuse_unknown(const char *name, ep_rpc_call *call)
{
    const ep_rpc_server *server = call->origin->server;
    bool is_served = name[0] == 0;
    for (size_t i = 0; i < server->services_count && !is_served; i++) {
        is_served = strcmp(server->services[i]->descriptor->name, name) == 0;
    }
    if (is_served) {
        return false;
    }
    ep_error error;
    ep_err err = ep_error_set(&error, EP_ERR_NOT_FOUND,
                              "service \"%.100s\" is not served by this process", name);
    ep_rpc_call_finish(call, err, &error);
    return true;
}

static void health__check(Expertd__V1__Health_Service *service,
                          const Expertd__V1__HealthCheckRequest *input,
                          Expertd__V1__HealthCheckReply_Closure closure, void *closure_data)
{
    ep_rpc_health *health = (ep_rpc_health *)(void *)service;
    ep_rpc_call *call = closure_data;
    (void)closure;
    if (refuse_unknown(input->service, call)) {
        return;
    }
    pthread_mutex_lock(&health->lock);
    const char *state = health->state;
    pthread_mutex_unlock(&health->lock);
    send_state(call, state);
    ep_rpc_call_finish(call, EP_OK, NULL);
}

static void watch_ended(void *arg, ep_rpc_call *call)
{
    ep_rpc_health_watcher *watcher = arg;
    ep_rpc_health *health = &call->origin->server->health;
    pthread_mutex_lock(&health->lock);
    ep_rpc_health_watcher **at = &health->watchers;
    while (*at != watcher) {
        at = &(*at)->next;
    }
    *at = watcher->next;
    pthread_mutex_unlock(&health->lock);
    free(watcher);
    ep_rpc_call_finish(call, EP_ERR_CANCELLED, NULL);
}

static void health__watch(Expertd__V1__Health_Service *service,
                          const Expertd__V1__HealthCheckRequest *input,
                          Expertd__V1__HealthCheckReply_Closure closure, void *closure_data)
{
    ep_rpc_health *health = (ep_rpc_health *)(void *)service;
    ep_rpc_call *call = closure_data;
    (void)closure;
    if (refuse_unknown(input->service, call)) {
        return;
    }
    ep_rpc_health_watcher *watcher = calloc(1, sizeof(*watcher));
    if (watcher == NULL) {
        ep_rpc_call_finish(call, EP_ERR_NO_MEMORY, NULL);
        return;
    }
    watcher->call = call;
    pthread_mutex_lock(&health->lock);
    watcher->next = health->watchers;
    health->watchers = watcher;
    /* under the lock, so that states are sent in the order in which they were set */
    send_state(call, health->state);
    pthread_mutex_unlock(&health->lock);
    ep_rpc_call_on_cancel(call, watch_ended, watcher); /* the only way that this call ends */
}

void ep_rpc_health_set_state(ep_rpc_health *health, const char *state)
{
    const char *known = NULL;
    for (size_t i = 0; i < EP_ARRAY_COUNT(states); i++) {
        if (strcmp(states[i], state) == 0) {
            known = states[i];
        }
    }
    EP_ASSERT(known != NULL);
    pthread_mutex_lock(&health->lock);
    if (health->state != known) {
        health->state = known;
        for (ep_rpc_health_watcher *watcher = health->watchers; watcher != NULL;
             watcher = watcher->next) {
            send_state(watcher->call, known);
        }
    }
    pthread_mutex_unlock(&health->lock);
}

void ep_rpc_health_init(ep_rpc_health *health)
{
    health->service = (Expertd__V1__Health_Service)EXPERTD__V1__HEALTH__INIT(health__);
    health->state = states[0];
    pthread_mutex_init(&health->lock, NULL);
}

void ep_rpc_health_fini(ep_rpc_health *health)
{
    EP_ASSERT(health->watchers == NULL); /* their connections are gone */
    pthread_mutex_destroy(&health->lock);
}
