/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Share of extra sends a client may cause on its own: 10 % of what it sends anyway, plus a small
 * allowance to begin with. Without it, clients that repeat refused requests keep an overloaded node
 * overloaded. Answers that ask for a pause (RESOURCE_EXHAUSTED) and hedges are charged; re-routing
 * after a loss is not: there each live copy is asked once.
 *
 * Hedges have a smaller budget inside of it: so many of 1000 frames, and none to begin with. A
 * hedge pays from both: whatever the mixture, extra sends stay below 10 %.
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
#define EP_HEDGE_BUDGET_MAX (32 * EP_HEDGE_COST) /* what a quiet time may save up */

typedef struct ep_retry_budget {
    int64_t units;
    int64_t hedge_units;     /* each frame earns hedge_permille, each hedge costs EP_HEDGE_COST */
    uint32_t hedge_permille; /* atomic */
} ep_retry_budget;

static inline void ep_retry_budget_init(ep_retry_budget *budget, uint32_t hedge_permille)
{
    *budget = (ep_retry_budget){.units = EP_RETRY_BUDGET_START, .hedge_permille = hedge_permille};
}

/* Another share from now on. With 0 what was saved up pays for nothing either. */
static inline void ep_retry_budget_share(ep_retry_budget *budget, uint32_t hedge_permille)
{
    /* each call comes here */
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

/* count frames were sent for the first time. */
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

/* Pays for `frames` hedges; false, and nothing is paid, when one of both budgets does not allow
 * it. */
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
