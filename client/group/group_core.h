/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of a group: one connection to each other rank, the frames that came from it, and the calls
 * under way.
 *
 * Frames     a rank sends one frame (rows or failed) to every other member in each call, and
 *            nothing of call n + EP_GROUP_OPERATIONS_MAX before it has every frame of call n. So at
 *            most twice as many frames of a peer wait here, and a fast rank overwrites nothing. A
 *            failed frame after the rows takes them back, as long as the call has not taken them.
 * Gateways   in a call by host a rank of another host gets its frame from a rank of its own host,
 *            which takes the host's frame in and passes the parts on when it arrives, on the lane's
 *            thread: whatever its own program does at that time, and in whichever call it is. What
 *            is passed on waits here as if the origin had sent it. Since two ways lead here, a
 *            rank's frames of later calls may come before that of call n.
 * Members    change only with elastic_info, while no call is under way. Each change begins a
 *            generation; numbers of calls count from 0 in it.
 * Threads    lock guards everything below it; lane callbacks take it, hold it briefly, and never
 *            with a lane call inside but sends.
 */
#ifndef EP_CLIENT_GROUP_CORE_H
#define EP_CLIENT_GROUP_CORE_H

#include <pthread.h>

#include "base/buffer.h"
#include "expertd/group.h"
#include "common/fork_guard.h"
#include "group/group_frame.h"
#include "group/group_hosts.h"
#include "transport/transport.h"

/* of a generation, and those that a rank may send of the next ones without hearing from this one */
#define GROUP_RING_FRAMES (4 * EP_GROUP_OPERATIONS_MAX)
/* calls by which a frame may be ahead of one that has not come */
#define GROUP_AHEAD_MAX (2 * EP_GROUP_OPERATIONS_MAX - 1)
#define GROUP_NO_RANK UINT32_MAX
#define GROUP_WHY_BYTES 200

typedef struct group_link {
    ep_group *group;
    ep_conn *conn;
    uint32_t rank; /* GROUP_NO_RANK: it has not said hello */
    bool dialed;
    bool closed;             /* on_closed has been called */
    struct group_link *next; /* of group->links */
} group_link;

typedef struct group_inbox_frame {
    ep_buffer *buffer;
    ep_group_frame head;
    uint64_t arrived_ns;
    uint32_t via; /* rank that brought it: the peer itself, or a gateway */
} group_inbox_frame;

/* A frame for this host that came before this rank knew all its neighbours. */
typedef struct group_held_frame {
    ep_buffer *buffer;
    ep_group_frame head;
    uint32_t origin;
    struct group_held_frame *next;
} group_held_frame;

/* Which frames of a peer have come. */
typedef struct group_arrivals {
    uint32_t generation;  /* the newest in which one came; valid with any */
    uint64_t next_number; /* all of this generation before it have come */
    uint32_t ahead;       /* bit i: and next_number + i too */
    /* bit (number % 32): a failed frame came first, and may have overtaken the rows */
    uint32_t failed;
    bool any;
} group_arrivals;

typedef struct group_peer {
    group_link *link; /* NULL: none yet */
    bool ready;       /* hello and welcome have been exchanged */
    bool hello_waits; /* said hello before we knew the membership */
    uint64_t hello_membership;
    bool gone;                 /* left or lost, after it was ready */
    char why[GROUP_WHY_BYTES]; /* it is gone, or lost to a neighbour */
    char url[EP_GROUP_URL_BYTES];
    char host[EP_HOST_BYTES];
    /* bit r: rank r of this host says that it is gone and all it had sent is here */
    uint64_t lost_at[(EP_GROUP_WORLD_MAX + 63) / 64];
    ep_group_traffic traffic;
    /* dialing; touched by the thread in ep_group_create and on_dial */
    ep_dial *dial;
    bool dial_done;
    uint64_t dial_at_ns;
    uint64_t dial_backoff_ns;
    char dial_why[GROUP_WHY_BYTES]; /* why the last attempt failed */
    /* frames that wait, oldest first */
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
    bool guards_token; /* has one, which must not be shown in plain text beyond loopback */
    uint32_t world;
    uint32_t rank;
    uint64_t deadline_us;
    size_t frame_bytes_max;
    bool payload_crc;
    ep_fork_guard fork;
    ep_buffer_pool *pool;
    ep_lane_limits limits;
    ep_listener *listener;
    /* of the current generation; written only while no call is under way */
    uint32_t *members; /* [world] */
    uint32_t members_count;
    int64_t members_digest;
    ep_group_hosts hosts; /* of the members */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t membership; /* 0: not known yet */
    bool closing;
    bool table_sent; /* begun */
    bool table_out;  /* rank 0: to all; nothing else goes to them before */
    /* [world] lowest rank on each rank's host; known with the membership, like the next */
    uint32_t *same_host;
    bool has_neighbours;    /* another rank is on this host */
    bool joined;            /* all are connected: frames for this host need not be held */
    group_held_frame *held; /* oldest first */
    group_peer *peers;      /* [world] */
    group_link *links;
    uint32_t links_open;
    uint32_t sends_in_flight;
    char last_refusal[EP_ERROR_TEXT_BYTES];
    ep_error create_error; /* code not OK: ep_group_create fails with it */
    uint32_t generation;
    uint64_t number;                               /* of the next call */
    struct group_op *ops[EP_GROUP_OPERATIONS_MAX]; /* under way; NULL: free */
    bool has_watcher;                              /* with a thread that tells of calls' ends */
    bool watcher_ends;
    pthread_t watcher;
    ep_error broken; /* code not OK: this generation is given up, from the call broken_from on */
    uint64_t broken_from;
    /* this one, or a later one that some other rank has given up; broken_from is 0 then */
    uint32_t broken_generation;
    ep_group_stats stats;
};

