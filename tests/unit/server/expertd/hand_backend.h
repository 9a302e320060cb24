/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A backend the test drives by hand: it keeps every job it is given, in order, until the test
 * completes it, and computes nothing. Makes order and limits visible without any timing. Threads:
 * any.
 */
#ifndef EP_TESTS_UNIT_SERVER_HAND_BACKEND_H
#define EP_TESTS_UNIT_SERVER_HAND_BACKEND_H

#include <pthread.h>

#include "backends/backend.h"

#define HAND_JOBS_MAX 4096

typedef struct hand_backend {
    ep_backend base;
    pthread_mutex_t lock;
    pthread_cond_t submitted;
    ep_job *jobs[HAND_JOBS_MAX]; /* all jobs ever submitted, in order */
    uint32_t count;
    uint32_t completed;
    ep_err next_error; /* what submit answers next, once */
    /* each job taken; NULL: not wanted. Jobs' memory is used again */
    void (*on_submit)(const ep_job *job);
} hand_backend;

void hand_backend_init(hand_backend *hand);
/* Until count jobs have been submitted in all. */
void hand_backend_wait(hand_backend *hand, uint32_t count);
/* Completes the oldest job that is not complete; false when there is none. */
bool hand_backend_complete(hand_backend *hand, ep_err result);
/* With EP_OK, those too that come meanwhile. */
void hand_backend_complete_all(hand_backend *hand);

#endif
