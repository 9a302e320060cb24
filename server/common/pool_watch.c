/* SPDX-License-Identifier: Apache-2.0 */
/* See pool_watch.h. */
#include "common/pool_watch.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"

#define LOOK_MS 1000u
#define LOG_NS (10000 * EP_NS_PER_MS)
#define RECENT_NS (5000 * EP_NS_PER_MS)

static void look(void *arg)
{
    ep_pool_watch *watch = arg;
    ep_rpc_share shares[EP_RPC_SHARES];
    uint64_t now_ns = ep_clock_now_ns();
    ep_rpc_server_read_shares(watch->server, shares);
    for (size_t i = 0; i < EP_RPC_SHARES; i++) {
        uint64_t refused = shares[i].refusals;
        if (refused != watch->shares[i].seen) {
            watch->shares[i].seen = refused;
            __atomic_store_n(&watch->shares[i].refused_ns, now_ns, __ATOMIC_RELAXED);
        }
        bool due = watch->shares[i].logged_ns == 0 || now_ns - watch->shares[i].logged_ns >= LOG_NS;
        if (refused != watch->shares[i].logged && due) {
            ep_log(EP_LOG_WARN, "pool-exhausted", EP_KV(share, shares[i].name),
                   EP_KV(refused, refused - watch->shares[i].logged),
                   EP_KV(lent_bytes, shares[i].lent_bytes),
                   EP_KV(limit_bytes, shares[i].limit_bytes),
                   EP_KV(held_most_by, shares[i].address[0] != 0 ? shares[i].address : NULL),
                   EP_KV(reason, "frames want more memory than the share has"),
                   EP_KV(hint, "raise buffer_bytes_max, or let callers send less at once"));
            watch->shares[i].logged = refused;
            watch->shares[i].logged_ns = now_ns;
        }
    }
}

ep_err ep_pool_watch_start(ep_pool_watch *watch, ep_service_loop *loop, ep_rpc_server *server)
{
    *watch = (ep_pool_watch){.server = server};
    ep_err err = ep_service_loop_timer_create(loop, look, watch, &watch->timer);
    if (err == EP_OK) {
        ep_loop_timer_start(watch->timer, LOOK_MS, LOOK_MS);
    }
    return err;
}

ep_probe_check ep_pool_watch_check(const ep_pool_watch *watch)
{
    ep_probe_check check = {.name = "buffers", .ok = true};
    ep_rpc_share shares[EP_RPC_SHARES];
    uint64_t now_ns = ep_clock_now_ns();
    snprintf(check.text, sizeof(check.text), "there is memory for frames");
    ep_rpc_server_read_shares(watch->server, shares);
    /* the first one, the total, decides last */
    for (size_t i = EP_RPC_SHARES; i-- > 0;) {
        uint64_t refused_ns = __atomic_load_n(&watch->shares[i].refused_ns, __ATOMIC_RELAXED);
        if (refused_ns != 0 && now_ns - refused_ns < RECENT_NS) {
            check.ok = i != EP_RPC_SHARE_ALL;
            snprintf(check.text, sizeof(check.text), "exhausted: share %s, %llu of %llu bytes lent",
                     shares[i].name, (unsigned long long)shares[i].lent_bytes,
                     (unsigned long long)shares[i].limit_bytes);
        }
    }
    return check;
}

void ep_pool_watch_collect(const ep_pool_watch *watch, ep_metrics *metrics)
{
    ep_rpc_share shares[EP_RPC_SHARES];
    ep_rpc_server_read_shares(watch->server, shares);
    for (size_t i = 0; i < EP_RPC_SHARES; i++) {
        const ep_metric_label label = {"share", shares[i].name};
        ep_gauge_set(metrics, "expertd_buffer_share_bytes",
                     "Memory of frames lent now, by who may use it; "
                     "client_address: by the address that holds most",
                     &label, 1, (double)shares[i].lent_bytes);
        ep_gauge_set(metrics, "expertd_buffer_share_limit_bytes", "The most of it", &label, 1,
                     (double)shares[i].limit_bytes);
        ep_counter_set(metrics, "expertd_buffer_share_refused_total",
                       "Requests for it that found none", &label, 1, shares[i].refusals);
    }
}
