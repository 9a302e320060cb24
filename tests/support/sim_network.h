/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the simulated network: shared by its clock (sim_network.c) and its lane
 * (sim_lane.c). */
#ifndef EP_TESTS_SUPPORT_SIM_NETWORK_H
#define EP_TESTS_SUPPORT_SIM_NETWORK_H

#include <pthread.h>

#include "transport/address.h"
#include "transport/lane_conn.h"
#include "transport/lane_dial.h"
#include "support/sim_lane.h"

typedef struct sim_conn sim_conn;
typedef struct sim_listener sim_listener;

typedef struct sim_host {
    char name[EP_ADDRESS_BYTES];
    ep_sim_host_state state;
} sim_host;

struct ep_sim {
    pthread_mutex_t lock; /* guards everything; dropped for callbacks */
    pthread_cond_t changed;
    pthread_cond_t posted;
    uint64_t now_ns;
    uint64_t random;
    uint64_t hash;
    uint64_t sequence;
    ep_sim_event **heap; /* [1..heap_count] */
    size_t heap_count;
    size_t heap_capacity;
    ep_sim_event **parked; /* events of stopped hosts, in the order they came due */
    size_t parked_count;
    size_t parked_capacity;
    sim_host hosts[EP_SIM_HOSTS_MAX];
    uint32_t hosts_count;
    ep_sim_link links[EP_SIM_HOSTS_MAX][EP_SIM_HOSTS_MAX];
    ep_sim_host_id host; /* current */
    pthread_t runner;    /* the thread inside an event */
    bool running;
    sim_conn *conns; /* in the order they were made */
    sim_conn *conns_tail;
    sim_listener *listeners;
    ep_sim_stats stats;
};

extern ep_sim *ep_sim_current;

/* The caller of these holds the lock. */
ep_err ep_sim_post_event(ep_sim *sim, ep_sim_event *event, ep_sim_host_id host, uint64_t due_ns);
bool ep_sim_cancel_event(ep_sim *sim, ep_sim_event *event);
uint64_t ep_sim_random_below(ep_sim *sim, uint64_t bound);
bool ep_sim_chance(ep_sim *sim, uint32_t ppm);
void ep_sim_trace_words(ep_sim *sim, uint64_t kind, uint64_t a, uint64_t b, uint64_t c);
void ep_sim_trace_bytes(ep_sim *sim, const void *bytes, size_t count);
ep_sim_host_id ep_sim_find_host(ep_sim *sim, const char *name);
bool ep_sim_on_runner(const ep_sim *sim);

void ep_sim_network_set_host_state(ep_sim *sim, ep_sim_host_id host, ep_sim_host_state state);

#endif
