/* SPDX-License-Identifier: Apache-2.0 */
#include "base/clock.h"

#include <errno.h>
#include <time.h>

uint64_t ep_clock_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * EP_NS_PER_S + (uint64_t)t.tv_nsec;
}

bool ep_clock_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until_ns)
{
    const struct timespec until = {.tv_sec = (time_t)(until_ns / EP_NS_PER_S),
                                   .tv_nsec = (long)(until_ns % EP_NS_PER_S)};
    return (until_ns == EP_TIME_NEVER
                ? pthread_cond_wait(cond, lock)
                : pthread_cond_clockwait(cond, lock, CLOCK_MONOTONIC, &until)) != ETIMEDOUT;
}
