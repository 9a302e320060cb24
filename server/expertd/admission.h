/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may come in: a request first takes from the token budget (rows in work at once); when that is
 * used up, it takes its bytes from the spill budget; past both it is refused, told when to come
 * back and which key to change. Threads: any.
 *
 * Lateness: once requests have missed their deadline here, those that could not keep theirs are
 * refused when they come, judged by what the node did of late. Work that ends too late helps
 * nobody: a node that does it first in, first out ends every request just too late, however little
 * there is too much. Tenants, and decode and prefill, are judged apart, as they wait apart.
 *
 * With listed tenants each is held to its quotas before that: tokens in work (a request that is
 * alone may exceed them) and tokens per second (a second's worth may come at once). And one tenant
 * gets at most EP_ADMISSION_TENANT_EIGHTHS / 8 of each budget, so that there is room for the
 * others.
 */
#ifndef EP_EXPERTD_ADMISSION_H
#define EP_EXPERTD_ADMISSION_H

#include "base/error.h"
#include "expertd/tenants.h"

#define EP_ADMISSION_TENANT_EIGHTHS 7

typedef struct ep_admission ep_admission;

/* Who wants to come in, and what it took. Zero it first. */
typedef struct ep_ticket {
    uint32_t tenant;
    uint32_t tokens;
    uint64_t bytes;
    bool is_prefill;
    uint64_t deadline_ns; /* EP_TIME_NEVER: none */
    /* private */
    bool is_spilled;
    uint64_t work; /* tokens, and the weights they read */
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
/* Errors: RESOURCE_EXHAUSTED with retry_after_us; the text names budget, use and key. One that
 * would be late is told to come back after its deadline. */
ep_err ep_admission_enter(ep_admission *admission, ep_ticket *ticket, uint64_t now_ns,
                          ep_error *out_error);
/* took_ns: how long the request was in; the advice to come back follows it. result: OK is work
 * done, DEADLINE_EXCEEDED begins the judgement of lateness. */
void ep_admission_leave(ep_admission *admission, const ep_ticket *ticket, uint64_t now_ns,
                        uint64_t took_ns, ep_err result);
/* Work on it would be for nothing: its deadline has passed or, where requests are late, comes
 * before what is `left` of it (of 1) can be done. The second never of one that is alone. */
bool ep_admission_is_lost(ep_admission *admission, const ep_ticket *ticket, double left,
                          uint64_t now_ns);
void ep_admission_read_stats(ep_admission *admission, ep_admission_stats *out_stats);
void ep_admission_read_tenant(ep_admission *admission, uint32_t tenant,
                              ep_admission_tenant_stats *out_stats);

#endif
