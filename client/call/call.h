/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The object of one call and its functions. All three public forms use it.
 *
 * Events (answers, timer, wake, cancel) come from any thread and are put into the call's inbox. One
 * thread at a time is `busy` with a call: it steps call_state with the events and performs the
 * actions (call_steps.h), without holding a lock. A thread that posts to a call that is not busy
 * becomes the busy thread; the timers' thread hands the call to a worker instead (call_workers.h).
 * A blocking caller stays busy and waits for events ("driven"), so that packing and combining run
 * on its own thread.
 *
 * A frame in flight has three records of the same index: the plan's chunk (what it carries), the
 * parcel (its state), and ep_call_frame (its I/O). lib/rpc sends it as one request with one buffer.
 *
 * Ownership  a call is reference-counted: by its owner, the run under way, each frame whose answer
 *            is not processed yet, and an armed timer. After the last one it becomes spare or is
 *            freed.
 */
#ifndef EP_CLIENT_CALL_H
#define EP_CLIENT_CALL_H

#include <sys/queue.h>

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
    uint64_t bytes;    /* claimed from client->window_bytes */
    size_t slots_used; /* of its part of call->window_slots */
} ep_call_window;

/* What a run sent to a host; indexed by the node that stands for the host. */
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
    bool slots_owned; /* allocated, not in the call's array */
    /* set when it is sent; NULL before that and for stuck slots */
    ep_peer_link *link;      /* holds a reference to its peer */
    ep_rpc_call_id rpc_id;   /* 0: not sent */
    ep_rpc_channel *channel; /* of link, on which rpc_id was sent */
    bool is_relayed;         /* it also has slots for other nodes of the peer's host */
    bool given_up;           /* cancelled here because its node is silent */
    uint32_t rows_count;     /* of x: with node_sum also of the reply */
    uint32_t host;           /* node that stands for its node's host */
    uint64_t bytes;          /* sent */
    uint64_t sent_ns;
    float slowness;       /* of the node at the time of sending */
    ep_answer_norm *norm; /* the client's, for comparing the time of the answer */
    const char *numerics; /* id that the answer must have; "": any */
    /* set by the answer */
    bool ok;
    ep_buffer *reply;       /* reference, until the window is combined */
    const uint8_t *rows;    /* the tensor section, in reply */
    ep_reply_layout layout; /* of it */
    ep_error error;
    ep_frame_trace trace;
    ep_frame_timing timing;
    STAILQ_ENTRY(ep_call_frame) inbox;
} ep_call_frame;

struct ep_call {
    ep_client *client; /* reference; NULL while spare */
    uint32_t refs;
    ep_call_links links;
    STAILQ_ENTRY(ep_call) work; /* workers' queue */

    pthread_mutex_t lock; /* protects the fields up to `began` */
    pthread_cond_t changed;
    STAILQ_HEAD(, ep_call_frame) inbox;
    uint32_t flags;   /* what has happened; ANSWER: the inbox is not empty */
    uint32_t waiters; /* threads waiting for `changed` */
    bool busy;
    bool driven; /* the busy thread waits for events here */
    bool done;
    bool began; /* prepared: between begin and finish */

    /* The rest belongs to the busy thread, or to the owner before a run. */
    ep_call_form form;
    ep_moe_done_func on_done; /* called at the end of each run, or NULL */
    void *on_done_arg;
    bool deliver;      /* on_done is still to be called */
    ep_call_spec spec; /* spec.batch.tokens: this run's T */
    uint32_t tokens_max;
    struct ep_stream_call *stream_call; /* of client/api; NULL: no tensors on a device */
    ep_timer timer;
    bool timer_used;   /* armed since the call was acquired */
    uint64_t timer_ns; /* when it fires; 0: not known */
    ep_call_state state;
    ep_flow flow;
    ep_peer_class class_index; /* by flow */
    /* a reference to the view of the newest round of sending; NULL between runs */
    ep_view_layer at;
    ep_answer_norm *norm;     /* of class_index and the model */
    uint32_t slots_per_token; /* of batch and layer */
    uint64_t spread;
    uint64_t step_member; /* id of this run in all its frames; 0: no step group */
    ep_call_window windows[EP_CALL_WINDOWS];
    uint32_t tokens_sent; /* tokens in windows begun so far */
    /* claim on client->window_bytes kept from windows that ended, for windows not begun yet */
    uint64_t kept_bytes;

