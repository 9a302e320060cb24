/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Greedy start, then exchanges with the busiest node. An exchange moves a copy to another node,
 * swaps two copies, or replaces a spare copy by one of another expert. It is judged by the busiest
 * of all nodes it affects; each step makes the best one.
 */
#include "placement/balance.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/random.h"

enum { IDLE_MAX = 128, TRIES = 64 };
/* relief without a load counts as much as this many times the relief with one */
#define DROP_WORTH 16
#define WORTH_IT 1e-4 /* part of the busiest node's time that a search step must gain */
#define NO_EXPERT UINT32_MAX
#define NO_NODE UINT32_MAX
#define START_GOOD 1.008 /* relative to the bound: from here on, search finds the rest */
/* of a start's distance to the bound: a further start is worthwhile only below this part */
#define START_WORTH 0.4
#define ROUNDING 1e-6   /* the bound is more precise than this */
#define LEAST_GAIN 1e-9 /* part of the busiest node's time; a smaller gain is rounding */

struct ep_balance {
    const ep_balance_input *in;
    uint32_t width;  /* slots of the largest node */
    uint32_t total;  /* copies placed */
    uint32_t budget; /* copies_total, but at most the number of slots */
    bool is_even;    /* all speeds are equal: moving a copy does not change its share */
    double bound;
    uint8_t *held;      /* [nodes][experts] */
    uint32_t *listed;   /* [nodes][width] its experts */
    uint32_t *counts;   /* [nodes] */
    uint32_t *holders;  /* [experts][nodes] */
    uint32_t *copies;   /* [experts] */
    double *speed_sums; /* [experts] sum of the holders' speeds */
    double *shares;     /* [experts] what each copy adds to its node: heat / speed_sums */
    double *busy;       /* [nodes] */
    struct step {
        uint32_t giver, given;
    } * way;         /* [nodes] for the search for room */
    uint32_t *queue; /* [nodes] */
};

/*
 * A change of who holds what.
 *   MOVE   given goes from `from` to `to`, taken (or nothing) the other way
 *   COPY   `to` gets one more copy of given, replacing its copy of taken (or in a free slot)
 *   TRADE  `from` gets taken from `to`, replacing its copy of given
 *   DROP   `from` gives up its copy of given; to = from
 */
typedef enum { MOVE, COPY, TRADE, DROP } exchange_kind;

typedef struct {
    exchange_kind kind;
    uint32_t from, to;     /* nodes */
    uint32_t given, taken; /* experts */
} exchange;

/* ---- the board ---- */

static ep_err check_input(const ep_balance_input *in, ep_error *out_error)
{
    uint64_t slots = 0;
    for (uint32_t n = 0; n < in->nodes; n++) {
        slots += in->slots[n] < in->experts ? in->slots[n] : in->experts;
    }
    const uint64_t least = (uint64_t)in->experts * in->copies_min;
    if (in->copies_min < 1 || in->copies_min > in->nodes || in->copies_total < least ||
        slots < least) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "balance of %u experts with at least %u copies of each, %u in all, "
                            "over %u nodes with %llu slots",
                            in->experts, in->copies_min, in->copies_total, in->nodes,
                            (unsigned long long)slots);
    }
    return EP_OK;
}

ep_err ep_balance_create(const ep_balance_input *in, ep_balance **out_balance, ep_error *out_error)
{
    ep_err err = check_input(in, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_balance *b = calloc(1, sizeof(*b));
    if (b == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to balance %u experts",
                            in->experts);
    }
    uint64_t slots_all = 0;
    b->in = in;
    b->is_even = true;
    for (uint32_t n = 0; n < in->nodes; n++) {
        const uint32_t slots = in->slots[n] < in->experts ? in->slots[n] : in->experts;
        b->width = slots > b->width ? slots : b->width;
        slots_all += slots;
        b->is_even = b->is_even && in->speeds[n] == in->speeds[0];
    }
    b->budget = slots_all < in->copies_total ? (uint32_t)slots_all : in->copies_total;
    b->held = calloc(in->nodes, in->experts);
    b->listed = calloc((size_t)in->nodes * b->width, sizeof(*b->listed));
    b->counts = calloc(in->nodes, sizeof(*b->counts));
    b->holders = calloc((size_t)in->experts * in->nodes, sizeof(*b->holders));
    b->copies = calloc(in->experts, sizeof(*b->copies));
    b->speed_sums = calloc(in->experts, sizeof(*b->speed_sums));
    b->shares = calloc(in->experts, sizeof(*b->shares));
    b->busy = calloc(in->nodes, sizeof(*b->busy));
    b->way = calloc(in->nodes, sizeof(*b->way));
    b->queue = calloc(in->nodes, sizeof(*b->queue));
    if (b->held == NULL || b->listed == NULL || b->counts == NULL || b->holders == NULL ||
        b->copies == NULL || b->speed_sums == NULL || b->shares == NULL || b->busy == NULL ||
        b->way == NULL || b->queue == NULL) {
        ep_balance_destroy(b);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory to balance %u experts over %u nodes", in->experts,
                            in->nodes);
    }
    b->bound = ep_balance_bound(in, false);
    *out_balance = b;
    return EP_OK;
}

