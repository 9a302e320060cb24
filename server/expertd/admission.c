/* SPDX-License-Identifier: Apache-2.0 */
/* The two budgets of a node, the quotas of its tenants, and the refusal of late requests. */
#include "expertd/admission.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"
#include "expertd/batch_policy.h"

#define RETRY_US_MIN 500
#define RETRY_US_MAX 1000000
/* requests are judged for so long after one was late or was refused as too late */
#define LATE_NS EP_NS_PER_S
#define LEARN_NS (EP_NS_PER_S / 5)

/* The requests of one tenant and class; they wait behind one another. */
typedef struct request_lane {
    uint64_t work; /* of the requests admitted now */
    /* recent time with requests in the lane, and the work answered in that time */
    uint64_t busy_ns;
    uint64_t done_work;
    uint64_t counted_ns;      /* busy_ns is counted up to here */
    _Atomic uint64_t late_ns; /* until then requests are judged */
} request_lane;

typedef struct tenant_use {
    uint64_t tokens_budget; /* of inflight_tokens */
    uint64_t spill_bytes;
    int64_t rate_left;     /* tokens * EP_NS_PER_S it may still take; below 0: it took more */
    uint64_t rate_ns;      /* when rate_left was computed */
    request_lane lanes[2]; /* decode, prefill */
    ep_admission_tenant_stats stats;
} tenant_use;

struct ep_admission {
    uint32_t inflight_tokens;
    uint64_t spill_bytes;
    uint64_t tokens_part; /* of inflight_tokens: what one tenant may hold */
    uint64_t spill_part;
    const ep_tenants *tenants;
    pthread_mutex_t lock;
    ep_admission_stats stats;
    uint64_t mean_us; /* moving average of how long a request is in */
    tenant_use uses[EP_TENANTS_MAX];
};

/* Why a request may not come in. */
typedef struct refusal {
    enum { NONE, BUDGETS, TENANT_TOKENS, TENANT_RATE, LATE } reason;
    ep_admission_stats stats;
    uint64_t wait_us; /* LATE: expected */
    uint64_t tenant_tokens;
    uint64_t retry_us;
} refusal;

/* What one tenant may hold of a budget. */
static uint64_t tenant_part(const ep_tenants *tenants, uint64_t budget)
{
    return tenants->count == 1 ? budget : budget - budget / 8 * (8 - EP_ADMISSION_TENANT_EIGHTHS);
}

