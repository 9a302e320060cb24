/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Membership against a coordinator that the test plays: registers, loads what it is assigned,
 * reports it, keeps old experts until the new table is in force, and registers again with a new
 * coordinator. The event loop runs on the test's main thread.
 */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "coordinator.pb-c.h"
#include "expertd/membership.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"

#define EXPERTS 8

typedef struct coordinator {
    Expertd__V1__Coordinator_Service base;
    ep_rpc_server *server;
    /* script, guarded by lock */
    ep_epoch epoch;
    ep_epoch committed;
    uint32_t experts[EXPERTS]; /* of layer 0 */
    size_t experts_count;
    const char *neighbour; /* of the node, at tcp://there:1; NULL none */
    uint32_t window_us;    /* of the policy; 0: there is none */
    bool asks_again;       /* the next heartbeat is told to register */
    size_t loses_owned; /* the next heartbeat that says so many experts are owned fails; 0 none */
    /* what was seen */
    int registered;
    int heartbeats;
    ep_epoch reported;
    uint32_t owned[EXPERTS];
    size_t owned_count;
    char state[16];
    bool counts_told; /* all that report() counts */
} coordinator;

static struct rig {
    char dir[EP_FIXTURE_PATH_BYTES];
    char url[64];
    ep_node_model_config model_config;
    ep_node_config config;
    ep_backend *backend;
    ep_weight_store *store;
    ep_node_models models;
    ep_node_epoch epoch;
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_common common;
    ep_service_loop *loop;
    ep_membership *membership;
    ep_loop_task weights_task;
    ep_loop_timer *look;
    pthread_mutex_t lock;
    coordinator coordinator;
    const char *state;
    int step;
    char neighbours[64];       /* as the node was told last */
    uint32_t policy_window_us; /* the same; UINT32_MAX: not set */
} rig;

/* ---- the coordinator ---- */

static Expertd__V1__Epoch wire_epoch(ep_epoch epoch)
{
    Expertd__V1__Epoch wire = EXPERTD__V1__EPOCH__INIT;
    wire.term = epoch.term;
    wire.number = epoch.number;
    return wire;
}

static Expertd__V1__NodeAssignment wire_assignment(coordinator *c)
{
    Expertd__V1__NodeAssignment assignment = EXPERTD__V1__NODE_ASSIGNMENT__INIT;
    assignment.model = (char *)(uintptr_t) "demo";
    assignment.layer = 0;
    assignment.experts = c->experts;
    assignment.n_experts = c->experts_count;
    return assignment;
}

static Expertd__V1__Neighbour wire_neighbour(const coordinator *c)
{
    Expertd__V1__Neighbour neighbour = EXPERTD__V1__NEIGHBOUR__INIT;
    neighbour.node = (char *)(uintptr_t)c->neighbour;
    neighbour.url = (char *)(uintptr_t) "tcp://there:1";
    return neighbour;
}

static void serve_register_node(Expertd__V1__Coordinator_Service *s,
                                const Expertd__V1__RegisterRequest *in,
                                Expertd__V1__RegisterReply_Closure closure, void *data)
{
    coordinator *c = (coordinator *)(void *)s;
    Expertd__V1__RegisterReply reply = EXPERTD__V1__REGISTER_REPLY__INIT;
    pthread_mutex_lock(&rig.lock);
    cr_expect_str_eq(in->node, "n1");
    cr_expect_str_eq(in->url, "tcp://here:1");
    cr_expect_eq(in->incarnation, 77);
    cr_expect_eq(in->n_models, 1);
    cr_expect_str_eq(in->models[0]->name, "demo");
    Expertd__V1__Epoch epoch = wire_epoch(c->epoch), committed = wire_epoch(c->committed);
    Expertd__V1__NodeAssignment assignment = wire_assignment(c), *list = &assignment;
    Expertd__V1__Neighbour neighbour = wire_neighbour(c), *neighbours = &neighbour;
    reply.neighbours = &neighbours;
    reply.n_neighbours = c->neighbour != NULL;
    reply.node_id = 9;
    reply.heartbeat_ms = EP_HEARTBEAT_MS_MIN;
    reply.epoch = &epoch;
    reply.committed = &committed;
    reply.assignments = &list;
    reply.n_assignments = 1;
    c->registered++;
    closure(&reply, data);
    pthread_mutex_unlock(&rig.lock);
    ep_rpc_call_finish(data, EP_OK, NULL);
}

