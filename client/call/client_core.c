/* SPDX-License-Identifier: Apache-2.0 */
/* References to a client, and whether it may still be used. */
#include "call/client_core.h"

#include <stdlib.h>

/* Everything that runs has ended in ep_client_destroy; the memory goes with the last prepared
 * call. */
void ep_client_unref(ep_client *client)
{
    if (__atomic_fetch_sub(&client->refs, 1, __ATOMIC_ACQ_REL) != 1) {
        return;
    }
    ep_call_registry_fini(&client->registry);
    ep_rpc_credentials_destroy(client->credentials);
    ep_client_config_free(&client->config);
    ep_fork_guard_fini(&client->guard);
    free(client);
}

ep_err ep_client_enter(ep_client *client, ep_error *out_error)
{
    if (client == NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "client is NULL");
    }
    if (ep_fork_guard_in_child(&client->guard)) {
        return ep_error_set(
            out_error, EP_ERR_FAILED_PRECONDITION,
            "this process was forked from the one that made the client: a child makes its own");
    }
    ep_client_use(client);
    if (ep_call_registry_is_closing(&client->registry)) {
        ep_client_leave(client);
        return ep_error_set(out_error, EP_ERR_CLOSED, "the client is being destroyed");
    }
    return EP_OK;
}

void ep_client_leave(ep_client *client)
{
    ep_call_registry *registry = &client->registry;
    if (__atomic_fetch_sub(&registry->uses, 1, __ATOMIC_ACQ_REL) == 1 &&
        ep_call_registry_is_closing(registry)) {
        ep_call_registry_tell_idle(registry);
    }
    ep_client_unref(client);
}
