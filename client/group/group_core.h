/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internals of a group: a connection to each other rank, the frames received from it, and the calls
 * under way.
 *
 * Frames     in each call a rank sends one frame (rows or failed) to every other member. It sends
 *            nothing of call n + EP_GROUP_OPERATIONS_MAX before it has every frame of call n. So at
 *            most twice as many frames of a peer wait here, and a fast rank overwrites nothing. A
 *            failed frame after the rows revokes them, unless the call has taken them already.
 * Gateways   in a call by host a rank gets frames of other hosts through a rank of its own host.
 *            This gateway receives a frame for the whole host and passes on its parts at once, on
 *            the lane's thread, whatever its own program does. A part waits here as if the origin
 *            had sent it. As frames may come straight or through a gateway, a rank's frames of
 *            later calls may overtake that of call n.
 * Members    change only with elastic_info, while no call is under way. Each change begins a
 *            generation, in which calls are numbered from 0.
 * Threads    lock protects all fields below it. Lane callbacks hold it briefly, and under it call
 *            no function of the lane but send.
 */
#ifndef EP_CLIENT_GROUP_CORE_H
#define EP_CLIENT_GROUP_CORE_H

#include <pthread.h>
#include <sys/queue.h>

#include "base/buffer.h"
#include "expertd/group.h"
#include "common/fork_guard.h"
#include "group/group_frame.h"
#include "group/group_hosts.h"
#include "transport/transport.h"

/* room for frames of a generation, and of later ones that a rank may send without hearing from this
 * one */
#define GROUP_RING_FRAMES (4 * EP_GROUP_OPERATIONS_MAX)
/* how many calls a frame may be ahead of a missing one */
#define GROUP_AHEAD_MAX (2 * EP_GROUP_OPERATIONS_MAX - 1)
#define GROUP_NO_RANK UINT32_MAX
#define GROUP_WHY_BYTES 200

typedef struct group_link {
    ep_group *group;
    ep_conn *conn;
    uint32_t rank; /* GROUP_NO_RANK: no hello yet */
    bool dialed;
    bool closed;                  /* on_closed has been called */
    LIST_ENTRY(group_link) entry; /* in group->links */
} group_link;

typedef struct group_inbox_frame {
    ep_buffer *buffer;
    ep_group_frame head;
    uint64_t arrived_ns;
    uint32_t via; /* rank that sent it here: the peer itself, or a gateway */
} group_inbox_frame;

/* A frame for this host that was received before all neighbours were known. */
typedef struct group_held_frame {
    ep_buffer *buffer;
    ep_group_frame head;
    uint32_t origin;
    STAILQ_ENTRY(group_held_frame) entry;
} group_held_frame;

/* The frames received from a peer. */
typedef struct group_arrivals {
    uint32_t generation;  /* the newest generation of a frame; valid if any */
    uint64_t next_number; /* all frames of this generation before it have come */
    uint32_t ahead;       /* bit i: next_number + i has come too */
    /* bit (number % 32): a failed frame came first and may have overtaken the rows */
    uint32_t failed;
    bool any;
} group_arrivals;

typedef struct group_peer {
    group_link *link; /* NULL: none yet */
    bool ready;       /* hello and welcome were exchanged */
    bool hello_waits; /* its hello came before the membership was known */
    uint64_t hello_membership;
    bool gone;                 /* it left or was lost after it was ready */
    char why[GROUP_WHY_BYTES]; /* why it is gone, or lost to a neighbour */
    char url[EP_GROUP_URL_BYTES];
    char host[EP_HOST_BYTES];
    /* bit r: rank r of this host reports it as gone, after its last frame */
    uint64_t lost_at[(EP_GROUP_WORLD_MAX + 63) / 64];
    ep_group_traffic traffic;
    /* dialing; used by the thread in ep_group_create and by on_dial */
    ep_dial *dial;
    bool dial_done;
    uint64_t dial_at_ns;
    uint64_t dial_backoff_ns;
    char dial_why[GROUP_WHY_BYTES]; /* why the last attempt failed */
    /* waiting frames, oldest first */
    group_inbox_frame ring[GROUP_RING_FRAMES];
    uint32_t ring_count;
    group_arrivals seen;
} group_peer;

