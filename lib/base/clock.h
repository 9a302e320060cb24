/* SPDX-License-Identifier: Apache-2.0 */
/* Monotonic time. Wall-clock time appears only in logs. */
#ifndef EP_BASE_CLOCK_H
#define EP_BASE_CLOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define EP_NS_PER_US 1000ull
#define EP_NS_PER_MS 1000000ull
#define EP_NS_PER_S 1000000000ull
#define EP_TIME_NEVER UINT64_MAX

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t ep_clock_now_ns(void);
/* The time so many microseconds from now. Those that would not fit end after 146 years. */
static inline uint64_t ep_clock_after_us(uint64_t us)
{
    const uint64_t most_us = UINT64_MAX / 4 / EP_NS_PER_US;
    return ep_clock_now_ns() + (us < most_us ? us : most_us) * EP_NS_PER_US;
}

/* Waits for a condition, lock held, until a time of ep_clock_now_ns; EP_TIME_NEVER: no limit.
 * False: the time has come. Like every condition wait, it may also return without a reason. */
bool ep_clock_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until_ns);

#endif
