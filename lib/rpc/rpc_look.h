/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A look at a port that takes connections and does not answer Hello: what stands there, and what is
 * to be changed? The network library says "cryptographic error" at most; here the handshake is
 * repeated with libssl, which says why it fails, and certificates are read. For words only: a look
 * decides nothing, and shows nobody a token.
 *
 * Threads    any; it blocks. SIGPIPE is blocked or ignored there.
 */
#ifndef EP_RPC_RPC_LOOK_H
#define EP_RPC_RPC_LOOK_H

#include <stdbool.h>

#include "transport/transport.h"

typedef struct ep_rpc_look {
    const char *code; /* word for programs, as "tls-refused"; NULL: nothing wrong was found */
    char text[400];   /* what is wrong; "" when nothing is */
    char advice[240]; /* what to do */
} ep_rpc_look;

/*
 * address: tcp or tls+tcp. peer: its address in numbers; NULL: that of address->url, whose name is
 * then resolved. stop (atomic; may be NULL) ends the look early when it becomes true. Takes some
 * seconds at most, and milliseconds where somebody answers.
 */
void ep_rpc_look_at(const ep_lane_address *address, const char *peer, const bool *stop,
                    ep_rpc_look *out_look);

#endif
