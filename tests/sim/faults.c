/* SPDX-License-Identifier: Apache-2.0 */
/* What goes wrong, when, and how it ends. */
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "world.h"

typedef struct fault_kind {
    const char *name;
    bool survived;        /* with two copies no call fails for it */
    uint64_t took_ms_max; /* nor takes longer, where it is the only fault; 0: as long as it must */
    void (*begin)(sim_fault *fault);
    void (*end)(sim_fault *fault);
} fault_kind;

static sim_node *node_of(sim_fault *fault)
{
    return &fault->world->nodes[fault->node];
}

/* Both directions between the node and each client. */
static void set_links(world *w, ep_sim_host_id node, const ep_sim_link *to_node,
                      const ep_sim_link *from_node)
{
    for (uint32_t i = 0; i < w->clients_count; i++) {
        ep_sim_set_link(sim_env, w->clients[i].host, node, to_node);
        ep_sim_set_link(sim_env, node, w->clients[i].host, from_node);
    }
}

static ep_sim_link plain_link(void)
{
    return (ep_sim_link){.delay_ns = 100 * EP_NS_PER_US, .jitter_ns = 50 * EP_NS_PER_US};
}

static void links_end(sim_fault *fault)
{
    ep_sim_link plain = plain_link();
    set_links(fault->world, node_of(fault)->host, &plain, &plain);
}

static void both_links(sim_fault *fault, const ep_sim_link *link)
{
    set_links(fault->world, node_of(fault)->host, link, link);
}

static void loss_begin(sim_fault *fault)
{
    ep_sim_link link = plain_link();
    link.loss_ppm = (uint32_t)world_between(fault->world, 10000, 200000);
    both_links(fault, &link);
}

static void delay_begin(sim_fault *fault)
{
    ep_sim_link link = plain_link();
    link.delay_ns = world_between(fault->world, MS, 50 * MS);
    link.jitter_ns = world_between(fault->world, 0, 100 * MS);
    both_links(fault, &link);
}

static void corrupt_begin(sim_fault *fault)
{
    ep_sim_link link = plain_link();
    link.corrupt_ppm = (uint32_t)world_between(fault->world, 10000, 300000);
    both_links(fault, &link);
}

static void truncate_begin(sim_fault *fault)
{
    ep_sim_link link = plain_link();
    link.truncate_ppm = (uint32_t)world_between(fault->world, 10000, 100000);
    both_links(fault, &link);
}

static void rate_begin(sim_fault *fault)
{
    ep_sim_link link = plain_link();
    link.bytes_per_s = world_between(fault->world, 20000, 200000);
    both_links(fault, &link);
}

static void cut_begin(sim_fault *fault)
{
    ep_sim_link cut = plain_link();
    cut.cut = true;
    both_links(fault, &cut);
}

static void cut_requests_begin(sim_fault *fault)
{
    ep_sim_link cut = plain_link();
    ep_sim_link plain = plain_link();
    cut.cut = true;
    set_links(fault->world, node_of(fault)->host, &cut, &plain);
}

static void cut_replies_begin(sim_fault *fault)
{
    ep_sim_link cut = plain_link();
    ep_sim_link plain = plain_link();
    cut.cut = true;
    set_links(fault->world, node_of(fault)->host, &plain, &cut);
}

/* Frames lost, repeated, overtaken and damaged inside connections. */
static void hostile_begin(sim_fault *fault)
{
    ep_sim_link link = plain_link();
    link.hostile = true;
    link.loss_ppm = (uint32_t)world_between(fault->world, 0, 100000);
    link.duplicate_ppm = (uint32_t)world_between(fault->world, 0, 500000);
    link.reorder_ppm = (uint32_t)world_between(fault->world, 0, 300000);
    link.corrupt_ppm = (uint32_t)world_between(fault->world, 0, 50000);
    both_links(fault, &link);
}

/* A reply comes twice, nothing else is wrong. */
static void duplicate_begin(sim_fault *fault)
{
    ep_sim_link plain = plain_link();
    ep_sim_link link = plain_link();
    link.hostile = true;
    link.duplicate_ppm = 1000000;
    set_links(fault->world, node_of(fault)->host, &plain, &link);
}

static void break_begin(sim_fault *fault)
{
    for (uint32_t i = 0; i < fault->world->clients_count; i++) {
        ep_sim_break(sim_env, fault->world->clients[i].host, node_of(fault)->host);
    }
}

static void nothing_end(sim_fault *fault)
{
    (void)fault;
}

static void kill_begin(sim_fault *fault)
{
    node_kill(node_of(fault));
}

static void start_end(sim_fault *fault)
{
    node_start(node_of(fault));
}

static void stop_begin(sim_fault *fault)
{
    if (node_of(fault)->running) {
        ep_sim_set_host_state(sim_env, node_of(fault)->host, EP_SIM_STOPPED);
    }
}

static void stop_end(sim_fault *fault)
{
    if (node_of(fault)->running) {
        ep_sim_set_host_state(sim_env, node_of(fault)->host, EP_SIM_UP);
    }
}