void ep_balance_destroy(ep_balance *b)
{
    if (b == NULL) {
        return;
    }
    free(b->held);
    free(b->listed);
    free(b->counts);
    free(b->holders);
    free(b->copies);
    free(b->speed_sums);
    free(b->shares);
    free(b->busy);
    free(b->way);
    free(b->queue);
    free(b);
}

static uint8_t *held(const ep_balance *b, uint32_t expert, uint32_t node)
{
    return &b->held[(size_t)node * b->in->experts + expert];
}

bool ep_balance_holds(const ep_balance *b, uint32_t expert, uint32_t node)
{
    return *held(b, expert, node) != 0;
}

static bool has_slot(const ep_balance *b, uint32_t node)
{
    return b->counts[node] < b->in->slots[node] && b->counts[node] < b->in->experts;
}

/* The expert's set of holders has changed: updates how busy each holder is with it. */
static void reshare(ep_balance *b, uint32_t expert, double speed_sum)
{
    const double share = speed_sum > 0 ? b->in->heat[expert] / speed_sum : 0;
    const uint32_t *nodes = &b->holders[(size_t)expert * b->in->nodes];
    for (uint32_t i = 0; i < b->copies[expert]; i++) {
        b->busy[nodes[i]] += share - b->shares[expert];
    }
    b->speed_sums[expert] = speed_sum;
    b->shares[expert] = share;
}

static void add(ep_balance *b, uint32_t expert, uint32_t node)
{
    EP_ASSERT(!ep_balance_holds(b, expert, node) && b->counts[node] < b->width);
    reshare(b, expert, b->speed_sums[expert] + b->in->speeds[node]);
    *held(b, expert, node) = 1;
    b->listed[(size_t)node * b->width + b->counts[node]++] = expert;
    b->holders[(size_t)expert * b->in->nodes + b->copies[expert]++] = node;
    b->busy[node] += b->shares[expert];
    b->total++;
}

static void drop(ep_balance *b, uint32_t expert, uint32_t node)
{
    uint32_t *experts = &b->listed[(size_t)node * b->width];
    uint32_t *nodes = &b->holders[(size_t)expert * b->in->nodes];
    uint32_t i = 0, j = 0;
    while (experts[i] != expert) {
        i++;
    }
    while (nodes[j] != node) {
        j++;
    }
    experts[i] = experts[--b->counts[node]];
    nodes[j] = nodes[--b->copies[expert]];
    *held(b, expert, node) = 0;
    b->busy[node] -= b->shares[expert];
    b->total--;
    reshare(b, expert, b->copies[expert] == 0 ? 0 : b->speed_sums[expert] - b->in->speeds[node]);
}

bool ep_balance_put(ep_balance *b, uint32_t expert, uint32_t node)
{
    if (ep_balance_holds(b, expert, node) || !has_slot(b, node)) {
        return false;
    }
    add(b, expert, node);
    return true;
}

static uint32_t busiest_node(const ep_balance *b)
{
    uint32_t most = 0;
    for (uint32_t n = 1; n < b->in->nodes; n++) {
        most = b->busy[n] > b->busy[most] ? n : most;
    }
    return most;
}

double ep_balance_busiest(const ep_balance *b)
{
    return b->in->nodes == 0 ? 0 : b->busy[busiest_node(b)];
}

/* ---- the start ---- */

typedef struct {
    double share; /* of one copy, when it has `copies` */
    uint32_t expert;
    uint32_t copies;
} ranked;

static int by_share(const void *left, const void *right)
{
    const ranked *a = left, *b = right;
    return a->share != b->share ? (a->share < b->share ? 1 : -1)
                                : (a->expert > b->expert) - (a->expert < b->expert);
}

static bool is_hotter(const ranked *a, const ranked *b)
{
    return a->share > b->share || (a->share == b->share && a->expert < b->expert);
}

static void sift(ranked *heap, uint32_t count, uint32_t at)
{
    for (;;) {
        uint32_t top = at;
        for (uint32_t child = 2 * at + 1; child <= 2 * at + 2 && child < count; child++) {
            top = is_hotter(&heap[child], &heap[top]) ? child : top;
        }
        if (top == at) {
            return;
        }
        const ranked moved = heap[at];
        heap[at] = heap[top];
        heap[top] = moved;
        at = top;
    }
}

