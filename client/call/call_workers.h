/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two threads that are busy with calls where the thread at hand must not be: the timers' thread,
 * which every deadline, ping and back-off of the client depends on, and the caller's own where its
 * callback would run inside the function that began or cancelled the call. Two, so that a callback
 * that blocks, which it must not, holds up neither the deadlines nor the callbacks of other calls.
 *
 * Threads  post from any. Posting never fails and allocates nothing: a call is in the queue at most
 *          once.
 */
#ifndef EP_CLIENT_CALL_WORKERS_H
#define EP_CLIENT_CALL_WORKERS_H

#include "expertd/client.h"

typedef struct ep_call_workers ep_call_workers;

/* Errors: NO_MEMORY, IO. */
ep_err ep_call_workers_create(ep_call_workers **out_workers);
/* When every call has ended. Waits for both threads; not from one. NULL allowed. */
void ep_call_workers_destroy(ep_call_workers *workers);
/* A worker runs ep_call_run_handed. The call is busy with nobody; a use goes with it. */
void ep_call_workers_post(ep_call_workers *workers, ep_call *call);

#endif