static void note_heartbeat(coordinator *c, const Expertd__V1__HeartbeatRequest *in)
{
    c->heartbeats++;
    c->reported = (ep_epoch){in->epoch->term, in->epoch->number};
    snprintf(c->state, sizeof(c->state), "%s", in->state);
    c->counts_told = in->rows_served == 5 && in->requests_failed == 4 && in->requests_hedged == 3 &&
                     in->requests_refused == 2;
    if (in->n_models > 0) {
        const Expertd__V1__LayerInfo *layer = in->models[0]->layers[0];
        c->owned_count = layer->n_owned;
        for (size_t i = 0; i < layer->n_owned && i < EXPERTS; i++) {
            c->owned[i] = layer->owned[i];
        }
    }
}

static void serve_heartbeat(Expertd__V1__Coordinator_Service *s,
                            const Expertd__V1__HeartbeatRequest *in,
                            Expertd__V1__HeartbeatReply_Closure closure, void *data)
{
    coordinator *c = (coordinator *)(void *)s;
    Expertd__V1__HeartbeatReply reply = EXPERTD__V1__HEARTBEAT_REPLY__INIT;
    pthread_mutex_lock(&rig.lock);
    if (c->loses_owned != 0 && in->n_models > 0 &&
        in->models[0]->layers[0]->n_owned == c->loses_owned) {
        c->loses_owned = 0;
        pthread_mutex_unlock(&rig.lock);
        ep_error error;
        ep_error_set(&error, EP_ERR_UNAVAILABLE, "not now");
        ep_rpc_call_finish(data, error.code, &error);
        return;
    }
    note_heartbeat(c, in);
    Expertd__V1__Epoch epoch = wire_epoch(c->epoch), committed = wire_epoch(c->committed);
    Expertd__V1__NodeAssignment assignment = wire_assignment(c), *list = &assignment;
    Expertd__V1__Neighbour neighbour = wire_neighbour(c), *neighbours = &neighbour;
    reply.neighbours = &neighbours;
    reply.n_neighbours = c->neighbour != NULL;
    reply.epoch = &epoch;
    reply.committed = &committed;
    Expertd__V1__NodePolicy policy = EXPERTD__V1__NODE_POLICY__INIT;
    policy.revision = 3;
    policy.has_step_group_us = true;
    policy.step_group_us = c->window_us;
    reply.policy = c->window_us != 0 ? &policy : NULL;
    reply.reregister = c->asks_again;
    c->asks_again = false;
    if (ep_epoch_compare(c->reported, c->epoch) != 0) {
        reply.has_assignments = true;
        reply.assignments = &list;
        reply.n_assignments = 1;
    }
    closure(&reply, data);
    pthread_mutex_unlock(&rig.lock);
    ep_rpc_call_finish(data, EP_OK, NULL);
}

static void serve_watch_placement(Expertd__V1__Coordinator_Service *s,
                                  const Expertd__V1__WatchPlacementRequest *in,
                                  Expertd__V1__PlacementSnapshot_Closure closure, void *data)
{
    (void)s;
    (void)in;
    (void)closure;
    ep_rpc_call_finish(data, EP_ERR_UNIMPLEMENTED, NULL);
}

static void serve_statistics(Expertd__V1__Coordinator_Service *service,
                             const Expertd__V1__StatisticsRequest *request,
                             Expertd__V1__StatisticsReply_Closure closure, void *closure_data)
{
    (void)service;
    (void)request;
    (void)closure;
    ep_rpc_call_finish(closure_data, EP_ERR_UNIMPLEMENTED, NULL);
}

static void serve_cluster_status(Expertd__V1__Coordinator_Service *s, const Expertd__V1__Empty *in,
                                 Expertd__V1__ClusterStatusReply_Closure closure, void *data)
{
    (void)s;
    (void)in;
    (void)closure;
    ep_rpc_call_finish(data, EP_ERR_UNIMPLEMENTED, NULL);
}

static void start_coordinator(void)
{
    ep_error e;
    ep_lane_address address = {.url = rig.url};
    ep_rpc_server_config config = {.common = rig.common};
    config.common.node = "c";
    config.common.role = "coordinator";
    rig.coordinator.base = (Expertd__V1__Coordinator_Service)EXPERTD__V1__COORDINATOR__INIT(serve_);
    ASSERT_OK(ep_rpc_server_create(&config, &rig.coordinator.server, &e), e);
    ASSERT_OK(ep_rpc_server_add_service(rig.coordinator.server, &rig.coordinator.base.base, &e), e);
    ep_rpc_server_set_state(rig.coordinator.server, "serving");
    ASSERT_OK(ep_rpc_server_listen(rig.coordinator.server, &address, EP_ROLES_MAIN, &e), e);
}

