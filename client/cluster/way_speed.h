/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The speed of a way to a host, for comm_alg = AUTO (moe/host_choice.h), in microseconds. A call
 * takes round trip + bytes * time per byte, from its first frame sent to its last answer. Pure.
 *
 * Each measured call moves the logarithms of both towards its time, each by its share of that time
 * (normalised least mean squares). So small calls set the round trip and large ones the time per
 * byte. A time counts as at most about a quarter above or below the expected one.
 * Threads    any, without a lock. Of two calls added at once one may be lost.
 */
#ifndef EP_CLIENT_WAY_SPEED_H
#define EP_CLIENT_WAY_SPEED_H

#include <stdint.h>

struct ep_host_way;

/* Zeroed memory is a new one. Its fields are atomic; read them by ep_way_speed_read. */
typedef struct ep_way_speed {
    float round_trip_us;
    float us_per_byte;
    uint32_t samples;
} ep_way_speed;

/* Adds a call of so many bytes, both directions together; 0 bytes or no time changes nothing. */
void ep_way_speed_add(ep_way_speed *speed, uint64_t bytes, double took_us);
void ep_way_speed_read(const ep_way_speed *speed, struct ep_host_way *out_way);

/* Straight to each node of a host, or once to a node that passes rows on. */
typedef enum ep_way { EP_WAY_STRAIGHT, EP_WAY_BY_HOST, EP_WAYS } ep_way;
/* Speeds of a host's ways; kept at its first node in the table. */
typedef struct ep_ways {
    ep_way_speed speeds[2][EP_WAYS]; /* [0] a row per slot, [1] sums, with far fewer reply bytes */
    uint64_t refused_ns;             /* atomic: when a node refused to pass rows on; 0: never */
} ep_ways;

#endif
