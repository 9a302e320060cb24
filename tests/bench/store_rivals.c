/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/store_rivals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PROTECTED_PART 0.7
#define NEVER UINT32_MAX

static const double lfu_half_lives[] = {12, 48, 192}; /* visits of the layer: the best for each load
                                                         counts */

const char *const rival_names[RIVALS_COUNT] = {"LRU", "LRU-2", "SLRU", "LFU decay", "Belady"};

typedef struct item {
    uint32_t last;       /* use numbers, 1-based; 0 never */
    uint32_t before;     /* the use before the last */
    uint32_t next;       /* Belady: the next use; NEVER none */
    float count;         /* LFU */
    uint32_t last_visit; /* counted over all layers, 1-based */
    uint32_t visit;      /* of its layer, when count was written */
    bool is_protected;
    int32_t slot; /* in memory: its place; -1 absent */
} item;

typedef struct pool {
    rival which;
    uint32_t capacity;
    uint32_t protected_max;
    uint32_t protected_count;
    uint32_t used;
    uint32_t *slots; /* items in memory */
    item *items;
    uint32_t *layer_visits;
    uint32_t experts;
    double half_life; /* LFU */
} pool;

/* The one with the least goes. */
static double worth(const pool *p, uint32_t id)
{
    const item *it = &p->items[id];
    switch (p->which) {
    case RIVAL_LRU2:
        return it->before != 0 ? (double)it->before + 1e10 : it->last;
    case RIVAL_SLRU:
        return it->last + (it->is_protected ? 1e10 : 0);
    case RIVAL_LFU:
        return it->count *
               exp2(-(double)(p->layer_visits[id / p->experts] - it->visit) / p->half_life);
    case RIVAL_BELADY:
        return -(double)it->next;
    default:
        return it->last;
    }
}

static uint32_t least(const pool *p, bool only_protected)
{
    uint32_t found = NEVER;
    double value = 0;
    for (uint32_t s = 0; s < p->used; s++) {
        const uint32_t id = p->slots[s];
        if (only_protected && !p->items[id].is_protected) {
            continue;
        }
        const double w = worth(p, id);
        if (found == NEVER || w < value) {
            found = id;
            value = w;
        }
    }
    return found;
}

static void load(pool *p, uint32_t id)
{
    uint32_t slot = p->used;
    if (p->used == p->capacity) {
        const uint32_t victim = least(p, false);
        slot = (uint32_t)p->items[victim].slot;
        p->items[victim].slot = -1;
        if (p->items[victim].is_protected) {
            p->items[victim].is_protected = false;
            p->protected_count--;
        }
    } else {
        p->used++;
    }
    p->slots[slot] = id;
    p->items[id].slot = (int32_t)slot;
}

static void touch(pool *p, uint32_t id, uint32_t use, bool was_hit, const uint32_t *next_use)
{
    item *it = &p->items[id];
    const uint32_t visit = p->layer_visits[id / p->experts];
    it->count = (float)(it->count * exp2(-(double)(visit - it->visit) / p->half_life)) + 1.0f;
    it->visit = visit;
    it->before = it->last;
    it->last = use + 1;
    it->next = next_use[use];
    if (p->which == RIVAL_SLRU && was_hit && !it->is_protected) {
        it->is_protected = true;
        if (++p->protected_count > p->protected_max) {
            p->items[least(p, true)].is_protected = false;
            p->protected_count--;
        }
    }
}

static uint32_t *next_uses(const store_trace *trace)
{
    const uint32_t experts = trace->setting.experts;
    uint32_t *next = malloc(trace->uses_count * sizeof(*next));
    uint32_t *seen = malloc((size_t)trace->setting.layers * experts * sizeof(*seen));
    memset(seen, 0xff, (size_t)trace->setting.layers * experts * sizeof(*seen));
    for (uint32_t v = trace->visits_count; v-- > 0;) {
        const trace_visit *visit = &trace->visits[v];
        for (uint32_t i = visit->count; i-- > 0;) {
            uint32_t *at = &seen[visit->layer * experts + trace->experts[visit->first + i]];
            next[visit->first + i] = *at;
            *at = visit->first + i;
        }
    }
    free(seen);
    return next;
}

static double run(rival which, double half_life, const store_trace *trace, uint32_t capacity,
                  uint32_t from)
{
    const uint32_t experts = trace->setting.experts;
    const uint32_t items = trace->setting.layers * experts;
    pool p = {.which = which,
              .capacity = capacity,
              .protected_max = (uint32_t)(capacity * PROTECTED_PART),
              .experts = experts,
              .half_life = half_life};
    uint32_t *next = next_uses(trace);
    uint64_t hits = 0;
    uint64_t uses = 0;
    p.slots = calloc(capacity, sizeof(*p.slots));
    p.items = calloc(items, sizeof(*p.items));
    p.layer_visits = calloc(trace->setting.layers, sizeof(*p.layer_visits));
    for (uint32_t i = 0; i < items; i++) {
        p.items[i].slot = -1;
    }
    for (uint32_t v = 0; v < trace->visits_count; v++) {
        const trace_visit *visit = &trace->visits[v];
        p.layer_visits[visit->layer]++;
        /* what is there first, as a node does it */
        for (int wants_hit = 1; wants_hit >= 0; wants_hit--) {
            for (uint32_t i = 0; i < visit->count; i++) {
                const uint32_t id = visit->layer * experts + trace->experts[visit->first + i];
                if (wants_hit ? p.items[id].slot < 0 : p.items[id].last_visit == v + 1) {
                    continue;
                }
                if (!wants_hit) {
                    load(&p, id);
                }
                p.items[id].last_visit = v + 1;
                touch(&p, id, visit->first + i, wants_hit, next);
                hits += v >= from && wants_hit;
                uses += v >= from;
            }
        }
    }
    free(next);
    free(p.slots);
    free(p.items);
    free(p.layer_visits);
    return (double)hits / (double)uses;
}

double rival_hit_rate(rival which, const store_trace *trace, uint32_t capacity, uint32_t from)
{
    double best = 0;
    for (size_t i = 0;
         i < (which == RIVAL_LFU ? sizeof(lfu_half_lives) / sizeof(lfu_half_lives[0]) : 1); i++) {
        const double rate = run(which, lfu_half_lives[i], trace, capacity, from);
        best = rate > best ? rate : best;
    }
    return best;
}
