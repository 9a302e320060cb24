/* SPDX-License-Identifier: Apache-2.0 */
/* Draws from a splitmix64 state: everything random in this test comes from the seed that it
 * prints. */
#ifndef PROPERTY_RANDOM_H
#define PROPERTY_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/random.h"

typedef struct random_source {
    uint64_t state;
} random_source;

/* An own sequence per (seed, number), so that each case can be made again alone. */
static inline random_source random_begin(uint64_t seed, uint64_t number)
{
    random_source random = {seed};
    uint64_t salt = ep_splitmix64(&random.state);
    random.state = salt ^ (number * 0xd1342543de82ef95ull);
    ep_splitmix64(&random.state);
    return random;
}

/* 0..bound-1; bound >= 1. */
static inline uint32_t random_below(random_source *random, uint32_t bound)
{
    return (uint32_t)((ep_splitmix64(&random->state) >> 33) % bound);
}

/* first..last */
static inline uint32_t random_between(random_source *random, uint32_t first, uint32_t last)
{
    return first + random_below(random, last - first + 1);
}

static inline bool random_chance(random_source *random, uint32_t percent)
{
    return random_below(random, 100) < percent;
}

/* [-1, 1) */
static inline float random_unit(random_source *random)
{
    return (float)(ep_splitmix64(&random->state) >> 40) * 0x1p-23f - 1.0f;
}

#endif
