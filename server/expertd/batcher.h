/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between requests and the backend: one queue per (layer, expert), first in, first out; a bounded number of
 * jobs on the backend.
 *
 * Two classes: decode goes before prefill, but while prefill waits, at least every
 * EP_BATCHER_PREFILL_EVERY-th job is prefill. Inside a class the experts that have work take turns, in the
 * order in which their work came.
 *
 * Ownership  work and queues belong to the caller; work is borrowed from submit until its done(), a queue
 *            while it has work.
 * Callbacks  done() exactly once per work, with no lock held: from a backend thread, or from a thread
 *            inside ep_batcher_submit or _close when the work was dropped or refused. is_dropped() must not
 *            block and not call the batcher.
 * Threads    all calls from any thread, also from done(), except destroy.
 */
#ifndef EP_EXPERTD_BATCHER_H
#define EP_EXPERTD_BATCHER_H

#include "backends/backend.h"
#include "observe/trace.h"

#define EP_BATCHER_PREFILL_EVERY 8
#define EP_BATCHER_JOB_ROWS_MAX 512

typedef struct ep_batcher ep_batcher;
typedef struct ep_work ep_work;

typedef enum ep_work_class { EP_WORK_DECODE, EP_WORK_PREFILL, EP_WORK_CLASSES } ep_work_class;

/* Waiting work of one expert. Zero it first. */
typedef struct ep_work_queue {
    /* private */
    struct {
        ep_work *first;
        ep_work *last;
        struct ep_work_queue *next_ready;
    } classes[EP_WORK_CLASSES];
} ep_work_queue;

/* What a work's spans say (observe/trace_spans.def: queue, job and, through job.trace, kernel). */
typedef struct ep_work_trace {
    ep_trace_fields fields; /* of the job. call: J; parent: R; peer "" */
    uint32_t group;         /* number in its request */
    bool queue_open;        /* private, as the next */
    bool job_open;
} ep_work_trace;

/* Rows of one request for one expert. Zero it first. */
struct ep_work {
    ep_job job; /* all but done and arg set by the caller; 1..EP_JOB_ROWS_MAX rows */
    ep_work_queue *queue;
    ep_work_class work_class;
    bool (*is_dropped)(
        const ep_work *work); /* asked just before compute: true ends it with CANCELLED. NULL: never */
    void (*done)(ep_work *work, ep_err result);
    void *arg;
    ep_work_trace *trace; /* lives as long as the work; NULL: not traced */
    uint64_t started_ns; /* set when handed to the backend; 0 when it never was */
    /* private */
    ep_batcher *batcher;
    ep_work *next;
    ep_err result;
};

typedef struct ep_batcher_stats {
    uint64_t waiting[EP_WORK_CLASSES];
    uint64_t in_flight;
    uint64_t jobs_total[EP_WORK_CLASSES];
} ep_batcher_stats;

/* in_flight_max: jobs on the backend at once, at least 1. Errors: NO_MEMORY. */
ep_err ep_batcher_create(ep_backend *backend, uint32_t in_flight_max, ep_batcher **out_batcher);
/* Queues count works in order. After close each is done with its reason. */
void ep_batcher_submit(ep_batcher *batcher, ep_work *works, uint32_t count);
/* Ends waiting work with reason and refuses more; work on the backend goes on. Idempotent. */
void ep_batcher_close(ep_batcher *batcher, ep_err reason);
/* Closes with CANCELLED and waits for the backend. NULL allowed. */
void ep_batcher_destroy(ep_batcher *batcher);
void ep_batcher_read_stats(ep_batcher *batcher, ep_batcher_stats *out_stats);

#endif
