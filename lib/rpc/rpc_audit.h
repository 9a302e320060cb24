/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Log lines for everybody who is refused and for every call of an operator, and counts by reason:
 *
 *     event=audit-refused peer=127.0.0.1:40112 node=n-1 role=client method=expertd.v1.Admin.Drain
 *         reason=method
 *
 *     event=audit-admin peer=127.0.0.1:40112 role=operator who=alice
 *         method=expertd.v1.Admin.Drain
 *
 * At most EP_AUDIT_LINES refusals are logged in EP_AUDIT_WINDOW_MS; the rest is counted, and the
 * count is logged when the window ends (audit-refused-more). who: the label beside the token.
 * Unknown fields are left out. Tokens are never logged.
 *
 * Threads    any, except _init and _fini.
 */
#ifndef EP_RPC_RPC_AUDIT_H
#define EP_RPC_RPC_AUDIT_H

#include <pthread.h>
#include <stdint.h>

#include "base/timer.h"
#include "rpc/rpc_credentials.h"

#define EP_AUDIT_LINES 20
#define EP_AUDIT_WINDOW_MS 10000

typedef struct ep_rpc_audit {
    ep_timer_service *timers;
    ep_timer timer; /* end of a window in which lines were left out */
    pthread_mutex_t lock;
    uint64_t window_ns; /* when the window began */
    uint32_t lines;
    uint64_t left_out;
    uint64_t refused[EP_REFUSALS_COUNT]; /* atomic */
} ep_rpc_audit;

typedef struct ep_rpc_audit_event {
    const char *peer;   /* address */
    const char *node;   /* name as claimed; this field and all below: NULL or "" none */
    const char *role;   /* as claimed; after Hello, as granted */
    const char *label;  /* of the token */
    const char *method; /* "Hello", or the full name */
    const char *text;   /* more about the reason */
} ep_rpc_audit_event;

void ep_rpc_audit_init(ep_rpc_audit *audit, ep_timer_service *timers);
/* Logs the count of lines that were left out. Not from a timer. */
void ep_rpc_audit_fini(ep_rpc_audit *audit);
void ep_rpc_audit_refused(ep_rpc_audit *audit, ep_rpc_refusal refusal,
                          const ep_rpc_audit_event *event);
/* Only counts: a line each for strangers that never say Hello would help nobody. */
void ep_rpc_audit_count(ep_rpc_audit *audit, ep_rpc_refusal refusal);
void ep_rpc_audit_admin(const ep_rpc_audit_event *event);

#endif