ep_err ep_admission_create(uint32_t inflight_tokens, uint64_t spill_bytes,
                           const ep_tenants *tenants, ep_admission **out_admission)
{
    ep_admission *admission = calloc(1, sizeof(*admission));
    if (admission == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    admission->inflight_tokens = inflight_tokens;
    admission->spill_bytes = spill_bytes;
    admission->tokens_part = tenant_part(tenants, inflight_tokens);
    admission->spill_part = tenant_part(tenants, spill_bytes);
    admission->tenants = tenants;
    admission->mean_us = RETRY_US_MIN;
    pthread_mutex_init(&admission->lock, NULL);
    *out_admission = admission;
    return EP_OK;
}

void ep_admission_destroy(ep_admission *admission)
{
    if (admission != NULL) {
        pthread_mutex_destroy(&admission->lock);
        free(admission);
    }
}

/* Lock held. Takes the ticket's tokens or, past those, its bytes. */
static bool take(ep_admission *admission, ep_ticket *ticket)
{
    const uint64_t tokens = ticket->tokens, bytes = ticket->bytes;
    ep_admission_stats *stats = &admission->stats;
    tenant_use *use = &admission->uses[ticket->tenant];
    if (stats->tokens_used + tokens <= admission->inflight_tokens &&
        use->tokens_budget + tokens <= admission->tokens_part) {
        stats->tokens_used += tokens;
        use->tokens_budget += tokens;
        return true;
    }
    if (bytes <= admission->spill_part &&
        stats->spill_used_bytes <= admission->spill_bytes - bytes &&
        use->spill_bytes <= admission->spill_part - bytes) {
        stats->spill_used_bytes += bytes;
        stats->spilled_total++;
        use->spill_bytes += bytes;
        ticket->is_spilled = true;
        return true;
    }
    return false;
}

/* Lock held. 0, or microseconds until a tenant's rate, tokens_per_s, lets the next request in. */
static uint64_t rate_wait_us(tenant_use *use, uint64_t rate, uint64_t now_ns)
{
    const int64_t full = (int64_t)(rate * EP_NS_PER_S);
    /* now_ns is read before the lock is taken, so it may be older than rate_ns */
    now_ns = now_ns < use->rate_ns ? use->rate_ns : now_ns;
    uint64_t passed_ns = use->rate_ns == 0 ? 0 : now_ns - use->rate_ns;
    bool is_full = use->rate_ns == 0 || passed_ns >= 60 * EP_NS_PER_S ||
                   use->rate_left + (int64_t)(passed_ns * rate) >= full;
    use->rate_left = is_full ? full : use->rate_left + (int64_t)(passed_ns * rate);
    use->rate_ns = now_ns;
    return use->rate_left > 0 ? 0 : (uint64_t)-use->rate_left / rate / EP_NS_PER_US + 1;
}

/* Lock held. How long so much work takes at the lane's recent speed. Work that ended too late does
 * not count as done, so the more of it there is, the fewer requests come in. */
static uint64_t time_of(const request_lane *lane, uint64_t work)
{
    return (uint64_t)((double)lane->busy_ns / (double)(lane->done_work + 1) * (double)work);
}

/* Lock held, requests are late. How long the request would be in, when that is too long; else 0.
 * Half of the expected time is added as reserve, because the slowest of several nodes ends a call.
 * A request whose own work takes too long says nothing about the load. */
static uint64_t too_late_us(request_lane *lane, const ep_ticket *ticket, uint64_t now_ns)
{
    const uint64_t work = ticket->work, deadline_ns = ticket->deadline_ns;
    const uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
    const uint64_t wait_ns = time_of(lane, lane->work + work) / 2 * 3;
    if (lane->work == 0 || deadline_ns == EP_TIME_NEVER || wait_ns <= left_ns) {
        return 0;
    }
    if (time_of(lane, work) / 2 * 3 <= left_ns) {
        lane->late_ns = now_ns + LATE_NS;
    }
    return wait_ns / EP_NS_PER_US + 1;
}

/* Lock held. Takes what the request needs, or returns why it may not come in. */
static refusal enter(ep_admission *admission, ep_ticket *ticket, uint64_t now_ns)
{
    const uint32_t tokens = ticket->tokens;
    tenant_use *use = &admission->uses[ticket->tenant];
    request_lane *lane = &use->lanes[ticket->is_prefill];
    const ep_tenant_limits *limits = &admission->tenants->limits[ticket->tenant];
    refusal no = {.reason = NONE};
    if (limits->tokens_per_s != 0 &&
        (no.retry_us = rate_wait_us(use, limits->tokens_per_s, now_ns)) > 0) {
        no.reason = TENANT_RATE;
    } else if (limits->inflight_tokens != 0 && use->stats.tokens_used > 0 &&
               use->stats.tokens_used + tokens > limits->inflight_tokens) {
        no.reason = TENANT_TOKENS;
        no.retry_us = admission->mean_us;
    } else if (now_ns < lane->late_ns && (no.wait_us = too_late_us(lane, ticket, now_ns)) > 0) {
        no.reason = LATE;
        no.retry_us = no.wait_us;
    } else if (!take(admission, ticket)) {
        no.reason = BUDGETS;
        no.retry_us = admission->mean_us;
    } else {
        lane->counted_ns = lane->work == 0 ? now_ns : lane->counted_ns;
        lane->work += ticket->work;
        use->stats.tokens_used += tokens;
        use->stats.tokens_total += tokens;
        use->rate_left -= limits->tokens_per_s != 0 ? (int64_t)(tokens * EP_NS_PER_S) : 0;
        return no;
    }
    admission->stats.refused_total++;
    use->stats.refused_total++;
    no.stats = admission->stats;
    no.tenant_tokens = use->stats.tokens_used;
    return no;
}

/* True: no waiting helps. */
static bool describe(const ep_admission *admission, const ep_ticket *ticket, uint64_t now_ns,
                     const refusal *no, ep_error *out_error)
{
    const uint32_t tenant = ticket->tenant, tokens = ticket->tokens;
    const uint64_t bytes = ticket->bytes;
    const ep_tenant_limits *limits = &admission->tenants->limits[tenant];
    const char *label = ep_tenants_label(admission->tenants, tenant);
    if (no->reason == TENANT_RATE) {
        ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                     "%u tokens: tenant '%s' has used up its tokens_per_s %u (key tenants)", tokens,
                     label, limits->tokens_per_s);
        return false;
    }
    if (no->reason == TENANT_TOKENS) {
        ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                     "%u tokens: tenant '%s' has %" PRIu64
                     " of its inflight_tokens %u in use (key tenants)",
                     tokens, label, no->tenant_tokens, limits->inflight_tokens);
        return false;
    }
    if (no->reason == LATE) {
        const uint64_t left_ns = ticket->deadline_ns > now_ns ? ticket->deadline_ns - now_ns : 0;
        ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                     "%u tokens would take about %" PRIu64 " us here and have %" PRIu64
                     " us left: the node has more work than it can do in time; ask for less, allow "
                     "more time or add nodes",
                     tokens, no->wait_us, (uint64_t)(left_ns / EP_NS_PER_US));
        return false;
    }
    bool never_fits = tokens > admission->tokens_part && bytes > admission->spill_part;
    ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                 "%u tokens, %" PRIu64 " bytes: %" PRIu64 " of inflight_tokens %u and %" PRIu64
                 " of spill_bytes %" PRIu64 " are in use%s",
                 tokens, bytes, no->stats.tokens_used, admission->inflight_tokens,
                 no->stats.spill_used_bytes, admission->spill_bytes,
                 never_fits
                     ? "; a request of this size never fits: send fewer tokens or raise spill_bytes"
                 : admission->tenants->count > 1 ? "; one tenant gets at most 7/8 of each"
                                                 : "");
    return never_fits;
}

