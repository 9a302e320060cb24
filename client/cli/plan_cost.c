/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_cost.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "moe/routing_plan.h"

#define ENOUGH 1e-12
#define DRAWN_TOKENS_MAX 1024
#define DRAWN_SLOTS (1 << 15) /* about so many in all draws together */
#define DRAWS_MIN 16
#define DRAWS_MAX 512
#define OVERLAP_PLAIN 3
#define OVERLAP_CODES 2
#define PLAIN_BYTES 2 /* bytes of a plain weight at least; codes have fewer */

/* ---- draws ---- */

void ep_plan_draw(const double *shares, uint32_t experts, uint32_t top_k, uint32_t tokens,
                  uint64_t *random, uint32_t *order, uint32_t *out_slots)
{
    memset(out_slots, 0, experts * sizeof(*out_slots));
    for (uint32_t t = 0; t < tokens; t++) {
        const double first = (double)(ep_splitmix64(random) >> 11) * 0x1p-53;
        double sum = 0;
        for (uint32_t i = 0, taken = 0; i < experts && taken < top_k; i++) {
            const uint32_t other = i + (uint32_t)(ep_splitmix64(random) % (experts - i)),
                           e = order[other];
            order[other] = order[i];
            order[i] = e;
            sum += top_k * shares[e];
            if (sum > first + taken) {
                out_slots[e]++;
                taken++;
            }
        }
    }
}

/* Memory for computing costs. */
typedef struct workspace {
    uint32_t *order, *slots, *chosen, *scratch; /* [experts, shared one too] */
    double *visits;                             /* [nodes] P_n, for a token of a step */
    double *compute_s;                          /* [nodes] of a draw, at the host's full rates */
    double *read;                               /* [nodes] bytes */
    double *rows;                               /* [nodes] */
    float *busy;
    uint8_t *usable;
} workspace;

static bool workspace_init(const ep_plan_layer *layer, workspace *w)
{
    const uint32_t experts = layer->experts + 1, nodes = layer->nodes;
    *w = (workspace){.order = calloc(4u * (size_t)experts, sizeof(uint32_t)),
                     .visits = calloc(4u * (size_t)nodes, sizeof(double)),
                     .busy = calloc(nodes, sizeof(float)),
                     .usable = malloc(nodes)};
    if (w->order == NULL || w->visits == NULL || w->busy == NULL || w->usable == NULL) {
        return false;
    }
    w->slots = w->order + experts;
    w->chosen = w->slots + experts;
    w->scratch = w->chosen + experts;
    w->compute_s = w->visits + nodes;
    w->read = w->compute_s + nodes;
    w->rows = w->read + nodes;
    memset(w->usable, 1, nodes);
    for (uint32_t e = 0; e < layer->experts; e++) {
        w->order[e] = e;
    }
    return true;
}

static void workspace_fini(workspace *w)
{
    free(w->order);
    free(w->visits);
    free(w->busy);
    free(w->usable);
}

/* ---- costs ---- */

static void count_visits(const ep_plan_layer *layer, workspace *w)
{
    double *slots = w->rows, *shared = w->read; /* not used until the first draw */
    for (uint32_t e = 0; e < layer->experts + layer->has_shared; e++) {
        const uint32_t begin = layer->offsets[e], end = layer->offsets[e + 1];
        const bool is_shared = e == layer->experts;
        for (uint32_t c = begin; c < end; c++) {
            *(is_shared ? &shared[layer->copies[c]] : &slots[layer->copies[c]]) +=
                (is_shared ? 1 : layer->shares[e]) / (end - begin);
        }
    }
    for (uint32_t n = 0; n < layer->nodes; n++) {
        w->visits[n] = 1 - pow(fmax(1 - slots[n], 0), layer->top_k) * (1 - shared[n]);
    }
}

double ep_plan_expert_s(double read_s, double compute_s, bool is_plain)
{
    const double p = is_plain ? OVERLAP_PLAIN : OVERLAP_CODES, longer = fmax(read_s, compute_s);
    return longer > 0 ? longer * pow(1 + pow(fmin(read_s, compute_s) / longer, p), 1 / p) : 0;
}

double ep_plan_expert_part_s(double job_s, double other_s, bool is_plain)
{
    const double p = is_plain ? OVERLAP_PLAIN : OVERLAP_CODES;
    return other_s < job_s ? job_s * pow(1 - pow(other_s / job_s, p), 1 / p) : NAN;
}

