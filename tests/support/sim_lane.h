/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A simulated network: a lane ("sim://name") whose time, order and faults come from one seed. Only
 * tests link it.
 *
 * Time       is virtual and moves only in ep_sim_run_one and ep_sim_run_until, which run what is
 *            due, in the order of (due, posted). Every callback of the lane runs inside them, never
 *            inside the call that began it.
 * Hosts      named by their URLs and by ep_sim_host. What runs inside an event belongs to the
 *            event's host; outside of events the host is the one set by ep_sim_enter, 0 at first. A
 *            dial, a connection and a posted event belong to the host they were begun in.
 * Links      one per direction and pair of hosts.
 *
 * What the layer above sees of a fault, as over TCP (hostile false):
 *   loss       the frame comes later by the retransmission time, doubled for each loss in a row
 *   cut        frames wait; after a minute of that the sender's end breaks; dials time out after
 *              five seconds
 *   corrupt    one bit of the frame is flipped; in the length it ends the connection
 *   truncate   the connection breaks in the middle of the frame: both ends lose it
 *   duplicate, reorder   never happens inside a connection
 * hostile true breaks the lane's promise on purpose: frames are really lost, repeated and
 * overtaken, a cut loses them.
 *   dead host     its connections end at both ends, dials are refused
 *   stopped host  nothing of it runs and nothing arrives: nobody is told; what was due runs when it
 *                 goes on
 *
 * Nothing depends on addresses in memory. Threads: any; one thread at a time runs events.
 */
#ifndef EP_TESTS_SUPPORT_SIM_LANE_H
#define EP_TESTS_SUPPORT_SIM_LANE_H

#include "transport/transport.h"

#define EP_SIM_HOSTS_MAX 64

typedef struct ep_sim ep_sim;
typedef struct ep_sim_event ep_sim_event;
typedef uint32_t ep_sim_host_id;

typedef enum ep_sim_host_state { EP_SIM_UP, EP_SIM_STOPPED, EP_SIM_DEAD } ep_sim_host_state;

typedef struct ep_sim_link {
    uint64_t delay_ns;
    uint64_t jitter_ns;   /* up to this much is added */
    uint64_t bytes_per_s; /* 0: no limit */
    uint32_t loss_ppm;    /* of a million frames */
    uint32_t corrupt_ppm;
    uint32_t truncate_ppm;
    uint32_t duplicate_ppm; /* hostile only */
    uint32_t reorder_ppm;   /* hostile only: comes later by up to ten delays, others pass it */
    bool cut;
    bool hostile;
} ep_sim_link;

typedef struct ep_sim_stats {
    uint64_t events;
    uint64_t frames; /* delivered */
    uint64_t lost;
    uint64_t corrupted;
    uint64_t truncated;
    uint64_t duplicated;
    uint64_t reordered;
    uint64_t cut_waits; /* a frame or dial met a cut link or a stopped host */
} ep_sim_stats;

/* Embedded in its owner. Zero it, set run and arg. */
struct ep_sim_event {
    void (*run)(ep_sim_event *event, void *arg);
    void *arg;
    /* private */
    uint64_t due_ns;
    uint64_t sequence;
    ep_sim_host_id host;
    size_t heap_index; /* 1-based; 0: not posted */
};

/* Makes the network of this process, one at a time, and registers its lane. Errors: NO_MEMORY. */
ep_err ep_sim_create(uint64_t seed, uint64_t start_ns, ep_sim **out_sim);
/* Every connection must have ended and every listener been closed. */
void ep_sim_destroy(ep_sim *sim);

uint64_t ep_sim_now_ns(ep_sim *sim);
/* When the next event is due; EP_TIME_NEVER: none. Events of stopped hosts do not count. */
uint64_t ep_sim_next_ns(ep_sim *sim);
/* Moves time to the next event and runs it. False: there is none. */
bool ep_sim_run_one(ep_sim *sim);
/* Runs everything due up to until_ns, and leaves time there. */
void ep_sim_run_until(ep_sim *sim, uint64_t until_ns);
/* Waits, in real time, until an event is posted that is due earlier than all others, or timeout_ns.
 * For a thread that pumps. */
void ep_sim_wait_posted(ep_sim *sim, uint64_t timeout_ns);

/* (Re-)posts for the current host; not before now. Errors: NO_MEMORY (nothing posted). */
ep_err ep_sim_post(ep_sim *sim, ep_sim_event *event, uint64_t due_ns);
/* True when it was posted and will not run. */
bool ep_sim_cancel(ep_sim *sim, ep_sim_event *event);

/* The host of this name, made when there is none. At most EP_SIM_HOSTS_MAX. */
ep_sim_host_id ep_sim_host(ep_sim *sim, const char *name);
/* Returns the host before. */
ep_sim_host_id ep_sim_enter(ep_sim *sim, ep_sim_host_id host);
ep_sim_host_id ep_sim_current_host(ep_sim *sim);
void ep_sim_set_host_state(ep_sim *sim, ep_sim_host_id host, ep_sim_host_state state);
/* Frames sent from now on; cut also holds for frames under way. */
void ep_sim_set_link(ep_sim *sim, ep_sim_host_id from, ep_sim_host_id to, const ep_sim_link *link);
/* Breaks every connection between two hosts: both ends lose it. */
void ep_sim_break(ep_sim *sim, ep_sim_host_id a, ep_sim_host_id b);

/* Digest of everything that happened so far: equal for two runs of one seed. */
uint64_t ep_sim_trace_hash(ep_sim *sim);
/* Adds to the digest. */
void ep_sim_trace(ep_sim *sim, const void *bytes, size_t count);
/* A number from the network's seed. */
uint64_t ep_sim_random(ep_sim *sim);
void ep_sim_read_stats(ep_sim *sim, ep_sim_stats *out_stats);

extern const ep_lane_ops ep_sim_lane;

#endif
