/* SPDX-License-Identifier: Apache-2.0 */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>

#include "base/check.h"

ep_err ep_thread_start(const char *name, void *(*func)(void *), void *arg, pthread_t *out_thread)
{
    /* a thread's own faults, which nobody else can handle, and the clock of a profiler */
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF};
    sigset_t blocked;
    sigset_t before;
    sigfillset(&blocked);
    for (size_t i = 0; i < EP_ARRAY_COUNT(own); i++) {
        sigdelset(&blocked, own[i]);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before); /* so that the new thread inherits the mask */
    int failed = pthread_create(out_thread, NULL, func, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0) {
        errno = failed;
        return EP_ERR_IO;
    }
    pthread_setname_np(*out_thread, name);
    return EP_OK;
}
