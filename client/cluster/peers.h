/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One node as the client sees it: two connections, so that a large prefill frame never stands in
 * front of a decode frame, and what was last heard from it. The channels redial by themselves.
 *
 * A node of our own host that offers shared memory in Hello gets a second channel per connection
 * over that. Calls take it whenever it is ready, and the first one whenever it is not.
 *
 * Ownership  counted. When the last reference goes, on_unused is called (any thread, a callback's
 *            too); its callee has ep_peer_destroy run where waiting is allowed.
 * Threads    any.
 */
#ifndef EP_CLIENT_PEERS_H
#define EP_CLIENT_PEERS_H

#include <pthread.h>

#include "cluster/answer_times.h"
#include "cluster/call_timing.h"
#include "cluster/way_speed.h"
#include "moe/routing_table.h"
#include "rpc/rpc.h"

typedef enum ep_peer_class { EP_PEER_DECODE, EP_PEER_BULK, EP_PEER_CLASSES } ep_peer_class;

typedef struct ep_peer ep_peer;

typedef struct ep_peer_config {
    ep_rpc_common common;
    ep_lane_address address;
    const char *name; /* in the routing table; "" not known yet */
    bool allows_shm;
    /* A connection has become ready. hello is valid in the call only. */
    void (*on_ready)(void *arg, ep_peer *peer, ep_peer_class class_index,
                     const Expertd__V1__Hello *hello);
    void (*on_unused)(void *arg, ep_peer *peer);
    void *arg;
    uint64_t *late_replies; /* see ep_rpc_channel_config */
} ep_peer_config;

typedef struct ep_peer_link {
    ep_peer *peer;
    ep_rpc_channel *channel;
    ep_peer_class class_index;
    bool ready;            /* atomic: channel is */
    uint64_t suspected_ns; /* atomic: when it was found silent; 0 never, or it has spoken since */
    ep_answer_times times;
    ep_ways ways;        /* where its node stands for its host */
    ep_rpc_channel *shm; /* atomic; NULL until the node offered it. Lives as long as channel */
    char shm_url[EP_URL_BYTES];
    bool shm_ready; /* atomic */
} ep_peer_link;

struct ep_peer {
    uint32_t refs;
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    ep_peer_link links[EP_PEER_CLASSES];
    bool refused;      /* no channel can be made to its URL: it is never ready */
    bool draining;     /* atomic: it said so since it was last connected */
    uint64_t heard_ns; /* atomic: newest reply or Hello; 0 never */
    ep_peer_timing timing;
    uint64_t frame_bytes_max; /* atomic: what it accepts, as in its Hello; 0 not known */
    ep_peer_config config;
    pthread_mutex_t lock; /* guards the rest */
    ep_error last_error;  /* code EP_OK: none */
    uint64_t last_error_ns;
    /* the newest one, a copy; kept only where the table is made of them */
    Expertd__V1__Hello *hello;
    ep_peer *next; /* owner's list */
};

/* Starts both connections and returns. Errors: INVALID_ARGUMENT (URL), NO_MEMORY. */
ep_err ep_peer_create(const ep_peer_config *config, ep_peer **out_peer, ep_error *out_error);
/* A peer without connections, never ready, that reports `why`. Errors: NO_MEMORY. */
ep_err ep_peer_create_refused(const ep_peer_config *config, const ep_error *why, ep_peer **out_peer,
                              ep_error *out_error);
/* Ends its connections and waits for their callbacks; not from one. Calls in flight on them end
 * first. NULL allowed. */
void ep_peer_close(ep_peer *peer);
/* The same, then frees it. */
void ep_peer_destroy(ep_peer *peer);
ep_peer *ep_peer_ref(ep_peer *peer);
void ep_peer_unref(ep_peer *peer);

static inline bool ep_peer_link_is_ready(const ep_peer_link *link)
{
    return __atomic_load_n(&link->ready, __ATOMIC_ACQUIRE) ||
           __atomic_load_n(&link->shm_ready, __ATOMIC_ACQUIRE);
}

/* Silent (silence.h) and not heard since: to be used only where there is no better copy. */
bool ep_peer_link_is_suspected(ep_peer_link *link);
/* Looks at a connection for a frame sent at sent_ns without an answer: pings, or finds the node
 * silent, which is then true for everyone until it speaks again. *out_next_ns: when to look
 * again. */
bool ep_peer_link_is_silent(ep_peer_link *link, uint64_t now_ns, uint64_t sent_ns,
                            uint64_t *out_next_ns);

/*
 * ep_rpc_call_start on the best channel that is ready. *out_channel, for ep_rpc_call_cancel, is
 * written before on_reply can run.
 */
ep_err ep_peer_link_call(ep_peer_link *link, const ep_rpc_request *request,
                         ep_rpc_reply_func on_reply, void *arg, ep_rpc_channel **out_channel,
                         ep_rpc_call_id *out_id, ep_error *out_error);

/*
 * For a frame sent on `channel` that failed: only its shared memory was lost. The node lives, as
 * far as its stream tells, and what is sent to it from here on takes the stream.
 */
bool ep_peer_link_lost_only_shm(ep_peer_link *link, const ep_rpc_channel *channel);

/* Name if it has one, else URL. */
const char *ep_peer_label(const ep_peer *peer);
/* Its Hello is here, or an attempt to get it has failed. The owner's lock over hello is held. */
bool ep_peer_was_tried(ep_peer *peer);
/* The last thing known of a node, for errors: state, newest error, when it was last heard. */
void ep_peer_link_describe(ep_peer_link *link, uint64_t now_ns, char *out_text, size_t bytes);

#endif
