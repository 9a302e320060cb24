/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A simulated network: a lane ("sim://name") whose time, order and faults come from one seed. Only
 * tests link it.
 *
 * Time       is virtual and moves only in ep_sim_run_one and ep_sim_run_until, which run due events
 *            in the order of (due, posted). Every callback of the lane runs inside them, never
 *            inside the call that began it.
 * Hosts      are named by their URLs and by ep_sim_host. Code inside an event runs on the event's
 *            host, other code on the host set by ep_sim_enter (0 at first). A dial, a connection
 *            and a posted event belong to the host on which they were begun.
 * Links      one per direction and pair of hosts.
 *
 * Effect of a fault on the layer above, as over TCP (hostile false):
 *   loss       the frame comes later by the retransmission time, doubled for each loss in a row
 *   cut        frames wait; after a minute the sender gives up and both ends break; dials time out
 *              after five seconds
 *   corrupt    one bit of the frame is flipped; a flipped length ends the connection
 *   truncate   the connection breaks in the middle of the frame: both ends lose it
 *   duplicate, reorder   never happens inside a connection
 * hostile true breaks the lane's contract on purpose: frames are really lost, repeated and
 * overtaken; a cut loses them.
 *   dead host     its connections end at both ends, dials are refused
 *   stopped host  runs nothing and receives nothing, and no peer is told; due events run once it
 *                 continues
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
    uint32_t loss_ppm;    /* losses in a million frames */
    uint32_t corrupt_ppm;
    uint32_t truncate_ppm;
    uint32_t duplicate_ppm; /* hostile only */
    /* hostile only: the frame comes later by up to ten delays, so others overtake it */
    uint32_t reorder_ppm;
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

/* Makes the network of this process (one at a time) and registers its lane. Errors: NO_MEMORY. */
ep_err ep_sim_create(uint64_t seed, uint64_t start_ns, ep_sim **out_sim);
/* Every connection must have ended and every listener been closed. */
void ep_sim_destroy(ep_sim *sim);

uint64_t ep_sim_now_ns(ep_sim *sim);
/* Returns when the next event is due; EP_TIME_NEVER: none. Events of stopped hosts do not count. */
uint64_t ep_sim_next_ns(ep_sim *sim);
/* Moves time to the next event and runs it. False: there is none. */
bool ep_sim_run_one(ep_sim *sim);
/* Runs all events due up to until_ns and sets time to until_ns. */
void ep_sim_run_until(ep_sim *sim, uint64_t until_ns);
/* Waits in real time, at most timeout_ns, until an event is posted that is due before all others.
 * For a thread that runs events in a loop. */
void ep_sim_wait_posted(ep_sim *sim, uint64_t timeout_ns);

/* Posts the event, or moves a posted one, for the current host; it runs now at the earliest.
 * Errors: NO_MEMORY (nothing posted). */
ep_err ep_sim_post(ep_sim *sim, ep_sim_event *event, uint64_t due_ns);
/* True: it was posted and will not run. */
bool ep_sim_cancel(ep_sim *sim, ep_sim_event *event);

/* Finds or makes the host of this name. At most EP_SIM_HOSTS_MAX. */
ep_sim_host_id ep_sim_host(ep_sim *sim, const char *name);
/* Sets the current host and returns the one before. */
ep_sim_host_id ep_sim_enter(ep_sim *sim, ep_sim_host_id host);
ep_sim_host_id ep_sim_current_host(ep_sim *sim);
void ep_sim_set_host_state(ep_sim *sim, ep_sim_host_id host, ep_sim_host_state state);
/* Sets the faults of frames sent from now on; a cut also holds frames that are on their way. */
void ep_sim_set_link(ep_sim *sim, ep_sim_host_id from, ep_sim_host_id to, const ep_sim_link *link);
/* Breaks every connection between two hosts; both ends notice. */
void ep_sim_break(ep_sim *sim, ep_sim_host_id a, ep_sim_host_id b);

/* Returns a digest of everything that happened so far; two runs of one seed have the same. */
uint64_t ep_sim_trace_hash(ep_sim *sim);
/* Adds to the digest. */
void ep_sim_trace(ep_sim *sim, const void *bytes, size_t count);
/* Draws a number from the network's seed. */
uint64_t ep_sim_random(ep_sim *sim);
void ep_sim_read_stats(ep_sim *sim, ep_sim_stats *out_stats);

extern const ep_lane_ops ep_sim_lane;

#endif
