/* SPDX-License-Identifier: Apache-2.0 */
/* What listeners of the stream lanes share: how many connections they may have, and their address with the real port. */
#ifndef EP_TRANSPORT_LANE_ACCEPT_H
#define EP_TRANSPORT_LANE_ACCEPT_H

#include "transport/transport.h"

#define EP_ACCEPT_BACKOFF_MIN_MS 10
#define EP_ACCEPT_BACKOFF_MAX_MS 1000

/* Connections a listener has accepted and that have not ended; outlives the listener. */
typedef struct ep_accept_count {
    uint32_t refs;
    uint32_t connections;
} ep_accept_count;

/* NULL: no memory. */
ep_accept_count *ep_accept_count_create(void);
/* False when max are there already. */
bool ep_accept_count_add(ep_accept_count *count, uint32_t max);
/* Undoes one add and its reference. */
void ep_accept_count_remove(ep_accept_count *count);
void ep_accept_count_unref(ep_accept_count *count);

/* Lowers connections_max so that some descriptors stay free for the rest of the program; says so once. */
void ep_accept_leave_descriptors(ep_lane_limits *limits, const char *url);
/* The next pause after a failed accept, which is logged when it is the first in a row; backoff_ms is 0 after a success. */
uint32_t ep_accept_backoff_ms(uint32_t backoff_ms, const char *url, const char *reason);
/* The URL asked for with the real port. */
void ep_accept_url(const char *asked, int port, char *out_url, size_t bytes);

#endif
