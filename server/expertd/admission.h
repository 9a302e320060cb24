/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Admission control. A request takes its rows from the token budget. When that is used up, it takes
 * its bytes from the spill budget. When both are used up, it is refused; the error says when to
 * come back and which key to change. Threads: any.
 *
 * Lateness: once a request has missed its deadline, requests that would miss theirs are refused on
 * arrival, judged by the node's recent speed. Without this a node that is overloaded even slightly
 * and works first in, first out ends every request just after its deadline. Tenants are judged
 * apart, and decode and prefill are too, because they wait apart.
 *
 * Where tenants are listed, each must keep its quotas first: tokens in work (a request that is
 * alone may exceed them) and tokens per second (a second's worth may come at once). One tenant gets
 * at most EP_ADMISSION_TENANT_EIGHTHS / 8 of each budget, so that there is room for others.
 */
#ifndef EP_EXPERTD_ADMISSION_H
#define EP_EXPERTD_ADMISSION_H

#include "base/error.h"
#include "expertd/tenants.h"

#define EP_ADMISSION_TENANT_EIGHTHS 7

typedef struct ep_admission ep_admission;

/* A request and what it took from the budgets. Zero it first. */
typedef struct ep_ticket {
    uint32_t tenant;
    uint32_t tokens;
    uint64_t bytes;
    bool is_prefill;
    uint64_t deadline_ns; /* EP_TIME_NEVER: none */
    /* private */
    bool is_spilled;
    uint64_t work; /* tokens, plus a constant for reading weights */
} ep_ticket;

typedef struct ep_admission_stats {
    uint64_t tokens_used;
    uint64_t spill_used_bytes;
    uint64_t refused_total;
    uint64_t spilled_total;
} ep_admission_stats;

typedef struct ep_admission_tenant_stats {
    uint64_t tokens_used; /* spilled ones included */
    uint64_t tokens_total;
    uint64_t refused_total;
} ep_admission_tenant_stats;

/* tenants is borrowed. Errors: NO_MEMORY. */
ep_err ep_admission_create(uint32_t inflight_tokens, uint64_t spill_bytes,
                           const ep_tenants *tenants, ep_admission **out_admission);
void ep_admission_destroy(ep_admission *admission);
/* Errors: RESOURCE_EXHAUSTED with retry_after_us; the text names budget, use and key. A request
 * that would be late is told to come back after its deadline. */
ep_err ep_admission_enter(ep_admission *admission, ep_ticket *ticket, uint64_t now_ns,
                          ep_error *out_error);
/* took_ns: how long the request was in, 0 if it was not begun; retry_after_us follows its average.
 * result: OK counts as work done, DEADLINE_EXCEEDED starts the judgement of lateness. */
void ep_admission_leave(ep_admission *admission, const ep_ticket *ticket, uint64_t now_ns,
                        uint64_t took_ns, ep_err result);
/* Whether work on the request is in vain: its deadline has passed or, while requests are late, the
 * deadline comes before `left` of its work (1: all) can be done. The second rule spares a request
 * that is alone. */
bool ep_admission_is_lost(ep_admission *admission, const ep_ticket *ticket, double left,
                          uint64_t now_ns);
void ep_admission_read_stats(ep_admission *admission, ep_admission_stats *out_stats);
void ep_admission_read_tenant(ep_admission *admission, uint32_t tenant,
                              ep_admission_tenant_stats *out_stats);

#endif
