/* SPDX-License-Identifier: Apache-2.0 */
/* A bare peer that claims any role with any token over any TLS files, and says what became of
 * it. */
#ifndef EP_TEST_SECURE_PEER_H
#define EP_TEST_SECURE_PEER_H

#include "rpc/rpc.h"

#define SECURE_WAIT_MS 60000

typedef struct secure_claim {
    const char *url;
    const ep_tls_config *tls; /* NULL: none */
    const char *role;
    const char *token;
    const char *node;
} secure_claim;

/* The channel when Hello was accepted, else NULL with the refusal. Never redials. */
ep_rpc_channel *secure_connect(const secure_claim *claim, ep_error *out_error);
void secure_close(ep_rpc_channel *channel);
/* Whether such a peer is let in; closes at once. */
bool secure_is_admitted(const secure_claim *claim, ep_error *out_error);

/*
 * Calls with an empty request. A stream counts as EP_OK once a later call on the same connection
 * was answered and it was not refused; it is then cancelled.
 */
ep_err secure_call(ep_rpc_channel *channel, const ep_rpc_method *method, ep_error *out_error);
/* Joins the threads. */
void secure_end(void);

#endif
