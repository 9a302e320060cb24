/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/expert_heat.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#define MEAN_VISITS 96.0f /* how many visits of a layer a profile's means reach back */
/* how many visits (of any layer) the fit of a profile covers */
#define FIT_VISITS 10.0f
#define NORM_VISITS 400.0f  /* the same for the usual fit of the present profile */
#define SWITCH_MARGIN 0.15f /* another profile must fit better by this many nats per use */
/* a fit this many nats per use below the usual: no profile knows the load */
#define STRANGE_MARGIN 0.30f
#define STRANGE_VISITS 24   /* a new profile begins after this many such visits */
#define CHANCE_FLOOR 0.002f /* chance of an expert that was never seen */
#define MEAN_CLASSES 16     /* classes of the square root of a mean */
#define ROW_CLASSES 4       /* of rows in the last visit: 0, 1, 2..3, more */
#define FIRST_SEEN 4.0f
#define SEEN_MAX 4096.0f /* above this count, older observations count half */
#define CHANCES_EVERY 16 /* chances are computed anew after this many visits */
/* a prefetched expert must be hotter than the victim by this factor ... */
#define PREFETCH_MARGIN 1.10f
#define PREFETCH_FLOOR 0.01f /* ... and by at least this much */
#define PREFETCH_DEPTH 2     /* how many layers ahead are prefetched */
/* factor for the heat of an expert whose layer is more than half a round away */
#define AWAY_FACTOR 0.5f
/* how many visits the check covers whether layers follow each other in order */
#define ORDER_VISITS 32.0f
#define ORDER_LEAST 0.5f /* there is an order if this part of them came as predicted */
#define TRUST_MAX 8      /* how many wrong predictions a layer's successor survives at most */
#define ROUND_LEAST 4    /* with fewer layers, every layer's next turn is near */
#define NO_LAYER UINT32_MAX

typedef struct heat_layer {
    uint32_t experts;
    float weight; /* 1 for the largest experts, more for smaller ones */
    uint64_t bytes;
    float *means[EP_HEAT_PROFILES]; /* [experts] */
    uint32_t visits[EP_HEAT_PROFILES];
    uint8_t *last;  /* [experts] rows in the last visit, 0..255 */
    uint8_t *place; /* [experts] ep_heat_place */
    bool is_coldest_known;
    uint32_t coldest; /* the resident expert with the least heat; `experts`: none */
    uint32_t next;    /* the layer visited after it; NO_LAYER: unknown */
    uint32_t next_trust;
    /* after how many visits from the last one this layer's turn comes; 0: unknown */
    uint32_t ahead;
} heat_layer;

typedef struct heat_profile {
    float fit; /* mean log chance of the used experts, over FIT_VISITS */
    uint64_t last_visit;
} heat_profile;

struct ep_expert_heat {
    uint32_t layers_count;
    heat_layer *layers;
    uint64_t bytes_max;
    heat_profile profiles[EP_HEAT_PROFILES];
    uint32_t profiles_count;
    uint32_t present;
    float usual; /* fit of the present profile, over NORM_VISITS */
    uint32_t strange_visits;
    uint64_t visits;
    uint64_t present_visits; /* visits since it became the present profile */
    /* observations: experts with this mean that had this many rows in the last visit ... */
    float seen[MEAN_CLASSES + 1][ROW_CLASSES];
    /* ... and how many of them were used in this visit */
    float used[MEAN_CLASSES + 1][ROW_CLASSES];
    float chance[MEAN_CLASSES + 2][ROW_CLASSES];
    uint32_t last_layer;
    uint32_t round;      /* after how many visits the last layer comes again; 0: unknown */
    float order;         /* part of the visits whose layer was predicted */
    uint32_t unmeasured; /* visits since chance was computed */
};

