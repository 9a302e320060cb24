/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/store_own.h"

#include <stdlib.h>

#include "base/check.h"
#include "moe/expert_heat.h"
#include "moe/load_room.h"

#define NS_PER_US 1e3

#define NONE UINT32_MAX

enum { ABSENT, THERE, AHEAD };

typedef struct own_pool {
    const store_trace *trace;
    const store_clock *clock;
    uint32_t experts;
    uint32_t used;
    uint32_t capacity;
    uint32_t visit; /* 1-based */
    uint8_t *place;
    double *ready_us;     /* the load ends */
    uint32_t *last_visit; /* a visit holds those it found, until the next */
    ep_expert_heat *heat;
    ep_load_room room;
    double now_us;
    double link_us;  /* the last load ends */
    uint32_t flight; /* the last prefetch: it gives way to loads that are waited for; NONE */
    uint64_t counted_visits, uses, hits, misses, prefetches, useful;
    double waited_us;
    bool counts;
} own_pool;

static bool is_free(void *arg, uint32_t layer, uint32_t expert)
{
    const own_pool *p = arg;
    const uint32_t id = layer * p->experts + expert;
    return p->last_visit[id] != p->visit && id != p->flight;
}

static uint64_t ns(double us)
{
    return (uint64_t)(us * NS_PER_US) + 1;
}

static void load(own_pool *p, uint32_t layer, uint32_t expert, uint8_t place)
{
    const uint32_t id = layer * p->experts + expert;
    const bool is_ahead = place == AHEAD;
    ep_heat_choice victim;
    if (p->used < p->capacity) {
        p->used++;
    } else {
        if (!ep_expert_heat_victim(p->heat, is_ahead, is_free, p, &victim)) {
            EP_ASSERT(ep_expert_heat_victim(p->heat, is_ahead, NULL, NULL, &victim));
        }
        ep_expert_heat_set_place(p->heat, victim.layer, victim.expert, EP_HEAT_ABSENT);
        p->place[victim.layer * p->experts + victim.expert] = ABSENT;
    }
    ep_expert_heat_set_place(p->heat, layer, expert, EP_HEAT_RESIDENT);
    p->place[id] = place;
    p->link_us += p->clock->load_us;
    p->ready_us[id] = p->link_us;
    ep_load_room_loaded(&p->room, ns(p->clock->load_us));
}

static void count_uses(own_pool *p, uint32_t layer, const uint32_t *of, uint32_t count,
                       uint32_t *out_misses)
{
    *out_misses = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t id = layer * p->experts + of[i];
        const bool is_hit = p->place[id] != ABSENT && p->ready_us[id] <= p->now_us;
        p->useful += p->counts && is_hit && p->place[id] == AHEAD;
        p->uses += p->counts;
        p->hits += p->counts && is_hit;
        *out_misses += !is_hit;
        if (p->place[id] != ABSENT) {
            p->place[id] = THERE;
            p->last_visit[id] = p->visit;
        }
    }
    p->counted_visits += p->counts;
    p->misses += p->counts ? *out_misses : 0;
}

/* What the visit waits for is loaded. A prefetch under way that it does not use stops after its
 * piece and goes on afterwards. */
static void load_missing(own_pool *p, const trace_visit *v, const uint32_t *of, uint32_t misses)
{
    double left_us = p->flight != NONE && p->link_us > p->now_us ? p->link_us - p->now_us : 0;
    if (left_us == 0 || p->last_visit[p->flight] == p->visit) {
        p->flight = NONE;
        left_us = 0;
    } else if (misses > 0) {
        const double piece_us = left_us < p->clock->piece_us ? left_us : p->clock->piece_us;
        p->link_us = p->now_us + piece_us;
        left_us -= piece_us;
    }
    p->link_us = p->link_us > p->now_us ? p->link_us : p->now_us;
    for (uint32_t i = 0; i < v->count; i++) {
        if (p->place[v->layer * p->experts + of[i]] == ABSENT) {
            load(p, v->layer, of[i], THERE);
        }
    }
    if (misses > 0) {
        p->waited_us += p->link_us - p->now_us;
        ep_load_room_idle(&p->room, ns(p->link_us));
        if (p->flight != NONE) {
            p->link_us += left_us;
            p->ready_us[p->flight] = p->link_us;
        }
    }
}