ep_err ep_admission_enter(ep_admission *admission, ep_ticket *ticket, uint64_t now_ns,
                          ep_error *out_error)
{
    /* reading weights takes most of the time of a few tokens */
    ticket->work = (uint64_t)ticket->tokens + EP_BATCH_WEIGHT_ROWS;
    ticket->is_spilled = false;
    pthread_mutex_lock(&admission->lock);
    refusal no = enter(admission, ticket, now_ns);
    pthread_mutex_unlock(&admission->lock);
    if (no.reason == NONE) {
        return EP_OK;
    }
    bool never_fits = describe(admission, ticket, now_ns, &no, out_error);
    if (out_error != NULL && no.reason == LATE) {
        /* after the deadline, so it is not bounded like the others */
        out_error->retry_after_us = no.retry_us;
    } else if (out_error != NULL && !never_fits) {
        out_error->retry_after_us = no.retry_us < RETRY_US_MIN   ? RETRY_US_MIN
                                    : no.retry_us > RETRY_US_MAX ? RETRY_US_MAX
                                                                 : no.retry_us;
    }
    return EP_ERR_RESOURCE_EXHAUSTED;
}

bool ep_admission_is_lost(ep_admission *admission, const ep_ticket *ticket, double left,
                          uint64_t now_ns)
{
    const uint64_t deadline_ns = ticket->deadline_ns;
    request_lane *lane = &admission->uses[ticket->tenant].lanes[ticket->is_prefill];
    if (now_ns >= lane->late_ns || deadline_ns == EP_TIME_NEVER) {
        return now_ns >= deadline_ns;
    }
    pthread_mutex_lock(&admission->lock);
    /* a request that is alone is computed, so that a wrong estimate corrects itself */
    const uint64_t own_ns = lane->work == ticket->work ? 0 : time_of(lane, ticket->work);
    pthread_mutex_unlock(&admission->lock);
    return now_ns + (uint64_t)((double)own_ns * left) >= deadline_ns;
}

void ep_admission_leave(ep_admission *admission, const ep_ticket *ticket, uint64_t now_ns,
                        uint64_t took_ns, ep_err result)
{
    pthread_mutex_lock(&admission->lock);
    tenant_use *use = &admission->uses[ticket->tenant];
    request_lane *lane = &use->lanes[ticket->is_prefill];
    lane->busy_ns += now_ns > lane->counted_ns ? now_ns - lane->counted_ns : 0;
    lane->counted_ns = now_ns;
    lane->done_work += result == EP_OK ? ticket->work : 0;
    while (lane->busy_ns > LEARN_NS) {
        lane->busy_ns /= 2;
        lane->done_work /= 2;
    }
    if (result == EP_ERR_DEADLINE_EXCEEDED) {
        lane->late_ns = now_ns + LATE_NS;
    }
    lane->work -= ticket->work;
    use->stats.tokens_used -= ticket->tokens;
    if (ticket->is_spilled) {
        admission->stats.spill_used_bytes -= ticket->bytes;
        use->spill_bytes -= ticket->bytes;
    } else {
        admission->stats.tokens_used -= ticket->tokens;
        use->tokens_budget -= ticket->tokens;
    }
    if (took_ns > 0) {
        admission->mean_us = (admission->mean_us * 7 + took_ns / EP_NS_PER_US) / 8;
    }
    pthread_mutex_unlock(&admission->lock);
}

void ep_admission_read_stats(ep_admission *admission, ep_admission_stats *out_stats)
{
    pthread_mutex_lock(&admission->lock);
    *out_stats = admission->stats;
    pthread_mutex_unlock(&admission->lock);
}

void ep_admission_read_tenant(ep_admission *admission, uint32_t tenant,
                              ep_admission_tenant_stats *out_stats)
{
    pthread_mutex_lock(&admission->lock);
    *out_stats = admission->uses[tenant].stats;
    pthread_mutex_unlock(&admission->lock);
}
