/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes: real servers; what they compute is fake_expert. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "moe/convert.h"
#include "wire/forward_codec.h"
#include "world.h"

#define COMPUTE_MIN_NS (50 * EP_NS_PER_US)
#define COMPUTE_MAX_NS (2 * EP_NS_PER_MS)
#define RETRY_AFTER_US 5000

static void job_free(node_job *job)
{
    ep_sim_cancel(sim_env, &job->event);
    *(job->previous != NULL ? &job->previous->next : &job->node->jobs) = job->next;
    if (job->next != NULL) {
        job->next->previous = job->previous;
    }
    free(job);
}

static void finish(node_job *job, ep_err code, const ep_error *error)
{
    ep_rpc_call *call = job->call;
    job_free(job);
    ep_rpc_call_finish(call, code, error);
}

static void finish_error(node_job *job, ep_err code, int32_t expert, uint64_t retry_after_us)
{
    ep_error error;
    ep_error_set(&error, code, "simulated");
    error.expert = expert;
    error.retry_after_us = retry_after_us;
    snprintf(error.node, sizeof(error.node), "%s", job->node->name);
    finish(job, code, &error);
}

static const sim_table *find_table(const world *w, ep_epoch epoch)
{
    for (uint32_t i = w->tables_count; i-- > 0;) {
        if (w->tables[i].epoch.term == epoch.term && w->tables[i].epoch.number == epoch.number) {
            return &w->tables[i];
        }
    }
    return NULL;
}

/* A request goes only where the table of its epoch says. */
static void check_routing(const sim_node *node, const Expertd__V1__ForwardRequest *in,
                          const ep_forward_view *view)
{
    ep_epoch epoch =
        in->epoch != NULL ? (ep_epoch){in->epoch->term, in->epoch->number} : (ep_epoch){0, 0};
    const sim_table *table = find_table(node->world, epoch);
    SIM_CHECK(table != NULL, "a request carries the epoch (%llu, %llu), which was never published",
              (unsigned long long)epoch.term, (unsigned long long)epoch.number);
    for (uint32_t s = 0; s < view->slots; s++) {
        uint32_t expert = view->wire_slots[s].expert;
        SIM_CHECK((table->owners[expert] & 1u << node->index) != 0,
                  "expert %u was asked of %s, which the table (%llu, %llu) does not name", expert,
                  node->name, (unsigned long long)epoch.term, (unsigned long long)epoch.number);
    }
}

static void compute(node_job *job, const ep_forward_view *view)
{
    ep_buffer *tensors = NULL;
    size_t row_bytes = view->hidden * ep_dtype_bytes(view->reply_dtype);
    float row[HIDDEN_MAX];
    if (ep_buffer_acquire(ep_rpc_call_incoming(job->call)->pool, view->slots * row_bytes + 1,
                          &tensors) != EP_OK) {
        finish_error(job, EP_ERR_RESOURCE_EXHAUSTED, -1, RETRY_AFTER_US);
        return;
    }
    tensors->bytes = view->slots * row_bytes;
    for (uint32_t s = 0; s < view->slots; s++) {
        ep_row_widen(view->x + view->wire_slots[s].row * view->x_row_bytes, view->x_dtype,
                     view->hidden, row);
        fake_expert(view->wire_slots[s].expert, row, view->hidden, view->reply_dtype,
                    tensors->data + s * row_bytes);
    }
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    reply.slots = view->slots;
    reply.hidden = view->hidden;
    reply.dtype = view->reply_dtype;
    reply.numerics = (char *)(uintptr_t)FAKE_NUMERICS;
    ep_rpc_call_attach(job->call, tensors);
    job->closure(&reply, job->call);
    finish(job, EP_OK, NULL);
}

static ep_err missing_code(const sim_node *node, const Expertd__V1__ForwardRequest *in)
{
    ep_epoch asked =
        in->epoch != NULL ? (ep_epoch){in->epoch->term, in->epoch->number} : (ep_epoch){0, 0};
    return world_epoch_older(asked, node->epoch) ? EP_ERR_STALE_EPOCH : EP_ERR_NOT_OWNER;
}

static void answer(ep_sim_event *event, void *arg)
{
    node_job *job = arg;
    sim_node *node = job->node;
    ep_forward_view view;
    ep_error error;
    (void)event;
    const ep_rpc_incoming *asked = ep_rpc_call_incoming(job->call);
    if (ep_rpc_call_is_cancelled(job->call)) {
        finish_error(job, EP_ERR_CANCELLED, -1, 0);
        return;
    }
    if (node->fault == NODE_HANG) {
        return; /* until it is released, cancelled, or the node dies */
    }
    ep_err err = ep_forward_view_make(job->in, asked->tensors, asked->tensor_bytes,
                                      &node->world->shape, &view, &error);
    SIM_CHECK(err == EP_OK, "a request that passed its checksum is malformed: %s", error.text);
    check_routing(node, job->in, &view);
    for (uint32_t s = 0; s < view.slots; s++) {
        if ((node->owned & 1u << view.wire_slots[s].expert) == 0) {
            finish_error(job, missing_code(node, job->in), (int32_t)view.wire_slots[s].expert, 0);
            return;
        }
    }
    if (node->fault == NODE_CRASH_AFTER) {
        node->fault = NODE_OK;
        ep_sim_post(sim_env, &node->kill_event, 0);
        return;
    }
    compute(job, &view);
}

static void on_cancel(void *arg, ep_rpc_call *call)
{
    node_job *job = arg;
    (void)call;
    ep_sim_post(sim_env, &job->event, 0);
}

