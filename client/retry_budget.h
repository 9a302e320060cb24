/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Share of extra sends a client may cause on its own: 10 % of what it sends anyway, plus a small allowance to
 * begin with. Without it, clients that repeat refused requests keep an overloaded node overloaded. Only
 * answers that ask for a pause (RESOURCE_EXHAUSTED) are charged; re-routing after a loss is not: there each
 * live copy is asked once.
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

typedef struct ep_retry_budget {
    int64_t units;
} ep_retry_budget;

static inline void ep_retry_budget_init(ep_retry_budget *budget)
{
    budget->units = EP_RETRY_BUDGET_START;
}

/* count frames were sent for the first time. */
static inline void ep_retry_budget_earn(ep_retry_budget *budget, uint32_t count)
{
    int64_t old = __atomic_load_n(&budget->units, __ATOMIC_RELAXED);
    int64_t grown;
    do {
        grown = old + count > EP_RETRY_BUDGET_MAX ? EP_RETRY_BUDGET_MAX : old + count;
        if (grown == old) {
            return;
        }
    } while (
        !__atomic_compare_exchange_n(&budget->units, &old, grown, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* Pays for one repeat; false when the budget does not allow it. */
static inline bool ep_retry_budget_take(ep_retry_budget *budget)
{
    int64_t old = __atomic_load_n(&budget->units, __ATOMIC_RELAXED);
    do {
        if (old < EP_RETRY_COST) {
            return false;
        }
    } while (!__atomic_compare_exchange_n(&budget->units, &old, old - EP_RETRY_COST, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return true;
}

#endif
