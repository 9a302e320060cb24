/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster/way_speed.h"

#include <math.h>

#include "moe/host_choice.h"

/* First guess for a way: so many bytes take as long as the round trip. */
#define BYTES_OF_ROUND_TRIP 65536.0
#define SAMPLES_EARLY 16u
#define STEP_EARLY 0.7 /* the most that a call moves a logarithm */
#define STEP_LATER 0.25
#define GAIN_LATER (1.0 / 16)

static double load(const float *value)
{
    float now;
    __atomic_load(value, &now, __ATOMIC_RELAXED);
    return (double)now;
}

static void store(float *value, double wanted)
{
    float now = (float)wanted;
    __atomic_store(value, &now, __ATOMIC_RELAXED);
}

void ep_way_speed_add(ep_way_speed *speed, uint64_t bytes, double took_us)
{
    const uint32_t samples = __atomic_load_n(&speed->samples, __ATOMIC_RELAXED);
    const double n = (double)bytes;
    if (took_us <= 0 || bytes == 0) {
        return;
    }
    if (samples == 0) {
        const double share = n / (n + BYTES_OF_ROUND_TRIP);
        store(&speed->round_trip_us, took_us * (1 - share));
        store(&speed->us_per_byte, took_us * share / n);
    } else {
        const double round_trip = load(&speed->round_trip_us);
        const double per_byte = load(&speed->us_per_byte);
        const double told = round_trip + per_byte * n;
        const double share = per_byte * n / told;
        const double most = samples < SAMPLES_EARLY ? STEP_EARLY : STEP_LATER;
        const double gain = samples < SAMPLES_EARLY ? 1.0 / (samples + 1) : GAIN_LATER;
        const double off = fmax(-most, fmin(most, log(took_us / told)));
        const double step = gain * off / (share * share + (1 - share) * (1 - share));
        store(&speed->round_trip_us, round_trip * exp(step * (1 - share)));
        store(&speed->us_per_byte, per_byte * exp(step * share));
    }
    if (samples < SAMPLES_EARLY) {
        /* written after its times */
        __atomic_store_n(&speed->samples, samples + 1, __ATOMIC_RELEASE);
    }
}

void ep_way_speed_read(const ep_way_speed *speed, struct ep_host_way *out_way)
{
    const uint32_t samples = __atomic_load_n(&speed->samples, __ATOMIC_ACQUIRE);
    *out_way = (ep_host_way){.round_trip_us = load(&speed->round_trip_us),
                             .us_per_byte = load(&speed->us_per_byte),
                             .samples = samples};
}
