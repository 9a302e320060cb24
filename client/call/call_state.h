/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one call does next: the retry and routing policy as step(state, now, event) -> actions.
 * Pure: no I/O, no clock, no threads, so that tests drive it with a fake clock and a simulator can
 * run it unchanged. call.c performs the actions.
 *
 * A parcel is a set of slots that travel together to one node. Its life:
 *
 *     add --> IN_FLIGHT --rows--> ARRIVED --window done--> FREE
 *                 |
 *                 +-- connection lost, not owner, stale epoch, draining, wrong bytes
 *                 |                                   --> ROUTABLE: sent to another copy at once
 *                 +-- the node asks for a pause, or our own queue is full
 *                 |                                   --> DELAYED until due_ns, then ROUTABLE
 *                 +-- late, or its node silent: its slots are sent again as HEDGE parcels while it
 *                 |   stays IN_FLIGHT. Its rows first: the hedges are ZOMBIE. All the hedges' rows
 *                 |   first: it is ZOMBIE. It fails meanwhile: COVERED, the hedges bring its slots.
 *                 |   A hedge fails: as if never sent
 *                 +-- call over                       --> ZOMBIE until its answer comes, then FREE
 *     ROUTABLE --no copy left that was not tried--> STUCK: a newer table, a node that returns, or
 *                                                   back-off makes it ROUTABLE
 *
 * Rules
 *   - Each copy of an expert is tried once per round at once, outside the retry budget. When none
 *     is left the slots wait (10 ms doubling to 200 ms, jittered, or until woken); then a new round
 *     begins in which every copy may be tried again.
 *   - RESOURCE_EXHAUSTED from a node waits retry_after_us and pays from the retry budget; with an
 *     empty budget it ends the call. Where that is past the deadline another copy is tried at once;
 *     without one the call ends or, with missing rows allowed, goes on with the others.
 *   - An error that no other copy can mend (INVALID_ARGUMENT, ...) ends the call at once.
 *   - At the deadline the call ends: UNAVAILABLE when slots wait for a copy, DEADLINE_EXCEEDED when
 *     a live node did not answer, or success with missing rows when that was allowed.
 *   - Up to EP_CALL_WINDOWS windows are under way. Each parcel belongs to one; a window is done
 *     when all its parcels have arrived, whatever the other one does, and only then may another
 *     take its place.
 *   - A parcel whose answer is later than others of its kind were is hedged at most once, and pays
 *     for it from the hedge budget. When its node is silent it is a re-route, which pays nothing,
 *     as after a loss: a node that answers no ping is as good as lost, and with a budget most of
 *     what it holds would wait for it.
 *   - complete is given exactly once per run. Answers after it, or twice, are late: they change
 *     nothing.
 *
 * Memory   parcels and marks grow on reserve and add, and stay. Reserved once, a run allocates
 *          nothing.
 * Threads  one at a time.
 */
#ifndef EP_CLIENT_CALL_STATE_H
#define EP_CLIENT_CALL_STATE_H

#include "base/error.h"
#include "call/flow.h"
#include "moe/routing_plan.h"
#include "call/retry_budget.h"

/* some are packed and sent while others are computed and return */
#define EP_CALL_WINDOWS EP_FLOW_WINDOWS
#define EP_CALL_BACKOFF_MIN_US 10000u
#define EP_CALL_BACKOFF_MAX_US 200000u
/* Least pause after RESOURCE_EXHAUSTED, also when our own queue is full. */
#define EP_CALL_PAUSE_MIN_US 1000u
#define EP_CALL_PAUSE_MAX_US 1000000u /* a peer's retry_after_us is believed up to this */

typedef enum ep_parcel_phase {
    EP_PARCEL_FREE,
    EP_PARCEL_ZOMBIE,
    EP_PARCEL_HEDGE, /* in flight, with slots of the parcel hedge_of */
    EP_PARCEL_SPENT, /* nothing comes of it any more; it keeps its place until the window is done */
    EP_PARCEL_ARRIVED,
    EP_PARCEL_OPEN, /* from here on its slots still wait for their rows */
    EP_PARCEL_IN_FLIGHT = EP_PARCEL_OPEN,
    EP_PARCEL_COVERED, /* failed; its hedges are to bring its slots */
    EP_PARCEL_ROUTABLE,
    EP_PARCEL_WAITING, /* from here on it waits for its time */
    EP_PARCEL_DELAYED = EP_PARCEL_WAITING,
    EP_PARCEL_STUCK
} ep_parcel_phase;

