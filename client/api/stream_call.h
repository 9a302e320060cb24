/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A prepared call whose tensors are on an Ascend device: what lies between the caller's stream and
 * the run.
 *
 *   caller's stream   ... record begun ......................... wait for ended, copy out in,
 *                     record taken ...
 *   own stream        wait for taken, begun; copy inputs out, record copied, callback ...... record
 *                     ended
 *   host              callback -> the reports' thread starts the run; whoever ends it records ended
 *
 * Events tell streams what another stream has done, and only of what was recorded before the wait.
 * So the caller's stream waits for a notify, which may be recorded later: when the run has ended,
 * by our own stream. A callback may not call the runtime: it marks its run, and the thread that
 * processes reports does the rest.
 */
#ifndef EP_CLIENT_STREAM_CALL_H
#define EP_CLIENT_STREAM_CALL_H

#include "expertd/client.h"

typedef struct ep_stream_call ep_stream_call;

/*
 * Moves the tensors that are on a device to pinned memory, in args and out; *out_stream_call is
 * NULL when none is.
 * Errors: as ep_stage_add; INVALID_ARGUMENT (x or out in host memory, the other on the device),
 * NO_MEMORY, IO, the runtime's.
 */
ep_err ep_stream_call_create(ep_moe_args *args, ep_tensor *out, ep_stream_call **out_stream_call,
                             ep_error *out_error);
/* Between runs. What a stream still holds is waited for, or left as it is (5 s). NULL allowed. */
void ep_stream_call_destroy(ep_stream_call *s);

/*
 * False: the call has a run, to be cancelled there. True: there is none yet, and it ends with
 * CANCELLED when its inputs are there, or there will be none.
 */
bool ep_stream_call_cancel(ep_stream_call *s);
/*
 * The call's on_done: before the end of a run is told, lets the caller's stream go on. The call's
 * error becomes the device's where there was none.
 */
void ep_stream_call_end(void *stream_call, const ep_moe_result *result);
/*
 * Waits until the run has started, up to timeout_ns (UINT64_MAX: for ever): false: it has not. An
 * error in *out_error: it never will, and has ended.
 */
bool ep_stream_call_wait(ep_stream_call *s, uint64_t timeout_ns, ep_error *out_error);
/* The run has ended and is told: the next one may begin. */
void ep_stream_call_collect(ep_stream_call *s);

#endif