/* How many copies each expert gets: the hottest copy is split repeatedly while there are fewer than
 * `total`. Sorted by share. */
static void rank(const ep_balance *b, uint64_t total, ranked *experts)
{
    const ep_balance_input *in = b->in;
    uint64_t left = total;
    for (uint32_t e = 0; e < in->experts; e++) {
        const uint32_t copies = b->copies[e] > in->copies_min ? b->copies[e] : in->copies_min;
        experts[e] = (ranked){.share = in->heat[e] / copies, .expert = e, .copies = copies};
        left = left > copies ? left - copies : 0;
    }
    for (uint32_t i = in->experts / 2; i-- > 0;) {
        sift(experts, in->experts, i);
    }
    for (; left > 0 && experts[0].copies < in->nodes && experts[0].share > 0; left--) {
        ranked *hottest = &experts[0];
        hottest->share = in->heat[hottest->expert] / ++hottest->copies;
        sift(experts, in->experts, 0);
    }
    qsort(experts, in->experts, sizeof(*experts), by_share);
}

static bool may_go(const ep_balance *b, uint32_t expert, uint32_t from, uint32_t to)
{
    return b->in->hosts == NULL ||
           ep_hosts_allow(b->in->hosts, &b->holders[(size_t)expert * b->in->nodes],
                          b->copies[expert], from, to);
}

static bool gains_host(const ep_balance *b, uint32_t expert, uint32_t from, uint32_t to)
{
    return b->in->hosts != NULL &&
           ep_hosts_gain(b->in->hosts, &b->holders[(size_t)expert * b->in->nodes],
                         b->copies[expert], from, to);
}

static bool has_work_left(const ep_balance *b)
{
    return b->in->work_left == NULL || *b->in->work_left > 0;
}

static void spend(uint64_t *left, uint64_t work)
{
    if (left != NULL) {
        *left -= work < *left ? work : *left;
    }
}

/* Number of experts that both the node and the holders of this expert hold: if a holder is lost,
 * they add to the node's work. */
static uint32_t in_common(const ep_balance *b, uint32_t expert, uint32_t node)
{
    uint32_t sum = 0;
    for (uint32_t c = 0; c < b->copies[expert]; c++) {
        const uint32_t holder = b->holders[(size_t)expert * b->in->nodes + c];
        for (uint32_t i = 0; i < b->counts[holder]; i++) {
            sum += ep_balance_holds(b, b->listed[(size_t)holder * b->width + i], node);
        }
        spend(b->in->common_left, b->counts[holder]);
    }
    return sum;
}

/* Prefers a host without the expert, while it should be on more; of equally busy nodes, the one
 * with the fewest experts in common with its holders. The best node's number is counted once, when
 * another node is equal. */
static uint32_t least_busy(const ep_balance *b, const ranked *r)
{
    uint32_t best = NO_NODE;
    double least = 0;
    uint32_t best_common = UINT32_MAX;
    bool best_gains = false;
    for (uint32_t n = 0; n < b->in->nodes; n++) {
        if (!has_slot(b, n) || ep_balance_holds(b, r->expert, n)) {
            continue;
        }
        const double then = b->busy[n] + r->share / b->in->speeds[n];
        const bool gains = gains_host(b, r->expert, NO_NODE, n);
        const bool alike = best != NO_NODE && gains == best_gains &&
                           fabs(then - least) <= LEAST_GAIN * least && b->copies[r->expert] > 0 &&
                           (b->in->common_left == NULL || *b->in->common_left > 0);
        uint32_t common = UINT32_MAX;
        if (alike) {
            best_common = best_common == UINT32_MAX ? in_common(b, r->expert, best) : best_common;
            common = in_common(b, r->expert, n);
        }
        if (gains != best_gains
                ? gains
                : best == NO_NODE || (alike ? common < best_common : then < least)) {
            best = n;
            least = then;
            best_common = common;
            best_gains = gains;
        }
    }
    return best;
}

static uint32_t first_missing(const ep_balance *b, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < b->counts[from]; i++) {
        const uint32_t expert = b->listed[(size_t)from * b->width + i];
        if (!ep_balance_holds(b, expert, to) && may_go(b, expert, from, to)) {
            return expert;
        }
    }
    return NO_EXPERT;
}

/*
 * All nodes with a free slot already hold the expert. So a node without it gives a copy to another
 * node, that one to the next, and the last has a free slot: finds the shortest such chain. way[n]:
 * who gives to n, and what.
 */
