/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looks at a port that takes connections but does not answer Hello, to tell users what listens
 * there and what to change. The network library says "cryptographic error" at most. Here the
 * handshake is repeated with libssl, which says why it fails, and certificates are read. The result
 * is only text: nothing depends on it, and no token is sent.
 *
 * Threads    any; it blocks. SIGPIPE is blocked or ignored there.
 */
#ifndef EP_RPC_RPC_LOOK_H
#define EP_RPC_RPC_LOOK_H

#include <stdbool.h>

#include "transport/transport.h"

typedef struct ep_rpc_look {
    /* a word for programs, such as "tls-refused"; NULL: nothing wrong was found */
    const char *code;
    char text[400];   /* what is wrong; "" when nothing is */
    char advice[240]; /* what to do */
} ep_rpc_look;

/*
 * address: tcp or tls+tcp. peer: its numeric address; NULL: address->url is used and its name
 * resolved. stop (atomic; may be NULL) ends the look early when it becomes true. Takes a few
 * seconds at most, milliseconds where somebody answers.
 */
void ep_rpc_look_at(const ep_lane_address *address, const char *peer, const bool *stop,
                    ep_rpc_look *out_look);

#endif
