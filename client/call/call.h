/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One call: what it holds, and its life from begin to end. All three public forms share it.
 *
 * Events (answers, timer, wake, cancel) come from any thread and are put into the call's inbox. One
 * thread at a time is `busy` with a call: it steps call_state with the events and performs the
 * actions (call_steps.h), without holding a lock; whoever posts to a call that nobody is busy with
 * becomes that thread, or, on the timers' thread, makes a worker that (call_workers.h). A blocking
 * caller stays busy and waits for events ("driven"), so that packing and combining run on its own
 * thread.
 *
 * A frame on its way: the plan's chunk says what it carries, the parcel of the same index what
 * becomes of it, ep_call_frame where it is; lib/rpc takes it as one request with one buffer.
 *
 * Ownership  a call is counted: its owner, and one use each for the run under way, every frame
 *            whose answer is not processed, an armed timer. With the last one it becomes spare or
 *            is freed.
 */
#ifndef EP_CLIENT_CALL_H
#define EP_CLIENT_CALL_H

#include "call/call_state.h"
#include "call/call_trace.h"
#include "call/client_core.h"
#include "cluster/call_timing.h"
#include "common/args.h"
#include "moe/host_choice.h"
#include "wire/forward_codec.h"

struct ep_stream_call;

#define EP_CALL_COMBINED UINT32_MAX

#define EP_CALL_FLAG_WAKE 1u
#define EP_CALL_FLAG_TIMER 2u
#define EP_CALL_FLAG_CANCEL 4u
#define EP_CALL_FLAG_ANSWER 8u

/* A window under way. */
typedef struct ep_call_window {
    uint32_t begin; /* tokens */
    uint32_t end;
    uint64_t bytes;    /* reserved at the client */
    size_t slots_used; /* of its part of call->window_slots */
} ep_call_window;

/* What a run sent to a host; its index is the node that stands for the host. */
typedef struct ep_call_host {
    bool by_host;
    uint8_t ways;      /* a bit (1 << ep_way) for each way that its frames took */
    uint64_t bytes;    /* sent and received */
    uint64_t first_ns; /* sent */
    uint64_t last_ns;  /* received */
} ep_call_host;

typedef enum ep_call_form { EP_FORM_BLOCKING, EP_FORM_CALLBACK, EP_FORM_PREPARED } ep_call_form;

/* The I/O side of a parcel; same index. */
typedef struct ep_call_frame {
    ep_call *call;
    uint32_t index;
    uint32_t *slots; /* slot numbers, by expert, then token */
    uint32_t slots_count;
    bool slots_owned; /* from malloc, not the call's array */
    /* set when it is sent; NULL before, and where slots are stuck */
    ep_peer_link *link;      /* holds a reference to its peer */
    ep_rpc_call_id rpc_id;   /* 0: not sent */
    ep_rpc_channel *channel; /* of link: where rpc_id is */
    bool is_relayed;         /* slots of other nodes of the peer's host are in it */
    bool given_up;           /* cancelled by us, because its node is silent */
    uint32_t rows_count;     /* of x: with node_sum also of the reply */
    uint32_t host;           /* node that stands for its node's host */
    uint64_t bytes;          /* sent */
    uint64_t sent_ns;
    float slowness;       /* of its node when it was sent */
    ep_answer_norm *norm; /* of the client: what its answer is compared with */
    const char *numerics; /* what the answer must say; "" anything */
    /* set by its answer */
    bool ok;
    ep_buffer *reply;       /* reference, until the window is combined */
    const uint8_t *rows;    /* the tensor section, in reply */
    ep_reply_layout layout; /* of it */
    ep_error error;
    ep_frame_trace trace;
    ep_frame_timing timing;
    struct ep_call_frame *next; /* inbox */
} ep_call_frame;

struct ep_call {
    ep_client *client; /* reference; NULL while spare */
    uint32_t refs;
    ep_call_links links;
    struct ep_call *work_next; /* workers' queue */