/* ---- group_send.c ---- */

/* A frame to fill: *out_frame is its first byte, fixed part included. Errors: NO_MEMORY,
 * RESOURCE_EXHAUSTED (frame_bytes_max). */
ep_err ep_group_frame_acquire(ep_group *group, size_t frame_bytes, ep_buffer **out_buffer,
                              uint8_t **out_frame, ep_error *out_error);
/* The error of frame_bytes_max. */
ep_err ep_group_frame_too_large(const ep_group *group, size_t frame_bytes, ep_error *out_error);
/* First byte of a frame acquired so. */
uint8_t *ep_group_frame_data(ep_buffer *buffer);
/* Encodes the fixed part (payload_bytes is that of the acquire) and sends; takes the buffer in any
 * case. Of frame's flags only PASSED_ON is the caller's. Lock not held. */
ep_err ep_group_frame_send(group_link *link, ep_group_frame *frame, ep_buffer *taken_buffer);
/* A frame with text as payload (NULL none; code in front of it when not OK). Failures are the
 * connection's. Lock not held. */
void ep_group_send_text(group_link *link, ep_group_frame_kind kind, uint32_t generation,
                        uint64_t number, ep_err code, const char *text);
/* The same for a frame given but for its payload: one that is passed on. */
ep_err ep_group_send_text_as(group_link *link, ep_group_frame *frame, ep_err code,
                             const char *text);
/* What such a frame holds: code and text, up to EP_ERROR_TEXT_BYTES; returns the payload's
 * bytes. */
#define GROUP_TEXT_PAYLOAD_MAX (4 + EP_ERROR_TEXT_BYTES)
size_t ep_group_put_text(uint8_t *payload, ep_err code, const char *text);
/* Takes apart what ep_group_send_text made. */
void ep_group_read_text(const ep_buffer *buffer, ep_error *out_error);

/* ---- group_link.c: what connections bring ---- */

/* A link for a connection; rank GROUP_NO_RANK: accepted. Takes conn. NULL: no memory, conn is
 * released. */
group_link *ep_group_link_start(ep_group *group, ep_conn *taken_conn, uint32_t rank);
/* on_accept of the group's listener. */
void ep_group_accepted(void *group, ep_conn *taken_conn);
/* Lock held: drops what waits from a peer for calls that are over. */
void ep_group_drop_old_frames(ep_group *group, group_peer *peer);
/* Lock held: the frame of a call that waits from a peer; NULL: none. */
group_inbox_frame *ep_group_inbox_find(group_peer *peer, uint32_t generation, uint64_t number);
/* Lock held: takes it out of the peer's ring; its buffer is the caller's. */
void ep_group_inbox_remove(group_peer *peer, group_inbox_frame *frame);
/* Puts a frame of origin where the call looks for it, and takes it then; false: it cannot be in
 * this place. Lock not held. */
bool ep_group_inbox_add(ep_group *group, uint32_t origin, uint32_t via, const ep_group_frame *frame,
                        ep_buffer **inout_buffer);
/* Lock held: whether ep_group_inbox_add would take it. */
bool ep_group_inbox_has_place(ep_group *group, uint32_t origin, const ep_group_frame *frame);
/* Frames of origin may come from itself and from neighbours, so that a later one may come first.
 * Lock held. */
bool ep_group_has_two_ways(const ep_group *group, uint32_t origin);
/* Marks the link's peer as gone, for why, and closes the link. Lock not held. */
void ep_group_link_close_badly(group_link *link, const char *why);
/* Lock held: the link of a rank that is there; NULL: none, or it is gone. Stays valid as long as
 * the group. */
group_link *ep_group_peer_link(ep_group *group, uint32_t rank);

/* ---- group_relay.c: the gateway's part; runs on the lanes' threads. Lock not held ---- */

/* A frame for all ranks of this host: passes the parts on and keeps its own. Takes the buffer. */
void ep_group_relay_frame(ep_group *group, uint32_t origin, const ep_group_frame *frame,
                          ep_buffer *taken_buffer);
/* Tells the other ranks of this host that rank is gone. */
void ep_group_relay_loss(ep_group *group, uint32_t rank);
/* All are connected: passes on what was held until now. */
void ep_group_relay_open(ep_group *group);
/* Lock held: drops what is held. */
void ep_group_relay_drop(ep_group *group);