static void assign(ep_epoch epoch, ep_epoch committed, uint32_t first, size_t count)
{
    pthread_mutex_lock(&rig.lock);
    rig.coordinator.epoch = epoch;
    rig.coordinator.committed = committed;
    rig.coordinator.experts_count = count;
    for (size_t i = 0; i < count; i++) {
        rig.coordinator.experts[i] = first + (uint32_t)i;
    }
    pthread_mutex_unlock(&rig.lock);
}

static coordinator seen(void)
{
    pthread_mutex_lock(&rig.lock);
    coordinator c = rig.coordinator;
    pthread_mutex_unlock(&rig.lock);
    return c;
}

/* ---- the node ---- */

static void on_weights(void *arg)
{
    (void)arg;
    ep_service_loop_post(rig.loop, &rig.weights_task);
}

static void weights_on_loop(void *arg)
{
    (void)arg;
    ep_membership_on_weights(rig.membership);
}

static void report(void *arg, Expertd__V1__HeartbeatRequest *out, ep_membership_texts *texts)
{
    (void)arg;
    (void)texts;
    out->state = (char *)(uintptr_t)rig.state;
    out->rows_served = 5;
    out->requests_failed = 4;
    out->requests_hedged = 3;
    out->requests_refused = 2;
}

static void ignore(void *arg)
{
    (void)arg;
}

static void note_neighbours(void *arg, Expertd__V1__Neighbour *const *neighbours, size_t count)
{
    (void)arg;
    rig.neighbours[0] = 0;
    for (size_t i = 0; i < count; i++) {
        size_t n = strlen(rig.neighbours);
        snprintf(rig.neighbours + n, sizeof(rig.neighbours) - n, "%s=%s ", neighbours[i]->node,
                 neighbours[i]->url);
    }
}

static void note_policy(void *arg, const Expertd__V1__NodePolicy *policy)
{
    (void)arg;
    rig.policy_window_us =
        policy != NULL && policy->has_step_group_us ? policy->step_group_us : UINT32_MAX;
}

static void on_stop(void *arg, const char *name)
{
    (void)arg;
    (void)name;
    ep_service_loop_quit(rig.loop);
}

static void setup(void)
{
    ep_error e;
    ep_fixture_config fixture = ep_fixture_default();
    pthread_mutex_init(&rig.lock, NULL);
    rig.state = "serving";
    ep_fixture_new(&fixture, rig.dir);
    snprintf(rig.url, sizeof(rig.url), "loopback://coordinator-%d", (int)getpid());
    ep_backend_config backend = {.threads = 1};
    ASSERT_OK(ep_backend_by_name("reference")->open(&backend, &rig.backend, &e), e);
    rig.model_config =
        (ep_node_model_config){.name = "demo", .path = rig.dir, .choice = EP_EXPERTS_ASSIGNED};
    rig.config = (ep_node_config){.models_count = 1, .models = &rig.model_config};
    ep_node_epoch_init(&rig.epoch);
    ep_service_loop_handler handler = {.on_stop = on_stop};
    ASSERT_OK(ep_service_loop_create(&handler, &rig.loop, &e), e);
    rig.weights_task = (ep_loop_task){.func = weights_on_loop};
    ep_weight_store_config store = {
        .backends = &rig.backend, .backends_count = 1, .on_change = on_weights};
    cr_assert_eq(ep_weight_store_create(&store, &rig.store, &e), EP_OK);
    ASSERT_OK(ep_node_models_open(&rig.models, &rig.config, &rig.backend, 1, rig.store, NULL, &e),
              e);
    cr_assert_eq(ep_weight_store_start(rig.store, &e), EP_OK);
    cr_assert_eq(ep_timer_service_create("rig", &rig.timers), EP_OK);
    cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &rig.pool), EP_OK);
    rig.common = (ep_rpc_common){.timers = rig.timers,
                                 .pool = rig.pool,
                                 .token = "",
                                 .node = "n1",
                                 .role = "node",
                                 .incarnation = 77,
                                 .payload_crc = true};
    ep_rpc_limits_default(&rig.common.limits);
}

static void start_membership(void)
{
    ep_error e;
    ep_membership_config config = {.coordinator_url = rig.url,
                                   .node_url = "tcp://here:1",
                                   .common = &rig.common,
                                   .drop_grace_ms = 1,
                                   .loop = rig.loop,
                                   .models = &rig.models,
                                   .store = rig.store,
                                   .epoch = &rig.epoch,
                                   .report = report,
                                   .on_change = ignore,
                                   .on_neighbours = note_neighbours,
                                   .on_policy = note_policy};
    ASSERT_OK(ep_membership_create(&config, &rig.membership, &e), e);
}

