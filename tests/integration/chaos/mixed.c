/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All nodes and the coordinator behind bad wires, all kinds of faults at once, calls, heartbeats,
 * registrations and tables alike. Calls may fail, by their deadline and with a reason; no bit is
 * ever wrong. After each round the faults end and every call succeeds. Rounds go on until no
 * daemon's memory grows any more.
 */
#include <stdio.h>

#include "base/check.h"
#include "chaos_fixture.h"

#define CALLS_ONLY (1u << EP_FRAME_REQUEST | 1u << EP_FRAME_REPLY)
#define BOTH (EP_CHAOS_TO_SERVER | EP_CHAOS_TO_CLIENT)
#define DEADLINE_US 700000

/* Memory is flat when no daemon grows by more than this in FLAT_ROUNDS rounds on end, after a
   warm-up as long as it takes. */
enum {
    RSS_GROWTH_KIB_MAX = 1024,
    FLAT_ROUNDS = 4,
    FLAT_ROUNDS_LONG = 30,
    ROUNDS_MAX = 400,
    ROUND_CALLS = 300,
    SANITIZED_ROUND_CALLS = 100
};

static const ep_chaos_rule node_rules[] = {
    {EP_CHAOS_DELAY, BOTH, .rate = 100, .amount_min = 1, .amount_max = 30},
    {EP_CHAOS_HOLD, BOTH, .rate = 50, .amount_min = 1, .amount_max = 6},
    {EP_CHAOS_SWAP, BOTH, .rate = 50},
    {EP_CHAOS_SPLIT, BOTH, .rate = 50, .amount_min = 16, .amount_max = 512},
    {EP_CHAOS_DUPLICATE, EP_CHAOS_TO_CLIENT, .rate = 50},
    {EP_CHAOS_DUPLICATE, EP_CHAOS_TO_SERVER, .rate = 20},
    {EP_CHAOS_STALL, BOTH, .rate = 5, .amount_min = 20, .amount_max = 100},
    {EP_CHAOS_RESET, BOTH, .rate = 10},
    {EP_CHAOS_TRUNCATE, BOTH, .rate = 10},
    {EP_CHAOS_FLIP_FIXED, BOTH, .rate = 10},
    {EP_CHAOS_FLIP_HEADER, BOTH, .rate = 50},
    {EP_CHAOS_FLIP_TENSORS, BOTH, .rate = 50},
    {EP_CHAOS_DROP, BOTH, CALLS_ONLY, .rate = 20},
    {EP_CHAOS_LIE_CALL, EP_CHAOS_TO_CLIENT, .rate = 20},
    {EP_CHAOS_LIE_NO_CALL, EP_CHAOS_TO_CLIENT, .rate = 20},
    {EP_CHAOS_LIE_ATTEMPT, EP_CHAOS_TO_CLIENT, .rate = 20},
    {EP_CHAOS_LIE_METHOD, EP_CHAOS_TO_CLIENT, .rate = 10},
    {EP_CHAOS_LIE_SEQUENCE, EP_CHAOS_TO_CLIENT, .rate = 50},
    {EP_CHAOS_LIE_SLOTS, BOTH, .rate = 50},
    {EP_CHAOS_LIE_HIDDEN, BOTH, .rate = 50},
    {EP_CHAOS_LIE_DTYPE, BOTH, .rate = 50},
    {EP_CHAOS_LIE_NUMERICS, BOTH, .rate = 50},
    {EP_CHAOS_LIE_ROWS, BOTH, .rate = 50},
    {EP_CHAOS_LIE_HEADER, EP_CHAOS_TO_CLIENT, .rate = 50},
    {EP_CHAOS_CUT, BOTH, CALLS_ONLY, .rate = 10, .limit = 1},
};

/* Few frames go there. */
static const ep_chaos_rule coordinator_rules[] = {
    {EP_CHAOS_DELAY, BOTH, .rate = 500, .amount_min = 1, .amount_max = 100},
    {EP_CHAOS_DUPLICATE, BOTH, .rate = 300},
    {EP_CHAOS_SPLIT, BOTH, .rate = 500, .amount_min = 1, .amount_max = 64},
    {EP_CHAOS_RESET, BOTH, .rate = 200},
    {EP_CHAOS_TRUNCATE, BOTH, .rate = 200},
    {EP_CHAOS_FLIP_FIXED, BOTH, .rate = 200},
    {EP_CHAOS_FLIP_HEADER, BOTH, .rate = 300},
    {EP_CHAOS_DROP, BOTH, .rate = 300},
    {EP_CHAOS_CUT, BOTH, .rate = 50, .limit = 1},
};

