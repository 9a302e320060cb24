/* SPDX-License-Identifier: Apache-2.0 */
/* One seed from begin to end. */
#include "world.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/random.h"

#define START_NS (1000 * EP_NS_PER_S)
#define FAULTS_SPAN_NS (6 * EP_NS_PER_S)
#define STEPS_MAX 1000000ull /* a hundred times what a seed takes */

world *watched;

uint64_t world_below(world *w, uint64_t bound)
{
    return ep_splitmix64(&w->random) % bound;
}

uint64_t world_between(world *w, uint64_t low, uint64_t high)
{
    return low + world_below(w, high - low + 1);
}

void world_say(world *w, const char *format, ...)
{
    if (!w->verbose) {
        return;
    }
    va_list args;
    printf("%12.6f  ", (double)(ep_sim_now_ns(sim_env) - START_NS) / 1e9);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

static void draw_world(world *w)
{
    w->single_fault = world_below(w, 4) == 0;
    w->busy = world_below(w, 4) == 0;
    w->copies = (uint32_t)world_between(w, w->single_fault ? 2 : 1, 3);
    w->nodes_count = (uint32_t)world_between(w, w->copies, NODES_MAX);
    w->clients_count = (uint32_t)world_between(w, 1, CLIENTS_MAX);
    w->callers_count = (uint32_t)world_between(w, 1, CALLERS_MAX);
    w->shape = (ep_layer_shape){.layer = 3,
                                .hidden = 8 * (uint32_t)world_between(w, 1, HIDDEN_MAX / 8),
                                .inner = 8,
                                .experts = (uint32_t)world_between(w, 4, EXPERTS_MAX),
                                .top_k = 2};
    w->epoch = (ep_epoch){1 + world_below(w, 5), 0};
}

static void place_experts(world *w)
{
    for (uint32_t e = 0; e < w->shape.experts; e++) {
        uint32_t first = (uint32_t)world_below(w, w->nodes_count);
        for (uint32_t c = 0; c < w->copies; c++) {
            uint32_t n = (first + c) % w->nodes_count;
            w->owners[e] |= 1u << n;
            w->nodes[n].owned |= 1u << e;
        }
    }
}

static void run_callers(world *w, const char *what)
{
    uint64_t steps = 0;
    while (w->busy_callers > 0) {
        SIM_CHECK(ep_sim_run_one(sim_env),
                  "%s: nothing is left to happen, and calls have not ended", what);
        SIM_CHECK(++steps < STEPS_MAX, "%s: calls have not ended after %llu events", what,
                  STEPS_MAX);
        for (uint32_t i = 0; i < w->clients_count; i++) {
            for (uint32_t k = 0; k < w->callers_count; k++) {
                const sim_caller *caller = &w->clients[i].callers[k];
                SIM_CHECK(!caller->busy ||
                              ep_sim_now_ns(sim_env) <= caller->deadline_ns + EP_NS_PER_S,
                          "%s: a call has not ended a second after its deadline", what);
            }
        }
    }
}

static void close_world(world *w)
{
    ep_sim_run_until(sim_env, ep_sim_now_ns(sim_env) + 5 * EP_NS_PER_S); /* what is late comes */
    callers_check_outs(w);
    for (uint32_t i = 0; i < w->clients_count; i++) {
        client_stop(w, i);
    }
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        node_kill(&w->nodes[n]);
    }
    coordinator_kill(w);
    while (ep_sim_run_one(sim_env)) { /* connections that nobody holds any more */
    }
}

sim_outcome world_run(uint64_t seed, bool verbose)
{
    world *w = calloc(1, sizeof(*w));
    SIM_CHECK(w != NULL && ep_sim_create(seed, START_NS, &sim_env) == EP_OK, "no memory");
    watched = w;
    w->seed = seed;
    w->random = seed * 0x9e3779b97f4a7c15ull + 1;
    w->random_stream = ~w->random; /* others draw what they drew without it */
    w->verbose = verbose;
    draw_world(w);
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        node_init(w, n);
    }
    place_experts(w);
    for (uint32_t n = 0; n < w->nodes_count; n++) {
        node_start(&w->nodes[n]);
    }
    coordinator_start(w);
    coordinator_publish_next(w);
    for (uint32_t i = 0; i < w->clients_count; i++) {
        client_start(w, i);
    }
    world_say(w, "%u nodes, %u copies, %u experts, %u clients with %u callers%s", w->nodes_count,
              w->copies, w->shape.experts, w->clients_count, w->callers_count,
              w->single_fault ? ", one fault" : "");
    faults_draw(w, FAULTS_SPAN_NS);
    callers_start(w, (uint32_t)world_between(w, w->busy ? 100 : 10, w->busy ? 400 : 50),
                  w->single_fault);
    run_callers(w, "under faults");
    faults_check_took(w);
    world_say(w, "the slowest call took %.3f ms", (double)w->took_ns_max / 1e6);
    faults_heal(w);
    ep_sim_run_until(sim_env, ep_sim_now_ns(sim_env) + 2 * EP_NS_PER_S);
    callers_start(w, 2, true);
    run_callers(w, "after healing");
    close_world(w);
    ep_sim_stats stats;
    ep_sim_read_stats(sim_env, &stats);
    world_say(w, "%llu frames hedged, %llu sent again, %llu late replies",
              (unsigned long long)w->hedged_frames, (unsigned long long)w->rerouted_frames,
              (unsigned long long)w->late_replies);
    world_say(w,
              "%llu calls well, %llu failed, %llu requests, %llu events, %llu frames, %llu damaged",
              (unsigned long long)w->calls_ok, (unsigned long long)w->calls_failed,
              (unsigned long long)w->requests, (unsigned long long)stats.events,
              (unsigned long long)stats.frames, (unsigned long long)stats.corrupted);
    world_say(w, "%llu calls streamed in %llu ranges, %llu of them failed behind the first",
              (unsigned long long)w->calls_streamed, (unsigned long long)w->ranges,
              (unsigned long long)w->calls_delivered);
    const sim_outcome outcome = {.hash = ep_sim_trace_hash(sim_env),
                                 .calls_streamed = w->calls_streamed,
                                 .calls_delivered = w->calls_delivered,
                                 .hedged_frames = w->hedged_frames,
                                 .rerouted_frames = w->rerouted_frames};
    ep_sim_destroy(sim_env);
    sim_env = NULL;
    watched = NULL;
    free(w);
    return outcome;
}
