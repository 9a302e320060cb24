/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One node of three behind a bad wire, each kind of fault alone, while every expert has a copy on
 * another node. No bit is wrong, daemons live, and once the fault is over every call succeeds.
 *
 * Kinds that a client can see cost no call. Those it cannot are frames that are lost while their
 * connection lives: TCP does not do that. Hedges save as many of the calls that wait for them as
 * their budget allows, the others end with DEADLINE_EXCEEDED. A request that lies is refused by its
 * node and ends the call, as no other copy would take it.
 */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "chaos_fixture.h"

#define TO_SERVER EP_CHAOS_TO_SERVER
#define TO_CLIENT EP_CHAOS_TO_CLIENT
#define BOTH (TO_SERVER | TO_CLIENT)
#define CALLS_ONLY (1u << EP_FRAME_REQUEST | 1u << EP_FRAME_REPLY)
#define SHORT_US 400000

typedef struct phase {
    ep_chaos_rule rule;
    uint32_t goal;          /* faults to wait for */
    uint64_t deadline_us;   /* not 0: calls may end unanswered, at it */
    bool reroutes;          /* each fault makes the client ask another copy */
    const char *refusal[2]; /* words one of which the refusal of a request has */
} phase;

#define PHASE(kind, ways, per_10000, faults, ...)                                                  \
    {                                                                                              \
        .rule.fault = EP_CHAOS_##kind, .rule.directions = (ways), .rule.rate = (per_10000),        \
        .goal = (faults), __VA_ARGS__                                                              \
    }

static const phase phases[] = {
    PHASE(DELAY, BOTH, 1000, 50, .rule.amount_min = 1, .rule.amount_max = 30),
    PHASE(HOLD, BOTH, 500, 50, .rule.amount_min = 1, .rule.amount_max = 6),
    PHASE(SWAP, BOTH, 1000, 50),
    PHASE(SPLIT, BOTH, 1000, 50, .rule.amount_min = 16, .rule.amount_max = 512),
    PHASE(DUPLICATE, TO_CLIENT, 1000, 50),
    PHASE(DUPLICATE, TO_SERVER, 300, 20),
    PHASE(STALL, BOTH, 100, 4, .rule.amount_min = 50, .rule.amount_max = 250, .rule.limit = 4),
    PHASE(CUT, TO_CLIENT, 1000, 1, .rule.kinds = CALLS_ONLY, .rule.limit = 1, .reroutes = true),
    PHASE(CUT, TO_SERVER, 1000, 1, .rule.kinds = CALLS_ONLY, .rule.limit = 1, .reroutes = true),
    PHASE(RESET, BOTH, 200, 20),
    PHASE(TRUNCATE, BOTH, 200, 20),
    PHASE(FLIP_FIXED, BOTH, 200, 20),
    PHASE(FLIP_HEADER, BOTH, 500, 30, .rule.kinds = CALLS_ONLY),
    PHASE(FLIP_TENSORS, BOTH, 500, 30, .reroutes = true),
    PHASE(DROP, BOTH, 200, 30, .rule.kinds = CALLS_ONLY, .deadline_us = SHORT_US),
    PHASE(LIE_CALL, TO_CLIENT, 300, 20, .deadline_us = SHORT_US, .reroutes = true),
    PHASE(LIE_NO_CALL, TO_CLIENT, 200, 20, .reroutes = true),
    PHASE(LIE_ATTEMPT, TO_CLIENT, 200, 20, .reroutes = true),
    PHASE(LIE_METHOD, TO_CLIENT, 200, 20, .reroutes = true),
    PHASE(LIE_SEQUENCE, TO_CLIENT, 500, 30, .reroutes = true),
    PHASE(LIE_SLOTS, TO_CLIENT, 500, 30, .reroutes = true),
    PHASE(LIE_HIDDEN, TO_CLIENT, 500, 30, .reroutes = true),
    PHASE(LIE_DTYPE, TO_CLIENT, 500, 30, .reroutes = true),
    PHASE(LIE_NUMERICS, TO_CLIENT, 500, 30, .reroutes = true),
    PHASE(LIE_ROWS, TO_CLIENT, 500, 30, .reroutes = true),
    PHASE(LIE_HEADER, TO_CLIENT, 500, 30),
    PHASE(LIE_SLOTS, TO_SERVER, 300, 20, .refusal = {"slots", "tensor"}),
    PHASE(LIE_HIDDEN, TO_SERVER, 300, 20, .refusal = {"hidden", "tensor"}),
    PHASE(LIE_DTYPE, TO_SERVER, 300, 20, .refusal = {"dtype", "tensor"}),
    PHASE(LIE_NUMERICS, TO_SERVER, 300, 20, .reroutes = true),
    PHASE(LIE_ROWS, TO_SERVER, 300, 20, .refusal = {"tensor", "slots"}),
};

