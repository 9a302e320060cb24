/* SPDX-License-Identifier: Apache-2.0 */
/* The TLS part of a look, and helpers shared with rpc_look.c. */
#ifndef EP_RPC_RPC_LOOK_TLS_H
#define EP_RPC_RPC_LOOK_TLS_H

#include "rpc/rpc_look.h"

/* Whether the peer speaks TLS on this connection (closed here; -1 none). tls: our dial settings;
 * fills out_look if something is wrong with them there. NULL: only finds out whether. */
bool ep_rpc_look_tls(int taken_fd, const ep_tls_config *tls, const bool *stop,
                     ep_rpc_look *out_look);

/* ---- rpc_look.c ---- */
/* Waits for one of poll's events. False when a step's time is over, or the look must end. */
bool ep_rpc_look_wait(int fd, short events, const bool *stop);
void ep_rpc_look_found(ep_rpc_look *look, const char *code, const char *advice, const char *format,
                       ...) __attribute__((format(printf, 4, 5)));
/* Recognises a door by its greeting. */
bool ep_rpc_look_is_door(const char *greeting, size_t bytes, ep_rpc_look *out_look);

#endif