static void forward(Expertd__V1__ExpertService_Service *service,
                    const Expertd__V1__ForwardRequest *in,
                    Expertd__V1__ForwardReply_Closure closure, void *closure_data)
{
    sim_node *node = (sim_node *)(void *)service;
    world *w = node->world;
    node_job *job = calloc(1, sizeof(*job));
    *job = (node_job){.node = node, .call = closure_data, .in = in, .closure = closure};
    job->event = (ep_sim_event){.run = answer, .arg = job};
    job->next = node->jobs;
    if (node->jobs != NULL) {
        node->jobs->previous = job;
    }
    node->jobs = job;
    w->requests++;
    uint64_t took_ns =
        world_between(w, COMPUTE_MIN_NS, COMPUTE_MAX_NS) * (node->fault == NODE_SLOW ? 10 : 1);
    if (node->fault == NODE_REFUSE) {
        finish_error(job, EP_ERR_RESOURCE_EXHAUSTED, -1, RETRY_AFTER_US);
        return;
    }
    if (node->fault == NODE_FAIL_ONCE) {
        node->fault = NODE_OK;
        finish_error(job, EP_ERR_UNAVAILABLE, -1, 0);
        return;
    }
    if (node->fault == NODE_CRASH_BEFORE) {
        node->fault = NODE_OK;
        ep_sim_post(sim_env, &node->kill_event, 0);
        return;
    }
    ep_sim_post(sim_env, &job->event, ep_sim_now_ns(sim_env) + took_ns);
    ep_rpc_call_on_cancel(job->call, on_cancel, job);
}

static void describe(Expertd__V1__ExpertService_Service *service, const Expertd__V1__Empty *in,
                     Expertd__V1__DescribeReply_Closure closure, void *closure_data)
{
    (void)service;
    (void)in;
    (void)closure;
    ep_rpc_call_finish(closure_data, EP_ERR_UNIMPLEMENTED, NULL);
}

ep_rpc_server *world_serve(const char *name, const char *role, ep_timer_service *timers,
                           ep_buffer_pool *pool, ProtobufCService *service, const char *url)
{
    ep_error error;
    ep_rpc_server *server = NULL;
    ep_rpc_server_config config = {.common = {.timers = timers,
                                              .pool = pool,
                                              .token = "",
                                              .node = name,
                                              .role = role,
                                              .incarnation = ep_sim_random(sim_env),
                                              .payload_crc = true}};
    ep_rpc_limits_default(&config.common.limits);
    if (ep_rpc_server_create(&config, &server, &error) != EP_OK ||
        ep_rpc_server_add_service(server, service, &error) != EP_OK ||
        ep_rpc_server_listen(server, &(ep_lane_address){.url = url}, EP_ROLES_MAIN, &error) !=
            EP_OK) {
        SIM_FAIL("%s cannot serve: %s", name, error.text);
    }
    ep_rpc_server_set_state(server, "serving");
    return server;
}

static void kill_run(ep_sim_event *event, void *arg)
{
    (void)event;
    node_kill(arg);
}

void node_init(world *w, uint32_t index)
{
    sim_node *node = &w->nodes[index];
    *node = (sim_node){.service = EXPERTD__V1__EXPERT_SERVICE__INIT(), .world = w, .index = index};
    snprintf(node->name, sizeof(node->name), "n%u", index);
    snprintf(node->url, sizeof(node->url), "sim://n%u", index);
    node->host = ep_sim_host(sim_env, node->url);
    node->kill_event = (ep_sim_event){.run = kill_run, .arg = node};
}

void node_start(sim_node *node)
{
    if (node->running || node->dying) {
        return;
    }
    ep_sim_set_host_state(sim_env, node->host, EP_SIM_UP);
    ep_sim_host_id old = ep_sim_enter(sim_env, node->host);
    node->running = true;
    node->fault = NODE_OK;
    ep_timer_service_create("node", &node->timers);
    SIM_CHECK(ep_buffer_pool_create(0, 0, &node->pool) == EP_OK, "no pool");
    node->server =
        world_serve(node->name, "node", node->timers, node->pool, &node->service.base, node->url);
    ep_sim_enter(sim_env, old);
    world_say(node->world, "%s starts", node->name);
}

void node_kill(sim_node *node)
{
    if (!node->running) {
        return;
    }
    world_say(node->world, "%s dies", node->name);
    node->running = false;
    node->dying = true;
    ep_sim_cancel(sim_env, &node->kill_event);
    ep_sim_set_host_state(sim_env, node->host, EP_SIM_DEAD);
    ep_sim_host_id old = ep_sim_enter(sim_env, node->host);
    while (node->jobs != NULL) {
        /* to nobody: its connections have ended */
        finish_error(node->jobs, EP_ERR_UNAVAILABLE, -1, 0);
    }
    ep_rpc_server_destroy(node->server);
    ep_timer_service_destroy(node->timers);
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(node->pool, &stats);
    SIM_CHECK(stats.lent_bytes == 0, "%s leaves %llu bytes of buffers lent", node->name,
              (unsigned long long)stats.lent_bytes);
    ep_buffer_pool_destroy(node->pool);
    ep_sim_enter(sim_env, old);
    node->dying = false;
}

void node_release(sim_node *node)
{
    if (node->fault != NODE_HANG) {
        return;
    }
    node->fault = NODE_OK;
    ep_sim_host_id old = ep_sim_enter(sim_env, node->host);
    for (node_job *job = node->jobs; job != NULL; job = job->next) {
        ep_sim_post(sim_env, &job->event, 0);
    }
    ep_sim_enter(sim_env, old);
}
