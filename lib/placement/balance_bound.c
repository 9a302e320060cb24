/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The smallest busiest time T that no placement can beat, by bisection over T. T is impossible when
 * one of these conditions fails:
 *
 *   work     all nodes together must do all heat within T: sum of heat <= T * sum of speeds.
 *   copies   an expert with heat h needs k nodes whose speeds add up to h / T; k is smallest with
 *            the fastest nodes. Sum of k <= copies_total, k <= nodes.
 *   slots    (all speeds equal) an expert is on c >= k nodes, in the best case those with the
 *            fewest slots. At most f slots can stay empty: all slots less the copies that are
 *            needed. So these nodes hold at least (their slots - c - f) other copies, which weigh
 *            at least as much as the lightest copies. Splitting a light expert further does not
 *            help, because each split fills one more slot.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "placement/balance.h"

enum { HALVINGS = 40 };
#define CLOSE_ENOUGH 1e-7

typedef struct {
    double weight; /* of one copy */
    double below;  /* weight of all copies before this group in ascending order */
    uint32_t copies, before;
} light;

typedef struct {
    const ep_balance_input *in;
    double *reach;       /* [nodes+1] sum of the fastest k speeds */
    uint32_t *few_slots; /* [nodes+1] sum of the fewest k slots */
    uint32_t slots;      /* of all */
    uint32_t *needed;    /* [experts] k at the present T */
    light *lights;       /* [experts] ascending */
    bool is_even;
    bool with_slots;
} scale;

static int by_speed(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a < b) - (a > b);
}

static int by_slots(const void *left, const void *right)
{
    const uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

static int by_weight(const void *left, const void *right)
{
    const light *a = left, *b = right;
    return (a->weight > b->weight) - (a->weight < b->weight);
}

/* The fewest nodes that can do `heat` within `time`; more than there are if none can. */
static uint32_t nodes_for(const scale *s, double heat, double time)
{
    if (heat <= time * s->reach[1]) {
        return 1;
    }
    if (s->is_even) {
        const double k = ceil(heat / (time * s->reach[1]) * (1 - 1e-12));
        return k > s->in->nodes ? s->in->nodes + 1 : (uint32_t)k;
    }
    uint32_t k = 1;
    while (k <= s->in->nodes && heat > time * s->reach[k] * (1 + 1e-12)) {
        k++;
    }
    return k;
}

/* The sum of the lightest `count` copies. */
static double lightest(const scale *s, uint32_t count)
{
    uint32_t low = 0, high = s->in->experts - 1;
    while (low < high) { /* the last group that begins below count */
        const uint32_t middle = (low + high + 1) / 2;
        if (s->lights[middle].before < count) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const light *l = &s->lights[low];
    const uint32_t of_it = count - l->before < l->copies ? count - l->before : l->copies;
    return l->below + of_it * l->weight;
}

static void weigh_copies(scale *s)
{
    for (uint32_t e = 0; e < s->in->experts; e++) {
        s->lights[e] = (light){.weight = s->in->heat[e] / s->needed[e], .copies = s->needed[e]};
    }
    qsort(s->lights, s->in->experts, sizeof(*s->lights), by_weight);
    for (uint32_t i = 1; i < s->in->experts; i++) {
        const light *l = &s->lights[i - 1];
        s->lights[i].before = l->before + l->copies;
        s->lights[i].below = l->below + l->copies * l->weight;
    }
}

static bool slots_allow(scale *s, double time, uint64_t needed)
{
    const double speed = s->reach[1];
    weigh_copies(s);
    for (uint32_t e = 0; e < s->in->experts; e++) {
        bool fits = false;
        for (uint32_t c = s->needed[e]; c <= s->in->nodes && !fits; c++) {
            const int64_t empty = (int64_t)s->slots - (int64_t)(needed - s->needed[e]) - c;
            const int64_t others = (int64_t)s->few_slots[c] - c - empty;
            if (empty < 0) {
                break;
            }
            fits = s->in->heat[e] + (others > 0 ? lightest(s, (uint32_t)others) : 0) <=
                   time * c * speed * (1 + 1e-12);
        }
        if (!fits) {
            return false;
        }
    }
    return true;
}

static bool is_possible(scale *s, double time)
{
    uint64_t needed = 0;
    for (uint32_t e = 0; e < s->in->experts; e++) {
        uint32_t k = nodes_for(s, s->in->heat[e], time);
        if (k > s->in->nodes) {
            return false;
        }
        k = k > s->in->copies_min ? k : s->in->copies_min;
        s->needed[e] = k;
        needed += k;
    }
    return needed <= s->in->copies_total && needed <= s->slots &&
           (!s->with_slots || slots_allow(s, time, needed));
}

static void measure(scale *s, double *out_least, double *out_most)
{
    const ep_balance_input *in = s->in;
    double heat = 0;
    memcpy(s->reach + 1, in->speeds, in->nodes * sizeof(double));
    for (uint32_t n = 0; n < in->nodes; n++) { /* an expert has at most one copy on a node */
        s->few_slots[n + 1] = in->slots[n] < in->experts ? in->slots[n] : in->experts;
    }
    qsort(s->reach + 1, in->nodes, sizeof(double), by_speed);
    qsort(s->few_slots + 1, in->nodes, sizeof(uint32_t), by_slots);
    s->is_even = s->reach[1] == s->reach[in->nodes];
    const double slowest = s->reach[in->nodes];
    for (uint32_t n = 1; n <= in->nodes; n++) {
        s->reach[n] += s->reach[n - 1];
        s->few_slots[n] += s->few_slots[n - 1];
    }
    s->slots = s->few_slots[in->nodes];
    for (uint32_t e = 0; e < in->experts; e++) {
        heat += in->heat[e];
    }
    *out_least = heat / s->reach[in->nodes];
    *out_most = heat / slowest; /* all of it on the slowest node */
}

double ep_balance_bound(const ep_balance_input *in, bool with_slots)
{
    scale s = {.in = in};
    double least = 0, most;
    s.reach = calloc(in->nodes + 1u, sizeof(*s.reach));
    s.few_slots = calloc(in->nodes + 1u, sizeof(*s.few_slots));
    s.needed = calloc(in->experts + 1u, sizeof(*s.needed));
    s.lights = with_slots ? calloc(in->experts + 1u, sizeof(*s.lights)) : NULL;
    if (s.reach != NULL && s.few_slots != NULL && s.needed != NULL &&
        (!with_slots || s.lights != NULL)) {
        measure(&s, &least, &most);
        s.with_slots = with_slots && s.is_even;
        if (least > 0 && !is_possible(&s, least)) {
            for (uint32_t i = 0; i < HALVINGS && most - least > least * CLOSE_ENOUGH; i++) {
                const double middle = (least + most) / 2;
                if (is_possible(&s, middle)) {
                    most = middle;
                } else {
                    least = middle;
                }
            }
        }
    }
    free(s.reach);
    free(s.few_slots);
    free(s.needed);
    free(s.lights);
    return least;
}
