/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Places one layer's copies on nodes so that the busiest node has as little to do as possible:
 * greedy by heat, then local search. Pure, private to lib/placement.
 *
 * Heat       what an expert's tokens cost a node of speed 1, in any unit. Its copies share it in
 *            proportion to their nodes' speeds, so a copy adds heat / (sum of its holders' speeds)
 *            to the busy time of each holder.
 * Promise    never two copies of an expert on one node, never more copies on a node than its slots,
 *            and an expert on as many hosts as wanted where slots allow it; the same input gives
 *            the same result.
 * Sources    more copies for the hottest copy, and longest processing time first with equal counts:
 *            DeepSeek's EPLB. The local search, the bound and the repair are our own.
 */
#ifndef EP_PLACEMENT_BALANCE_H
#define EP_PLACEMENT_BALANCE_H

#include <stdbool.h>

#include "base/error.h"
#include "placement/hosts.h"

typedef struct ep_balance_input {
    uint32_t experts;
    uint32_t nodes;
    const double *heat;    /* [experts] finite, >= 0 */
    const double *speeds;  /* [nodes] finite, > 0 */
    const uint32_t *slots; /* [nodes] the most copies it may hold */
    uint32_t copies_min;   /* of each expert, in 1..nodes */
    uint32_t copies_total; /* of all experts, at least experts * copies_min */
    const ep_hosts *hosts; /* on which hosts an expert's copies should be; NULL: anywhere */
    /* How many pairs of copies search, repair and further starts may still examine; they subtract
     * what they did. NULL: no limit */
    uint64_t *work_left;
    /* The same for experts that nodes have in common, which fill examines. At 0 it takes the first
     * suitable node */
    uint64_t *common_left;
} ep_balance_input;

typedef struct ep_balance ep_balance;

/* Borrows the input until destroy. Errors: INVALID_ARGUMENT (slots do not hold experts *
 * copies_min, or copies_total is less), NO_MEMORY. */
ep_err ep_balance_create(const ep_balance_input *input, ep_balance **out_balance,
                         ep_error *out_error);
void ep_balance_destroy(ep_balance *balance); /* NULL allowed */

/* Records a copy that exists now; false: it was recorded before, or the node is full. */
bool ep_balance_put(ep_balance *balance, uint32_t expert, uint32_t node);
/*
 * Places what has no place yet, the hottest copy first, each on the least busy node: copies_min of
 * each expert. On an empty board it places all of copies_total, or fewer where these divide better
 * (otherwise a spare copy is added by an exchange). Copies that were put stay, unless only another
 * order makes room. Starts beyond the first are charged to work_left.
 * Errors: RESOURCE_EXHAUSTED when no slots can be found for copies_min of each; NO_MEMORY.
 */
ep_err ep_balance_fill(ep_balance *balance, ep_error *out_error);
/* Exchanges copies, without a limit on their number, until the busiest node is within `good` of the
 * bound (1.001: a thousandth above), or no exchange helps. */
void ep_balance_search(ep_balance *balance, double good);
/* Makes the exchanges with the busiest node that gain most per copy to load, until it is within
 * `good` of the bound, the next one would exceed loads_max, or none helps. Returns the number of
 * copies to load. */
uint32_t ep_balance_repair(ep_balance *balance, double good, uint32_t loads_max);

bool ep_balance_holds(const ep_balance *balance, uint32_t expert, uint32_t node);
double ep_balance_busiest(const ep_balance *balance); /* time of the busiest node */
/* No placement has a busiest node below this; 0 when out of memory. with_slots: the tighter bound,
 * which takes ten times as long. */
double ep_balance_bound(const ep_balance_input *input, bool with_slots);

#endif
