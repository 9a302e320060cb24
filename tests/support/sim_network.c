/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated network's clock, events, hosts and links. */
#include "support/sim_network.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"

#define DELAY_DEFAULT_NS (50 * EP_NS_PER_US)

ep_sim *ep_sim_current;

ep_err ep_sim_create(uint64_t seed, uint64_t start_ns, ep_sim **out_sim)
{
    EP_ASSERT(ep_sim_current == NULL);
    ep_sim *sim = calloc(1, sizeof(*sim));
    if (sim == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_init(&sim->lock, NULL);
    pthread_cond_init(&sim->changed, NULL);
    pthread_cond_init(&sim->posted, NULL);
    sim->now_ns = start_ns;
    sim->random = seed;
    sim->hash = 0xcbf29ce484222325ull;
    for (uint32_t a = 0; a < EP_SIM_HOSTS_MAX; a++) {
        for (uint32_t b = 0; b < EP_SIM_HOSTS_MAX; b++) {
            sim->links[a][b].delay_ns = DELAY_DEFAULT_NS;
        }
    }
    ep_sim_find_host(sim, "test");
    ep_sim_current = sim;
    ep_lane_register(&ep_sim_lane);
    *out_sim = sim;
    return EP_OK;
}

void ep_sim_destroy(ep_sim *sim)
{
    EP_ASSERT(sim->conns == NULL && sim->listeners == NULL);
    ep_sim_current = NULL;
    ep_lane_register(NULL);
    free(sim->heap);
    free(sim->parked);
    pthread_cond_destroy(&sim->posted);
    pthread_cond_destroy(&sim->changed);
    pthread_mutex_destroy(&sim->lock);
    free(sim);
}

/* ---- random and digest ---- */

uint64_t ep_sim_random_below(ep_sim *sim, uint64_t bound)
{
    return bound == 0 ? 0 : ep_splitmix64(&sim->random) % bound;
}

/* A fault that is off draws no number, so that it does not change the draws of the others. */
bool ep_sim_chance(ep_sim *sim, uint32_t ppm)
{
    return ppm != 0 && ep_sim_random_below(sim, 1000000) < ppm;
}

void ep_sim_trace_bytes(ep_sim *sim, const void *bytes, size_t count)
{
    const uint8_t *at = bytes;
    for (size_t i = 0; i < count; i++) {
        sim->hash = (sim->hash ^ at[i]) * 0x100000001b3ull;
    }
}

void ep_sim_trace_words(ep_sim *sim, uint64_t kind, uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t words[] = {sim->now_ns, kind, a, b, c};
    for (size_t i = 0; i < EP_ARRAY_COUNT(words); i++) {
        sim->hash = (sim->hash ^ words[i]) * 0x100000001b3ull;
        sim->hash ^= sim->hash >> 29;
    }
}

/* ---- the heap: ordered by (due, sequence) ---- */

static bool before(const ep_sim_event *a, const ep_sim_event *b)
{
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->sequence < b->sequence;
}

static void place(ep_sim *sim, size_t i, ep_sim_event *event)
{
    sim->heap[i] = event;
    event->heap_index = i;
}

static void sift_up(ep_sim *sim, size_t i, ep_sim_event *event)
{
    for (; i > 1 && before(event, sim->heap[i / 2]); i /= 2) {
        place(sim, i, sim->heap[i / 2]);
    }
    place(sim, i, event);
}

static void sift_down(ep_sim *sim, size_t i, ep_sim_event *event)
{
    for (size_t child; (child = 2 * i) <= sim->heap_count; i = child) {
        if (child < sim->heap_count && before(sim->heap[child + 1], sim->heap[child])) {
            child++;
        }
        if (!before(sim->heap[child], event)) {
            break;
        }
        place(sim, i, sim->heap[child]);
    }
    place(sim, i, event);
}

static void heap_remove(ep_sim *sim, ep_sim_event *event)
{
    size_t i = event->heap_index;
    ep_sim_event *last = sim->heap[sim->heap_count--];
    event->heap_index = 0;
    if (last == event) {
        return;
    }
    if (i > 1 && before(last, sim->heap[i / 2])) {
        sift_up(sim, i, last);
    } else {
        sift_down(sim, i, last);
    }
}

static ep_err reserve(ep_sim_event ***array, size_t *capacity, size_t count)
{
    if (count <= *capacity) {
        return EP_OK;
    }
    size_t grown = *capacity == 0 ? 256 : *capacity * 2;
    ep_sim_event **events = realloc(*array, grown * sizeof(**array));
    if (events == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    *array = events;
    *capacity = grown;
    return EP_OK;
}

#define PARKED SIZE_MAX

static void unpark(ep_sim *sim, size_t i)
{
    sim->parked[i]->heap_index = 0;
    memmove(&sim->parked[i], &sim->parked[i + 1],
            (sim->parked_count - i - 1) * sizeof(*sim->parked));
    sim->parked_count--;
}

bool ep_sim_cancel_event(ep_sim *sim, ep_sim_event *event)
{
    if (event->heap_index == 0) {
        return false;
    }
    if (event->heap_index != PARKED) {
        heap_remove(sim, event);
        return true;
    }
    for (size_t i = 0; i < sim->parked_count; i++) {
        if (sim->parked[i] == event) {
            unpark(sim, i);
            return true;
        }
    }
    return false;
}

ep_err ep_sim_post_event(ep_sim *sim, ep_sim_event *event, ep_sim_host_id host, uint64_t due_ns)
{
    ep_sim_cancel_event(sim, event);
    if (reserve(&sim->heap, &sim->heap_capacity, sim->heap_count + 2) != EP_OK) {
        return EP_ERR_NO_MEMORY;
    }
    event->due_ns = due_ns < sim->now_ns ? sim->now_ns : due_ns;
    event->sequence = ++sim->sequence;
    event->host = host;
    sift_up(sim, ++sim->heap_count, event);
    if (sim->heap[1] == event) {
        pthread_cond_signal(&sim->posted);
    }
    return EP_OK;
}

ep_err ep_sim_post(ep_sim *sim, ep_sim_event *event, uint64_t due_ns)
{
    pthread_mutex_lock(&sim->lock);
    ep_err err = ep_sim_post_event(sim, event, sim->host, due_ns);
    pthread_mutex_unlock(&sim->lock);
    return err;
}

bool ep_sim_cancel(ep_sim *sim, ep_sim_event *event)
{
    pthread_mutex_lock(&sim->lock);
    bool cancelled = ep_sim_cancel_event(sim, event);
    pthread_mutex_unlock(&sim->lock);
    return cancelled;
}

/* ---- running ---- */

uint64_t ep_sim_now_ns(ep_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    uint64_t now_ns = sim->now_ns;
    pthread_mutex_unlock(&sim->lock);
    return now_ns;
}

uint64_t ep_sim_next_ns(ep_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    uint64_t due_ns = sim->heap_count > 0 ? sim->heap[1]->due_ns : EP_TIME_NEVER;
    pthread_mutex_unlock(&sim->lock);
    return due_ns;
}

bool ep_sim_on_runner(const ep_sim *sim)
{
    return sim->running && pthread_equal(sim->runner, pthread_self()) != 0;
}

/* An event may itself run events, so the outer event's state is restored. */
static void run_event(ep_sim *sim, ep_sim_event *event)
{
    ep_sim_host_id host = sim->host;
    bool running = sim->running;
    sim->host = event->host;
    sim->running = true;
    sim->runner = pthread_self();
    sim->stats.events++;
    pthread_mutex_unlock(&sim->lock);
    event->run(event, event->arg);
    pthread_mutex_lock(&sim->lock);
    sim->host = host;
    sim->running = running;
}

static void park(ep_sim *sim, ep_sim_event *event)
{
    EP_ASSERT(reserve(&sim->parked, &sim->parked_capacity, sim->parked_count + 1) == EP_OK);
    event->heap_index = PARKED;
    sim->parked[sim->parked_count++] = event;
}

static bool run_one_before(ep_sim *sim, uint64_t until_ns)
{
    while (sim->heap_count > 0 && sim->heap[1]->due_ns <= until_ns) {
        ep_sim_event *event = sim->heap[1];
        heap_remove(sim, event);
        sim->now_ns = event->due_ns > sim->now_ns ? event->due_ns : sim->now_ns;
        if (sim->hosts[event->host].state == EP_SIM_STOPPED) {
            park(sim, event);
            continue;
        }
        run_event(sim, event);
        return true;
    }
    return false;
}

bool ep_sim_run_one(ep_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    bool ran = run_one_before(sim, EP_TIME_NEVER - 1);
    pthread_mutex_unlock(&sim->lock);
    return ran;
}

void ep_sim_run_until(ep_sim *sim, uint64_t until_ns)
{
    pthread_mutex_lock(&sim->lock);
    while (run_one_before(sim, until_ns)) {
    }
    sim->now_ns = until_ns > sim->now_ns ? until_ns : sim->now_ns;
    pthread_mutex_unlock(&sim->lock);
}

void ep_sim_wait_posted(ep_sim *sim, uint64_t timeout_ns)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t until_ns = (uint64_t)t.tv_sec * EP_NS_PER_S + (uint64_t)t.tv_nsec + timeout_ns;
    t = (struct timespec){.tv_sec = (time_t)(until_ns / EP_NS_PER_S),
                          .tv_nsec = (long)(until_ns % EP_NS_PER_S)};
    pthread_mutex_lock(&sim->lock);
    if (sim->heap_count == 0 || sim->heap[1]->due_ns > sim->now_ns) {
        pthread_cond_clockwait(&sim->posted, &sim->lock, CLOCK_MONOTONIC, &t);
    }
    pthread_mutex_unlock(&sim->lock);
}

/* ---- hosts and links ---- */

ep_sim_host_id ep_sim_find_host(ep_sim *sim, const char *name)
{
    for (uint32_t i = 0; i < sim->hosts_count; i++) {
        if (strcmp(sim->hosts[i].name, name) == 0) {
            return i;
        }
    }
    EP_ASSERT(sim->hosts_count < EP_SIM_HOSTS_MAX);
    snprintf(sim->hosts[sim->hosts_count].name, sizeof(sim->hosts[0].name), "%s", name);
    return sim->hosts_count++;
}

ep_sim_host_id ep_sim_host(ep_sim *sim, const char *name)
{
    pthread_mutex_lock(&sim->lock);
    ep_sim_host_id host = ep_sim_find_host(sim, name);
    pthread_mutex_unlock(&sim->lock);
    return host;
}

ep_sim_host_id ep_sim_enter(ep_sim *sim, ep_sim_host_id host)
{
    pthread_mutex_lock(&sim->lock);
    ep_sim_host_id old = sim->host;
    sim->host = host;
    pthread_mutex_unlock(&sim->lock);
    return old;
}

ep_sim_host_id ep_sim_current_host(ep_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    ep_sim_host_id host = sim->host;
    pthread_mutex_unlock(&sim->lock);
    return host;
}

void ep_sim_network_set_host_state(ep_sim *sim, ep_sim_host_id host, ep_sim_host_state state)
{
    ep_sim_trace_words(sim, 'h', host, state, 0);
    sim->hosts[host].state = state;
    for (size_t i = 0; state != EP_SIM_STOPPED && i < sim->parked_count;) {
        ep_sim_event *event = sim->parked[i];
        if (event->host != host) {
            i++;
            continue;
        }
        unpark(sim, i);
        EP_ASSERT(ep_sim_post_event(sim, event, host, sim->now_ns) == EP_OK);
    }
}

void ep_sim_set_link(ep_sim *sim, ep_sim_host_id from, ep_sim_host_id to, const ep_sim_link *link)
{
    pthread_mutex_lock(&sim->lock);
    sim->links[from][to] = *link;
    pthread_mutex_unlock(&sim->lock);
}

uint64_t ep_sim_trace_hash(ep_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    uint64_t hash = sim->hash;
    pthread_mutex_unlock(&sim->lock);
    return hash;
}

void ep_sim_trace(ep_sim *sim, const void *bytes, size_t count)
{
    pthread_mutex_lock(&sim->lock);
    ep_sim_trace_bytes(sim, bytes, count);
    pthread_mutex_unlock(&sim->lock);
}

uint64_t ep_sim_random(ep_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    uint64_t value = ep_splitmix64(&sim->random);
    pthread_mutex_unlock(&sim->lock);
    return value;
}

void ep_sim_read_stats(ep_sim *sim, ep_sim_stats *out_stats)
{
    pthread_mutex_lock(&sim->lock);
    *out_stats = sim->stats;
    pthread_mutex_unlock(&sim->lock);
}
