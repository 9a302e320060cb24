/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Three nodes with two copies of each expert, each node and the coordinator behind a proxy of its
 * own, and calls of five kinds of callers at once: an asynchronous load and four threads that
 * block.
 */
#ifndef CHAOS_FIXTURE_H
#define CHAOS_FIXTURE_H

#include "fault_fixture.h"
#include "support/chaos_proxy.h"

enum {
    CHAOS_PROXIES = FAULT_NODES + 1, /* the last one is the coordinator's */
    CHAOS_COORDINATOR = FAULT_NODES,
    CHAOS_CALLERS = 4,
    CHAOS_LOAD = 44, /* of them in flight all the time */
};

typedef struct chaos_fixture {
    fault_fixture faults; /* its client goes through the proxies */
    ep_chaos_proxy *proxies[CHAOS_PROXIES];
    ep_test_usage start[CHAOS_PROXIES];
    uint64_t seed;
} chaos_fixture;

/* How calls may end besides with the right bits. */
typedef struct chaos_allowed {
    /* DEADLINE_EXCEEDED, not before the deadline: a frame was lost, and nothing is sent twice */
    bool unanswered;
    bool unavailable; /* UNAVAILABLE, not before the deadline: the bad nodes hold all copies */
    bool refused; /* INVALID_ARGUMENT or UNAVAILABLE at once: a node refused a request that lies */
} chaos_allowed;

typedef struct chaos_counts {
    uint64_t succeeded;
    uint64_t unanswered;
    uint64_t unavailable;
    uint64_t refused;
    uint64_t rerouted_frames;
    uint64_t hedged_frames;
    char refusal[256]; /* the newest one's words */
} chaos_counts;

typedef struct chaos_run chaos_run;

/* The seed is EP_TEST_SEED; without it a fixed one, or with EP_TEST_LONG a random one. It is
 * printed. */
void chaos_fixture_init(chaos_fixture *f);
void chaos_fixture_fini(chaos_fixture *f);
bool chaos_is_long(void);

/* Calls of all five until stopped; deadline_us 0: the client's, a minute. Any other end than
   allowed fails the test. */
chaos_run *chaos_run_start(chaos_fixture *f, uint64_t deadline_us, const chaos_allowed *allowed);
void chaos_run_read(chaos_run *run, chaos_counts *out_counts);
/* Until the load has had so many more right results. */
void chaos_run_wait_succeeded(chaos_run *run, uint64_t more);
uint32_t chaos_run_in_flight(chaos_run *run);
void chaos_run_stop(chaos_run *run, chaos_counts *out_counts);

/* After the faults: calls succeed, all of them, and all processes run. */
void chaos_expect_well(chaos_fixture *f);
/* What a node says it still holds for calls: requests, jobs, tokens, bytes; 0 nothing. No calls go
 * on. */
double chaos_held_by(const chaos_fixture *f, uint32_t index);
/* Descriptors and threads of all four are back where they began, nodes hold nothing for calls;
 * their usage. */
void chaos_settle(chaos_fixture *f, ep_test_usage out_usage[CHAOS_PROXIES]);

#endif
