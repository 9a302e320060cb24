/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decides what a call does next: the retry and routing policy as step(state, now, event) ->
 * actions. Pure: no I/O, no clock, no threads, so that tests can use a fake clock and the simulator
 * runs it unchanged. call.c performs the actions.
 *
 * A parcel is a set of slots that travel together to one node. Its life:
 *
 *     add --> IN_FLIGHT --rows--> ARRIVED --window done--> FREE
 *                 |
 *                 +-- connection lost, not owner, stale epoch, draining, wrong bytes
 *                 |                                   --> ROUTABLE: sent to another copy at once
 *                 +-- the node asks for a pause, or our own queue is full
 *                 |                                   --> DELAYED until due_ns, then ROUTABLE
 *                 +-- its answer is late, or its node silent: its slots are sent again as HEDGE
 *                 |   parcels while it stays IN_FLIGHT. If its rows come first, the hedges become
 *                 |   ZOMBIE. If all hedges' rows come first, it does. If it fails meanwhile, it is
 *                 |   COVERED: the hedges bring its slots. A hedge that fails is as if never sent
 *                 +-- call over                       --> ZOMBIE until its answer comes, then FREE
 *     ROUTABLE --no copy left that was not tried--> STUCK: a newer table, a node that returns, or
 *                                                   back-off makes it ROUTABLE
 *
 * Rules
 *   - In a round each copy of an expert is tried once, without a pause and without paying from the
 *     retry budget. When no copy is left the slots wait (10 ms doubling to 200 ms, jittered, or
 *     until woken). Then a new round begins, in which every copy may be tried again.
 *   - After RESOURCE_EXHAUSTED from a node the parcel waits retry_after_us and pays from the retry
 *     budget; with an empty budget the call ends. If the wait would pass the deadline, another copy
 *     is tried at once; without one the call ends or, if missing rows are allowed, goes on without
 *     these.
 *   - An error that another copy would give too (INVALID_ARGUMENT, ...) ends the call at once.
 *   - At the deadline the call ends with success when missing rows are allowed, else with
 *     UNAVAILABLE when slots wait for a copy, RESOURCE_EXHAUSTED when they wait for a full node, or
 *     DEADLINE_EXCEEDED when a live node did not answer.
 *   - Up to EP_CALL_WINDOWS windows are under way. Each parcel belongs to one. A window is done
 *     when all its parcels have arrived, whatever the others do; only then may another take its
 *     place.
 *   - A parcel whose answer is unusually late is hedged at most once, and pays from the hedge
 *     budget. If its node is silent the second send counts as a re-route, which pays nothing: such
 *     a node is as good as lost, and with a budget most of its slots would wait for it.
 *   - complete is set exactly once per run. Later and repeated answers are late: they change
 *     nothing.
 *
 * Memory   parcels and marks grow on reserve and add, and are kept: after a reserve a run allocates
 *          nothing.
 * Threads  one at a time.
 */
#ifndef EP_CLIENT_CALL_STATE_H
#define EP_CLIENT_CALL_STATE_H

#include "base/error.h"
#include "call/flow.h"
#include "moe/routing_plan.h"
#include "call/retry_budget.h"

/* so that some are packed and sent while others are computed and return */
#define EP_CALL_WINDOWS EP_FLOW_WINDOWS
#define EP_CALL_BACKOFF_MIN_US 10000u
#define EP_CALL_BACKOFF_MAX_US 200000u
/* Least pause after RESOURCE_EXHAUSTED from a node or from the own send queue. */
#define EP_CALL_PAUSE_MIN_US 1000u
#define EP_CALL_PAUSE_MAX_US 1000000u /* cap on a peer's retry_after_us */

typedef enum ep_parcel_phase {
    EP_PARCEL_FREE,
    EP_PARCEL_ZOMBIE,
    EP_PARCEL_HEDGE, /* in flight with slots of the parcel hedge_of */
    EP_PARCEL_SPENT, /* over without rows; keeps its place until the window is done */
    EP_PARCEL_ARRIVED,
    EP_PARCEL_OPEN, /* from here on its slots still wait for their rows */
    EP_PARCEL_IN_FLIGHT = EP_PARCEL_OPEN,
    EP_PARCEL_COVERED, /* failed, but its hedges may bring its slots */
    EP_PARCEL_ROUTABLE,
    EP_PARCEL_WAITING, /* from here on it waits for its time */
    EP_PARCEL_DELAYED = EP_PARCEL_WAITING,
    EP_PARCEL_STUCK
} ep_parcel_phase;

