/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A prepared call whose tensors are on an Ascend device: connects the caller's stream with the run.
 *
 *   caller's stream   ... record begun ......................... wait for ended, copy out in,
 *                     record taken ...
 *   own stream        wait for taken, begun; copy inputs out, record copied, callback ...... record
 *                     ended
 *   host              callback -> the reports' thread starts the run; whoever ends it records ended
 *
 * A stream can wait only for events that were recorded before the wait. So the caller's stream
 * waits for a notify instead, which may be recorded later: the own stream records it when the run
 * has ended. A callback must not call the runtime, so it only marks its run, and the thread that
 * processes reports does the rest.
 */
#ifndef EP_CLIENT_STREAM_CALL_H
#define EP_CLIENT_STREAM_CALL_H

#include "expertd/client.h"

typedef struct ep_stream_call ep_stream_call;

/*
 * Replaces device tensors in args and out by pinned host memory; *out_stream_call is NULL if there
 * are none. Errors: as ep_stage_add; INVALID_ARGUMENT (only one of x and out is on the device),
 * NO_MEMORY, IO, the runtime's.
 */
ep_err ep_stream_call_create(ep_moe_args *args, ep_tensor *out, ep_stream_call **out_stream_call,
                             ep_error *out_error);
/* Call it between runs. Waits up to 5 s for tasks in the streams; memory that later tasks may use
 * is not freed. NULL allowed. */
void ep_stream_call_destroy(ep_stream_call *s);

/*
 * False: the run has started and must be cancelled there. True: it has not; if it has begun, it
 * ends with CANCELLED once its inputs are copied.
 */
bool ep_stream_call_cancel(ep_stream_call *s);
/*
 * The call's on_done: lets the caller's stream go on, before the end of the run is reported. An
 * error of the device becomes the call's if that has none.
 */
void ep_stream_call_end(void *stream_call, const ep_moe_result *result);
/*
 * Waits up to timeout_ns (UINT64_MAX: for ever) until the run has started; false: it has not. With
 * an error in *out_error it has ended without being started.
 */
bool ep_stream_call_wait(ep_stream_call *s, uint64_t timeout_ns, ep_error *out_error);
/* The end of the run has been reported: the next one may begin. */
void ep_stream_call_collect(ep_stream_call *s);

#endif
