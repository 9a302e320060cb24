/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two threads that work on calls in place of a thread that must not: the timers' thread, on which
 * every deadline, ping and back-off of the client depends, and a caller's thread on which a
 * callback would run inside the function that began or cancelled the call. There are two, so that a
 * callback that blocks, against the rules, does not hold up those of other calls.
 *
 * Threads  post on any. It never fails and never allocates, as a call is in the queue at most once.
 */
#ifndef EP_CLIENT_CALL_WORKERS_H
#define EP_CLIENT_CALL_WORKERS_H

#include "expertd/client.h"

typedef struct ep_call_workers ep_call_workers;

/* Errors: NO_MEMORY, IO. */
ep_err ep_call_workers_create(ep_call_workers **out_workers);
/* Call it when every call has ended, not on a worker. Waits for both threads. NULL allowed. */
void ep_call_workers_destroy(ep_call_workers *workers);
/* Makes a worker run ep_call_run_handed. The call is busy without a thread; a use goes with it. */
void ep_call_workers_post(ep_call_workers *workers, ep_call *call);

#endif