typedef enum ep_hedge_phase {
    EP_HEDGE_NONE,
    EP_HEDGE_WHOLE, /* hedges for all of its slots are in flight or have arrived */
    EP_HEDGE_BROKEN /* one of them failed */
} ep_hedge_phase;

typedef struct ep_parcel {
    ep_parcel_phase phase;
    uint32_t window; /* 0..EP_CALL_WINDOWS-1 */
    /* why it is DELAYED; if ROUTABLE: RESOURCE_EXHAUSTED when its node has no room before the
     * deadline */
    ep_err reason;
    uint64_t due_ns; /* DELAYED, STUCK */
    /* hedge_ns: IN_FLIGHT, when its answer is late. look_ns: IN_FLIGHT and HEDGE, when to check
     * whether its node is silent. Or EP_TIME_NEVER */
    uint64_t hedge_ns;
    uint64_t look_ns;
    uint64_t anew_ns; /* IN_FLIGHT: earliest time of the next ep_call_state_ask_anew */
    ep_hedge_phase hedge;
    uint32_t hedges_open; /* number of its HEDGE parcels */
    uint32_t hedge_of;    /* HEDGE */
} ep_parcel;

typedef enum ep_window_phase { EP_WINDOW_FREE, EP_WINDOW_SENDING, EP_WINDOW_SENT } ep_window_phase;

typedef struct ep_call_state_window {
    ep_window_phase phase;
    uint32_t open_count; /* parcels that are OPEN or beyond */
} ep_call_state_window;

typedef enum ep_call_phase { EP_CALL_IDLE, EP_CALL_RUNNING, EP_CALL_DONE } ep_call_phase;

typedef struct ep_call_state {
    ep_call_phase phase;
    uint64_t begin_ns;
    uint64_t deadline_ns;
    bool allow_missing;
    uint32_t windows_left; /* not begun */
    ep_call_state_window windows[EP_CALL_WINDOWS];
    uint32_t attempt; /* rounds of sending so far */
    ep_err code;      /* DONE: how it ended */
    /* DONE with an error: the parcel that the call waited for; UINT32_MAX: none */
    uint32_t blame;
    ep_error last_error; /* newest failure of a parcel; code OK: none */
    uint64_t last_error_ns;
    uint8_t *tried; /* [tried_count] one per copy of the layer in use, as ep_copy_choice.tried */
    uint32_t waiting_count; /* parcels that are WAITING or beyond */
    /* private */
    ep_retry_budget *budget;
    uint64_t random;
    uint64_t backoff_us;
    ep_parcel *parcels;
    uint32_t parcels_count; /* parcels ever used, FREE ones included */
    uint32_t parcels_capacity;
    uint64_t look_ns; /* at or before the earliest hedge_ns and look_ns */
    uint32_t tried_count;
    uint32_t tried_capacity;
    uint32_t tried_marks; /* number of marks set */
} ep_call_state;

typedef enum ep_call_event_kind {
    EP_EVENT_WINDOW,  /* window: all its parcels have been added */
    EP_EVENT_ROWS,    /* parcel: its rows have come and are checked */
    EP_EVENT_FAILED,  /* parcel, error: the node or the connection failed */
    EP_EVENT_REFUSED, /* parcel, error: it was not sent */
    EP_EVENT_WAKE,    /* there is a newer table, or a node has become usable */
    EP_EVENT_TIMER,   /* ep_call_state_due_ns has passed */
    EP_EVENT_CANCEL,
    EP_EVENT_FATAL /* error: the call cannot go on */
} ep_call_event_kind;

typedef struct ep_call_event {
    ep_call_event_kind kind;
    uint32_t parcel;
    uint32_t window;
    const ep_error *error;
} ep_call_event;

typedef struct ep_call_actions {
    bool late;   /* drop what came with the event */
    bool route;  /* send the ROUTABLE parcels' slots again */
    bool look;   /* parcels are late or their nodes may be silent: see ep_call_state_next_due */
    bool cancel; /* parcels have become ZOMBIE: send cancels to their nodes */
    /* a bit for each window whose rows have all come: combine it, release it, send the next */
    uint32_t windows_done;
    bool complete; /* the call is over with state->code; exactly once per run */
} ep_call_actions;