static void visit(own_pool *p, const trace_visit *v, const uint32_t *of, const uint32_t *rows,
                  bool prefetches)
{
    uint32_t misses;
    ep_heat_choice choice;
    ep_load_room_visit(&p->room, ns(p->now_us));
    ep_expert_heat_visit(p->heat, v->layer, of, rows, v->count);
    count_uses(p, v->layer, of, v->count, &misses);
    if (misses > 0) {
        ep_load_room_needed(&p->room, ns(p->now_us));
    }
    const double before_us = p->waited_us;
    load_missing(p, v, of, misses);
    const double computed_us = p->now_us + v->count * p->clock->compute_us;
    const double loaded_us =
        misses > 0 ? p->now_us + (p->waited_us - before_us) + p->clock->compute_us : 0;
    const double end_us = (computed_us > loaded_us ? computed_us : loaded_us) + p->clock->gap_us;
    const double next_us =
        p->now_us + p->clock->pace_us > end_us ? p->now_us + p->clock->pace_us : end_us;
    while (
        prefetches && p->used == p->capacity && p->link_us < next_us &&
        ep_load_room_fits(&p->room, ns(p->link_us)) &&
        ep_expert_heat_prefetch(p->heat, ep_load_room_lead(&p->room), false, is_free, p, &choice)) {
        load(p, choice.layer, choice.expert, AHEAD);
        p->flight = choice.layer * p->experts + choice.expert;
        p->prefetches += p->counts;
    }
    p->now_us = next_us;
}

own_result own_run(const store_trace *trace, uint32_t capacity, uint32_t from,
                   const store_clock *clock, bool prefetches)
{
    const uint32_t experts = trace->setting.experts;
    const uint32_t items = trace->setting.layers * experts;
    own_pool p = {
        .trace = trace, .clock = clock, .experts = experts, .capacity = capacity, .flight = NONE};
    p.place = calloc(items, sizeof(*p.place));
    p.last_visit = calloc(items, sizeof(*p.last_visit));
    p.ready_us = calloc(items, sizeof(*p.ready_us));
    EP_ASSERT(p.place != NULL && p.last_visit != NULL && p.ready_us != NULL &&
              ep_expert_heat_create(&p.heat) == EP_OK);
    for (uint32_t l = 0; l < trace->setting.layers; l++) {
        EP_ASSERT(ep_expert_heat_add_layer(p.heat, experts, 1) == EP_OK);
        for (uint32_t e = 0; e < experts; e++) {
            ep_expert_heat_set_place(p.heat, l, e, EP_HEAT_ABSENT);
        }
    }
    for (uint32_t v = 0; v < trace->visits_count; v++) {
        p.waited_us = v == from ? 0 : p.waited_us;
        const trace_visit *of = &trace->visits[v];
        p.visit = v + 1;
        p.counts = v >= from;
        visit(&p, of, trace->experts + of->first, trace->rows + of->first, prefetches);
    }
    ep_expert_heat_destroy(p.heat);
    free(p.place);
    free(p.last_visit);
    free(p.ready_us);
    const double visits = p.counted_visits > 0 ? (double)p.counted_visits : 1;
    return (own_result){.hits = (double)p.hits / (double)p.uses,
                        .misses = (double)p.misses / visits,
                        .prefetches = (double)p.prefetches / visits,
                        .useful = p.prefetches > 0 ? (double)p.useful / (double)p.prefetches : 0,
                        .waited = p.waited_us / clock->load_us / visits};
}