static bool make_room(ep_balance *b, uint32_t expert)
{
    uint32_t *queue = b->queue, count = 0;
    for (uint32_t n = 0; n < b->in->nodes; n++) {
        b->way[n].giver = NO_NODE;
        if (!ep_balance_holds(b, expert, n)) {
            b->way[n].giver = n; /* the chain begins here */
            queue[count++] = n;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t n = 0; n < b->in->nodes; n++) {
            const uint32_t given =
                b->way[n].giver == NO_NODE ? first_missing(b, queue[i], n) : NO_EXPERT;
            if (given == NO_EXPERT) {
                continue;
            }
            b->way[n] = (struct step){.giver = queue[i], .given = given};
            queue[count++] = n;
            if (has_slot(b, n)) {
                uint32_t at = n;
                for (; b->way[at].giver != at; at = b->way[at].giver) {
                    drop(b, b->way[at].given, b->way[at].giver);
                    add(b, b->way[at].given, at);
                }
                add(b, expert, at);
                return true;
            }
        }
    }
    return false;
}

/* Removes a spare copy from a node that lacks the expert. */
static bool replace_spare(ep_balance *b, uint32_t expert)
{
    for (uint32_t n = 0; n < b->in->nodes; n++) {
        for (uint32_t i = 0; !ep_balance_holds(b, expert, n) && i < b->counts[n]; i++) {
            const uint32_t other = b->listed[(size_t)n * b->width + i];
            if (b->copies[other] > b->in->copies_min && may_go(b, other, n, NO_NODE)) {
                drop(b, other, n);
                add(b, expert, n);
                return true;
            }
        }
    }
    return false;
}

static ep_err fill(ep_balance *b, const ranked *experts, ep_error *out_error)
{
    for (uint32_t i = 0; i < b->in->experts; i++) {
        const ranked *r = &experts[i];
        while (b->copies[r->expert] < r->copies) {
            const uint32_t node = least_busy(b, r);
            if (node != NO_NODE) {
                add(b, r->expert, node);
            } else if (!make_room(b, r->expert) && (b->copies[r->expert] >= b->in->copies_min ||
                                                    !replace_spare(b, r->expert))) {
                break;
            }
        }
        if (b->copies[r->expert] < b->in->copies_min) {
            return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                                "no slots for %u copies of expert %u", b->in->copies_min,
                                r->expert);
        }
    }
    return EP_OK;
}

static void clear(ep_balance *b)
{
    const ep_balance_input *in = b->in;
    b->total = 0;
    memset(b->held, 0, (size_t)in->nodes * in->experts);
    memset(b->counts, 0, in->nodes * sizeof(*b->counts));
    memset(b->busy, 0, in->nodes * sizeof(*b->busy));
    memset(b->copies, 0, in->experts * sizeof(*b->copies));
    memset(b->speed_sums, 0, in->experts * sizeof(*b->speed_sums));
    memset(b->shares, 0, in->experts * sizeof(*b->shares));
}

/* The fewest copies of which none is above the bound; all speeds are equal. */
static uint64_t copies_needed(const ep_balance *b)
{
    const ep_balance_input *in = b->in;
    uint64_t needed = 0;
    for (uint32_t e = 0; e < in->experts; e++) {
        const double copies =
            fmin(ceil(in->heat[e] / (b->bound * in->speeds[0]) * (1 - ROUNDING)), in->nodes);
        needed += copies > in->copies_min ? (uint32_t)copies : in->copies_min;
    }
    return needed;
}

/* Returns the busiest node's time; INFINITY if an expert finds no place (named in out_error). */
static double start_with(ep_balance *b, uint64_t total, ranked *experts, ep_error *out_error)
{
    clear(b);
    rank(b, total, experts);
    return fill(b, experts, out_error) == EP_OK ? ep_balance_busiest(b) : INFINITY;
}

/*
 * For an empty board. All spare copies make small pieces, which mostly divide well. But where a few
 * experts take nearly all, two of their pieces on a node are too much and one is too little: then
 * slightly more copies than needed are better, and the number that is best must be tried.
 */
static ep_err start(ep_balance *b, ranked *experts, ep_error *out_error)
{
    static const uint8_t more[] = {1, 2, 4, 0};
    uint64_t *common_left = b->in->common_left;
    const uint64_t common_before = common_left != NULL ? *common_left : 0;
    const double busiest = start_with(b, b->budget, experts, out_error);
    if (busiest == INFINITY || busiest <= START_GOOD * b->bound || !b->is_even) {
        return busiest == INFINITY ? EP_ERR_RESOURCE_EXHAUSTED : EP_OK;
    }
    const uint64_t needed = copies_needed(b);
    if (needed + more[0] >= b->budget || !has_work_left(b)) {
        return EP_OK; /* there is no other number to try */
    }
    uint64_t best = b->budget;
    double least = b->bound + (busiest - b->bound) * START_WORTH;
    const uint64_t common_after = common_left != NULL ? *common_left : 0;
    if (common_left != NULL) {
        *common_left = 0; /* experts in common do not change how busy nodes are */
    }
    for (uint32_t i = 0; i < sizeof(more) && has_work_left(b) && (more[i] > 0 || best == b->budget);
         i++) {
        const uint64_t total = needed + more[i];
        if (total >= b->budget) {
            continue;
        }
        const double then = start_with(b, total, experts, NULL);
        spend(b->in->work_left, (uint64_t)b->budget * b->in->nodes);
        if (then < least) {
            least = then;
            best = total;
        } else if (i == 0 && then > busiest) {
            break; /* other numbers of pieces do not cure what is too large here */
        }
    }
    /* repeating the first start gives the same placement, and is counted once */
    if (common_left != NULL) {
        *common_left = best == b->budget ? common_before : common_after;
    }
    return start_with(b, best, experts, out_error) == INFINITY ? EP_ERR_RESOURCE_EXHAUSTED : EP_OK;
}