/* ---- group_mesh.c ---- */

/* Lock not held: rank 0 tells everybody the table once all have said hello. False: it cannot;
 * create_error says why, and all are refused. */
bool ep_group_send_table(ep_group *group);
/* Lock not held: answers the hellos that came before the table did. */
void ep_group_answer_hellos(ep_group *group);
void ep_group_send_welcome(group_link *link);
/* Lock held: all peers' hosts are known. */
void ep_group_find_hosts(ep_group *group);

/* Waits on changed until deadline_ns; false: the deadline has passed. Lock held. */
bool ep_group_wait_until(ep_group *group, uint64_t deadline_ns);

/* ---- group_exchange.c: one call ---- */

/* A call under way. All but what is said to be under the lock is touched by one thread at a time.
 */
typedef struct group_op {
    ep_group *group;
    const ep_group_call *call;
    uint64_t number;
    uint32_t own; /* this rank's place among the members */
    uint64_t deadline_ns;
    uint64_t deadline_us;
    uint64_t wait_began_ns;
    bool answered; /* the others have what this rank owes them */
    /* by member */
    ep_buffer **incoming;
    uint64_t *incoming_ns;
    uint32_t *incoming_via;
    ep_buffer **outgoing;
    uint32_t *outgoing_rows;
    ep_group_call *told;
    /* under the lock */
    bool taken;                      /* all frames came and are in incoming */
    bool given_up;                   /* cancelled, or failed on this rank */
    bool is_beginning;               /* may wait until the others have answered earlier calls */
    const struct group_watch *watch; /* who is told when it is over; NULL: nobody */
    void *watch_arg;
} group_op;

/* What deadline_us of a call stands for. */
static inline uint64_t ep_group_deadline_us(const ep_group *group, uint64_t deadline_us)
{
    return deadline_us != 0 ? deadline_us : group->deadline_us;
}

/* Memory for calls in a group of world ranks; *out_op is otherwise zero. */
ep_err ep_group_op_init(uint32_t world, group_op *out_op, ep_error *out_error);
void ep_group_op_fini(group_op *op);
/*
 * Gives a call its number. members: the group's ranks of this call in local order. Waits where the
 * others have not yet answered calls that failed on this rank before. Errors: FAILED_PRECONDITION
 * (too many under way, other members meanwhile, a forked child), UNAVAILABLE (a member is gone),
 * what broke this generation, DEADLINE_EXCEEDED. After EP_OK ep_group_op_end must follow.
 */
ep_err ep_group_op_begin(group_op *op, ep_group *group, const ep_group_call *call,
                         const uint32_t *members, uint64_t deadline_us, ep_error *out_error);
/* The body of the frame to a member, to be filled before ep_group_op_send. rows: how many it has,
 * for the statistics. */
ep_err ep_group_op_body(group_op *op, uint32_t member, size_t body_bytes, uint32_t rows,
                        uint8_t **out_body, ep_error *out_error);
/* Sends every body. In a call by host only gateways of other hosts have one, for the whole host. */
ep_err ep_group_op_send(group_op *op, ep_error *out_error);
/* Instead of ep_group_op_send, or to take back what it sent: tells all others that this rank
 * failed. */
void ep_group_op_fail(group_op *op, const ep_error *error);
/* Whoever waits for it waits no more. Any thread. */
void ep_group_op_give_up(group_op *op);
/* ep_group_op_wait would not wait for other ranks. */
bool ep_group_op_is_over(const group_op *op);
bool ep_group_op_is_over_locked(const group_op *op); /* lock held */
/* A frame has come: wakes who waits for nothing more. Lock held. */
void ep_group_op_wake(ep_group *group, const ep_group_frame *frame);
/* Waits for all frames, checks them and that all ranks agree. */
ep_err ep_group_op_wait(group_op *op, ep_error *out_error);
/* After ep_group_op_wait: what a member sent; told is its record. */
const uint8_t *ep_group_op_received(const group_op *op, uint32_t member, size_t *out_bytes);
static inline const ep_group_call *group_op_told(const group_op *op, uint32_t member)
{
    return &op->told[member];
}
/* Microseconds this call waited for a member. */
int64_t ep_group_op_waited_us(const group_op *op, uint32_t member);
void ep_group_op_end(group_op *op);

/* ---- group_watch.c: the thread that calls back ---- */

typedef struct group_watch {
    /* lock held: whether over shall be called; then arg stays until it has been */
    bool (*take)(void *arg);
    void (*over)(void *arg); /* lock not held */
} group_watch;

/* Starts it unless it runs; ep_group_destroy ends it. Errors: RESOURCE_EXHAUSTED. */
ep_err ep_group_watch_start(ep_group *group, ep_error *out_error);
/* It is told once, as soon as the call is over. */
void ep_group_watch(group_op *op, const group_watch *watch, void *arg);

#endif
