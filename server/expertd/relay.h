/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Passing slots on to other nodes of this host (comm_alg = HIERARCHY): connections to neighbours,
 * made when first needed and kept, and one request per part, whose rows are copied to where the
 * part's rows belong.
 *
 * A request names its neighbours; only those of ep_relay_set_neighbours are connected to, so that
 * nobody can make this node dial what he likes, and nothing is sent to one before its Hello has
 * said that name and this node's host. It is called in the role of a client, with the token that
 * the one who named it has shown here itself; by ep_address_for_dial never in plain text beyond
 * loopback. What is passed on has no parts of its own, so that nothing goes further.
 *
 * Errors     a part ends with the neighbour's error, or UNAVAILABLE; error.node names the neighbour
 *            in every case. CANCELLED when the caller of the request has gone.
 * Ownership  a part belongs to the caller; it stays until release.
 * Threads    send, cancel, release from any; done() on any thread, also inside send. The others:
 *            the owner's.
 */
#ifndef EP_EXPERTD_RELAY_H
#define EP_EXPERTD_RELAY_H

#include "rpc/rpc.h"
#include "wire/relay_codec.h"

/* Connections; beyond it requests are refused, and callers go to the neighbour themselves. */
#define EP_RELAY_LINKS_MAX 64

typedef struct ep_relay ep_relay;
typedef struct ep_relay_link ep_relay_link;
typedef struct ep_relay_part ep_relay_part;

/* A node of this host, as the table names it. */
typedef struct ep_relay_neighbour {
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
} ep_relay_neighbour;

typedef struct ep_relay_config {
    const ep_rpc_common *common; /* of the node; its strings are borrowed, as is tls */
    const ep_tls_config *tls;
    bool insecure; /* a token may be shown in plain text beyond loopback */
} ep_relay_config;

/* Zero it first. */
struct ep_relay_part {
    ep_rpc_call *call; /* the request that is passed on: deadline, metadata, buffers */
    const Expertd__V1__ForwardRequest *header; /* of it, checked by ep_relay_check */
    const ep_forward_view *view;               /* of it */
    size_t index;                              /* in header->relay; not 0 */
    uint8_t *rows;                             /* [slots of the part,H] of the reply's type */
    /* exactly once; NULL: rows are there */
    void (*done)(ep_relay_part *part, const ep_error *error);
    void *arg;
    /* private */
    ep_relay_link *link;
    ep_rpc_call_id id;
    ep_relay_part *next;
};

ep_err ep_relay_create(const ep_relay_config *config, ep_relay **out_relay);
/* Whom parts may go to from here on; nobody at first. The list is taken: from malloc(); NULL with
 * count 0. */
void ep_relay_set_neighbours(ep_relay *relay, ep_relay_neighbour *taken_neighbours, size_t count);
void ep_relay_send(ep_relay *relay, ep_relay_part *part);
/* Nobody needs the rows any more: done() comes soon, or has come. Between send and release. */
void ep_relay_cancel(ep_relay_part *part);
/* Once for each part that was sent, after done() and the last cancel. */
void ep_relay_release(ep_relay_part *part);
/* Drops connections that nobody uses: to neighbours that have been away for some time, and to those
 * that are none any more. Now and then, where waiting is allowed. */
void ep_relay_sweep(ep_relay *relay, uint64_t now_ns);
/* When every call whose parts were passed on has ended; waits for the last callbacks. NULL
 * allowed. */
void ep_relay_destroy(ep_relay *relay);

#endif