/* The others have failed their next requests when it is noticed, and are the only ones that can
 * serve. */
static void stop_beside_errors_begin(sim_fault *fault)
{
    world *w = fault->world;
    stop_begin(fault);
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        if (n != fault->node && w->nodes[n].fault == NODE_OK) {
            w->nodes[n].fault = NODE_FAIL_ONCE;
        }
    }
}

static void set_fault(sim_fault *fault, node_fault value)
{
    node_of(fault)->fault = value;
}

static void crash_before_begin(sim_fault *fault)
{
    set_fault(fault, NODE_CRASH_BEFORE);
}

static void crash_after_begin(sim_fault *fault)
{
    set_fault(fault, NODE_CRASH_AFTER);
}

static void crash_end(sim_fault *fault)
{
    set_fault(fault, NODE_OK);
    node_start(node_of(fault));
}

static void hang_begin(sim_fault *fault)
{
    set_fault(fault, NODE_HANG);
}

static void hang_end(sim_fault *fault)
{
    node_release(node_of(fault));
}

static void slow_begin(sim_fault *fault)
{
    set_fault(fault, NODE_SLOW);
}

static void refuse_begin(sim_fault *fault)
{
    set_fault(fault, NODE_REFUSE);
}

static void ok_end(sim_fault *fault)
{
    set_fault(fault, NODE_OK);
}

static void drain_begin(sim_fault *fault)
{
    if (node_of(fault)->running) {
        ep_rpc_server_set_state(node_of(fault)->server, "draining");
    }
}

static void drain_end(sim_fault *fault)
{
    node_kill(node_of(fault));
    node_start(node_of(fault));
}

static void moves_begin(sim_fault *fault)
{
    world *w = fault->world;
    for (uint32_t i = 0; i < 4; i++) {
        coordinator_move(w, (uint32_t)world_below(w, w->shape.experts));
    }
}

/* Its experts go to others first. */
static void leave_begin(sim_fault *fault)
{
    world *w = fault->world;
    sim_node *node = node_of(fault);
    uint32_t others = 0;
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        others += !w->nodes[n].leaving && n != node->index;
    }
    if (others == 0 || !w->coordinator.running) {
        return;
    }
    node->leaving = true;
    for (uint32_t e = 0; e < w->shape.experts; e++) {
        w->owners[e] &= ~(1u << node->index);
        for (uint32_t n = 0; n < w->nodes_count && w->owners[e] == 0; n++) {
            if (!w->nodes[n].leaving) {
                w->nodes[n].owned |= 1u << e;
                w->owners[e] |= 1u << n;
            }
        }
    }
    coordinator_publish_next(w);
}

static void join_end(sim_fault *fault)
{
    world *w = fault->world;
    sim_node *node = node_of(fault);
    if (!node->leaving || !w->coordinator.running) {
        return;
    }
    node->leaving = false;
    for (uint32_t e = 0; e < w->shape.experts; e++) {
        w->owners[e] |= (node->owned >> e & 1u) << node->index;
    }
    coordinator_publish_next(w);
}

static void coordinator_dies(sim_fault *fault)
{
    coordinator_kill(fault->world);
}

/* The one that was the coordinator before comes back, with its old term and a number that grew. */
static void old_coordinator_begin(sim_fault *fault)
{
    world *w = fault->world;
    if (!w->coordinator.running) {
        return;
    }
    coordinator_kill(w);
    coordinator_start(w);
    uint32_t owners[EXPERTS_MAX];
    memcpy(owners, w->owners, sizeof(owners));
    for (uint32_t e = 0; e < w->shape.experts; e++) {
        uint32_t n = 0;
        while ((w->owners[e] & 1u << n) == 0) {
            n++;
        }
        w->owners[e] = 1u << n; /* what it says is not quite what is */
    }
    coordinator_publish(w, (ep_epoch){w->epoch.term - 1, w->epoch.number + 1000 + w->tables_count});
    memcpy(w->owners, owners, sizeof(owners));
}

static void new_coordinator_end(sim_fault *fault)
{
    world *w = fault->world;
    coordinator_kill(w);
    coordinator_start(w);
    w->epoch = (ep_epoch){w->epoch.term + 1, 0};
    coordinator_publish_next(w);
}

static void coordinator_cut(sim_fault *fault)
{
    ep_sim_link cut = plain_link();
    cut.cut = true;
    set_links(fault->world, fault->world->coordinator.host, &cut, &cut);
    moves_begin(fault);
}

static void coordinator_uncut(sim_fault *fault)
{
    ep_sim_link plain = plain_link();
    set_links(fault->world, fault->world->coordinator.host, &plain, &plain);
}

/* One that refuses for long, and a network that breaks the lane's promise, cost calls: nothing else
 * is to be done for them. A node that hangs above its connection answers pings: what the budget for
 * hedges does not cover waits until it goes on. */