typedef enum ep_hedge_phase {
    EP_HEDGE_NONE,
    EP_HEDGE_WHOLE, /* its hedges bring all of its slots, or have */
    EP_HEDGE_BROKEN /* one of them failed */
} ep_hedge_phase;

typedef struct ep_parcel {
    ep_parcel_phase phase;
    uint32_t window; /* 0..EP_CALL_WINDOWS-1 */
    /* why it is DELAYED; ROUTABLE: RESOURCE_EXHAUSTED where its node has no room before the
     * deadline */
    ep_err reason;
    uint64_t due_ns; /* DELAYED, STUCK */
    /* IN_FLIGHT: when its answer is late. It and HEDGE: when to look whether its node is silent.
     * EP_TIME_NEVER */
    uint64_t hedge_ns;
    uint64_t look_ns;
    uint64_t anew_ns; /* IN_FLIGHT: ep_call_state_ask_anew not before */
    ep_hedge_phase hedge;
    uint32_t hedges_open; /* HEDGE parcels of it */
    uint32_t hedge_of;    /* HEDGE */
} ep_parcel;

typedef enum ep_window_phase { EP_WINDOW_FREE, EP_WINDOW_SENDING, EP_WINDOW_SENT } ep_window_phase;

typedef struct ep_call_state_window {
    ep_window_phase phase;
    uint32_t open_count; /* its parcels that are OPEN or beyond */
} ep_call_state_window;

typedef enum ep_call_phase { EP_CALL_IDLE, EP_CALL_RUNNING, EP_CALL_DONE } ep_call_phase;

typedef struct ep_call_state {
    ep_call_phase phase;
    uint64_t begin_ns;
    uint64_t deadline_ns;
    bool allow_missing;
    uint32_t windows_left; /* not begun */
    ep_call_state_window windows[EP_CALL_WINDOWS];
    uint32_t attempt;    /* rounds of sending so far */
    ep_err code;         /* DONE: how it ended */
    uint32_t blame;      /* DONE with an error: the parcel the call waited for, UINT32_MAX none */
    ep_error last_error; /* newest failure of a parcel; code OK when there was none */
    uint64_t last_error_ns;
    uint8_t *tried; /* [tried_count] per copy of the layer in use, as ep_copy_choice.tried */
    uint32_t waiting_count; /* parcels that are WAITING or beyond */
    /* private */
    ep_retry_budget *budget;
    uint64_t random;
    uint64_t backoff_us;
    ep_parcel *parcels;
    uint32_t parcels_count; /* used so far, FREE ones included */
    uint32_t parcels_capacity;
    uint64_t look_ns; /* not after the first hedge_ns or look_ns */
    uint32_t tried_count;
    uint32_t tried_capacity;
    uint32_t tried_marks; /* of them, set */
} ep_call_state;

typedef enum ep_call_event_kind {
    EP_EVENT_WINDOW,  /* window: every parcel of it has been added */
    EP_EVENT_ROWS,    /* parcel: its rows are here and checked */
    EP_EVENT_FAILED,  /* parcel, error: the node or the connection failed */
    EP_EVENT_REFUSED, /* parcel, error: it never left this process */
    EP_EVENT_WAKE,    /* a newer table, or a node has become usable */
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
    bool look;   /* parcels are late, or their nodes may be silent: ep_call_state_next_due */
    bool cancel; /* parcels have become ZOMBIE: their nodes may be told */
    /* a bit for each window whose rows are all here: combine it, release it, send the next */
    uint32_t windows_done;
    bool complete; /* the call is over with state->code; exactly once per run */
} ep_call_actions;

void ep_call_state_init(ep_call_state *state, ep_retry_budget *budget, uint64_t seed);
void ep_call_state_fini(ep_call_state *state);
/* Room for parcels and for the copies of one layer. Errors: NO_MEMORY. */
ep_err ep_call_state_reserve(ep_call_state *state, uint32_t parcels, uint32_t copies);

