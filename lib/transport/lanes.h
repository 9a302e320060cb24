/* SPDX-License-Identifier: Apache-2.0 */
/* What the list of lanes asks of each lane beside its table. */
#ifndef EP_TRANSPORT_LANES_H
#define EP_TRANSPORT_LANES_H

#include "transport/transport.h"

/* Each ends its lane's own threads, once nothing needs them (ep_lane_hold). */
void ep_loopback_fini(void);
void ep_nng_fini(void);
void ep_shm_fini(void);
void ep_uv_fini(void);
/* FAILED_PRECONDITION in a child of a process that used nng. */
ep_err ep_nng_check_fork(ep_error *out_error);
/* What ep_stream_lane_set_busy_poll set, and the looks of it so far. */
uint32_t ep_uv_busy_poll(uint64_t *out_polls);

#endif