ep_err ep_expert_heat_create(ep_expert_heat **out_heat)
{
    ep_expert_heat *heat = calloc(1, sizeof(*heat));
    if (heat == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    heat->profiles_count = 1;
    for (uint32_t m = 0; m <= MEAN_CLASSES; m++) {
        for (uint32_t r = 0; r < ROW_CLASSES; r++) { /* values until something is measured */
            const float mean = (float)(m * m) / (float)(MEAN_CLASSES * MEAN_CLASSES);
            heat->seen[m][r] = FIRST_SEEN;
            heat->used[m][r] = FIRST_SEEN * (r == 0 ? 0.7f * mean : 0.3f + 0.7f * mean);
            heat->chance[m][r] = heat->used[m][r] / FIRST_SEEN;
        }
    }
    memcpy(heat->chance[MEAN_CLASSES + 1], heat->chance[MEAN_CLASSES], sizeof(heat->chance[0]));
    *out_heat = heat;
    return EP_OK;
}

static void free_layer(heat_layer *layer)
{
    free(layer->means[0]);
    free(layer->last);
    free(layer->place);
}

void ep_expert_heat_destroy(ep_expert_heat *heat)
{
    if (heat != NULL) {
        for (uint32_t l = 0; l < heat->layers_count; l++) {
            free_layer(&heat->layers[l]);
        }
        free(heat->layers);
        free(heat);
    }
}

ep_err ep_expert_heat_add_layer(ep_expert_heat *heat, uint32_t experts, uint64_t bytes)
{
    heat_layer layer = {.experts = experts, .bytes = bytes > 0 ? bytes : 1, .next = NO_LAYER};
    const size_t room = experts > 0 ? experts : 1;
    heat_layer *grown = realloc(heat->layers, (heat->layers_count + 1) * sizeof(*grown));
    if (grown != NULL) {
        heat->layers = grown;
    }
    layer.means[0] = calloc(room * EP_HEAT_PROFILES, sizeof(float));
    layer.last = calloc(room, 1);
    layer.place = calloc(room, 1);
    if (grown == NULL || layer.means[0] == NULL || layer.last == NULL || layer.place == NULL) {
        free_layer(&layer);
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t p = 1; p < EP_HEAT_PROFILES; p++) {
        layer.means[p] = layer.means[0] + p * room;
    }
    heat->layers[heat->layers_count++] = layer;
    heat->bytes_max = layer.bytes > heat->bytes_max ? layer.bytes : heat->bytes_max;
    for (uint32_t l = 0; l < heat->layers_count; l++) {
        heat->layers[l].weight = (float)heat->bytes_max / (float)heat->layers[l].bytes;
        heat->layers[l].is_coldest_known = false;
    }
    return EP_OK;
}

static uint32_t row_class(uint32_t rows)
{
    return rows < 2 ? rows : rows < 4 ? 2 : 3;
}

/* As measured, interpolated between the two nearest means. */
static float chance(const ep_expert_heat *heat, const heat_layer *layer, uint32_t expert)
{
    const float at = sqrtf(layer->means[heat->present][expert]) * MEAN_CLASSES;
    const uint32_t m = (uint32_t)at;
    const uint32_t r = row_class(layer->last[expert]);
    const float low = heat->chance[m][r];
    return low + (heat->chance[m + 1][r] - low) * (at - (float)m);
}

float ep_expert_heat_of(const ep_expert_heat *heat, uint32_t layer, uint32_t expert)
{
    return chance(heat, &heat->layers[layer], expert);
}

/* ---- which profile fits the present load ---- */

static void judge_profiles(ep_expert_heat *heat, const heat_layer *layer, const uint32_t *experts,
                           uint32_t count)
{
    for (uint32_t p = 0; p < heat->profiles_count; p++) {
        float sum = 0;
        for (uint32_t i = 0; i < count; i++) {
            sum += logf(layer->means[p][experts[i]] + CHANCE_FLOOR);
        }
        heat->profiles[p].fit += (sum / (float)count - heat->profiles[p].fit) / FIT_VISITS;
    }
}

static void become_present(ep_expert_heat *heat, uint32_t profile)
{
    heat->present = profile;
    heat->usual = heat->profiles[profile].fit;
    heat->strange_visits = 0;
    heat->present_visits = 0;
    for (uint32_t l = 0; l < heat->layers_count; l++) {
        heat->layers[l].is_coldest_known = false;
    }
}

/* Begins a copy of the present profile that learns anew. It replaces the one that was not used for
 * the longest time. */
static void begin_profile(ep_expert_heat *heat)
{
    uint32_t to = heat->profiles_count;
    if (to < EP_HEAT_PROFILES) {
        heat->profiles_count++;
    } else {
        to = heat->present == 0 ? 1 : 0;
        for (uint32_t p = 0; p < EP_HEAT_PROFILES; p++) {
            if (p != heat->present &&
                heat->profiles[p].last_visit < heat->profiles[to].last_visit) {
                to = p;
            }
        }
    }
    for (uint32_t l = 0; l < heat->layers_count; l++) {
        heat_layer *layer = &heat->layers[l];
        memcpy(layer->means[to], layer->means[heat->present], layer->experts * sizeof(float));
        layer->visits[to] = 4; /* the copied knowledge counts as this many visits */
    }
    heat->profiles[to].fit = heat->profiles[heat->present].fit;
    become_present(heat, to);
}

static void choose_profile(ep_expert_heat *heat)
{
    uint32_t best = heat->present;
    for (uint32_t p = 0; p < heat->profiles_count; p++) {
        best = heat->profiles[p].fit > heat->profiles[best].fit ? p : best;
    }
    const float fit = heat->profiles[heat->present].fit;
    if (best != heat->present && heat->profiles[best].fit > fit + SWITCH_MARGIN) {
        become_present(heat, best);
        return;
    }
    const bool is_strange =
        heat->present_visits > 2 * STRANGE_VISITS && fit < heat->usual - STRANGE_MARGIN;
    heat->strange_visits = is_strange ? heat->strange_visits + 1 : 0;
    if (heat->strange_visits >= STRANGE_VISITS) {
        begin_profile(heat);
    } else if (!is_strange) {
        heat->usual +=
            (fit - heat->usual) /
            (heat->present_visits < NORM_VISITS ? (float)heat->present_visits + 1 : NORM_VISITS);
    }
}

/* ---- visits ---- */

/* Measures how often experts are used, by their mean and rows in the last visit, for one layer. */
static void measure_chances(ep_expert_heat *heat, const heat_layer *layer, const uint32_t *experts,
                            uint32_t count)
{
    const float *means = layer->means[heat->present];
    uint32_t next = 0;
    for (uint32_t e = 0; e < layer->experts; e++) {
        const uint32_t m = (uint32_t)(sqrtf(means[e]) * MEAN_CLASSES + 0.5f);
        const uint32_t r = row_class(layer->last[e]);
        const bool is_used = next < count && experts[next] == e;
        next += is_used;
        heat->seen[m][r] += 1.0f;
        heat->used[m][r] += is_used ? 1.0f : 0.0f;
        if (heat->seen[m][r] > SEEN_MAX) {
            heat->seen[m][r] *= 0.5f;
            heat->used[m][r] *= 0.5f;
        }
    }
    if (++heat->unmeasured < CHANCES_EVERY) {
        return;
    }
    heat->unmeasured = 0;
    for (uint32_t m = 0; m <= MEAN_CLASSES + 1; m++) {
        for (uint32_t r = 0; r < ROW_CLASSES; r++) {
            const uint32_t from = m <= MEAN_CLASSES ? m : MEAN_CLASSES;
            heat->chance[m][r] = heat->used[from][r] / heat->seen[from][r];
        }
    }
    for (uint32_t l = 0; l < heat->layers_count; l++) {
        heat->layers[l].is_coldest_known = false;
    }
}

/* Layers are expected to follow each other as they did the last time: how far each is from the
 * present one. */
static void follow_order(ep_expert_heat *heat, uint32_t index)
{
    if (heat->visits > 0) {
        heat_layer *last = &heat->layers[heat->last_layer];
        const bool is_foretold = last->next == index;
        heat->order += ((is_foretold ? 1.0f : 0.0f) - heat->order) / ORDER_VISITS;
        if (is_foretold) {
            last->next_trust += last->next_trust < TRUST_MAX;
        } else if (last->next_trust > 0) {
            last->next_trust--;
        } else {
            last->next = index;
        }
    }
    heat->last_layer = index;
    for (uint32_t l = 0; l < heat->layers_count; l++) {
        heat->layers[l].ahead = 0;
    }
    heat->round = 0;
    for (uint32_t l = heat->layers[index].next; l != NO_LAYER && heat->layers[l].ahead == 0;
         l = heat->layers[l].next) {
        heat->layers[l].ahead = ++heat->round;
    }
}

void ep_expert_heat_visit(ep_expert_heat *heat, uint32_t layer_index, const uint32_t *experts,
                          const uint32_t *rows, uint32_t count)
{
    heat_layer *layer = &heat->layers[layer_index];
    if (count == 0) {
        return;
    }
    follow_order(heat, layer_index);
    heat->visits++;
    heat->present_visits++;
    judge_profiles(heat, layer, experts, count);
    choose_profile(heat);
    heat->profiles[heat->present].last_visit = heat->visits;
    measure_chances(heat, layer, experts, count);

    uint32_t *visits = &layer->visits[heat->present];
    float *means = layer->means[heat->present];
    const float step =
        1.0f / (*visits < (uint32_t)MEAN_VISITS ? (float)*visits + 1.0f : MEAN_VISITS);
    *visits += *visits < (uint32_t)MEAN_VISITS;
    for (uint32_t e = 0; e < layer->experts; e++) {
        means[e] -= step * means[e];
    }
    memset(layer->last, 0, layer->experts);
    for (uint32_t i = 0; i < count; i++) {
        means[experts[i]] += step;
        layer->last[experts[i]] = (uint8_t)(rows == NULL || rows[i] == 0 ? 1
                                            : rows[i] < 255              ? rows[i]
                                                                         : 255);
    }
    layer->is_coldest_known = false;
}

void ep_expert_heat_set_place(ep_expert_heat *heat, uint32_t layer, uint32_t expert,
                              ep_heat_place place)
{
    EP_ASSERT(layer < heat->layers_count && expert < heat->layers[layer].experts);
    heat->layers[layer].place[expert] = (uint8_t)place;
    heat->layers[layer].is_coldest_known = false;
}

/* ---- choices ---- */

/* The coldest resident expert of a layer that can be evicted; `experts`: none. */
static uint32_t coldest_of(ep_expert_heat *heat, uint32_t index,
                           bool (*may_go)(void *arg, uint32_t layer, uint32_t expert), void *arg)
{
    heat_layer *layer = &heat->layers[index];
    uint32_t coldest = layer->experts;
    float least = INFINITY;
    if (layer->is_coldest_known && (layer->coldest == layer->experts || may_go == NULL ||
                                    may_go(arg, index, layer->coldest))) {
        return layer->coldest;
    }
    bool is_refused = false;
    for (uint32_t e = 0; e < layer->experts; e++) {
        if (layer->place[e] != EP_HEAT_RESIDENT) {
            continue;
        }
        const float heat_of = chance(heat, layer, e);
        if (heat_of < least) {
            if (may_go != NULL && !may_go(arg, index, e)) {
                is_refused = true;
                continue;
            }
            least = heat_of;
            coldest = e;
        }
    }
    if (!is_refused) {
        layer->is_coldest_known = true;
        layer->coldest = coldest;
    }
    return coldest;
}

static bool has_order(const ep_expert_heat *heat)
{
    return heat->order >= ORDER_LEAST && heat->round >= ROUND_LEAST;
}

/* For a load that a request waits for, all layers count alike. A prefetch may evict an expert that
 * can be loaded again before it is missed. */
static float away_factor(const ep_expert_heat *heat, const heat_layer *layer, bool is_ahead)
{
    return is_ahead && has_order(heat) && layer->ahead > heat->round / 2 ? AWAY_FACTOR : 1.0f;
}

bool ep_expert_heat_victim(ep_expert_heat *heat, bool is_ahead,
                           bool (*may_go)(void *arg, uint32_t layer, uint32_t expert), void *arg,
                           ep_heat_choice *out_victim)
{
    bool found = false;
    for (uint32_t l = 0; l < heat->layers_count; l++) {
        heat_layer *layer = &heat->layers[l];
        const uint32_t expert = coldest_of(heat, l, may_go, arg);
        if (expert == layer->experts) {
            continue;
        }
        const float least =
            chance(heat, layer, expert) * layer->weight * away_factor(heat, layer, is_ahead);
        if (!found || least < out_victim->heat) {
            *out_victim = (ep_heat_choice){.layer = l, .expert = expert, .heat = least};
            found = true;
        }
    }
    return found;
}

/* Whether a prefetch that takes `lead` visits suits this layer: it ends in time, and not so early
 * that the evicted expert would be missed before. */
static bool is_next(const ep_expert_heat *heat, const heat_layer *layer, uint32_t lead)
{
    return !has_order(heat) || (layer->ahead >= lead && layer->ahead < lead + PREFETCH_DEPTH &&
                                layer->ahead <= heat->round / 2);
}

bool ep_expert_heat_prefetch(ep_expert_heat *heat, uint32_t lead, bool has_room,
                             bool (*may_go)(void *arg, uint32_t layer, uint32_t expert), void *arg,
                             ep_heat_choice *out_choice)
{
    ep_heat_choice best = {.heat = 0};
    ep_heat_choice victim;
    for (uint32_t l = 0; l < heat->layers_count; l++) {
        const heat_layer *layer = &heat->layers[l];
        for (uint32_t e = 0; is_next(heat, layer, lead) && e < layer->experts; e++) {
            const float heat_of =
                layer->place[e] == EP_HEAT_ABSENT ? chance(heat, layer, e) * layer->weight : 0;
            if (heat_of > best.heat) {
                best = (ep_heat_choice){.layer = l, .expert = e, .heat = heat_of};
            }
        }
    }
    if (best.heat < PREFETCH_FLOOR) {
        return false;
    }
    if (!has_room && (!ep_expert_heat_victim(heat, true, may_go, arg, &victim) ||
                      best.heat < victim.heat * PREFETCH_MARGIN)) {
        return false;
    }
    *out_choice = best;
    return true;
}