/* Starts a run; not while RUNNING. Parcels of the run before that are still ZOMBIE stay so. */
void ep_call_state_begin(ep_call_state *state, uint64_t now_ns, uint64_t deadline_ns,
                         uint32_t windows_count, bool allow_missing);
/* Begins the next window if one is left and there is a free place: false otherwise. EP_EVENT_WINDOW
 * follows when its parcels have been added. */
bool ep_call_state_open_window(ep_call_state *state, uint32_t *out_window);
/* Takes back the last ep_call_state_open_window; nothing was added. */
void ep_call_state_withdraw_window(ep_call_state *state, uint32_t window);
/* Whether some window is under way. */
bool ep_call_state_has_window(const ep_call_state *state);
/* Parcels that are not free. */
uint32_t ep_call_state_parcels_used(const ep_call_state *state);
/* Adds a parcel that is being sent; a free one is taken again. Errors: NO_MEMORY. */
ep_err ep_call_state_add(ep_call_state *state, uint32_t window, uint32_t *out_parcel);
/* When an IN_FLIGHT parcel is late, and when to look whether its node, or a HEDGE's, is silent. */
void ep_call_state_watch(ep_call_state *state, uint32_t parcel, uint64_t hedge_ns,
                         uint64_t look_ns);
/* The first parcel from `from` on that is to be hedged or looked at now; UINT32_MAX: none. */
uint32_t ep_call_state_next_due(const ep_call_state *state, uint64_t now_ns, uint32_t from);
/* After all due parcels were looked at: when the next one is. */
void ep_call_state_looked(ep_call_state *state);
/* The slots of an IN_FLIGHT parcel are about to be sent again in so many frames, each of which is
 * then given to ep_call_state_add_hedge. False, and nothing changed, when it was done before or the
 * budget does not allow it. silent: its node is; nothing is paid. */
bool ep_call_state_begin_hedge(ep_call_state *state, uint32_t parcel, uint32_t frames, bool silent);
/* True: a silent node's slots, of which each other copy has failed, may go to those once more now;
 * and not again for pause_ns. */
bool ep_call_state_ask_anew(ep_call_state *state, uint32_t parcel, uint64_t now_ns,
                            uint64_t pause_ns);
/* Errors: NO_MEMORY; the parcel then counts as not hedged. */
ep_err ep_call_state_add_hedge(ep_call_state *state, uint32_t parcel, uint32_t *out_hedge);
/* Adds a parcel of slots that have no copy left. Errors: NO_MEMORY. */
ep_err ep_call_state_add_stuck(ep_call_state *state, uint32_t window, uint64_t now_ns,
                               uint32_t *out_parcel);
/* The same of slots whose nodes have no room before the deadline: with allow_missing they are
 * waited for until then. */
ep_err ep_call_state_add_late(ep_call_state *state, uint32_t window, uint32_t *out_parcel);
/* Its slots now travel in other parcels. ROUTABLE only. */
void ep_call_state_absorb(ep_call_state *state, uint32_t parcel);
/* The window's rows have been combined, or the run is over: its ARRIVED and SPENT parcels and its
 * place become FREE. */
void ep_call_state_release_window(ep_call_state *state, uint32_t window);

/* Adds to *actions, so that several events may be stepped before any is performed. */
void ep_call_state_step(ep_call_state *state, uint64_t now_ns, const ep_call_event *event,
                        ep_call_actions *actions);
/* When EP_EVENT_TIMER is due: the deadline, the end of a pause, or a look at what is in flight.
 * EP_TIME_NEVER when not RUNNING. */
uint64_t ep_call_state_due_ns(const ep_call_state *state);

/* Forgets which copies were tried and sizes the marks for a layer: another table is in use. Errors:
 * NO_MEMORY. */
ep_err ep_call_state_use_layer(ep_call_state *state, const ep_routing_layer *layer);
/* A node had no room, and will have none before the deadline: asking it again, or waiting for it,
 * is of no use. */
bool ep_call_state_is_too_late(const ep_call_state *state, uint64_t now_ns, const ep_error *error);
/* The copy of expert on node is not to be tried again in this round. */
void ep_call_state_mark_tried(ep_call_state *state, const ep_routing_layer *layer, uint32_t expert,
                              uint32_t node);

#endif
