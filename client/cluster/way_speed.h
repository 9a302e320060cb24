/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a way to a host gives: the round trip and the time of a byte, such that round trip + bytes *
 * time is what calls take there, from the first frame sent to the last answer. Pure.
 *
 * Each call moves both so that what they say comes nearer to what was measured: by logarithms, in
 * parts as each contributes to the time (normalised least mean squares), so that small calls teach
 * the round trip and large ones the rate. A call that took for ever counts as a quarter more.
 * Threads    any, without a lock. Two threads may lose a call to each other, no more.
 */
#ifndef EP_CLIENT_WAY_SPEED_H
#define EP_CLIENT_WAY_SPEED_H

#include <stdint.h>

struct ep_host_way;

/* Zeroed memory is a new one. Atomic. */
typedef struct ep_way_speed {
    float round_trip_us;
    float us_per_byte;
    uint32_t samples;
} ep_way_speed;

void ep_way_speed_add(ep_way_speed *speed, uint64_t bytes, double took_us);
void ep_way_speed_read(const ep_way_speed *speed, struct ep_host_way *out_way);

/* The ways to a host's nodes, as the first of them in the table has them. */
typedef enum ep_way { EP_WAY_STRAIGHT, EP_WAY_BY_HOST, EP_WAYS } ep_way;
typedef struct ep_ways {
    ep_way_speed speeds[2][EP_WAYS]; /* of rows, of sums: what comes back differs too much */
    uint64_t refused_ns;             /* atomic: when a node refused to pass rows on; 0 never */
} ep_ways;

#endif
