/* SPDX-License-Identifier: Apache-2.0 */
#include "base/random.h"

#include <sys/random.h>

#include "base/clock.h"

uint64_t ep_random_id(void)
{
    uint64_t id = 0;
    if (getrandom(&id, sizeof(id), 0) != (ssize_t)sizeof(id) || id == 0) {
        uint64_t state = ep_clock_now_ns(); /* a seccomp filter may forbid getrandom */
        id = ep_splitmix64(&state) | 1;
    }
    return id;
}
