/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cuts jobs into passes and passes into tasks, and gives tasks to worker threads.
 *
 * A pass goes through the stages prepare, pack, gate-up, round, down (kernels/ffn_pass.h). A thread
 * takes tasks of the oldest pass that has some. Where the last tasks of a stage still run on other
 * threads, it takes tasks of the next pass. So no thread waits at a barrier while there is work,
 * and one expert may use one thread or all. A small pass runs as a single task. Tasks of the stage
 * that a thread works on are claimed by one atomic step; the lock is taken when a stage ends, or
 * when something better to do may have come up.
 *
 * Idle threads spin for a short time, then sleep; on CPUs that other threads need too, they sleep
 * at once (cpu_spin.h). A thread prefers passes whose weights are on its own memory node.
 *
 * A job of smaller priority overtakes at the next task, since threads choose its passes first. As
 * many threads as urgent passes can use also stay away from patient jobs (EP_JOB_PATIENT) at the
 * stage ends of urgent ones: a panel of 96 rows may take longer than a whole stage of a decode
 * pass.
 *
 * Threads  submit: any. start and stop: one, in that order.
 */
#ifndef EP_BACKENDS_CPU_CPU_SCHEDULE_H
#define EP_BACKENDS_CPU_CPU_SCHEDULE_H

#include "backends/backend.h"
#include "backends/cpu/cpu_topology.h"
#include "kernels/ffn_pass.h"

typedef struct ep_cpu_schedule ep_cpu_schedule;

typedef struct ep_cpu_weights {
    ep_backend_weights base;
    ep_expert_source outline; /* the layout of packed follows from it; head of the exported form */
    ep_ffn_packed packed;     /* points into memory */
    void *memory;
    size_t bytes;
    uint32_t node; /* memory node where they are; 0 if there is only one */
} ep_cpu_weights;

typedef struct ep_cpu_schedule_config {
    const ep_ffn_kernel *const *kernels; /* [EP_FFN_FAMILIES], borrowed for the call */
    const ep_cpu_topology *topology;     /* outlives the schedule */
    uint32_t threads;
    /* with one thread per CPU, each is tied to its CPU; with fewer or more, threads are tied to
     * memory nodes only */
    bool pins;
} ep_cpu_schedule_config;

/* Sums over all threads since the start. */
typedef struct ep_cpu_counts {
    uint64_t tasks_near; /* with weights on the thread's own memory node */
    uint64_t tasks_far;
    uint64_t idle_ns; /* without a task, spinning or asleep */
} ep_cpu_counts;

/* Errors: NO_MEMORY. */
ep_err ep_cpu_schedule_start(const ep_cpu_schedule_config *config, ep_cpu_schedule **out_schedule);
/* All jobs must be done and each submit must have returned. Joins the threads. NULL allowed. */
void ep_cpu_schedule_stop(ep_cpu_schedule *schedule);
/* job must have been checked; its weights are ep_cpu_weights. Errors: RESOURCE_EXHAUSTED. */
ep_err ep_cpu_schedule_submit(ep_cpu_schedule *schedule, ep_job *job);
/* Threads: any. */
ep_cpu_counts ep_cpu_schedule_counts(ep_cpu_schedule *schedule);

#endif