/* ---- exchanges ---- */

/* What a copy adds to each holder when `gone` loses it and `come` gets one (NO_NODE: nobody). */
static double share_after(const ep_balance *b, uint32_t expert, uint32_t gone, uint32_t come)
{
    const double *speeds = b->in->speeds;
    return b->in->heat[expert] / (b->speed_sums[expert] - (gone == NO_NODE ? 0 : speeds[gone]) +
                                  (come == NO_NODE ? 0 : speeds[come]));
}

static bool gives_up(exchange_kind kind)
{
    return kind == MOVE || kind == DROP;
}

static bool takes_in(exchange_kind kind)
{
    return kind == MOVE || kind == TRADE;
}

/* How much more each holder of the two experts then has to do, and how busy the two nodes are. */
typedef struct {
    double given, taken;
    double from, to;
} outcome;

static outcome foresee(const ep_balance *b, const exchange *x)
{
    const bool takes = x->taken != NO_EXPERT;
    const double given = b->shares[x->given], taken = takes ? b->shares[x->taken] : 0;
    double given_then = given, taken_then = taken;
    if (!b->is_even || x->kind != MOVE) {
        given_then = share_after(b, x->given, gives_up(x->kind) ? x->from : NO_NODE,
                                 x->kind == DROP ? NO_NODE : x->to);
        taken_then =
            takes ? share_after(b, x->taken, x->to, takes_in(x->kind) ? x->from : NO_NODE) : 0;
    }
    outcome o = {.given = given_then - given, .taken = taken_then - taken};
    o.from = b->busy[x->from] - given;
    o.to = x->kind == DROP ? o.from : b->busy[x->to] - taken + given_then;
    o.from += gives_up(x->kind) ? 0 : given_then;
    if (takes_in(x->kind)) {
        o.from += taken_then;
    } else if (takes && ep_balance_holds(b, x->taken, x->from)) {
        o.from += o.taken;
    }
    return o;
}

/* The busiest other holder of an expert when each has `more` to do. */
static double busiest_other(const ep_balance *b, const exchange *x, uint32_t expert, double more)
{
    const uint32_t *nodes = &b->holders[(size_t)expert * b->in->nodes];
    double most = 0;
    for (uint32_t i = 0; more > 0 && i < b->copies[expert]; i++) {
        if (nodes[i] != x->from && nodes[i] != x->to && b->busy[nodes[i]] + more > most) {
            most = b->busy[nodes[i]] + more;
        }
    }
    return most;
}

/* The busiest node that an exchange affects. */
static double busiest_after(const ep_balance *b, const exchange *x)
{
    const outcome o = foresee(b, x);
    double most = o.from > o.to ? o.from : o.to;
    if (o.given > 0) {
        most = fmax(most, busiest_other(b, x, x->given, o.given));
    }
    if (o.taken > 0) {
        most = fmax(most, busiest_other(b, x, x->taken, o.taken));
    }
    return most;
}

static double above(double busy, double allowed)
{
    return busy > allowed ? busy - allowed : 0;
}

/* By how much less the other holders of an expert exceed `allowed` when each has `more` to do. */
static double relief_of_others(const ep_balance *b, const exchange *x, uint32_t expert, double more,
                               double allowed)
{
    const uint32_t *nodes = &b->holders[(size_t)expert * b->in->nodes];
    double relief = 0;
    for (uint32_t i = 0; more != 0 && i < b->copies[expert]; i++) {
        if (nodes[i] != x->from && nodes[i] != x->to) {
            relief += above(b->busy[nodes[i]], allowed) - above(b->busy[nodes[i]] + more, allowed);
        }
    }
    return relief;
}

static uint32_t loads_of(const exchange *x)
{
    return x->kind == DROP ? 0 : takes_in(x->kind) && x->taken != NO_EXPERT ? 2 : 1;
}

/* By how much less all nodes together exceed `allowed`, per load; exchanges without a load come
 * first. */
