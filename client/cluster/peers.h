/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One node as the client sees it: its state, and two connections, so that no large prefill frame
 * delays a decode frame. The channels redial by themselves.
 *
 * If a node of this host offers shared memory in Hello, each connection gets a second channel over
 * that. Calls use it whenever it is ready, and the first one otherwise.
 *
 * Ownership  reference-counted. The last unref calls on_unused (any thread, also in a callback),
 *            which arranges for ep_peer_destroy on a thread that may wait.
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
    const char *name; /* in the routing table; "": not known yet */
    bool allows_shm;
    /* A connection has become ready. hello is valid only during the call. */
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
    bool ready;            /* atomic: channel is ready */
    uint64_t suspected_ns; /* atomic: when it was found silent; 0: never, or heard again since */
    ep_answer_times times;
    ep_ways ways;        /* if its node stands for its host */
    ep_rpc_channel *shm; /* atomic; NULL until offered. Lives as long as channel */
    char shm_url[EP_URL_BYTES];
    bool shm_ready; /* atomic */
} ep_peer_link;

struct ep_peer {
    uint32_t refs;
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    ep_peer_link links[EP_PEER_CLASSES];
    bool refused;      /* no channel can be made to its URL, so it is never ready */
    bool draining;     /* atomic: reported since it was last connected */
    uint64_t heard_ns; /* atomic: newest reply or Hello; 0: never */
    ep_peer_timing timing;
    uint64_t frame_bytes_max; /* atomic: limit from its Hello; 0: not known */
    ep_peer_config config;
    pthread_mutex_t lock; /* protects the rest */
    ep_error last_error;  /* code EP_OK: none */
    /* copy of the newest one; only for clients without a coordinator */
    Expertd__V1__Hello *hello;
    ep_peer *next; /* owner's list */
};

/* Starts both connections and returns. Errors: INVALID_ARGUMENT (URL), NO_MEMORY. */
ep_err ep_peer_create(const ep_peer_config *config, ep_peer **out_peer, ep_error *out_error);
/* Makes a peer without connections that is never ready and reports `why`. Errors: NO_MEMORY. */
ep_err ep_peer_create_refused(const ep_peer_config *config, const ep_error *why, ep_peer **out_peer,
                              ep_error *out_error);
/* Closes its connections and waits for their callbacks; not from one. Calls in flight end first.
 * NULL allowed. */
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

/* Found silent (silence.h) and not heard since: to be used only if there is no better copy. */
bool ep_peer_link_is_suspected(ep_peer_link *link);
/* Checks the connection of a frame that was sent at sent_ns and not answered: pings it or finds it
 * silent, and so suspected by all until it is heard again. *out_next_ns: when to check again. */
bool ep_peer_link_is_silent(ep_peer_link *link, uint64_t now_ns, uint64_t sent_ns,
                            uint64_t *out_next_ns);

/*
 * ep_rpc_call_start on the best ready channel. *out_channel, for ep_rpc_call_cancel, is written
 * before on_reply can run.
 */
ep_err ep_peer_link_call(ep_peer_link *link, const ep_rpc_request *request,
                         ep_rpc_reply_func on_reply, void *arg, ep_rpc_channel **out_channel,
                         ep_rpc_call_id *out_id, ep_error *out_error);

/*
 * For a failed frame on `channel`: whether only shared memory was lost. The node's stream is alive
 * and takes further frames.
 */
bool ep_peer_link_lost_only_shm(ep_peer_link *link, const ep_rpc_channel *channel);

/* Its name or, without one, its URL. */
const char *ep_peer_label(const ep_peer *peer);
/* Whether its Hello has come or dialling has failed. The owner's lock over hello is held. */
bool ep_peer_was_tried(ep_peer *peer);
/* Describes a node for errors: state, newest error, when it was last heard. */
void ep_peer_link_describe(ep_peer_link *link, uint64_t now_ns, char *out_text, size_t bytes);

#endif
