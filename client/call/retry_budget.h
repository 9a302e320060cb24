/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Limits the extra sends of a client to 10 % of its other sends, plus a small allowance at the
 * start. Without a limit, clients that repeat refused requests keep an overloaded node overloaded.
 * Repeats after RESOURCE_EXHAUSTED and hedges are charged. Re-routing after a loss is not, since
 * each live copy is asked only once.
 *
 * Hedges have a smaller budget inside this one: hedge_permille of all frames, and none at the
 * start. A hedge pays from both, so extra sends of any mixture stay below 10 %.
 *
 * Threads  any.
 */
#ifndef EP_CLIENT_RETRY_BUDGET_H
#define EP_CLIENT_RETRY_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#define EP_RETRY_COST 10 /* one repeat costs what ten first sends earn: 10 % */
#define EP_RETRY_BUDGET_START 100
#define EP_RETRY_BUDGET_MAX 1000
#define EP_HEDGE_COST 1000
#define EP_HEDGE_BUDGET_MAX (32 * EP_HEDGE_COST) /* the most that can be saved up */

typedef struct ep_retry_budget {
    int64_t units;
    int64_t hedge_units;     /* each frame earns hedge_permille, each hedge costs EP_HEDGE_COST */
    uint32_t hedge_permille; /* atomic */
} ep_retry_budget;

static inline void ep_retry_budget_init(ep_retry_budget *budget, uint32_t hedge_permille)
{
    *budget = (ep_retry_budget){.units = EP_RETRY_BUDGET_START, .hedge_permille = hedge_permille};
}

/* Sets another share. With 0 saved units do not pay for hedges either. */
static inline void ep_retry_budget_share(ep_retry_budget *budget, uint32_t hedge_permille)
{
    /* each call does this: do not write the shared cache line without need */
    if (__atomic_load_n(&budget->hedge_permille, __ATOMIC_RELAXED) != hedge_permille) {
        __atomic_store_n(&budget->hedge_permille, hedge_permille, __ATOMIC_RELAXED);
    }
}

static inline void ep_retry_units_add(int64_t *units, int64_t amount, int64_t max)
{
    int64_t old = __atomic_load_n(units, __ATOMIC_RELAXED);
    int64_t grown;
    do {
        grown = old + amount > max ? max : old + amount;
        if (grown == old) {
            return;
        }
    } while (
        !__atomic_compare_exchange_n(units, &old, grown, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

static inline bool ep_retry_units_take(int64_t *units, int64_t amount)
{
    int64_t old = __atomic_load_n(units, __ATOMIC_RELAXED);
    do {
        if (old < amount) {
            return false;
        }
    } while (!__atomic_compare_exchange_n(units, &old, old - amount, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return true;
}

/* Earns for count frames that were sent for the first time. */
static inline void ep_retry_budget_earn(ep_retry_budget *budget, uint32_t count)
{
    int64_t share = __atomic_load_n(&budget->hedge_permille, __ATOMIC_RELAXED);
    ep_retry_units_add(&budget->units, count, EP_RETRY_BUDGET_MAX);
    ep_retry_units_add(&budget->hedge_units, count * share, EP_HEDGE_BUDGET_MAX);
}

/* Pays for one repeat; false when the budget does not allow it. */
static inline bool ep_retry_budget_take(ep_retry_budget *budget)
{
    return ep_retry_units_take(&budget->units, EP_RETRY_COST);
}

/* Pays for `frames` hedges. False, and nothing is paid: one of the budgets does not allow it. */
static inline bool ep_retry_budget_take_hedge(ep_retry_budget *budget, uint32_t frames)
{
    int64_t cost = (int64_t)frames * EP_HEDGE_COST;
    if (__atomic_load_n(&budget->hedge_permille, __ATOMIC_RELAXED) == 0) {
        return false;
    }
    if (!ep_retry_units_take(&budget->hedge_units, cost)) {
        return false;
    }
    if (!ep_retry_units_take(&budget->units, (int64_t)frames * EP_RETRY_COST)) {
        ep_retry_units_add(&budget->hedge_units, cost, EP_HEDGE_BUDGET_MAX);
        return false;
    }
    return true;
}

#endif
