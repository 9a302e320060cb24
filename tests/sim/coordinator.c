/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator: a real server for WatchPlacement, with real snapshots of tables made here. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "wire/placement_codec.h"
#include "world.h"

#define COORDINATOR_URL "sim://coordinator"

static void watcher_end(ep_sim_event *event, void *arg)
{
    watcher *w = arg;
    (void)event;
    for (watcher **at = &w->world->coordinator.watchers; *at != NULL; at = &(*at)->next) {
        if (*at == w) {
            *at = w->next;
            break;
        }
    }
    ep_sim_cancel(sim_env, &w->event);
    ep_rpc_call_finish(w->call, EP_ERR_CANCELLED, NULL);
    free(w);
}

static void on_cancel(void *arg, ep_rpc_call *call)
{
    watcher *w = arg;
    (void)call;
    ep_sim_post(sim_env, &w->event, 0);
}

static void watch_placement(Expertd__V1__Coordinator_Service *service,
                            const Expertd__V1__WatchPlacementRequest *in,
                            Expertd__V1__PlacementSnapshot_Closure closure, void *closure_data)
{
    sim_coordinator *coordinator = (sim_coordinator *)(void *)service;
    watcher *w = calloc(1, sizeof(*w));
    (void)in;
    *w = (watcher){
        .world = watched, .call = closure_data, .closure = closure, .next = coordinator->watchers};
    w->event = (ep_sim_event){.run = watcher_end, .arg = w};
    coordinator->watchers = w;
    if (coordinator->snapshot != NULL) {
        closure(coordinator->snapshot, w->call);
    }
    ep_rpc_call_on_cancel(w->call, on_cancel, w);
}

#define UNUSED_METHOD(name, Request, Reply)                                                        \
    static void name(Expertd__V1__Coordinator_Service *service, const Expertd__V1__##Request *in,  \
                     Expertd__V1__##Reply##_Closure closure, void *closure_data)                   \
    {                                                                                              \
        (void)service;                                                                             \
        (void)in;                                                                                  \
        (void)closure;                                                                             \
        ep_rpc_call_finish(closure_data, EP_ERR_UNIMPLEMENTED, NULL);                              \
    }
UNUSED_METHOD(register_node, RegisterRequest, RegisterReply)
UNUSED_METHOD(heartbeat, HeartbeatRequest, HeartbeatReply)
UNUSED_METHOD(statistics, StatisticsRequest, StatisticsReply)
UNUSED_METHOD(cluster_status, Empty, ClusterStatusReply)

void coordinator_start(world *w)
{
    sim_coordinator *c = &w->coordinator;
    if (c->running || c->dying) {
        return;
    }
    c->service = (Expertd__V1__Coordinator_Service)EXPERTD__V1__COORDINATOR__INIT();
    c->host = ep_sim_host(sim_env, COORDINATOR_URL);
    c->running = true;
    ep_sim_set_host_state(sim_env, c->host, EP_SIM_UP);
    ep_sim_host_id old = ep_sim_enter(sim_env, c->host);
    ep_timer_service_create("coordinator", &c->timers);
    SIM_CHECK(ep_buffer_pool_create(0, 0, &c->pool) == EP_OK, "no pool");
    c->server = world_serve("coordinator", "coordinator", c->timers, c->pool, &c->service.base,
                            COORDINATOR_URL);
    ep_sim_enter(sim_env, old);
    world_say(w, "the coordinator starts");
}

void coordinator_kill(world *w)
{
    sim_coordinator *c = &w->coordinator;
    if (!c->running) {
        return;
    }
    world_say(w, "the coordinator dies");
    c->running = false;
    c->dying = true;
    ep_sim_set_host_state(sim_env, c->host, EP_SIM_DEAD);
    ep_sim_host_id old = ep_sim_enter(sim_env, c->host);
    while (c->watchers != NULL) {
        watcher_end(NULL, c->watchers);
    }
    ep_rpc_server_destroy(c->server);
    ep_timer_service_destroy(c->timers);
    ep_buffer_pool_destroy(c->pool);
    if (c->snapshot != NULL) {
        ep_placement_snapshot_free(c->snapshot);
        c->snapshot = NULL;
    }
    ep_sim_enter(sim_env, old);
    c->dying = false;
}

static void note_table(world *w, ep_epoch epoch)
{
    SIM_CHECK(w->tables_count < EPOCHS_MAX, "more tables than EPOCHS_MAX");
    sim_table *table = &w->tables[w->tables_count++];
    table->epoch = epoch;
    memcpy(table->owners, w->owners, sizeof(w->owners));
}

void coordinator_publish(world *w, ep_epoch epoch)
{
    sim_coordinator *c = &w->coordinator;
    const char *names[NODES_MAX];
    const char *urls[NODES_MAX];
    uint32_t owners[EXPERTS_MAX] = {0};
    uint32_t count = 0;
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        if (w->nodes[n].leaving) {
            continue;
        }
        names[count] = w->nodes[n].name;
        urls[count] = w->nodes[n].url;
        for (uint32_t e = 0; e < w->shape.experts; e++) {
            owners[e] |= (w->owners[e] >> n & 1u) << count;
        }
        count++;
    }
    note_table(w, epoch);
    world_say(w, "table (%llu, %llu) of %u nodes", (unsigned long long)epoch.term,
              (unsigned long long)epoch.number, count);
    ep_routing_table *table = fake_table(epoch, &w->shape, names, urls, NULL, count, owners);
    if (c->snapshot != NULL) {
        ep_placement_snapshot_free(c->snapshot);
    }
    SIM_CHECK(ep_placement_encode(table, &c->snapshot) == EP_OK, "a table cannot be encoded");
    ep_routing_table_unref(table);
    ep_sim_host_id old = ep_sim_enter(sim_env, c->host);
    for (watcher *at = c->watchers; at != NULL; at = at->next) {
        at->closure(c->snapshot, at->call);
    }
    ep_sim_enter(sim_env, old);
}

void coordinator_publish_next(world *w)
{
    if (!w->coordinator.running) {
        return;
    }
    w->epoch.number++;
    coordinator_publish(w, w->epoch);
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        bool late = world_below(w, 4) == 0; /* a server may be behind */
        if (!late) {
            w->nodes[n].epoch = w->epoch;
        }
    }
}

/* The new owner has the expert before the table says so; the old one may drop it at once. */
void coordinator_move(world *w, uint32_t expert)
{
    uint32_t have = w->owners[expert];
    uint32_t from = (uint32_t)world_below(w, w->nodes_count);
    uint32_t to = (uint32_t)world_below(w, w->nodes_count);
    if (!w->coordinator.running || (have & 1u << from) == 0 || (have & 1u << to) != 0 ||
        w->nodes[to].leaving) {
        return;
    }
    w->nodes[to].owned |= 1u << expert;
    w->owners[expert] = (have & ~(1u << from)) | 1u << to;
    coordinator_publish_next(w);
    if (world_below(w, 2) == 0) {
        w->nodes[from].owned &= ~(1u << expert);
    }
}
