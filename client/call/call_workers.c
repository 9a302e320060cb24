/* SPDX-License-Identifier: Apache-2.0 */
/* A queue of calls, linked through themselves, and the threads that empty it. */
#include "call/call_workers.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/thread.h"
#include "call/call.h"

#define WORKERS 2

struct ep_call_workers {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    STAILQ_HEAD(, ep_call) queue;
    bool stopping;
    uint32_t threads_count;
    pthread_t threads[WORKERS];
};

static void *worker_main(void *arg)
{
    ep_call_workers *w = arg;
    pthread_mutex_lock(&w->lock);
    while (!STAILQ_EMPTY(&w->queue) || !w->stopping) {
        ep_call *call = STAILQ_FIRST(&w->queue);
        if (call == NULL) {
            pthread_cond_wait(&w->wake, &w->lock);
            continue;
        }
        STAILQ_REMOVE_HEAD(&w->queue, work);
        pthread_mutex_unlock(&w->lock);
        ep_call_run_handed(call);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

ep_err ep_call_workers_create(ep_call_workers **out_workers)
{
    ep_call_workers *w = calloc(1, sizeof(*w));
    if (w == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    STAILQ_INIT(&w->queue);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    for (uint32_t i = 0; i < WORKERS; i++) {
        if (ep_thread_start("ep-client-work", worker_main, w, &w->threads[i]) != EP_OK) {
            ep_call_workers_destroy(w);
            return EP_ERR_IO;
        }
        w->threads_count++;
    }
    *out_workers = w;
    return EP_OK;
}

void ep_call_workers_destroy(ep_call_workers *w)
{
    if (w == NULL) {
        return;
    }
    pthread_mutex_lock(&w->lock);
    w->stopping = true;
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);
    for (uint32_t i = 0; i < w->threads_count; i++) {
        pthread_join(w->threads[i], NULL);
    }
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

void ep_call_workers_post(ep_call_workers *w, ep_call *call)
{
    pthread_mutex_lock(&w->lock);
    STAILQ_INSERT_TAIL(&w->queue, call, work);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
}