struct ep_group {
    /* fixed after ep_group_create */
    char name[EP_GROUP_NAME_BYTES_MAX + 1];
    char own_url[EP_GROUP_URL_BYTES];
    char own_host[EP_HOST_BYTES];
    char token[EP_GROUP_TOKEN_BYTES];
    ep_tls_config tls;
    bool guards_token; /* the token must not be sent in plain text beyond loopback */
    uint32_t world;
    uint32_t rank;
    uint64_t deadline_us;
    size_t frame_bytes_max;
    bool payload_crc;
    ep_fork_guard fork;
    ep_buffer_pool *pool;
    ep_lane_limits limits;
    ep_listener *listener;
    /* members of the current generation; written only while no call is under way */
    uint32_t *members; /* [world] */
    uint32_t members_count;
    int64_t members_digest;
    ep_group_hosts hosts; /* of the members */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t membership; /* 0: not known yet */
    bool closing;
    bool table_sent; /* sending has begun */
    bool table_out;  /* rank 0: sent to all, before anything else */
    /* [world] lowest rank on each rank's host; known with the membership, the next too */
    uint32_t *same_host;
    bool has_neighbours; /* another rank is on this host */
    bool joined;         /* all are connected, so frames for this host are not held */
    STAILQ_HEAD(, group_held_frame) held; /* oldest first */
    group_peer *peers;                    /* [world] */
    LIST_HEAD(, group_link) links;
    uint32_t links_open;
    uint32_t sends_in_flight;
    char last_refusal[EP_ERROR_TEXT_BYTES];
    ep_error create_error; /* code not OK: the error of ep_group_create */
    uint32_t generation;
    uint64_t number;                               /* of the next call */
    struct group_op *ops[EP_GROUP_OPERATIONS_MAX]; /* calls under way; NULL: free */
    bool has_watcher;                              /* there is a thread that calls back */
    bool watcher_ends;
    pthread_t watcher;
    ep_error broken; /* code not OK: this generation is broken, from the call broken_from on */
    uint64_t broken_from;
    /* the broken generation; a later one if another rank has given that up, with broken_from 0 */
    uint32_t broken_generation;
    ep_group_stats stats;
};

/* ---- group_send.c ---- */

/* Gets a frame to fill; *out_frame is its first byte, fixed part included. Errors: NO_MEMORY,
 * RESOURCE_EXHAUSTED (frame_bytes_max). */
ep_err ep_group_frame_acquire(ep_group *group, size_t frame_bytes, ep_buffer **out_buffer,
                              uint8_t **out_frame, ep_error *out_error);
/* Sets the error for a frame above frame_bytes_max. */
ep_err ep_group_frame_too_large(const ep_group *group, size_t frame_bytes, ep_error *out_error);
/* Encodes the fixed part (with the size given to acquire) and sends; takes the buffer in any case.
 * The caller sets no flag but PASSED_ON. Lock not held. */
ep_err ep_group_frame_send(group_link *link, ep_group_frame *frame, ep_buffer *taken_buffer);
/* Sends a frame with text as payload (NULL: none), preceded by code if that is not OK. A failure to
 * send ends the connection. Lock not held. */
void ep_group_send_text(group_link *link, ep_group_frame_kind kind, uint32_t generation,
                        uint64_t number, ep_err code, const char *text);
/* The same for a given frame, to which the payload is added: one that is passed on. */
ep_err ep_group_send_text_as(group_link *link, ep_group_frame *frame, ep_err code,
                             const char *text);
/* Writes such a payload: code and text, up to EP_ERROR_TEXT_BYTES; returns its size. */
#define GROUP_TEXT_PAYLOAD_MAX (4 + EP_ERROR_TEXT_BYTES)
size_t ep_group_put_text(uint8_t *payload, ep_err code, const char *text);
/* Reads a payload of ep_group_send_text. */
void ep_group_read_text(const ep_buffer *buffer, ep_error *out_error);

/* ---- group_link.c: events of connections ---- */

/* Makes the link of a connection; rank GROUP_NO_RANK: it was accepted. Takes conn. NULL: no memory,
 * and conn is released. */
group_link *ep_group_link_start(ep_group *group, ep_conn *taken_conn, uint32_t rank);
/* on_accept of the group's listener. */
void ep_group_accepted(void *group, ep_conn *taken_conn);
/* Lock held: drops frames of a peer for calls that are over. */
void ep_group_drop_old_frames(ep_group *group, group_peer *peer);
/* Lock held: the waiting frame of a peer for a call; NULL: none. */
group_inbox_frame *ep_group_inbox_find(group_peer *peer, uint32_t generation, uint64_t number);
/* Lock held: removes a frame from the ring; its buffer becomes the caller's. */
void ep_group_inbox_remove(group_peer *peer, group_inbox_frame *frame);
/* Adds a frame of origin, in which case it takes the buffer. False: it is invalid. Lock not
 * held. */
bool ep_group_inbox_add(ep_group *group, uint32_t origin, uint32_t via, const ep_group_frame *frame,
                        ep_buffer **inout_buffer);
/* Lock held: whether ep_group_inbox_add would take it. */
bool ep_group_inbox_has_place(ep_group *group, uint32_t origin, const ep_group_frame *frame);
/* Whether frames of origin come straight and through neighbours, so later ones may come first. Lock
 * held. */
bool ep_group_has_two_ways(const ep_group *group, uint32_t origin);
/* Marks the link's peer as gone, with the reason, and closes the link. Lock not held. */
void ep_group_link_close_badly(group_link *link, const char *why);
/* Lock not held: the link of a rank; NULL: none, or it is gone. Valid as long as the group. */
group_link *ep_group_peer_link(ep_group *group, uint32_t rank);

/* ---- group_relay.c: the gateway's part; runs on the lanes' threads. Lock not held ---- */

/* Passes on the parts of a frame for this host and keeps this rank's. Takes the buffer. */
void ep_group_relay_frame(ep_group *group, uint32_t origin, const ep_group_frame *frame,
                          ep_buffer *taken_buffer);