    pthread_mutex_t lock; /* guards up to `began` */
    pthread_cond_t changed;
    ep_call_frame *inbox_head;
    ep_call_frame *inbox_tail;
    uint32_t flags;   /* what has happened; ANSWER: the inbox has some */
    uint32_t waiters; /* threads waiting for `changed` */
    bool busy;
    bool driven; /* the busy thread waits for events */
    bool done;
    bool began; /* prepared: between begin and finish */

    /* The rest belongs to the busy thread, or to the owner before a run. */
    ep_call_form form;
    ep_moe_done_func on_done; /* at the end of each run; NULL: nobody is told */
    void *on_done_arg;
    bool deliver;      /* the end is to be told */
    ep_call_spec spec; /* spec.batch.tokens: this run's T */
    uint32_t tokens_max;
    struct ep_stream_call *stream_call; /* api's; NULL: its tensors are not on a device */
    ep_timer timer;
    bool timer_used;   /* armed since the call was acquired */
    uint64_t timer_ns; /* what it is armed for; 0 not known */
    ep_call_state state;
    ep_flow flow;
    ep_peer_class class_index; /* by flow */
    ep_view_layer at;          /* of the newest round of sending; a reference; NULL between runs */
    ep_answer_norm *norm;      /* of class_index and the model */
    uint32_t slots_per_token;  /* of batch and layer */
    uint64_t spread;
    uint64_t step_member; /* names this run in all its frames; 0 without a step group */
    ep_call_window windows[EP_CALL_WINDOWS];
    uint32_t tokens_sent; /* tokens of all windows that were begun */
    /* of client->window_bytes: claimed by windows that ended, for those that are not begun */
    uint64_t kept_bytes;

    /* Arrays that grow to the largest run and stay. */
    ep_routing_plan plan;
    ep_call_frame **frames; /* [frames_count], each at a fixed address */
    uint32_t frames_count;
    uint32_t frames_capacity;
    uint32_t first_frames_max; /* prepared: frames of a run's first sending; else 0 */
    const void **rows;       /* [T * slots per token]; quantised rows: as many scales behind them */
    const void **row_scales; /* where this run's scales begin, behind its rows; NULL: plain rows */
    size_t rows_bytes;
    /* slot numbers of the frames of each window's first round, one part per window */
    uint32_t *window_slots;
    size_t window_slots_bytes;
    size_t window_part;  /* slots of a part */
    uint32_t *rows_left; /* [T] piecewise: rows a token waits for; EP_CALL_COMBINED */
    size_t rows_left_bytes;
    uint32_t *chosen;       /* [experts] node of each expert in this round */
    uint32_t *grouped;      /* [experts] what stands for its host; behind chosen */
    uint32_t *choice_order; /* [experts] scratch; behind grouped */
    uint32_t chosen_capacity;
    uint8_t *usable;      /* [nodes] */
    uint64_t *room_bytes; /* [nodes] what a frame to it may carry */
    float *slowness;      /* [nodes] as in ep_copy_choice; behind it a scratch of as many */
    bool has_slow;        /* some are above 1; else slowness holds nothing */
    uint32_t nodes_capacity;
    const ep_peer **served; /* peers that got rows in this run; compared only */
    uint32_t served_capacity;
    ep_plan_slot *host_slots; /* scratch for the largest chunk, with comm_alg hierarchy */
    size_t host_slots_bytes;
    bool is_by_host;          /* the plan's chunks are for hosts */
    ep_moe_comm comm_alg;     /* of this run; not DEFAULT */
    ep_call_host *hosts;      /* [nodes] */
    ep_host_load *host_loads; /* [nodes] of the newest window; with AUTO */
    uint32_t *host_scratch;   /* [2 * nodes] */
    /* hosts counts the whole run: it kept one table, in which nodes share hosts */
    bool knows_hosts;
    bool chose_hosts; /* by_host of hosts is set, for this table */
    float *combine_scratch;
    size_t combine_scratch_bytes;
    uint8_t *out_scratch; /* flow.is_aside: the result, until it is whole */
    size_t out_scratch_bytes;

