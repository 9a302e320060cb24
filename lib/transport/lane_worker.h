/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs of a lane, embedded in their owners: a list of jobs to run, a list of jobs that wait for
 * their time, and a thread that runs both, for lanes that watch no descriptors.
 *
 * Threads  lists: under their owner's lock. A worker: any, but _stop not from a job.
 */
#ifndef EP_TRANSPORT_LANE_WORKER_H
#define EP_TRANSPORT_LANE_WORKER_H

#include <pthread.h>

#include "transport/transport.h"

typedef struct ep_lane_job {
    void (*run)(struct ep_lane_job *job); /* no lock held; may push again, may free its owner */
    struct ep_lane_job *next;
    bool queued;
    bool waiting; /* for due_ns */
    uint64_t due_ns;
} ep_lane_job; /* may be queued or waiting, not both */

/* Jobs in the order in which they were pushed. */
typedef struct ep_lane_jobs {
    ep_lane_job *head;
    ep_lane_job *tail;
} ep_lane_jobs;

/* False: it was queued already, and runs only once. */
bool ep_lane_jobs_push(ep_lane_jobs *jobs, ep_lane_job *job);
/* NULL: none. */
ep_lane_job *ep_lane_jobs_pop(ep_lane_jobs *jobs);

/* Adds to the waiting jobs, in no order. The list is short: only jobs that lack memory or
 * descriptors wait. */
void ep_lane_later_add(ep_lane_job **later, ep_lane_job *job, uint64_t due_ns);
/* Does nothing when the job does not wait. */
void ep_lane_later_remove(ep_lane_job **later, ep_lane_job *job);
/* Removes a job that is due. NULL: none; *out_next_ns tells when the next one is. */
ep_lane_job *ep_lane_later_take(ep_lane_job **later, uint64_t now_ns, uint64_t *out_next_ns);

typedef struct ep_lane_worker {
    const char *name; /* of the thread, up to 15 characters */
    pthread_mutex_t lock;
    pthread_cond_t work; /* a job was pushed, or the worker must stop */
    pthread_t thread;
    bool running;
    bool stopping;
    ep_lane_jobs jobs;
    ep_lane_job *later;
} ep_lane_worker;
#define EP_LANE_WORKER(of_name)                                                                    \
    {                                                                                              \
        .name = (of_name), .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER     \
    }

/* Starts the thread unless it runs. Errors: IO. */
ep_err ep_lane_worker_start(ep_lane_worker *worker, ep_error *out_error);
/* Runs the job soon, also one that waits. False: it was queued already. Needs a started worker. */
bool ep_lane_worker_push(ep_lane_worker *worker, ep_lane_job *job);
/* Runs the job at due_ns. False: it was queued or waiting already. */
bool ep_lane_worker_push_later(ep_lane_worker *worker, ep_lane_job *job, uint64_t due_ns);
/* Ends the thread. Nothing may be pushed any more. */
void ep_lane_worker_stop(ep_lane_worker *worker);

#endif
