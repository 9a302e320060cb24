/* SPDX-License-Identifier: Apache-2.0 */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>

ep_err ep_thread_start(const char *name, void *(*func)(void *), void *arg, pthread_t *out_thread)
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* so that the new thread inherits the mask */
    int failed = pthread_create(out_thread, NULL, func, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0) {
        errno = failed;
        return EP_ERR_IO;
    }
    pthread_setname_np(*out_thread, name);
    return EP_OK;
}
