/* SPDX-License-Identifier: Apache-2.0 */
/* The two budgets of a node. */
#include "expertd/admission.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"

#define RETRY_US_MIN 500
#define RETRY_US_MAX 1000000

struct ep_admission {
    uint32_t inflight_tokens;
    uint64_t spill_bytes;
    pthread_mutex_t lock;
    ep_admission_stats stats;
    uint64_t mean_us; /* moving average of how long a request is in */
};

ep_err ep_admission_create(uint32_t inflight_tokens, uint64_t spill_bytes, ep_admission **out_admission)
{
    ep_admission *admission = calloc(1, sizeof(*admission));
    if (admission == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    admission->inflight_tokens = inflight_tokens;
    admission->spill_bytes = spill_bytes;
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

/* Lock held. */
static bool take(ep_admission *admission, uint32_t tokens, uint64_t bytes, ep_ticket *out_ticket)
{
    ep_admission_stats *stats = &admission->stats;
    if (stats->tokens_used + tokens <= admission->inflight_tokens) {
        stats->tokens_used += tokens;
        *out_ticket = (ep_ticket){.tokens = tokens, .bytes = bytes};
        return true;
    }
    if (bytes <= admission->spill_bytes && stats->spill_used_bytes <= admission->spill_bytes - bytes) {
        stats->spill_used_bytes += bytes;
        stats->spilled_total++;
        *out_ticket = (ep_ticket){.tokens = tokens, .bytes = bytes, .is_spilled = true};
        return true;
    }
    stats->refused_total++;
    return false;
}

ep_err ep_admission_enter(ep_admission *admission, uint32_t tokens, uint64_t bytes, ep_ticket *out_ticket,
                          ep_error *out_error)
{
    pthread_mutex_lock(&admission->lock);
    bool admitted = take(admission, tokens, bytes, out_ticket);
    ep_admission_stats stats = admission->stats;
    uint64_t mean_us = admission->mean_us;
    pthread_mutex_unlock(&admission->lock);
    if (admitted) {
        return EP_OK;
    }
    bool never_fits = tokens > admission->inflight_tokens && bytes > admission->spill_bytes;
    ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                 "%u tokens, %" PRIu64 " bytes: %" PRIu64 " of inflight_tokens %u and %" PRIu64
                 " of spill_bytes %" PRIu64 " are in use%s",
                 tokens, bytes, stats.tokens_used, admission->inflight_tokens, stats.spill_used_bytes,
                 admission->spill_bytes,
                 never_fits ? "; a request of this size never fits: send fewer tokens or raise spill_bytes"
                            : "");
    if (out_error != NULL && !never_fits) {
        out_error->retry_after_us = mean_us < RETRY_US_MIN   ? RETRY_US_MIN
                                    : mean_us > RETRY_US_MAX ? RETRY_US_MAX
                                                             : mean_us;
    }
    return EP_ERR_RESOURCE_EXHAUSTED;
}

void ep_admission_leave(ep_admission *admission, const ep_ticket *ticket, uint64_t took_ns)
{
    pthread_mutex_lock(&admission->lock);
    if (ticket->is_spilled) {
        admission->stats.spill_used_bytes -= ticket->bytes;
    } else {
        admission->stats.tokens_used -= ticket->tokens;
    }
    admission->mean_us = (admission->mean_us * 7 + took_ns / EP_NS_PER_US) / 8;
    pthread_mutex_unlock(&admission->lock);
}

void ep_admission_read_stats(ep_admission *admission, ep_admission_stats *out_stats)
{
    pthread_mutex_lock(&admission->lock);
    *out_stats = admission->stats;
    pthread_mutex_unlock(&admission->lock);
}