    ep_call_trace trace;
    uint64_t pack_ns; /* of this run, timed ones; as the next two */
    uint64_t combine_ns;
    uint64_t slowest_wait_us;
    ep_moe_result result; /* nodes: as many of served */
};

/* ---- call_memory.c: what a call holds ---- */

/* Errors: NO_MEMORY. */
ep_err ep_call_new(ep_client *client, ep_call **out_call);
void ep_call_free(ep_call *call);
void ep_call_unref(ep_call *call);
/* A reference to the call that ep_client_destroy waits for; ep_call_unuse ends it. */
void ep_call_use(ep_call *call);
void ep_call_unuse(ep_call *call);
/* Room for everything a run of spec's tokens, or fewer, needs, so that it allocates nothing.
 * Errors: NO_MEMORY. */
ep_err ep_call_reserve(ep_call *call, const ep_view_layer *at, ep_error *out_error);
/* The part of it that this run needs now. */
ep_err ep_call_reserve_run(ep_call *call, const ep_layer_shape *shape, const ep_flow *flow,
                           ep_error *out_error);
/* Makes `served` longer. Errors: NO_MEMORY. */
ep_err ep_call_reserve_served(ep_call *call, uint32_t count);
/* Grows the array of frames. Errors: NO_MEMORY. */
ep_err ep_call_reserve_frames(ep_call *call, uint32_t count);
/* The table, and the layer in it, of what is sent from now on. Errors: NO_MEMORY. */
ep_err ep_call_use_view(ep_call *call, const ep_view_layer *at);
/* Between runs a call holds no table and no peer: a prepared one may outlive the client's
 * connections. */
void ep_call_drop_view(ep_call *call);
/* Drops what a frame holds: peer, reply, slots. */
void ep_call_clear_frame(ep_call_frame *frame);

/* ---- call.c: its life ---- */

/* A spare or new call with one reference, the owner's. Errors: NO_MEMORY. */
ep_err ep_call_acquire(ep_client *client, ep_call_form form, ep_call **out_call,
                       ep_error *out_error);
/*
 * Checks the values of call->spec and starts a run with its first tokens; its deadline counts from
 * begin_ns. On an error nothing was begun. On success the caller is busy with the call:
 * ep_call_leave or ep_call_drive comes next.
 */
ep_err ep_call_start(ep_call *call, const ep_view_layer *at, uint32_t tokens, uint64_t begin_ns,
                     ep_error *out_error);
/* The same with the newest table, from now on. */
ep_err ep_call_start_newest(ep_call *call, uint32_t tokens, ep_error *out_error);
/* Whether a prepared call may begin so. Errors: FAILED_PRECONDITION, INVALID_ARGUMENT. */
ep_err ep_call_check_begin(const ep_call *call, uint32_t n_active, ep_error *out_error);
/* Gives the call to the library's threads. */
void ep_call_leave(ep_call *call);
/* Works on the call until its run is done. */
void ep_call_drive(ep_call *call);
/* The same after ep_call_leave, as soon as no library thread is busy with
 * it; returns when the run is done. */
void ep_call_wait(ep_call *call);
/* Cancels its run; not waited for. */
void ep_call_stop(ep_call *call);
/* On a worker: a call that was handed to it. */
void ep_call_run_handed(ep_call *call);
/* Its timer's function: arg is the call. */
void ep_call_on_timer(ep_timer *timer, void *arg);
/* Something happened: flags, and with ANSWER a frame, else NULL. The caller holds a use, or is the
 * owner. */
void ep_call_post(ep_call *call, ep_call_frame *taken_frame, uint32_t flags);

/* Lets every call look again that waits for a newer table or a node. */
void ep_calls_wake(ep_client *client);
/* No new calls; cancels those running and waits until none is in use, at most timeout_us; true when
 * it is so. */
bool ep_calls_close(ep_client *client, uint64_t timeout_us);

#endif
