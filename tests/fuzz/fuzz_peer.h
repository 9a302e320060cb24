/* SPDX-License-Identifier: Apache-2.0 */
/* What the raw peers of fuzz_node.c and fuzz_coordinator.c do alike. */
#ifndef EP_TESTS_FUZZ_PEER_H
#define EP_TESTS_FUZZ_PEER_H

#include "contract/rpc/raw_peer.h"

/* Sends a frame without a message: its kind (cancel, ping, pong, credit, goodbye; else none is
 * sent), call id, credit. */
void fuzz_peer_control(raw_peer *p, const uint8_t *rest, size_t bytes);
/* Until the other side has read everything that was sent: it answers a ping, or has closed. */
void fuzz_peer_wait_read(raw_peer *p);

#endif
