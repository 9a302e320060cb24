/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast a way to a host is, for comm_alg = AUTO (moe/host_choice.h): a round trip and a time per
 * byte, in microseconds. A call takes round trip + bytes * time per byte, from its first frame sent
 * to its last answer. Pure.
 *
 * Each call that was measured moves both towards the time it took: their logarithms, each by its
 * share of that time (normalised least mean squares). So small calls teach the round trip, large
 * ones the time per byte. A call that took far too long counts as one of about a quarter more.
 * Threads    any, without a lock. When two add at once, one of the calls may be lost.
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

/* A call of so many bytes, both directions together; 0 bytes or no time changes nothing. */
void ep_way_speed_add(ep_way_speed *speed, uint64_t bytes, double took_us);
void ep_way_speed_read(const ep_way_speed *speed, struct ep_host_way *out_way);

/* Straight to each node of a host, or once to one that passes rows on. */
typedef enum ep_way { EP_WAY_STRAIGHT, EP_WAY_BY_HOST, EP_WAYS } ep_way;
/* Of a host; kept at the first of its nodes in the table. */
typedef struct ep_ways {
    ep_way_speed speeds[2][EP_WAYS]; /* with a row per slot, with sums: far fewer bytes come back */
    uint64_t refused_ns;             /* atomic: when a node refused to pass rows on; 0 never */
} ep_ways;

#endif
