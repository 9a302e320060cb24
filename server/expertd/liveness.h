/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether the node still works, for the watchdog and for /livez. The event loop asks, so a loop
 * that stands still counts as dead without further checks. A node also hangs when
 *   - its timer thread does not run: no deadline ends, no ping is sent;
 *   - the backend holds jobs and has finished none for stall_ms: callers wait for rows that never
 *     come.
 * A node that is idle, or slow but making progress, is alive.
 *
 * Threads: _check on one thread; _read from any.
 */
#ifndef EP_EXPERTD_LIVENESS_H
#define EP_EXPERTD_LIVENESS_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/timer.h"

#define EP_LIVENESS_TIMER_STALL_MS 10000

typedef enum ep_liveness_state {
    EP_LIVENESS_OK,
    EP_LIVENESS_TIMERS_STUCK,
    EP_LIVENESS_COMPUTE_STUCK
} ep_liveness_state;

typedef struct ep_liveness {
    /* private */
    ep_timer_service *timers;
    ep_timer beat;
    _Atomic uint64_t beats;
    _Atomic uint32_t state;    /* ep_liveness_state */
    _Atomic uint64_t stuck_ns; /* for how long */
    uint64_t beats_seen;
    uint64_t beat_ns; /* when beats last grew or the timer was armed */
    uint64_t jobs_done_seen;
    uint64_t progress_ns; /* when a job was last finished, or there was none */
    bool is_armed;
} ep_liveness;

/* timers is borrowed until _fini. */
void ep_liveness_init(ep_liveness *liveness, ep_timer_service *timers, uint64_t now_ns);
void ep_liveness_fini(ep_liveness *liveness);
/*
 * jobs_done: jobs the backend has finished since the start; jobs_in_flight: jobs it holds. stall_ms
 * 0: jobs are not judged. Logs once when the node begins to hang, and once when it works again.
 */
ep_liveness_state ep_liveness_check(ep_liveness *liveness, uint64_t now_ns, uint64_t jobs_done,
                                    uint64_t jobs_in_flight, uint32_t stall_ms);
ep_liveness_state ep_liveness_read(const ep_liveness *liveness, uint64_t *out_stuck_ms);
/* "ok", "timers stuck", "compute stuck". */
const char *ep_liveness_name(ep_liveness_state state);

#endif