static double relief_per_load(const ep_balance *b, const exchange *x, double allowed)
{
    const outcome o = foresee(b, x);
    double relief = above(b->busy[x->from], allowed) - above(o.from, allowed) +
                    relief_of_others(b, x, x->given, o.given, allowed);
    if (x->kind != DROP) {
        relief += above(b->busy[x->to], allowed) - above(o.to, allowed);
    }
    if (x->taken != NO_EXPERT) {
        relief += relief_of_others(b, x, x->taken, o.taken, allowed);
    }
    return x->kind == DROP ? relief * DROP_WORTH : relief / loads_of(x);
}

/* Two aims. allowed 0: the busiest node should be as little busy as possible. Otherwise: exceed
 * `allowed` as little as possible with few loads. */
typedef struct {
    const ep_balance *b;
    double allowed;
    double most; /* no affected node may be busier afterwards */
    exchange best;
    double cost; /* of the best exchange */
} search;

/* Both experts stay on as many hosts as wanted. */
static bool keeps_hosts(const ep_balance *b, const exchange *x)
{
    return may_go(b, x->given, gives_up(x->kind) ? x->from : NO_NODE,
                  x->kind == DROP ? NO_NODE : x->to) &&
           (x->taken == NO_EXPERT ||
            may_go(b, x->taken, x->to, takes_in(x->kind) ? x->from : NO_NODE));
}

static void judge(search *s, const exchange *x)
{
    const double cost =
        s->allowed == 0 ? busiest_after(s->b, x) : -relief_per_load(s->b, x, s->allowed);
    if (cost < s->cost && (s->allowed == 0 || busiest_after(s->b, x) <= s->most) &&
        keeps_hosts(s->b, x)) {
        s->best = *x;
        s->cost = cost;
    }
}

/* For a swap that leaves shares unchanged: x.from has `less` to do, x.to more. Most swaps can be
 * rejected by this. */
static bool is_better(const search *s, const exchange *x, double less)
{
    const double from = s->b->busy[x->from], to = s->b->busy[x->to];
    if (s->allowed == 0) {
        return from - less < s->cost && to + less < s->cost;
    }
    const double relief =
        above(from, s->allowed) - above(from - less, s->allowed) - above(to + less, s->allowed);
    return -relief / 2 < s->cost;
}

/* The most that a copy can relieve, whatever is given up for it. */
static double relief_of_copy(const search *s, const exchange *x)
{
    const double then = s->b->busy[x->to] + share_after(s->b, x->given, NO_NODE, x->to);
    return relief_per_load(s->b, x, s->allowed) + above(then, s->allowed);
}

/* Tries everything that x.from can do with x.given and x.to. */
static void try_pair(search *s, exchange x)
{
    const ep_balance *b = s->b;
    const uint32_t *theirs = &b->listed[(size_t)x.to * b->width];
    const exchange_kind kind = x.kind;
    const bool is_plain = b->is_even && kind == MOVE;
    const bool may_trade = b->total < b->budget && has_slot(b, x.from);
    x.taken = NO_EXPERT;
    if (s->allowed > 0 && is_plain && b->busy[x.to] >= s->allowed) {
        return; /* what relieves one node burdens the other as much */
    }
    spend(b->in->work_left, 1);
    if (s->allowed > 0 && x.kind == COPY && relief_of_copy(s, &x) <= -s->cost) {
        return;
    }
    if (has_slot(b, x.to) && (x.kind == MOVE || b->total < b->budget)) {
        judge(s, &x);
    }
    const double given = b->shares[x.given];
    for (uint32_t j = 0; j < b->counts[x.to]; j++) {
        x.taken = theirs[j];
        if (is_plain && !is_better(s, &x, given - b->shares[x.taken])) {
            continue;
        }
        x.kind = kind == COPY && b->copies[x.taken] == b->in->copies_min ? TRADE : kind;
        if (x.kind == COPY ||
            (!ep_balance_holds(b, x.taken, x.from) && (x.kind == MOVE || may_trade))) {
            judge(s, &x);
        }
    }
    spend(b->in->work_left, b->counts[x.to]);
}

static void try_node(search *s, uint32_t from, exchange_kind kind)
{
    const ep_balance *b = s->b;
    const bool has_spare = b->total > (uint64_t)b->in->experts * b->in->copies_min;
    if (kind != MOVE && !has_spare && (kind == DROP || b->total == b->budget)) {
        return;
    }
    for (uint32_t i = 0; i < b->counts[from] && has_work_left(b); i++) {
        const uint32_t given = b->listed[(size_t)from * b->width + i];
        if (kind == DROP && b->copies[given] > b->in->copies_min) {
            judge(s,
                  &(exchange){
                      .kind = DROP, .from = from, .to = from, .given = given, .taken = NO_EXPERT});
            spend(b->in->work_left, b->copies[given]);
        }
        for (uint32_t to = 0; kind != DROP && to < b->in->nodes; to++) {
            if (!ep_balance_holds(b, given, to)) {
                try_pair(s, (exchange){.kind = kind, .from = from, .to = to, .given = given});
            }
        }
    }
}

