/* SPDX-License-Identifier: Apache-2.0 */
/* The thread of a group that calls back. It sleeps until a watched call is over. */
#include <errno.h>
#include <string.h>

#include "base/thread.h"
#include "group/group_core.h"

/* A watched call that is over; NULL: none, and *out_next_ns is the latest time of the next. Lock
 * held. */
static group_op *next_over(ep_group *group, uint64_t *out_next_ns)
{
    *out_next_ns = UINT64_MAX;
    for (uint32_t i = 0; i < EP_GROUP_OPERATIONS_MAX; i++) {
        group_op *op = group->ops[i];
        if (op != NULL && op->watch != NULL) {
            if (ep_group_op_is_over_locked(op)) {
                return op;
            }
            *out_next_ns = op->deadline_ns < *out_next_ns ? op->deadline_ns : *out_next_ns;
        }
    }
    return NULL;
}

static void *watcher_main(void *of)
{
    ep_group *group = of;
    pthread_mutex_lock(&group->lock);
    while (!group->watcher_ends) {
        uint64_t next_ns;
        group_op *op = next_over(group, &next_ns);
        if (op != NULL) {
            const group_watch *watch = op->watch;
            void *arg = op->watch_arg;
            op->watch = NULL;
            if (watch->take(arg)) { /* the plan stays until this thread stops driving */
                pthread_mutex_unlock(&group->lock);
                watch->over(arg);
                pthread_mutex_lock(&group->lock);
            }
        } else if (next_ns != UINT64_MAX) {
            ep_group_wait_until(group, next_ns);
        } else {
            pthread_cond_wait(&group->changed, &group->lock);
        }
    }
    pthread_mutex_unlock(&group->lock);
    return NULL;
}

ep_err ep_group_watch_start(ep_group *group, ep_error *out_error)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&group->lock);
    if (!group->has_watcher) {
        err = ep_thread_start("ep-group", watcher_main, group, &group->watcher);
        group->has_watcher = err == EP_OK;
    }
    pthread_mutex_unlock(&group->lock);
    return err == EP_OK ? EP_OK
                        : ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                                       "group %.40s: no thread for callbacks (%s)", group->name,
                                       strerror(errno));
}

void ep_group_watch(group_op *op, const group_watch *watch, void *arg)
{
    pthread_mutex_lock(&op->group->lock);
    op->watch = watch;
    op->watch_arg = arg;
    pthread_cond_broadcast(&op->group->changed);
    pthread_mutex_unlock(&op->group->lock);
}
