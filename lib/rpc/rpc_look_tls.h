/* SPDX-License-Identifier: Apache-2.0 */
/* The part of a look that speaks TLS, and what both parts need. */
#ifndef EP_RPC_RPC_LOOK_TLS_H
#define EP_RPC_RPC_LOOK_TLS_H

#include "rpc/rpc_look.h"

/* Whether TLS is spoken on this connection (closed here; -1 none). tls: as we dial. Fills out_look
 * where something is wrong. */
bool ep_rpc_look_tls(int taken_fd, const ep_tls_config *tls, const bool *stop,
                     ep_rpc_look *out_look);
/* Whether it is, without any settings. */
bool ep_rpc_look_speaks_tls(int taken_fd, const bool *stop);

/* ---- rpc_look.c ---- */
/* Until one of poll's events: false when a step's time is over, or the look is to end. */
bool ep_rpc_look_wait(int fd, short events, const bool *stop);
void ep_rpc_look_found(ep_rpc_look *look, const char *code, const char *advice, const char *format,
                       ...) __attribute__((format(printf, 4, 5)));
/* Finds a door by how it greets. */
bool ep_rpc_look_is_door(const char *greeting, size_t bytes, ep_rpc_look *out_look);

#endif
