/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that leave signals to the program's own: they block all but those of their own faults and
 * of profilers. */
#ifndef EP_BASE_THREAD_H
#define EP_BASE_THREAD_H

#include <pthread.h>

#include "expertd/error.h"

/* Runs func(arg) on a thread of that name, up to 15 characters; to be joined or detached. Errors:
 * IO, errno says why. */
ep_err ep_thread_start(const char *name, void *(*func)(void *), void *arg, pthread_t *out_thread);

#endif
