/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Picks the next token from logits. Pure, so the same seed gives the same text.
 *
 *     temperature 0   the largest logit, the lowest index among equals
 *     else            p_i = exp((l_i - max) / temperature); u = 24 random bits / 2^24 * sum; the
 *                     first i whose running sum is above u
 *
 * Every operation is f32 and in ascending index.
 */
#ifndef EP_CLI_SAMPLER_H
#define EP_CLI_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

#define EP_SAMPLER_CHOICES_MAX 256

/* logits [count], 1 <= count <= EP_SAMPLER_CHOICES_MAX. Advances *state (splitmix64, first set to
 * the seed) unless temperature is 0. */
size_t ep_sampler_pick(const float *logits, size_t count, float temperature, uint64_t *state);

#endif