static void teardown(void)
{
    ep_membership_destroy(rig.membership);
    ep_rpc_server_destroy(rig.coordinator.server);
    ep_weight_store_destroy(rig.store);
    ep_node_models_close(&rig.models);
    if (rig.backend != NULL) {
        rig.backend->ops->close(rig.backend);
    }
    ep_buffer_pool_destroy(rig.pool);
    ep_timer_service_destroy(rig.timers);
    ep_service_loop_destroy(rig.loop);
    ep_fixture_remove(rig.dir);
}

TestSuite(membership, .init = setup, .fini = teardown, .timeout = 60);

/* Runs the loop until condition() holds; it is looked at every few milliseconds of the loop's own
 * time. */
static bool (*condition)(void);
static void look(void *arg)
{
    (void)arg;
    if (condition()) {
        ep_service_loop_quit(rig.loop);
    }
}

static void run_until(bool (*func)(void))
{
    condition = func;
    if (rig.look == NULL) {
        cr_assert_eq(ep_service_loop_timer_create(rig.loop, look, NULL, &rig.look), EP_OK);
        ep_loop_timer_start(rig.look, 1, 2);
    }
    ep_service_loop_run(rig.loop);
}

static bool reported_1_1(void)
{
    coordinator c = seen();
    return c.reported.number == 1 && c.owned_count == 3;
}

static bool reported_1_2(void)
{
    coordinator c = seen();
    return c.reported.number == 2 && c.heartbeats > rig.step;
}

static bool dropped(void)
{
    coordinator c = seen();
    return c.owned_count == 2;
}

Test(membership, assignments_are_loaded_reported_and_old_experts_go_after_the_commit)
{
    ep_membership_view view;
    start_coordinator();
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, 0, 3); /* experts 0 1 2 */
    start_membership();
    run_until(reported_1_1);
    coordinator c = seen();
    cr_expect_eq(c.registered, 1);
    cr_expect_eq(c.owned[2], 2);
    cr_expect_str_eq(c.state, "serving");
    cr_expect(c.counts_told);
    ep_membership_read(rig.membership, &view);
    cr_expect(view.is_connected);
    cr_expect(view.was_assigned);
    cr_expect_eq(view.node_id, 9);

    assign((ep_epoch){1, 2}, (ep_epoch){1, 1}, 2, 2); /* prepare: experts 2 3; 0 and 1 are still
                                                         needed by 1.1 */
    rig.step = seen().heartbeats + 5;
    run_until(reported_1_2);
    cr_expect_eq(seen().owned_count, 4, "nothing goes before the new table is in force");
    cr_expect_eq(ep_node_epoch_loaded(&rig.epoch).number, 2);
    cr_expect_eq(ep_node_epoch_in_force(&rig.epoch).number, 1);

    assign((ep_epoch){1, 2}, (ep_epoch){1, 2}, 2, 2); /* commit */
    run_until(dropped);
    c = seen();
    cr_expect_eq(c.owned[0], 2);
    cr_expect_eq(c.owned[1], 3);
    cr_expect_eq(ep_node_epoch_in_force(&rig.epoch).number, 2);
}

static bool told_of_window(void)
{
    return rig.policy_window_us == 7000;
}

static bool told_of_no_window(void)
{
    return rig.policy_window_us == UINT32_MAX;
}

static void set_window(uint32_t window_us)
{
    pthread_mutex_lock(&rig.lock);
    rig.coordinator.window_us = window_us;
    pthread_mutex_unlock(&rig.lock);
}

Test(membership, the_policy_comes_with_heartbeats_and_goes_with_them)
{
    start_coordinator();
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, 0, 3);
    start_membership();
    run_until(told_of_no_window);
    set_window(7000);
    run_until(told_of_window);
    set_window(0);
    run_until(told_of_no_window);
}

static bool told_of_n2(void)
{
    return strcmp(rig.neighbours, "n2=tcp://there:1 ") == 0;
}

static bool told_of_n3(void)
{
    return strcmp(rig.neighbours, "n3=tcp://there:1 ") == 0;
}

static bool heartbeats_passed(void)
{
    return seen().heartbeats > rig.step;
}

