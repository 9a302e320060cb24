/* SPDX-License-Identifier: Apache-2.0 */
/* Audit lines and their limit. */
#include "rpc/rpc_audit.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"

#define WORD_BYTES 160
#define TEXT_BYTES 320

/* A peer's name as one word of a log line; from "first" on characters are kept. */
static const char *clean(const char *text, char first, char *out, size_t bytes)
{
    size_t n = 0;
    for (; text[n] != 0 && n + 1 < bytes; n++) {
        out[n] = text[n] >= first && text[n] <= '~' ? text[n] : '?';
    }
    out[n] = 0;
    return n == 0 ? "-" : out;
}

static void report_left_out(ep_rpc_audit *audit)
{
    pthread_mutex_lock(&audit->lock);
    uint64_t left_out = audit->left_out;
    audit->left_out = 0;
    pthread_mutex_unlock(&audit->lock);
    if (left_out > 0) {
        ep_log(EP_LOG_WARN, "audit-refused-more", "count %llu lines_max %d window_ms %d",
               (unsigned long long)left_out, EP_AUDIT_LINES, EP_AUDIT_WINDOW_MS);
    }
}

static void window_over(ep_timer *timer, void *arg)
{
    (void)timer;
    report_left_out(arg);
}

void ep_rpc_audit_init(ep_rpc_audit *audit, ep_timer_service *timers)
{
    *audit = (ep_rpc_audit){.timers = timers};
    pthread_mutex_init(&audit->lock, NULL);
    ep_timer_init(&audit->timer, window_over, audit);
}

void ep_rpc_audit_fini(ep_rpc_audit *audit)
{
    ep_timer_cancel_wait(audit->timers, &audit->timer);
    report_left_out(audit);
    pthread_mutex_destroy(&audit->lock);
}

/* True when a line may be written; else it is counted, and a timer tells how many there were. */
static bool take_line(ep_rpc_audit *audit)
{
    uint64_t now_ns = ep_clock_now_ns();
    uint64_t window_ns = (uint64_t)EP_AUDIT_WINDOW_MS * EP_NS_PER_MS;
    pthread_mutex_lock(&audit->lock);
    if (audit->window_ns == 0 || now_ns - audit->window_ns >= window_ns) {
        audit->window_ns = now_ns;
        audit->lines = 0;
    }
    bool room = audit->lines < EP_AUDIT_LINES;
    audit->lines += room ? 1 : 0;
    if (!room && audit->left_out++ == 0) {
        /* without memory for the timer the count waits for the next window or the end */
        (void)ep_timer_arm(audit->timers, &audit->timer, audit->window_ns + window_ns);
    }
    pthread_mutex_unlock(&audit->lock);
    return room;
}

/* Two arguments. */
#define WHO(event) (event)->label != NULL && (event)->label[0] != 0 ? " who " : "", (event)->label != NULL ? (event)->label : ""

void ep_rpc_audit_count(ep_rpc_audit *audit, ep_rpc_refusal refusal)
{
    __atomic_fetch_add(&audit->refused[refusal], 1, __ATOMIC_RELAXED);
}

void ep_rpc_audit_refused(ep_rpc_audit *audit, ep_rpc_refusal refusal, const ep_rpc_audit_event *event)
{
    char peer[WORD_BYTES], node[WORD_BYTES], role[WORD_BYTES], text[TEXT_BYTES];
    ep_rpc_audit_count(audit, refusal);
    if (!ep_log_enabled(EP_LOG_WARN) || !take_line(audit)) {
        return;
    }
    ep_log(EP_LOG_WARN, "audit-refused", "peer %s node %s role %s%s%s method %s reason %s%s%s",
           clean(event->peer, '!', peer, sizeof(peer)), clean(event->node, '!', node, sizeof(node)),
           clean(event->role, '!', role, sizeof(role)), WHO(event), event->method, ep_rpc_refusal_name(refusal),
           event->text != NULL ? " text " : "",
           event->text != NULL ? clean(event->text, ' ', text, sizeof(text)) : "");
}

void ep_rpc_audit_admin(const ep_rpc_audit_event *event)
{
    char peer[WORD_BYTES], node[WORD_BYTES];
    ep_log(EP_LOG_INFO, "audit-admin", "peer %s node %s role %s%s%s method %s",
           clean(event->peer, '!', peer, sizeof(peer)), clean(event->node, '!', node, sizeof(node)),
           event->role, WHO(event), event->method);
}