/* Draws the slots of each expert in a step, and the copy that gets them. */
static void draw_step(const ep_plan_layer *layer, double tokens, uint64_t turn, uint64_t *random,
                      workspace *w)
{
    const double drawn = fmin(tokens, DRAWN_TOKENS_MAX), stretch = sqrt(tokens / drawn);
    const ep_routing_layer routing = {.shape = {.experts = layer->experts,
                                                .shared_experts = layer->has_shared,
                                                .top_k = layer->top_k},
                                      .offsets = layer->offsets,
                                      .copies = layer->copies};
    const ep_copy_choice choice = {.nodes_count = layer->nodes,
                                   .usable = w->usable,
                                   .slots = w->slots,
                                   .pass_slots = EP_COPY_PASS_SLOTS,
                                   .spread = turn,
                                   .order = w->scratch,
                                   .busy = w->busy};
    ep_plan_draw(layer->shares, layer->experts, layer->top_k, (uint32_t)drawn, random, w->order,
                 w->slots);
    for (uint32_t e = 0; stretch > 1 && e < layer->experts; e++) {
        const double mean = layer->top_k * layer->shares[e];
        w->slots[e] = (uint32_t)fmin(
            fmax(tokens * mean + stretch * (w->slots[e] - drawn * mean) + 0.5, 0), tokens);
    }
    w->slots[layer->experts] = layer->has_shared ? (uint32_t)tokens : 0;
    ep_choose_copies(&routing, &choice, w->chosen);
}

static void add_work(const ep_plan_layer *layer, const ep_plan_machine *machine, workspace *w)
{
    memset(w->compute_s, 0, 3u * layer->nodes * sizeof(double));
    for (uint32_t e = 0; e < layer->experts + layer->has_shared; e++) {
        const double weights = e < layer->experts ? layer->expert_weights : layer->shared_weights;
        const double bytes = weights * layer->weight_bytes, rows = w->slots[e];
        if (w->slots[e] == 0) {
            continue;
        }
        const uint32_t n = w->chosen[e];
        w->compute_s[n] += ep_plan_expert_s(bytes / machine->memory_bytes_per_s,
                                            2 * weights * rows / machine->compute_per_s,
                                            layer->weight_bytes >= PLAIN_BYTES);
        w->read[n] += bytes;
        w->rows[n] += rows;
    }
}

/* Adds the drawn step. */
static void add_step(const ep_plan_layer *layer, const ep_plan_machine *machine, double tokens,
                     const workspace *w, ep_plan_cost *sum)
{
    double longest_s = 0, read = 0;
    for (uint32_t first = 0; first < layer->nodes; first += machine->nodes_per_host) {
        double most_s = 0, all_s = 0, rows = 0;
        for (uint32_t n = first; n < layer->nodes && n < first + machine->nodes_per_host; n++) {
            most_s = fmax(most_s, w->compute_s[n]);
            all_s += w->compute_s[n];
            rows += tokens * w->visits[n] + w->rows[n];
            read = fmax(read, w->read[n]);
        }
        longest_s = fmax(longest_s, fmax(most_s * machine->nodes_at_once, all_s) +
                                        layer->row_bytes * rows / machine->link_bytes_per_s);
    }
    sum->read_bytes += read;
    sum->time_s += machine->round_trip_s + longest_s;
}

ep_err ep_plan_cost_of(const ep_plan_layer *layer, const ep_plan_machine *machine, double tokens,
                       ep_plan_cost *out_cost)
{
    const double slots = fmin(tokens, DRAWN_TOKENS_MAX) * layer->top_k;
    const uint32_t draws = (uint32_t)fmin(fmax(DRAWN_SLOTS / slots, DRAWS_MIN), DRAWS_MAX);
    ep_plan_cost cost = {.combine_bytes = layer->row_bytes * (layer->top_k + layer->has_shared)};
    uint64_t random = 1; /* the same seed for every placement, so that draws do not differ */
    workspace w;
    if (!workspace_init(layer, &w)) {
        workspace_fini(&w);
        return EP_ERR_NO_MEMORY;
    }
    count_visits(layer, &w);
    for (uint32_t n = 0; n < layer->nodes; n++) {
        cost.nodes_per_token += w.visits[n];
    }
    for (uint32_t d = 0; d < draws; d++) {
        draw_step(layer, tokens, d, &random, &w);
        add_work(layer, machine, &w);
        add_step(layer, machine, tokens, &w, &cost);
    }
    cost.read_bytes /= draws;
    cost.time_s /= draws;
    cost.dispatch_bytes = layer->row_bytes * cost.nodes_per_token;
    workspace_fini(&w);
    *out_cost = cost;
    return EP_OK;
}

/* ---- shares ---- */

void ep_plan_cap_shares(double *shares, uint32_t experts, uint32_t top_k)
{
    const double cap = 1.0 / top_k;
    for (uint32_t round = 0; round <= experts; round++) { /* each round caps at least one more */
        double capped = 0, free_sum = 0, over = 0;
        for (uint32_t e = 0; e < experts; e++) {
            const bool is_full = shares[e] >= cap * (1 - ENOUGH) && round > 0;
            capped += is_full ? cap : 0;
            free_sum += is_full ? 0 : shares[e];
        }
        const double factor = free_sum > 0 ? fmax(1 - capped, 0) / free_sum : 0;
        for (uint32_t e = 0; e < experts; e++) {
            const bool is_full = shares[e] >= cap * (1 - ENOUGH) && round > 0;
            shares[e] = is_full ? cap : shares[e] * factor;
            over = fmax(over, shares[e] - cap);
        }
        if (over <= cap * ENOUGH) {
            return;
        }
    }
}
