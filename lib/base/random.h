/* SPDX-License-Identifier: Apache-2.0 */
/* Two sources of random numbers: the kernel, for identities; splitmix64, for back-off and for tests
 * that replay a seed. */
#ifndef EP_BASE_RANDOM_H
#define EP_BASE_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Unpredictable bits from the kernel; for incarnations and instance ids. Never 0. */
uint64_t ep_random_id(void);

/* One step of splitmix64: a pure function of *state, which it advances. */
static inline uint64_t ep_splitmix64(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

#endif