static void apply(ep_balance *b, const exchange *x)
{
    if (x->taken != NO_EXPERT) {
        drop(b, x->taken, x->to);
    }
    if (gives_up(x->kind)) {
        drop(b, x->given, x->from);
    }
    if (takes_in(x->kind) && x->taken != NO_EXPERT) {
        add(b, x->taken, x->from);
    }
    if (x->kind != DROP) {
        add(b, x->given, x->to);
    }
}

/* Used when no exchange helps the busiest node: any exchange between two other nodes that makes
 * neither as busy. */
static bool find_detour(const ep_balance *b, uint64_t *random, exchange *out)
{
    const double most = ep_balance_busiest(b) * (1 - LEAST_GAIN);
    for (uint32_t tries = 0; tries < TRIES; tries++) {
        const uint64_t r = ep_splitmix64(random);
        exchange x = {.from = (uint32_t)(r % b->in->nodes),
                      .to = (uint32_t)((r >> 16) % b->in->nodes),
                      .kind = (r >> 62) == 0 ? COPY : MOVE};
        if (x.from == x.to || b->counts[x.from] == 0 || b->counts[x.to] == 0) {
            continue;
        }
        x.given = b->listed[(size_t)x.from * b->width + (r >> 32) % b->counts[x.from]];
        x.taken = b->listed[(size_t)x.to * b->width + (r >> 45) % b->counts[x.to]];
        const bool can_go = x.kind == COPY ? b->copies[x.taken] > b->in->copies_min
                                           : !ep_balance_holds(b, x.taken, x.from);
        if (can_go && !ep_balance_holds(b, x.given, x.to) && busiest_after(b, &x) < most &&
            keeps_hosts(b, &x)) {
            *out = x;
            return true;
        }
    }
    return false;
}

static bool find_step(const ep_balance *b, uint64_t *random, exchange *out)
{
    const uint32_t from = busiest_node(b);
    search s = {.b = b, .best.given = NO_EXPERT, .cost = b->busy[from] * (1 - LEAST_GAIN)};
    for (exchange_kind kind = MOVE; kind <= DROP && s.best.given == NO_EXPERT; kind++) {
        try_node(&s, from, kind);
    }
    *out = s.best;
    return s.best.given != NO_EXPERT || find_detour(b, random, out);
}

/* More copies were put than wanted: removes spare ones whose loss makes the least busy nodes. */
static void trim(ep_balance *b)
{
    while (b->total > b->budget) {
        search s = {.b = b, .best.given = NO_EXPERT, .cost = INFINITY};
        for (uint32_t n = 0; n < b->in->nodes; n++) {
            try_node(&s, n, DROP);
        }
        if (s.best.given == NO_EXPERT) {
            return;
        }
        apply(b, &s.best);
    }
}

/* Considers a move into a free slot, or a swap with a copy that may go the other way. */
static void consider_partner(const ep_balance *b, exchange x, exchange *best, double *least)
{
    const bool is_free = has_slot(b, x.to);
    for (uint32_t j = 0; j < (is_free ? 1 : b->counts[x.to]); j++) {
        x.taken = is_free ? NO_EXPERT : b->listed[(size_t)x.to * b->width + j];
        if (!is_free &&
            (ep_balance_holds(b, x.taken, x.from) || !may_go(b, x.taken, x.to, x.from))) {
            continue;
        }
        const double busiest = busiest_after(b, &x);
        if (busiest < *least) {
            *least = busiest;
            *best = x;
        }
    }
}

/* Moves one of the expert's copies to a host that has none, to where the affected nodes are then
 * least busy; false: impossible. */
static bool spread_once(ep_balance *b, uint32_t expert)
{
    exchange best = {.given = NO_EXPERT};
    double least = INFINITY;
    for (uint32_t i = 0; i < b->copies[expert]; i++) {
        exchange x = {
            .kind = MOVE, .from = b->holders[(size_t)expert * b->in->nodes + i], .given = expert};
        for (x.to = 0; x.to < b->in->nodes; x.to++) {
            if (gains_host(b, expert, x.from, x.to)) {
                consider_partner(b, x, &best, &least);
                spend(b->in->work_left, b->counts[x.to]);
            }
        }
    }
    if (best.given != NO_EXPERT) {
        apply(b, &best);
    }
    return best.given != NO_EXPERT;
}

