/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of the loopback lane: one thread creates and ends connections and delivers frames. */
#ifndef EP_TRANSPORT_LOOPBACK_LANE_H
#define EP_TRANSPORT_LOOPBACK_LANE_H

#include "transport/lane_accept.h"
#include "transport/lane_dial.h"
#include "transport/lane_worker.h"

extern ep_lane_worker ep_loopback_worker;

/* Creates both ends. The accepted end takes count's place, also on error. Errors: NO_MEMORY. */
ep_err ep_loopback_conn_pair_create(const ep_lane_dial *dial, const ep_lane_limits *accept_limits,
                                    ep_accept_count *taken_count, ep_conn **out_dialed,
                                    ep_conn **out_accepted);
ep_err ep_loopback_conn_send(ep_conn *conn, ep_send *send);

#endif
