/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One layer's copies over nodes so that the busiest node has as little to do as can be: greedy by
 * heat, then local search. Pure, private to lib/placement.
 *
 * Heat       what an expert's tokens cost a node of speed 1, in any unit. Its copies share it in
 *            proportion to their nodes' speeds, so a copy adds heat / (sum of its holders' speeds)
 *            to the busy time of each holder.
 * Promise    never two copies of an expert on one node, never more copies on a node than its slots,
 *            and an expert on as many hosts as it shall be where slots allow; the same input gives
 *            the same result.
 * Sources    more copies for the hottest copy, longest processing time first with equal counts:
 *            DeepSeek's EPLB; the local search, the bound and the repair are our own.
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
    const uint32_t *slots; /* [nodes] copies it may hold */
    uint32_t copies_min;   /* of each expert, in 1..nodes */
    uint32_t copies_total; /* of all, at least experts * copies_min */
    const ep_hosts *hosts; /* where an expert's copies shall be; NULL: anywhere */
    /* Pairs of copies that search, repair and further starts may still look at; what they did is
     * taken off. NULL: no limit */
    uint64_t *work_left;
    /* the same of experts that nodes may have in common, which fill looks at; without it the first
     * node wins */
    uint64_t *common_left;
} ep_balance_input;

typedef struct ep_balance ep_balance;

/* Borrows the input until destroy. Errors: INVALID_ARGUMENT (slots do not hold experts *
 * copies_min, or copies_total is less), NO_MEMORY. */
ep_err ep_balance_create(const ep_balance_input *input, ep_balance **out_balance,
                         ep_error *out_error);
void ep_balance_destroy(ep_balance *balance); /* NULL allowed */

/* Puts a copy where it is now; false: it is there already, or the node is full. */
bool ep_balance_put(ep_balance *balance, uint32_t expert, uint32_t node);
/*
 * Places what lacks a place, the hottest copy first, each on the least busy node: copies_min of
 * each expert, and on an empty board all of copies_total, or fewer where these divide better (else
 * a spare copy is an exchange like any other). What was put stays, but where only another order
 * makes room. Starts beyond the first are taken off work_left.
 * Errors: RESOURCE_EXHAUSTED when no slots can be found for copies_min of each; NO_MEMORY.
 */
ep_err ep_balance_fill(ep_balance *balance, ep_error *out_error);
/* Exchanges copies, as many as it likes, until the busiest node is within `good` of the bound
 * (1.001: a thousandth above) or it finds no more. */
void ep_balance_search(ep_balance *balance, double good);
/* The exchanges with the busiest node that give most for each copy to load, until it is within
 * `good` of the bound, or the next one would be beyond loads_max, or none helps. Returns copies to
 * load. */
uint32_t ep_balance_repair(ep_balance *balance, double good, uint32_t loads_max);

bool ep_balance_holds(const ep_balance *balance, uint32_t expert, uint32_t node);
double ep_balance_busiest(const ep_balance *balance); /* the busiest node's time */
/* No placement has a busiest node below this; 0 with no memory. with_slots: the sharper bound, ten
 * times as slow. */
double ep_balance_bound(const ep_balance_input *input, bool with_slots);

#endif
