/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cuts jobs into passes and passes into tasks, and gives tasks to worker threads.
 *
 * A pass goes through the stages prepare, pack, gate-up, down (kernels/ffn_pass.h). A thread takes tasks of
 * the oldest pass that has some; where a stage's last tasks are still running elsewhere it takes tasks of the
 * next pass, so no thread waits at a barrier while there is work. Small passes run whole in one task. Idle
 * threads spin for a short time, then sleep.
 *
 * A job of smaller priority overtakes at the next task: threads turn to its passes first. Patient jobs
 * (EP_JOB_PATIENT) also give up the stage ends of the others: one of their panels of 96 rows may take longer
 * than a whole stage of a decode pass.
 *
 * Threads  submit: any. start and stop: one, in that order.
 */
#ifndef EP_BACKENDS_CPU_CPU_SCHEDULE_H
#define EP_BACKENDS_CPU_CPU_SCHEDULE_H

#include "backends/backend.h"
#include "kernels/ffn_pass.h"

typedef struct ep_cpu_schedule ep_cpu_schedule;

typedef struct ep_cpu_weights {
    ep_backend_weights base;
    ep_expert_source outline; /* what packed follows from; head of the exported form */
    ep_ffn_packed packed; /* into memory */
    void *memory;
    size_t bytes;
} ep_cpu_weights;

/* kernels: by family. Errors: NO_MEMORY. */
ep_err ep_cpu_schedule_start(const ep_ffn_kernel *const kernels[EP_FFN_FAMILIES], uint32_t threads, ep_cpu_schedule **out_schedule);
/* All jobs are done. Joins the threads. NULL allowed. */
void ep_cpu_schedule_stop(ep_cpu_schedule *schedule);
/* job has been checked; its weights are ep_cpu_weights. Errors: RESOURCE_EXHAUSTED. */
ep_err ep_cpu_schedule_submit(ep_cpu_schedule *schedule, ep_job *job);

#endif