static uint64_t faults_of(ep_chaos_proxy *proxy, ep_chaos_fault fault)
{
    ep_chaos_counts counts;
    ep_chaos_proxy_read(proxy, &counts);
    return counts.faults[fault];
}

static void check_phase(const phase *p, const chaos_counts *counts, uint64_t faults)
{
    const char *name = ep_chaos_fault_name(p->rule.fault);
    printf("  %llu faults; %llu calls right, %llu frames asked again elsewhere, %llu calls "
           "unanswered, "
           "%llu refused%s%s\n",
           (unsigned long long)faults, (unsigned long long)counts->succeeded,
           (unsigned long long)counts->rerouted_frames, (unsigned long long)counts->unanswered,
           (unsigned long long)counts->refused, counts->refused > 0 ? ", as: " : "",
           counts->refusal);
    /* What is cut off is late first of all: hedges may have saved every call. */
    uint64_t asked =
        counts->rerouted_frames + (p->rule.fault == EP_CHAOS_CUT ? counts->hedged_frames : 0);
    /* A fault at the very end, or of a call that was over, is seen by nobody. */
    EP_TEST_CHECK(!p->reroutes || asked * 2 >= faults,
                  "%s: %llu faults, %llu frames asked again elsewhere", name,
                  (unsigned long long)faults, (unsigned long long)asked);
    EP_TEST_CHECK(p->refusal[0] == NULL || counts->refused > 0, "%s: no request was refused", name);
    EP_TEST_CHECK(p->refusal[0] == NULL || strstr(counts->refusal, p->refusal[0]) != NULL ||
                      strstr(counts->refusal, p->refusal[1]) != NULL,
                  "%s: the refusal names neither %s nor %s: %s", name, p->refusal[0], p->refusal[1],
                  counts->refusal);
}

static void run_phase(chaos_fixture *f, const phase *p)
{
    ep_chaos_proxy *proxy = f->proxies[FAULT_VICTIM];
    const char *name = ep_chaos_fault_name(p->rule.fault);
    /* A call whose silent node's rows found no other copy in time ends with UNAVAILABLE, at the
     * deadline too. */
    const chaos_allowed allowed = {.unanswered = p->deadline_us != 0,
                                   .unavailable = p->deadline_us != 0,
                                   .refused = p->refusal[0] != NULL};
    chaos_counts before;
    chaos_counts after;
    chaos_run *run = chaos_run_start(f, p->deadline_us, &allowed);
    chaos_run_wait_succeeded(run, 50);
    uint64_t victim_in_flight = ep_test_cluster_wait_in_flight(&f->faults.cluster, FAULT_VICTIM);
    uint32_t in_flight = chaos_run_in_flight(run);
    chaos_run_read(run, &before);
    uint64_t faults = faults_of(proxy, p->rule.fault);
    ep_chaos_proxy_set_rules(proxy, &p->rule, 1);
    uint64_t end_ns = ep_clock_now_ns() + 2 * EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    while (faults_of(proxy, p->rule.fault) - faults < p->goal) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "%s: only %llu faults", name,
                      (unsigned long long)(faults_of(proxy, p->rule.fault) - faults));
        chaos_run_wait_succeeded(run, 10);
    }
    chaos_run_wait_succeeded(run, FAULT_FINISHED_AFTER_MIN);
    ep_chaos_proxy_set_rules(proxy, NULL, 0);
    faults = faults_of(proxy, p->rule.fault) - faults;
    chaos_run_stop(run, &after);
    char title[64];
    snprintf(title, sizeof(title), "%s%s", name,
             p->rule.directions == BOTH        ? ""
             : p->rule.directions == TO_CLIENT ? " of replies"
                                               : " of requests");
    fault_report(title, in_flight, victim_in_flight, after.succeeded - before.succeeded);
    check_phase(p, &after, faults);
    chaos_expect_well(f);
}

int main(void)
{
    static chaos_fixture f;
    ep_test_usage usage[CHAOS_PROXIES];
    setvbuf(stdout, NULL, _IOLBF, 0);
    chaos_fixture_init(&f);
    do {
        for (size_t i = 0; i < EP_ARRAY_COUNT(phases); i++) {
            run_phase(&f, &phases[i]);
        }
        f.seed++;
    } while (chaos_is_long() && f.seed % 10 != 0);
    chaos_settle(&f, usage);
    chaos_fixture_fini(&f);
    return 0;
}