    /* Arrays that grow to the largest run and stay. */
    ep_routing_plan plan;
    ep_call_frame **frames; /* [frames_count], each at a fixed address */
    uint32_t frames_count;
    uint32_t frames_capacity;
    uint32_t first_frames_max; /* prepared calls: frames that a run sends first; else 0 */
    /* [T * slots per token]; of quantised rows also as many pointers to scales */
    const void **rows;
    const void **row_scales; /* the part of rows with the scales; NULL: plain rows */
    size_t rows_bytes;
    /* slot numbers of the frames of each window's first round, one part per window */
    uint32_t *window_slots;
    size_t window_slots_bytes;
    size_t window_part; /* slots of a part */
    /* [T] with is_piecewise: rows that a token still waits for, or EP_CALL_COMBINED */
    uint32_t *rows_left;
    size_t rows_left_bytes;
    uint32_t *chosen; /* [experts] node of each expert in this round */
    /* [experts] the node that stands for its host; allocated behind chosen */
    uint32_t *grouped;
    uint32_t *choice_order; /* [experts] scratch; behind grouped */
    uint32_t chosen_capacity;
    uint8_t *usable;      /* [nodes] */
    uint64_t *room_bytes; /* [nodes] bytes that a frame to it may have */
    float *slowness;      /* [nodes] as in ep_copy_choice; followed by scratch of that size */
    bool has_slow;        /* some node's is above 1; else slowness is not filled */
    uint32_t nodes_capacity;
    const ep_peer **served; /* peers that got rows in this run; only compared, never used */
    uint32_t served_capacity;
    ep_plan_slot *host_slots; /* scratch for the largest chunk, with comm_alg hierarchy */
    size_t host_slots_bytes;
    bool is_by_host;          /* the plan's chunks are for hosts */
    ep_moe_comm comm_alg;     /* of this run; not DEFAULT */
    ep_call_host *hosts;      /* [nodes] */
    ep_host_load *host_loads; /* [nodes] of the newest window; with AUTO */
    uint32_t *host_scratch;   /* [2 * nodes] */
    /* hosts is valid: some nodes share a host, and the run has kept one table */
    bool knows_hosts;
    bool chose_hosts; /* by_host has been set in hosts for this table */
    float *combine_scratch;
    size_t combine_scratch_bytes;
    uint8_t *out_scratch; /* with flow.is_aside: the result until it is complete */
    size_t out_scratch_bytes;

    ep_call_trace trace;
    uint64_t pack_ns; /* of this run, if it is timed; the next two also */
    uint64_t combine_ns;
    uint64_t slowest_wait_us;
    ep_moe_result result; /* its field nodes counts served */
};

/* ---- call_memory.c: what a call holds ---- */

/* Errors: NO_MEMORY. */
ep_err ep_call_new(ep_client *client, ep_call **out_call);
void ep_call_free(ep_call *call);
void ep_call_unref(ep_call *call);
/* Takes a reference that ep_client_destroy waits for; ep_call_unuse drops it. */
void ep_call_use(ep_call *call);
void ep_call_unuse(ep_call *call);
/* Memory for runs of up to spec's tokens, so that they allocate nothing. Errors: NO_MEMORY. */
ep_err ep_call_reserve(ep_call *call, const ep_view_layer *at, ep_error *out_error);
/* The part of it that this run needs. */
ep_err ep_call_reserve_run(ep_call *call, const ep_layer_shape *shape, const ep_flow *flow,
                           ep_error *out_error);
/* Grows `served`. Errors: NO_MEMORY. */
ep_err ep_call_reserve_served(ep_call *call, uint32_t count);
/* Grows the array of frames. Errors: NO_MEMORY. */
ep_err ep_call_reserve_frames(ep_call *call, uint32_t count);
/* Sets the table, and the layer in it, for frames sent from now on. Errors: NO_MEMORY. */
ep_err ep_call_use_view(ep_call *call, const ep_view_layer *at);
/* Drops table and peers at the end of a run: a prepared call may outlive the client's
 * connections. */
void ep_call_drop_view(ep_call *call);
/* Drops a frame's peer, reply and slots. */
void ep_call_clear_frame(ep_call_frame *frame);

/* ---- call.c: its life ---- */

/* A spare or new call with one reference, the owner's. Errors: NO_MEMORY. */
ep_err ep_call_acquire(ep_client *client, ep_call_form form, ep_call **out_call,
                       ep_error *out_error);
/*
 * Checks the values of call->spec and starts a run of so many tokens; its deadline counts from
 * begin_ns. On an error nothing has begun. On success the caller is busy with the call and must
 * call ep_call_leave or ep_call_drive next.
 */
ep_err ep_call_start(ep_call *call, const ep_view_layer *at, uint32_t tokens, uint64_t begin_ns,
                     ep_error *out_error);
/* The same with the newest table and begin_ns now. */
ep_err ep_call_start_newest(ep_call *call, uint32_t tokens, ep_error *out_error);
/* Checks whether a prepared call may begin so. Errors: FAILED_PRECONDITION, INVALID_ARGUMENT. */
ep_err ep_call_check_begin(const ep_call *call, uint32_t n_active, ep_error *out_error);
/* Gives the call to the library's threads. */
void ep_call_leave(ep_call *call);
/* Works on the call until its run is done. */
void ep_call_drive(ep_call *call);
/* The same after ep_call_leave: takes over as soon as no library thread is busy with the call. */
void ep_call_wait(ep_call *call);
/* Cancels its run; does not wait for the end. */
void ep_call_stop(ep_call *call);
/* Works on a call that was handed to this worker. */
void ep_call_run_handed(ep_call *call);
/* Callback of the call's timer; arg: the call. */
void ep_call_on_timer(ep_timer *timer, void *arg);
/* Tells the call what happened: flags, and with ANSWER a frame, else NULL. The caller holds a use
 * or is the owner. */
void ep_call_post(ep_call *call, ep_call_frame *taken_frame, uint32_t flags);

/* Wakes all calls that wait for a newer table or a node. */
void ep_calls_wake(ep_client *client);
/* Refuses new calls, cancels the running ones and waits until none is in use (true), at most
 * timeout_us. */
bool ep_calls_close(ep_client *client, uint64_t timeout_us);

#endif
