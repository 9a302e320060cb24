/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench/bench_report.h"
#include "bench/lanes_form.h"

#define REPLY_WAIT_S 20 /* a run takes a fraction of a second */

void lanes_fail(const char *what, const char *why)
{
    fprintf(stderr, "bench_lanes: %s: %s\n", what, why);
    exit(1);
}

static void send_slot(lanes_pipeline *p, int slot)
{
    p->begin_us[slot] = bench_now_us();
    p->send(p->arg, slot);
}

double lanes_pipeline_run(lanes_pipeline *p)
{
    static sem_t done;
    int first = p->depth < p->count ? p->depth : p->count;
    p->depth = first;
    sem_init(&done, 0, 0);
    p->done = &done;
    p->finished = 0;
    __atomic_store_n(&p->started, first, __ATOMIC_RELEASE);
    double begin = bench_now_us();
    for (int i = 0; i < first; i++) {
        send_slot(p, i);
    }
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += REPLY_WAIT_S;
    while (sem_clockwait(&done, CLOCK_MONOTONIC, &until) != 0) {
        if (errno == ETIMEDOUT) {
            return -1; /* the semaphore stays: a late reply may yet post it */
        }
    }
    double seconds = (bench_now_us() - begin) / 1e6;
    sem_destroy(&done);
    return seconds;
}

void lanes_pipeline_reply(lanes_pipeline *p, int slot)
{
    double us = bench_now_us() - p->begin_us[slot];
    p->out_us[__atomic_fetch_add(&p->finished, 1, __ATOMIC_ACQ_REL)] = us;
    if (__atomic_fetch_add(&p->started, 1, __ATOMIC_ACQ_REL) < p->count) {
        send_slot(p, slot);
    } else if (__atomic_load_n(&p->started, __ATOMIC_ACQUIRE) == p->count + p->depth) {
        sem_post(p->done); /* every slot found nothing to start */
    }
}