/* Clients still go by the former table, so a coordinator without one takes no neighbour away. */
Test(membership, neighbours_follow_the_coordinator_once_it_has_a_table)
{
    start_coordinator();
    rig.coordinator.neighbour = "n2";
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, 0, 3);
    start_membership();
    run_until(told_of_n2);
    pthread_mutex_lock(&rig.lock);
    rig.coordinator.neighbour = "n3";
    pthread_mutex_unlock(&rig.lock);
    run_until(told_of_n3);
    pthread_mutex_lock(&rig.lock);
    rig.coordinator.neighbour = NULL;
    rig.coordinator.committed = (ep_epoch){0};
    rig.step = rig.coordinator.heartbeats + 3;
    pthread_mutex_unlock(&rig.lock);
    run_until(heartbeats_passed);
    cr_expect_str_eq(rig.neighbours, "n3=tcp://there:1 ");
}

Test(membership, what_a_failed_heartbeat_told_is_told_again)
{
    start_coordinator();
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, 0, 3);
    rig.coordinator.loses_owned = 3;
    start_membership();
    run_until(reported_1_1);
    cr_expect_eq(seen().loses_owned, 0u);
}

static bool registered_twice(void)
{
    return seen().registered == 2 && seen().heartbeats > rig.step;
}

Test(membership, registers_again_when_told_to)
{
    start_coordinator();
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, 0, 3);
    start_membership();
    run_until(reported_1_1);
    pthread_mutex_lock(&rig.lock);
    rig.coordinator.asks_again = true;
    rig.step = rig.coordinator.heartbeats + 2;
    pthread_mutex_unlock(&rig.lock);
    run_until(registered_twice);
}

static bool lost(void)
{
    ep_membership_view view;
    ep_membership_read(rig.membership, &view);
    return !view.is_connected;
}

Test(membership, a_lost_coordinator_changes_nothing_and_a_new_one_is_joined)
{
    start_coordinator();
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, 0, 3);
    start_membership();
    run_until(reported_1_1);
    ep_rpc_server_destroy(rig.coordinator.server);
    rig.coordinator.server = NULL;
    run_until(lost);
    uint32_t owned[EXPERTS];
    cr_expect_eq(ep_weight_store_owned(rig.store, 0, owned, NULL), 3,
                 "experts stay without a coordinator");
    start_coordinator();
    rig.step = seen().heartbeats;
    run_until(registered_twice);
    cr_expect_eq(seen().owned_count, 3);
}

static bool draining_seen(void)
{
    ep_membership_view view;
    ep_membership_read(rig.membership, &view);
    return view.said_draining;
}

Test(membership, draining_is_said_at_once)
{
    start_coordinator();
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, 0, 3);
    start_membership();
    run_until(reported_1_1);
    rig.state = "draining";
    ep_membership_hurry(rig.membership);
    run_until(draining_seen);
    cr_expect_str_eq(seen().state, "draining");
}

static bool reported_nothing_but_assigned(void)
{
    ep_membership_view view;
    ep_membership_read(rig.membership, &view);
    return view.was_assigned && seen().owned_count == 1 && seen().heartbeats > rig.step;
}

Test(membership, an_assignment_beyond_the_model_is_ignored_where_it_is_wrong)
{
    start_coordinator();
    /* 7, and 8 and 9, which do not exist */
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, EXPERTS - 1, 3);
    start_membership();
    rig.step = 3;
    run_until(reported_nothing_but_assigned);
    cr_expect_eq(seen().owned[0], EXPERTS - 1);
}

static bool settled_with_failures(void)
{
    ep_weight_stats stats;
    ep_weight_store_read_stats(rig.store, &stats);
    return stats.pending_count == 0 && stats.failed_count > 0;
}

Test(membership, an_expert_that_cannot_load_does_not_hold_back_the_others)
{
    char path[EP_FIXTURE_PATH_BYTES + 32];
    ep_weight_stats stats;
    snprintf(path, sizeof(path), "%s/model.safetensors", rig.dir);
    start_coordinator();
    assign((ep_epoch){1, 1}, (ep_epoch){1, 1}, 0, 3);
    start_membership();
    run_until(reported_1_1);
    cr_assert_eq(truncate(path, 4096), 0);
    /* 3 to 7 are to be read from what is left */
    assign((ep_epoch){1, 2}, (ep_epoch){1, 1}, 0, EXPERTS);
    run_until(settled_with_failures);
    rig.step = seen().heartbeats + 3;
    run_until(heartbeats_passed);
    ep_weight_store_read_stats(rig.store, &stats);
    cr_expect_eq(stats.resident_count, 3);
    coordinator c = seen();
    cr_expect_eq(c.reported.number, 2, "the assignment is reported as loaded");
    cr_expect_eq(c.owned_count, stats.resident_count, "with what there is");
    cr_expect_eq(ep_node_epoch_loaded(&rig.epoch).number, 2);
    cr_expect_str_neq(stats.last_error, "");
}