void ep_call_state_init(ep_call_state *state, ep_retry_budget *budget, uint64_t seed);
void ep_call_state_fini(ep_call_state *state);
/* Reserves memory for parcels and for the copies of one layer. Errors: NO_MEMORY. */
ep_err ep_call_state_reserve(ep_call_state *state, uint32_t parcels, uint32_t copies);

/* Starts a run; not while RUNNING. ZOMBIE parcels of the former run stay. */
void ep_call_state_begin(ep_call_state *state, uint64_t now_ns, uint64_t deadline_ns,
                         uint32_t windows_count, bool allow_missing);
/* Begins the next window. False: none is left, or there is no free place. Step EP_EVENT_WINDOW when
 * its parcels have been added. */
bool ep_call_state_open_window(ep_call_state *state, uint32_t *out_window);
/* Undoes the last ep_call_state_open_window, before a parcel is added. */
void ep_call_state_withdraw_window(ep_call_state *state, uint32_t window);
/* Whether any window is under way. */
bool ep_call_state_has_window(const ep_call_state *state);
/* Parcels that are not free. */
uint32_t ep_call_state_parcels_used(const ep_call_state *state);
/* Adds a parcel that is being sent, reusing a FREE one. Errors: NO_MEMORY. */
ep_err ep_call_state_add(ep_call_state *state, uint32_t window, uint32_t *out_parcel);
/* Sets when an IN_FLIGHT parcel is late, and when to check its (or a HEDGE's) node for silence. */
void ep_call_state_watch(ep_call_state *state, uint32_t parcel, uint64_t hedge_ns,
                         uint64_t look_ns);
/* The first parcel, from `from` on, whose hedge_ns or look_ns has come; UINT32_MAX: none. */
uint32_t ep_call_state_next_due(const ep_call_state *state, uint64_t now_ns, uint32_t from);
/* After all due parcels were handled: computes when the next one is due. */
void ep_call_state_looked(ep_call_state *state);
/* Begins to send the slots of an IN_FLIGHT parcel again, in so many frames; call
 * ep_call_state_add_hedge for each. False, with nothing changed: it was done before, or the budget
 * does not allow it. silent: its node is silent, so nothing is paid. */
bool ep_call_state_begin_hedge(ep_call_state *state, uint32_t parcel, uint32_t frames, bool silent);
/* Whether slots of a silent node may go again to copies that have failed. Once in pause_ns. */
bool ep_call_state_ask_anew(ep_call_state *state, uint32_t parcel, uint64_t now_ns,
                            uint64_t pause_ns);
/* Errors: NO_MEMORY; the parcel then counts as not hedged. */
ep_err ep_call_state_add_hedge(ep_call_state *state, uint32_t parcel, uint32_t *out_hedge);
/* Adds a parcel of slots that have no copy left. Errors: NO_MEMORY. */
ep_err ep_call_state_add_stuck(ep_call_state *state, uint32_t window, uint64_t now_ns,
                               uint32_t *out_parcel);
/* The same for slots whose nodes have no room before the deadline. The call waits until then
 * (allow_missing). */
ep_err ep_call_state_add_late(ep_call_state *state, uint32_t window, uint32_t *out_parcel);
/* Frees a ROUTABLE parcel whose slots go into other parcels. */
void ep_call_state_absorb(ep_call_state *state, uint32_t parcel);
/* Frees a window's ARRIVED and SPENT parcels and its place: its rows are combined, or the run is
 * over. */
void ep_call_state_release_window(ep_call_state *state, uint32_t window);

/* Adds to *actions, so that several events may be stepped before the actions are performed. */
void ep_call_state_step(ep_call_state *state, uint64_t now_ns, const ep_call_event *event,
                        ep_call_actions *actions);
/* When EP_EVENT_TIMER is due: at the deadline, the end of a pause, or the next hedge_ns or look_ns.
 * EP_TIME_NEVER when not RUNNING. */
uint64_t ep_call_state_due_ns(const ep_call_state *state);

/* After a change of the table: clears the marks and sizes them for the layer. Errors: NO_MEMORY. */
ep_err ep_call_state_use_layer(ep_call_state *state, const ep_routing_layer *layer);
/* Whether the error says that a node will have no room before the deadline. */
bool ep_call_state_is_too_late(const ep_call_state *state, uint64_t now_ns, const ep_error *error);
/* Marks the copy of expert on node as tried in this round. */
void ep_call_state_mark_tried(ep_call_state *state, const ep_routing_layer *layer, uint32_t expert,
                              uint32_t node);

#endif