static const fault_kind kinds[] = {
    {"loss", true, 0, loss_begin, links_end},
    {"delay", true, 0, delay_begin, links_end},
    {"corruption", true, 0, corrupt_begin, links_end},
    {"truncation", true, 0, truncate_begin, links_end},
    {"slow link", true, 0, rate_begin, links_end},
    {"cut", true, 500, cut_begin, links_end},
    {"cut of requests", true, 0, cut_requests_begin, links_end},
    {"cut of replies", true, 500, cut_replies_begin, links_end},
    {"hostile network", false, 0, hostile_begin, links_end},
    {"duplicate replies", true, 0, duplicate_begin, links_end},
    {"broken connections", true, 50, break_begin, nothing_end},
    {"killed node", true, 50, kill_begin, start_end},
    {"stopped node", true, 500, stop_begin, stop_end},
    {"stopped node beside errors", true, 500, stop_beside_errors_begin, stop_end},
    {"crash before computing", true, 50, crash_before_begin, crash_end},
    {"crash after computing", true, 50, crash_after_begin, crash_end},
    {"hanging node", true, 0, hang_begin, hang_end},
    {"slow node", true, 100, slow_begin, ok_end},
    {"refusing node", false, 0, refuse_begin, ok_end},
    {"draining node", true, 50, drain_begin, drain_end},
    {"moves of experts", true, 0, moves_begin, moves_begin},
    {"node leaves", true, 0, leave_begin, join_end},
    {"dead coordinator", true, 0, coordinator_dies, new_coordinator_end},
    {"coordinator of an older term", true, 0, old_coordinator_begin, new_coordinator_end},
    {"cut coordinator", true, 0, coordinator_cut, coordinator_uncut},
};

void faults_check_took(const world *w)
{
    uint64_t ms_max = kinds[w->faults[0].kind].took_ms_max;
    SIM_CHECK(!w->single_fault || ms_max == 0 || w->took_ns_max <= ms_max * MS,
              "with %s a call took %.3f ms, more than %llu", fault_name(w->faults[0].kind),
              (double)w->took_ns_max / 1e6, (unsigned long long)ms_max);
}

const char *fault_name(uint32_t kind)
{
    return kinds[kind].name;
}

uint32_t faults_kinds(void)
{
    return (uint32_t)EP_ARRAY_COUNT(kinds);
}

static bool is_busy(const world *w)
{
    bool busy = w->coordinator.dying;
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        busy = busy || w->nodes[n].dying;
    }
    return busy;
}

static void end_fault(sim_fault *fault)
{
    if (fault->begun && !fault->over) {
        fault->over = true;
        world_say(fault->world, "end of: %s, node %u", kinds[fault->kind].name, fault->node);
        kinds[fault->kind].end(fault);
    }
}

static void fault_run(ep_sim_event *event, void *arg)
{
    sim_fault *fault = arg;
    (void)event;
    if (is_busy(fault->world)) { /* we are inside of the taking down of one: later */
        ep_sim_post(sim_env, &fault->event, ep_sim_now_ns(sim_env) + MS);
        return;
    }
    if (fault->begun) {
        end_fault(fault);
        return;
    }
    fault->begun = true;
    world_say(fault->world, "fault: %s, node %u", kinds[fault->kind].name, fault->node);
    ep_sim_post(sim_env, &fault->event, ep_sim_now_ns(sim_env) + fault->lasts_ns);
    kinds[fault->kind].begin(fault);
}

static uint32_t draw_kind(world *w)
{
    uint32_t kind;
    do {
        kind = (uint32_t)world_below(w, faults_kinds());
    } while (w->single_fault && !kinds[kind].survived);
    return kind;
}

void faults_draw(world *w, uint64_t span_ns)
{
    w->faults_count = w->single_fault ? 1 : (uint32_t)world_between(w, 3, FAULTS_MAX);
    for (uint32_t i = 0; i < w->faults_count; i++) {
        sim_fault *fault = &w->faults[i];
        *fault = (sim_fault){.world = w,
                             .kind = draw_kind(w),
                             .node = (uint32_t)world_below(w, w->nodes_count),
                             .lasts_ns = world_between(w, 10 * MS, 2500 * MS)};
        fault->event = (ep_sim_event){.run = fault_run, .arg = fault};
        ep_sim_post(sim_env, &fault->event, ep_sim_now_ns(sim_env) + world_below(w, span_ns));
    }
}

/* Everything is well from now on. Outside of events. */
void faults_heal(world *w)
{
    world_say(w, "everything heals");
    for (uint32_t i = 0; i < w->faults_count; i++) {
        ep_sim_cancel(sim_env, &w->faults[i].event);
    }
    while (is_busy(w)) {
        ep_sim_run_one(sim_env);
    }
    ep_sim_link plain = plain_link();
    for (uint32_t i = 0; i < w->faults_count; i++) {
        end_fault(&w->faults[i]);
    }
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        sim_node *node = &w->nodes[n];
        ep_sim_set_host_state(sim_env, node->host, node->running ? EP_SIM_UP : EP_SIM_DEAD);
        node_start(node);
        node_release(node);
        node->fault = NODE_OK;
        node->leaving = false;
        set_links(w, node->host, &plain, &plain);
    }
    set_links(w, w->coordinator.host, &plain, &plain);
    sim_fault last = {.world = w};
    new_coordinator_end(&last);
}
