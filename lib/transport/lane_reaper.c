/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that frees what cannot be freed where its end is noticed. */
#include "transport/lane_reaper.h"

#include "transport/lane_common.h"

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work; /* an item was pushed, or stop */
    pthread_t thread;
    bool running;
    bool stopping;
    ep_reap_item *head;
    ep_reap_item *tail;
} reaper = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

static void *reaper_main(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&reaper.lock);
    for (;;) {
        ep_reap_item *item = reaper.head;
        if (item != NULL) {
            reaper.head = item->next;
            if (reaper.head == NULL) {
                reaper.tail = NULL;
            }
            pthread_mutex_unlock(&reaper.lock);
            item->func(item);
            pthread_mutex_lock(&reaper.lock);
        } else if (reaper.stopping) {
            break;
        } else {
            pthread_cond_wait(&reaper.work, &reaper.lock);
        }
    }
    pthread_mutex_unlock(&reaper.lock);
    return NULL;
}

ep_err ep_reaper_start(ep_error *out_error)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&reaper.lock);
    if (!reaper.running) {
        err = ep_lane_thread_create("ep-lane-reaper", reaper_main, NULL, &reaper.thread);
        reaper.running = err == EP_OK;
    }
    pthread_mutex_unlock(&reaper.lock);
    return err == EP_OK
               ? EP_OK
               : ep_error_set(out_error, err, "cannot start the reaper thread of the network lane");
}

void ep_reaper_push(ep_reap_item *item)
{
    pthread_mutex_lock(&reaper.lock);
    item->next = NULL;
    if (reaper.tail == NULL) {
        reaper.head = item;
    } else {
        reaper.tail->next = item;
    }
    reaper.tail = item;
    pthread_cond_signal(&reaper.work);
    pthread_mutex_unlock(&reaper.lock);
}

void ep_reaper_stop(void)
{
    pthread_mutex_lock(&reaper.lock);
    bool running = reaper.running;
    reaper.stopping = running;
    pthread_cond_signal(&reaper.work);
    pthread_mutex_unlock(&reaper.lock);
    if (running) {
        pthread_join(reaper.thread, NULL);
        pthread_mutex_lock(&reaper.lock);
        reaper.running = false;
        reaper.stopping = false;
        pthread_mutex_unlock(&reaper.lock);
    }
}
