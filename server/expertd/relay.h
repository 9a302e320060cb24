/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Passes slots on to other nodes of this host, its neighbours (comm_alg = HIERARCHY). Each part
 * becomes one request to a neighbour, and the rows of its reply are copied to part->rows.
 * Connections are made when first needed, and kept.
 *
 * A request names its neighbours, but only those of ep_relay_set_neighbours are dialled, so that no
 * caller can make this node connect to an address of its choice. Nothing is sent before the
 * neighbour's Hello has confirmed its name and this host. Calls have the role of a client and show
 * the client token, which the caller has shown here too; ep_address_for_dial keeps it from going
 * out in plain text beyond loopback. A request passed on has no parts of its own.
 *
 * Errors     a part ends with the neighbour's error, or UNAVAILABLE; error.node names the neighbour
 *            in every case. CANCELLED when the caller of the request is gone.
 * Ownership  a part belongs to the caller, who keeps it until release.
 * Threads    send, cancel, release from any; done() on any, also inside send. The others: the
 *            owner's.
 */
#ifndef EP_EXPERTD_RELAY_H
#define EP_EXPERTD_RELAY_H

#include "rpc/rpc.h"
#include "wire/relay_codec.h"

/* The most connections. Further parts are refused; callers then send to the neighbour. */
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
    const ep_rpc_common *common; /* the node's; its strings are borrowed, and tls is too */
    const ep_tls_config *tls;
    bool insecure; /* a token may be shown in plain text beyond loopback */
} ep_relay_config;

/* Zero it first. */
struct ep_relay_part {
    ep_rpc_call *call; /* the request that is passed on: deadline, metadata, buffers */
    const Expertd__V1__ForwardRequest *header; /* the request's, checked by ep_relay_check */
    const ep_forward_view *view;               /* of it */
    size_t index;                              /* in header->relay; not 0 */
    uint8_t *rows;                             /* [slots of the part,H] of the reply's type */
    /* called exactly once. error NULL: rows are there */
    void (*done)(ep_relay_part *part, const ep_error *error);
    void *arg;
    /* private */
    ep_relay_link *link;
    ep_rpc_call_id id;
    ep_relay_part *next;
};

ep_err ep_relay_create(const ep_relay_config *config, ep_relay **out_relay);
/* Sets the neighbours that parts may go to; none at first. Takes ownership of the list, which comes
 * from malloc(); NULL with count 0. */
void ep_relay_set_neighbours(ep_relay *relay, ep_relay_neighbour *taken_neighbours, size_t count);
void ep_relay_send(ep_relay *relay, ep_relay_part *part);
/* The rows are not needed any more: done() comes soon, or has come. Between send and release. */
void ep_relay_cancel(ep_relay_part *part);
/* Call it once for each part that was sent, after done() and the last cancel. */
void ep_relay_release(ep_relay_part *part);
/* Drops unused connections to neighbours that have been away for some time or are no longer listed.
 * Call it now and then, on a thread that may wait. */
void ep_relay_sweep(ep_relay *relay, uint64_t now_ns);
/* Call it when every call with parts has ended; waits for the last callbacks. NULL allowed. */
void ep_relay_destroy(ep_relay *relay);

#endif