static void set_rules(chaos_fixture *f, bool on)
{
    for (uint32_t i = 0; i < FAULT_NODES; i++) {
        ep_chaos_proxy_set_rules(f->proxies[i], node_rules, on ? EP_ARRAY_COUNT(node_rules) : 0);
    }
    ep_chaos_proxy_set_rules(f->proxies[CHAOS_COORDINATOR], coordinator_rules,
                             on ? EP_ARRAY_COUNT(coordinator_rules) : 0);
}

static void run_round(chaos_fixture *f, bool first, chaos_counts *sum)
{
    const chaos_allowed allowed = {.unanswered = true, .unavailable = true, .refused = true};
    chaos_counts before;
    chaos_counts after;
    chaos_run *run = chaos_run_start(f, DEADLINE_US, &allowed);
    chaos_run_wait_succeeded(run, 50);
    uint64_t victim_in_flight =
        first ? ep_test_cluster_wait_in_flight(&f->faults.cluster, FAULT_VICTIM) : 1;
    uint32_t in_flight = chaos_run_in_flight(run);
    chaos_run_read(run, &before);
    set_rules(f, true);
    const uint32_t more = ep_test_sanitized ? SANITIZED_ROUND_CALLS : ROUND_CALLS;
    chaos_run_wait_succeeded(run, first ? FAULT_FINISHED_AFTER_MIN : more);
    set_rules(f, false);
    chaos_run_stop(run, &after);
    if (first) {
        fault_report("all faults on all wires", in_flight, victim_in_flight,
                     after.succeeded - before.succeeded);
    }
    sum->succeeded += after.succeeded;
    sum->unanswered += after.unanswered;
    sum->unavailable += after.unavailable;
    sum->refused += after.refused;
    sum->rerouted_frames += after.rerouted_frames;
    chaos_expect_well(f);
}

static int run_until_flat(chaos_fixture *f, chaos_counts *sum)
{
    ep_test_usage flat_since[CHAOS_PROXIES] = {{.rss_kib = 0}};
    ep_test_usage now[CHAOS_PROXIES];
    int flat_wanted = chaos_is_long() ? FLAT_ROUNDS_LONG : FLAT_ROUNDS;
    int rounds = 0;
    for (int flat = 0; flat < flat_wanted; flat++) {
        EP_TEST_CHECK(rounds < ROUNDS_MAX,
                      "memory still grows after %d rounds: %ld, %ld, %ld and %ld KiB", rounds,
                      now[0].rss_kib, now[1].rss_kib, now[2].rss_kib, now[3].rss_kib);
        run_round(f, rounds == 0, sum);
        rounds++;
        chaos_settle(f, now);
        for (int i = 0; i < CHAOS_PROXIES; i++) {
            if (!ep_test_sanitized && now[i].rss_kib > flat_since[i].rss_kib + RSS_GROWTH_KIB_MAX) {
                flat_since[i] = now[i];
                flat = -1;
            }
        }
    }
    for (int i = 0; i < CHAOS_PROXIES; i++) {
        printf("%s: %ld KiB resident (%+ld), %ld threads, %ld descriptors (at the start %ld and "
               "%ld)\n",
               i < FAULT_NODES ? "node" : "coordinator", now[i].rss_kib,
               now[i].rss_kib - flat_since[i].rss_kib, now[i].threads, now[i].descriptors,
               f->start[i].threads, f->start[i].descriptors);
    }
    return rounds;
}

static void print_faults(chaos_fixture *f)
{
    for (uint32_t i = 0; i < CHAOS_PROXIES; i++) {
        ep_chaos_counts counts;
        ep_chaos_proxy_read(f->proxies[i], &counts);
        printf("%s: %llu connections, %llu frames;", i < FAULT_NODES ? "node" : "coordinator",
               (unsigned long long)counts.connections, (unsigned long long)counts.frames);
        for (int k = 0; k < EP_CHAOS_FAULTS_COUNT; k++) {
            if (counts.faults[k] > 0) {
                printf(" %s %llu", ep_chaos_fault_name((ep_chaos_fault)k),
                       (unsigned long long)counts.faults[k]);
            }
        }
        printf("\n");
    }
}

int main(void)
{
    static chaos_fixture f;
    chaos_counts sum = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    chaos_fixture_init(&f);
    int rounds = run_until_flat(&f, &sum);
    printf("%d rounds: %llu calls right, %llu frames asked again elsewhere, %llu calls unanswered, "
           "%llu without a copy, %llu refused\n",
           rounds, (unsigned long long)sum.succeeded, (unsigned long long)sum.rerouted_frames,
           (unsigned long long)sum.unanswered, (unsigned long long)sum.unavailable,
           (unsigned long long)sum.refused);
    print_faults(&f);
    EP_TEST_CHECK(sum.rerouted_frames > 0 && sum.unanswered > 0 && sum.refused > 0,
                  "the faults did nothing");
    chaos_fixture_fini(&f);
    return 0;
}
