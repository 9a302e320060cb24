/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The HTTP door for probes and metrics. GET and HEAD only:
 *     /livez /readyz /startupz       200 or 503, one line; ?verbose lists every check
 *     /health                        as /readyz
 *     /v2/health/live, .../ready     as /livez, /readyz with an empty body
 *     /metrics                       Prometheus text
 *     what config.page answers       with `front` as where / leads
 *     others                         404 and a line that lib/rpc/rpc_look.c reads: "expertd: node
 * a: calls go to tcp://..."
 *
 * Limits     EP_PROBES_CONNECTIONS_MAX connections of one request each, 16 KiB of memory per
 *            connection, and EP_PROBES_TIMEOUT_S seconds from its begin to the end of the answer.
 *            When more than half of the places are taken, the oldest connection is ended for a new
 *            one, so that nobody can block others by holding connections. The log names one a
 *            minute (probe-held).
 * Threads    a thread of its own calls checks(), which must not block. The timers' thread ends slow
 *            connections.
 */
#ifndef EP_SERVER_COMMON_PROBES_H
#define EP_SERVER_COMMON_PROBES_H

#include <stddef.h>

#include "base/error.h"
#include "base/timer.h"
#include "common/metrics.h"

#define EP_PROBES_CONNECTIONS_MAX 64
#define EP_PROBES_TIMEOUT_S 5
#define EP_PROBE_CHECKS_MAX 16

typedef enum ep_probe_kind { EP_PROBE_LIVE, EP_PROBE_READY, EP_PROBE_STARTUP } ep_probe_kind;

typedef struct ep_probe_check {
    const char *name; /* static */
    bool ok;
    char text[320];
} ep_probe_check;

typedef struct ep_probes ep_probes;

/* The query of a request. The value of a key; "" without a value, NULL: there is no such key. */
typedef struct ep_probe_query ep_probe_query;
const char *ep_probe_query_value(const ep_probe_query *query, const char *key);

/* The answer to a path that the program itself serves. */
typedef struct ep_probe_page {
    unsigned status;    /* of HTTP */
    const char *type;   /* of the body; static */
    const char *policy; /* Content-Security-Policy; NULL: none */
    const char *body;
    size_t bytes;
    /* called once it is sent, on the probes' thread or in ep_probes_stop; NULL: body is static */
    void (*release)(void *arg);
    void *release_arg;
} ep_probe_page;

typedef struct ep_probes_config {
    const char *address; /* "127.0.0.1:7421", "[::1]:0", "0.0.0.0:7421"; port 0: any free one */
    /* Fills out[EP_PROBE_CHECKS_MAX] and returns how many; the probe succeeds when all are ok. */
    size_t (*checks)(void *arg, ep_probe_kind kind, ep_probe_check *out);
    /* Fills out_page for a path such as "/status", without blocking; false: not known. NULL: no
     * pages. */
    bool (*page)(void *arg, const char *path, const ep_probe_query *query, ep_probe_page *out_page);
    const char *front; /* static, with page: the path that / redirects to, without its slash */
    void *arg;
    ep_metrics *metrics;      /* borrowed */
    const char *node;         /* borrowed; NULL: the coordinator's */
    const char *rpc_url;      /* borrowed: where calls go */
    const char *admin_url;    /* borrowed: where operators go; "" off */
    ep_timer_service *timers; /* borrowed */
} ep_probes_config;

/* Errors: INVALID_ARGUMENT (address), UNAVAILABLE (port taken), NO_MEMORY. */
ep_err ep_probes_start(const ep_probes_config *config, ep_probes **out_probes, ep_error *out_error);
/* Waits for the thread. NULL allowed. */
void ep_probes_stop(ep_probes *probes);
/* "http://127.0.0.1:7421" with the real port. */
void ep_probes_url(const ep_probes *probes, char *out_url, size_t bytes);
/* Checks "host:port" without binding. Errors: INVALID_ARGUMENT. */
ep_err ep_probes_check_address(const char *address, ep_error *out_error);

#endif