/* Moves one of the node's copies to another node's free slot; false: impossible. */
static bool free_slot(ep_balance *b, uint32_t node)
{
    for (uint32_t n = 0; n < b->in->nodes; n++) {
        spend(b->in->work_left, has_slot(b, n) ? b->counts[node] : 1);
        for (uint32_t j = 0; has_slot(b, n) && j < b->counts[node]; j++) {
            const uint32_t expert = b->listed[(size_t)node * b->width + j];
            if (!ep_balance_holds(b, expert, n) && may_go(b, expert, node, n)) {
                drop(b, expert, node);
                add(b, expert, n);
                return true;
            }
        }
    }
    return false;
}

/* There is no swap partner: a node of another host first gives up a copy. */
static bool spread_by_two(ep_balance *b, uint32_t expert)
{
    for (uint32_t i = 0; i < b->copies[expert]; i++) {
        const uint32_t from = b->holders[(size_t)expert * b->in->nodes + i];
        for (uint32_t to = 0; to < b->in->nodes && has_work_left(b); to++) {
            if (gains_host(b, expert, from, to) && free_slot(b, to)) {
                drop(b, expert, from);
                add(b, expert, to);
                return true;
            }
        }
    }
    return false;
}

/* Whether hosts have enough slots for all copies that should be apart; otherwise the search for the
 * rest would be in vain. */
static bool has_room_apart(const ep_balance *b)
{
    const ep_balance_input *in = b->in;
    uint64_t apart = 0;
    for (uint32_t h = 0; h < in->nodes; h++) {
        uint64_t slots = 0;
        for (uint32_t n = h; in->hosts->of_node[h] == h && n < in->nodes; n++) {
            slots += in->hosts->of_node[n] == h ? in->slots[n] : 0;
        }
        apart += slots < in->experts ? slots : in->experts;
    }
    return apart >= (uint64_t)in->experts * in->hosts->spread;
}

/* The hottest experts first: where room is short, they should be kept apart. */
static void spread(ep_balance *b, const ranked *experts)
{
    const bool has_room = has_room_apart(b);
    for (uint32_t i = 0; i < b->in->experts && has_work_left(b); i++) {
        while (spread_once(b, experts[i].expert) ||
               (has_room && spread_by_two(b, experts[i].expert))) {
        }
    }
}

ep_err ep_balance_fill(ep_balance *b, ep_error *out_error)
{
    ranked *experts = calloc((size_t)b->in->experts + 1, sizeof(*experts));
    if (experts == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to balance %u experts",
                            b->in->experts);
    }
    trim(b);
    ep_err err;
    if (b->total == 0) {
        err = start(b, experts, out_error);
    } else {
        rank(b, 0, experts);
        err = fill(b, experts, out_error);
    }
    if (err == EP_OK && b->in->hosts != NULL && b->in->hosts->spread > 1) {
        spread(b, experts);
    }
    free(experts);
    return err;
}

void ep_balance_search(ep_balance *b, double good)
{
    uint64_t random = 1;
    double least = INFINITY;
    uint32_t idle = 0;
    exchange x;
    while (idle <= b->in->nodes + IDLE_MAX && has_work_left(b) &&
           ep_balance_busiest(b) > good * b->bound && find_step(b, &random, &x)) {
        apply(b, &x);
        const double busiest = ep_balance_busiest(b);
        idle = busiest < least * (1 - WORTH_IT) ? 0 : idle + 1;
        least = fmin(least, busiest);
    }
}

/* Lists in the queue the nodes above `allowed`, the busiest first. Returns how many. */
static uint32_t list_above(ep_balance *b, double allowed)
{
    uint32_t count = 0;
    for (uint32_t n = 0; n < b->in->nodes; n++) {
        if (b->busy[n] > allowed) {
            uint32_t at = count++;
            for (; at > 0 && b->busy[b->queue[at - 1]] < b->busy[n]; at--) {
                b->queue[at] = b->queue[at - 1];
            }
            b->queue[at] = n;
        }
    }
    return count;
}

uint32_t ep_balance_repair(ep_balance *b, double good, uint32_t loads_max)
{
    uint32_t loads = 0;
    for (;;) {
        const double allowed = good * b->bound;
        search s = {.b = b,
                    .allowed = allowed,
                    .most = ep_balance_busiest(b),
                    .best.given = NO_EXPERT,
                    .cost = -allowed * LEAST_GAIN};
        const uint32_t count = allowed > 0 ? list_above(b, allowed) : 0;
        for (uint32_t i = 0; i < count && s.best.given == NO_EXPERT; i++) {
            try_node(&s, b->queue[i], MOVE);
            try_node(&s, b->queue[i], COPY);
            try_node(&s, b->queue[i], DROP);
        }
        if (s.best.given == NO_EXPERT || loads + loads_of(&s.best) > loads_max ||
            !has_work_left(b)) {
            return loads;
        }
        apply(b, &s.best);
        loads += loads_of(&s.best);
    }
}
