/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merges works of several requests into jobs and keeps a bounded number of jobs on the backend.
 * Which work is next: batch_policy.h.
 *
 * Ownership  work and queues belong to the caller; work is borrowed from submit until its done(), a
 *            queue while it has work.
 * Callbacks  done() exactly once per work, with no lock held: from a backend thread, or from a
 *            thread inside ep_batcher_submit or _close when the work was dropped or refused.
 *            is_dropped() must not block and not call the batcher.
 * Threads    all calls from any thread, also from done(), except destroy.
 */
#ifndef EP_EXPERTD_BATCHER_H
#define EP_EXPERTD_BATCHER_H

#include "backends/backend.h"
#include "base/timer.h"
#include "expertd/batch_policy.h"
#include "observe/trace.h"

typedef struct ep_batcher ep_batcher;

/* What a work's spans say (observe/trace_spans.def: queue, job and, through job.trace, kernel). */
typedef struct ep_work_trace {
    ep_trace_fields fields; /* of the job. call: J; parent: R; peer "" */
    uint32_t group;         /* number in its request */
    bool queue_open;        /* private, as the next */
    bool job_open;
} ep_work_trace;

/* Rows of one request for one expert. Zero it first. */
struct ep_work {
    ep_backend *backend; /* whose weights these are */
    /* Set rows (1..ep_batch_rows_max of its class), types, weights and trace. The backend gets a
     * copy with the rows of all works of its job; priority, done and arg are the batcher's. */
    ep_job job;
    ep_work_place place;
    /* asked just before compute: true ends the work with CANCELLED. NULL: never */
    bool (*is_dropped)(const ep_work *work);
    void (*done)(ep_work *work, ep_err result);
    void *arg;
    ep_work_trace *trace; /* lives as long as the work; NULL: not traced */
    uint64_t started_ns;  /* set when handed to the backend; 0 when it never was */
    ep_err result;        /* private */
};

typedef struct ep_batcher_stats {
    uint64_t waiting[EP_WORK_CLASSES];
    uint64_t in_flight;
    uint64_t jobs_total[EP_WORK_CLASSES];
    uint64_t works_total[EP_WORK_CLASSES]; /* in these jobs */
    uint64_t rows_total[EP_WORK_CLASSES];
    uint64_t busy_ns;         /* time with at least one job on the backend */
    uint64_t busy_work;       /* of finished jobs, counted as HeartbeatRequest.busy_work */
    uint64_t group_window_ns; /* in force */
    uint32_t pass_rows;       /* cost of reading an expert's weights, in rows (pass_cost.h) */
} ep_batcher_stats;

/* timers end the windows of step groups; NULL: nobody waits for a group. Errors: NO_MEMORY. */
ep_err ep_batcher_create(const ep_batch_policy_config *policy, ep_timer_service *timers,
                         ep_batcher **out_batcher);
/* Queues works of one request. step may be NULL. After close works end with its reason. */
void ep_batcher_submit(ep_batcher *batcher, ep_work *works, uint32_t count,
                       const ep_batch_step *step);
/* Sets the window of step groups that begin from now on; groups that wait keep theirs. */
void ep_batcher_set_group_window(ep_batcher *batcher, uint64_t window_ns);
/* Ends waiting work with reason and refuses more; work on the backend goes on. Idempotent. */
void ep_batcher_close(ep_batcher *batcher, ep_err reason);
/* Closes with CANCELLED and waits for the backend. NULL allowed. */
void ep_batcher_destroy(ep_batcher *batcher);
/* As in the stats, without a lock. */
uint32_t ep_batcher_pass_rows(const ep_batcher *batcher);
void ep_batcher_read_stats(ep_batcher *batcher, ep_batcher_stats *out_stats);

#endif
