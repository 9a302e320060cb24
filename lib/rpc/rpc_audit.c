/* SPDX-License-Identifier: Apache-2.0 */
/* Audit lines and the limit on them. */
#include "rpc/rpc_audit.h"

#include "base/clock.h"
#include "base/log.h"

static void report_left_out(ep_rpc_audit *audit)
{
    pthread_mutex_lock(&audit->lock);
    uint64_t left_out = audit->left_out;
    audit->left_out = 0;
    pthread_mutex_unlock(&audit->lock);
    if (left_out > 0) {
        ep_log(EP_LOG_WARN, "audit-refused-more", EP_KV(lines_left_out, left_out),
               EP_KV(lines_max, EP_AUDIT_LINES), EP_KV(window_ms, EP_AUDIT_WINDOW_MS),
               EP_KV(reason, "more were refused than lines_max"));
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

/* True when a line may be written. Otherwise it is counted, and a timer logs the count. */
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
        /* without memory for the timer, the count is logged with the next window or at the end */
        (void)ep_timer_arm(audit->timers, &audit->timer, audit->window_ns + window_ns);
    }
    pthread_mutex_unlock(&audit->lock);
    return room;
}

/* NULL for an empty field, which the line leaves out. */
static const char *said(const char *text)
{
    return text != NULL && text[0] != 0 ? text : NULL;
}

#define WHO(event)                                                                                 \
    EP_KV(peer, said((event)->peer)), EP_KV(node, said((event)->node)),                            \
        EP_KV(role, said((event)->role)), EP_KV(who, said((event)->label)),                        \
        EP_KV(method, said((event)->method))

void ep_rpc_audit_count(ep_rpc_audit *audit, ep_rpc_refusal refusal)
{
    __atomic_fetch_add(&audit->refused[refusal], 1, __ATOMIC_RELAXED);
}

void ep_rpc_audit_refused(ep_rpc_audit *audit, ep_rpc_refusal refusal,
                          const ep_rpc_audit_event *event)
{
    ep_rpc_audit_count(audit, refusal);
    if (ep_log_enabled(EP_LOG_WARN) && take_line(audit)) {
        ep_log(EP_LOG_WARN, "audit-refused", WHO(event),
               EP_KV(reason, ep_rpc_refusal_name(refusal)), EP_KV(detail, said(event->text)));
    }
}

void ep_rpc_audit_admin(const ep_rpc_audit_event *event)
{
    ep_log(EP_LOG_INFO, "audit-admin", WHO(event));
}
