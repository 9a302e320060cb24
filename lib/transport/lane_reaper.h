/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread that ends things. An nng object may not be freed inside its own callback, and a
 * connection's last callback may not run inside ep_conn_close: both are handed to this thread.
 *
 * Threads  all calls, any thread, except ep_reaper_stop: not from an item.
 */
#ifndef EP_TRANSPORT_LANE_REAPER_H
#define EP_TRANSPORT_LANE_REAPER_H

#include "transport/transport.h"

typedef struct ep_reap_item {
    /* runs on the reaper's thread, may push again, may free its owner */
    void (*func)(struct ep_reap_item *item);
    struct ep_reap_item *next;
} ep_reap_item;

/* Starts the thread unless it runs. Errors: IO. */
ep_err ep_reaper_start(ep_error *out_error);
/* The item is embedded in its owner and not queued now. Needs a started reaper. */
void ep_reaper_push(ep_reap_item *item);
/* Nothing is pushed any more: ends the thread. */
void ep_reaper_stop(void);

#endif