/* Tells the other ranks of this host that rank is gone. */
void ep_group_relay_loss(ep_group *group, uint32_t rank);
/* Once all are connected: passes on the held frames. */
void ep_group_relay_open(ep_group *group);
/* Lock held: drops the held frames. */
void ep_group_relay_drop(ep_group *group);

/* ---- group_mesh.c ---- */

/* Lock not held: rank 0 sends all ranks the table once all hellos have come. False: it cannot;
 * create_error says why, and all are refused. */
bool ep_group_send_table(ep_group *group);
/* Lock not held: answers the hellos that came before the table did. */
void ep_group_answer_hellos(ep_group *group);
void ep_group_send_welcome(group_link *link);
/* Lock held: fills in same_host; all peers' hosts are known. */
void ep_group_find_hosts(ep_group *group);

/* Waits on changed; false: deadline_ns has passed. Lock held. */
bool ep_group_wait_until(ep_group *group, uint64_t deadline_ns);

/* ---- group_exchange.c: one call ---- */

/* The frames of a call from and to a member. */
typedef struct group_op_frames {
    ep_buffer *incoming;
    uint64_t incoming_ns;
    uint32_t incoming_via; /* rank that brought it */
    ep_buffer *outgoing;
    uint32_t outgoing_rows;
} group_op_frames;

/* A call under way. Fields that are not under the lock are used by one thread at a time. */
typedef struct group_op {
    ep_group *group;
    const ep_group_call *call;
    uint64_t number;
    uint32_t own; /* this rank's place among the members */
    uint64_t deadline_ns;
    uint64_t deadline_us;
    uint64_t wait_began_ns;
    bool answered;           /* this rank has sent its frames */
    group_op_frames *frames; /* by member, as the next */
    ep_group_call *told;
    /* under the lock */
    bool taken;                      /* all frames have come and are in incoming */
    bool given_up;                   /* cancelled or failed on this rank */
    bool is_beginning;               /* may still wait for answers to earlier calls */
    const struct group_watch *watch; /* called when it is over; NULL: none */
    void *watch_arg;
} group_op;

/* A call's deadline_us, or the group's default for 0. */
static inline uint64_t ep_group_deadline_us(const ep_group *group, uint64_t deadline_us)
{
    return deadline_us != 0 ? deadline_us : group->deadline_us;
}

/* Allocates an operation for a group of world ranks, otherwise zeroed. */
ep_err ep_group_op_init(uint32_t world, group_op *out_op, ep_error *out_error);
void ep_group_op_fini(group_op *op);
/*
 * Gives a call its number. members: its ranks in local order. Waits while others have not answered
 * earlier calls that failed on this rank. Errors: FAILED_PRECONDITION (too many under way, other
 * members meanwhile, a forked child), UNAVAILABLE (a member is gone), the error that broke this
 * generation, DEADLINE_EXCEEDED. After EP_OK call ep_group_op_end.
 */
ep_err ep_group_op_begin(group_op *op, ep_group *group, const ep_group_call *call,
                         const uint32_t *members, uint64_t deadline_us, ep_error *out_error);
/* Gets the body of the frame to a member, to be filled before ep_group_op_send. rows: its number of
 * rows, for statistics. */
ep_err ep_group_op_body(group_op *op, uint32_t member, size_t body_bytes, uint32_t rows,
                        uint8_t **out_body, ep_error *out_error);
/* Sends every body. In a call by host only gateways of other hosts have one, for the whole host. */
ep_err ep_group_op_send(group_op *op, ep_error *out_error);
/* Instead of ep_group_op_send, or to revoke its frames: tells all others that this rank failed. */
void ep_group_op_fail(group_op *op, const ep_error *error);
/* Ends any wait for it. Any thread. */
void ep_group_op_give_up(group_op *op);
/* Whether ep_group_op_wait would return at once. */
bool ep_group_op_is_over(const group_op *op);
bool ep_group_op_is_over_locked(const group_op *op); /* lock held */
/* A frame has come: wakes waiters if a call now has all it waits for. Lock held. */
void ep_group_op_wake(ep_group *group, const ep_group_frame *frame);
/* Waits for all frames, checks them, and checks that all ranks agree. */
ep_err ep_group_op_wait(group_op *op, ep_error *out_error);
/* After ep_group_op_wait: a member's body. Its record is in told. */
const uint8_t *ep_group_op_received(const group_op *op, uint32_t member, size_t *out_bytes);
/* Microseconds this call waited for a member. */
int64_t ep_group_op_waited_us(const group_op *op, uint32_t member);
void ep_group_op_end(group_op *op);

/* ---- group_watch.c: the thread that calls back ---- */

typedef struct group_watch {
    /* lock held: whether to call over; if so, arg stays valid until then */
    bool (*take)(void *arg);
    void (*over)(void *arg); /* lock not held */
} group_watch;

/* Starts the thread if needed; ep_group_destroy ends it. Errors: RESOURCE_EXHAUSTED. */
ep_err ep_group_watch_start(ep_group *group, ep_error *out_error);
/* Calls watch once, as soon as the call is over. */
void ep_group_watch(group_op *op, const group_watch *watch, void *arg);

#endif
