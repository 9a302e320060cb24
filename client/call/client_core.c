/* SPDX-License-Identifier: Apache-2.0 */
/* Uses of a client, and lists of its calls under one short lock. */
#include "call/client_core.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/clock.h"
#include "call/call.h"

void ep_call_registry_init(ep_call_registry *out_registry, uint32_t running_max)
{
    *out_registry = (ep_call_registry){.running_max = running_max};
    pthread_mutex_init(&out_registry->lock, NULL);
    pthread_cond_init(&out_registry->idle, NULL);
    TAILQ_INIT(&out_registry->waiting);
}

/* ---- uses ---- */

/* ep_client_destroy has ended everything that runs; the last prepared call frees the memory. */
void ep_client_unref(ep_client *client)
{
    if (__atomic_fetch_sub(&client->refs, 1, __ATOMIC_ACQ_REL) != 1) {
        return;
    }
    pthread_mutex_destroy(&client->registry.lock);
    pthread_cond_destroy(&client->registry.idle);
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
    if (__atomic_load_n(&client->registry.closing, __ATOMIC_ACQUIRE)) {
        ep_client_leave(client);
        return ep_error_set(out_error, EP_ERR_CLOSED, "the client is being destroyed");
    }
    return EP_OK;
}

void ep_client_leave(ep_client *client)
{
    ep_call_registry *registry = &client->registry;
    if (__atomic_fetch_sub(&registry->uses, 1, __ATOMIC_ACQ_REL) == 1 &&
        __atomic_load_n(&registry->closing, __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&registry->lock);
        pthread_cond_broadcast(&registry->idle);
        pthread_mutex_unlock(&registry->lock);
    }
    ep_client_unref(client);
}

/* ---- lists ---- */

ep_err ep_call_registry_add(ep_call_registry *registry, ep_call *call, ep_error *out_error)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&registry->lock);
    if (registry->closing) {
        err = EP_ERR_CLOSED;
    } else if (registry->running_count >= registry->running_max) {
        err = EP_ERR_RESOURCE_EXHAUSTED;
    } else {
        LIST_INSERT_HEAD(&registry->running, call, links.entry);
        registry->running_count++;
        call->links.running = true;
        call->links.cancelled = false;
    }
    pthread_mutex_unlock(&registry->lock);
    if (err == EP_ERR_CLOSED) {
        return ep_error_set(out_error, err, "the client is being destroyed");
    }
    if (err != EP_OK) {
        return ep_error_set(out_error, err,
                            "%" PRIu32 " calls are in flight: allowed calls_max, %" PRIu32,
                            registry->running_max, registry->running_max);
    }
    return EP_OK;
}

static void stop_waiting(ep_call_registry *registry, ep_call *call)
{
    TAILQ_REMOVE(&registry->waiting, call, links.waiting_entry);
    call->links.waiting = false;
}

void ep_call_registry_remove(ep_call_registry *registry, ep_call *call)
{
    pthread_mutex_lock(&registry->lock);
    if (call->links.waiting) {
        stop_waiting(registry, call);
    }
    if (call->links.running) {
        LIST_REMOVE(call, links.entry);
        registry->running_count--;
        call->links.running = false;
    }
    pthread_mutex_unlock(&registry->lock);
}

bool ep_call_registry_wait(ep_call_registry *registry, ep_call *call, uint64_t seen)
{
    pthread_mutex_lock(&registry->lock);
    bool current = registry->wake_generation == seen;
    if (current && !call->links.waiting) {
        call->links.waiting = true;
        call->links.waiting_since = seen;
        TAILQ_INSERT_TAIL(&registry->waiting, call, links.waiting_entry);
    }
    pthread_mutex_unlock(&registry->lock);
    return current;
}

uint64_t ep_call_registry_wake(ep_call_registry *registry)
{
    pthread_mutex_lock(&registry->lock);
    uint64_t generation = __atomic_add_fetch(&registry->wake_generation, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_unlock(&registry->lock);
    return generation;
}

ep_call *ep_call_registry_next_woken(ep_call_registry *registry, uint64_t generation)
{
    pthread_mutex_lock(&registry->lock);
    ep_call *call = TAILQ_FIRST(&registry->waiting);
    /* Calls that began to wait after the wake are behind, with this generation. */
    if (call != NULL && call->links.waiting_since < generation) {
        stop_waiting(registry, call);
        ep_call_use(call); /* a waiting call is running, so it is alive */
    } else {
        call = NULL;
    }
    pthread_mutex_unlock(&registry->lock);
    return call;
}

ep_call *ep_call_registry_take_spare(ep_call_registry *registry)
{
    pthread_mutex_lock(&registry->lock);
    ep_call *call = LIST_FIRST(&registry->spare);
    if (call != NULL) {
        LIST_REMOVE(call, links.entry);
        registry->spare_count--;
        registry->spare_bytes -= call->links.spare_bytes;
    }
    pthread_mutex_unlock(&registry->lock);
    return call;
}

bool ep_call_registry_keep_spare(ep_call_registry *registry, ep_call *call, size_t bytes)
{
    pthread_mutex_lock(&registry->lock);
    bool keep = !registry->closing && registry->spare_count < EP_CALLS_SPARE_MAX &&
                bytes <= EP_CALLS_SPARE_BYTES_MAX - registry->spare_bytes;
    if (keep) {
        LIST_INSERT_HEAD(&registry->spare, call, links.entry);
        registry->spare_count++;
        registry->spare_bytes += bytes;
        call->links.spare_bytes = bytes;
    }
    pthread_mutex_unlock(&registry->lock);
    return keep;
}

void ep_call_registry_close(ep_call_registry *registry)
{
    pthread_mutex_lock(&registry->lock);
    __atomic_store_n(&registry->closing, true, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&registry->lock);
}

ep_call *ep_call_registry_next_to_cancel(ep_call_registry *registry)
{
    pthread_mutex_lock(&registry->lock);
    ep_call *call = LIST_FIRST(&registry->running);
    while (call != NULL && call->links.cancelled) {
        call = LIST_NEXT(call, links.entry);
    }
    if (call != NULL) {
        call->links.cancelled = true;
        ep_call_use(call);
    }
    pthread_mutex_unlock(&registry->lock);
    return call;
}

bool ep_call_registry_wait_idle(ep_call_registry *registry, uint64_t timeout_us)
{
    uint64_t until_ns = ep_clock_now_ns() + timeout_us * EP_NS_PER_US;
    pthread_mutex_lock(&registry->lock);
    while (__atomic_load_n(&registry->uses, __ATOMIC_ACQUIRE) > 0 &&
           ep_clock_wait(&registry->idle, &registry->lock, until_ns)) {
    }
    bool idle = __atomic_load_n(&registry->uses, __ATOMIC_ACQUIRE) == 0;
    pthread_mutex_unlock(&registry->lock);
    return idle;
}
