/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Judges whether the service is healthy, for /readyz, the coordinator's metrics (and so the
 * alerts), expertctl status and expertctl doctor alike. Pure: facts in, problems out.
 *
 * An error means that calls fail or soon will; a warning that the next fault may cost calls. With
 * either the service is not healthy. A problem with `ends_service` means that no call can be
 * answered; then /readyz fails.
 */
#ifndef EP_COORDINATOR_HEALTH_H
#define EP_COORDINATOR_HEALTH_H

#include "coordinator.pb-c.h"
#include "moe/routing_table.h"

#define EP_HEALTH_PROBLEMS_MAX 64

typedef enum ep_health_code {
    EP_HEALTH_MEMORY,
    EP_HEALTH_MIN_NODES,
    EP_HEALTH_NO_TABLE,
    EP_HEALTH_NOTHING_SERVED,
    EP_HEALTH_PLACEMENT,
    EP_HEALTH_STORE,
    EP_HEALTH_COPY_DIFFERS,
    EP_HEALTH_NO_COPY,
    EP_HEALTH_DEVICE_LOST,
    EP_HEALTH_NODE_DEGRADED,
    EP_HEALTH_NODE_SUSPECT,
    EP_HEALTH_NODE_LOST,
    EP_HEALTH_CERTIFICATE_ENDED,
    EP_HEALTH_TLS_REFUSED,
    EP_HEALTH_FEW_COPIES,
    EP_HEALTH_ONE_HOST,
    EP_HEALTH_NUMERICS,
    EP_HEALTH_VERSIONS,
    EP_HEALTH_NODE_STARTING,
    EP_HEALTH_NODE_DRAINING,
    EP_HEALTH_NODE_DRAINED,
    EP_HEALTH_NODE_BEHIND,
    EP_HEALTH_NODE_SLOW,
    EP_HEALTH_HOST_UNKNOWN,
    EP_HEALTH_CERTIFICATE_ENDS,
    EP_HEALTH_CODES
} ep_health_code;

typedef struct ep_health_rule {
    const char *word; /* stable, for programs: "no-copy" */
    bool is_error;    /* or a warning */
    bool ends_service;
    const char *advice; /* what to do */
} ep_health_rule;
extern const ep_health_rule ep_health_rules[EP_HEALTH_CODES];

typedef struct ep_health_facts {
    /* without the fields that are filled from the judgement */
    const Expertd__V1__ClusterStatusReply *cluster;
    const ep_routing_table *table;  /* the served one; NULL: none yet */
    const uint32_t *copies_waiting; /* of each model of the table; NULL: none */
    uint64_t move_rate;             /* the limit that they wait for */
    const char *memory_error; /* why even nodes and operators get no frame memory; NULL: they do */
    uint64_t tls_expiry;      /* of the coordinator, as HeartbeatRequest.tls_expiry */
    const char *tls_error;    /* of the coordinator, as HeartbeatRequest.tls_error */
    uint64_t unix_now;        /* in seconds */
} ep_health_facts;

typedef struct ep_health_problem {
    ep_health_code code;
    char text[EP_ERROR_TEXT_BYTES + 256];
} ep_health_problem;

typedef struct ep_health {
    uint32_t counts[EP_HEALTH_CODES]; /* of all problems, kept or not */
    /* problems kept, in the order of the codes: the worst first */
    uint32_t problems_count;
    uint32_t problems_dropped;
    uint32_t nodes_seen; /* starting, serving or degraded */
    /* those plus suspect and lost ones; at least min_nodes less the emptied ones */
    uint32_t nodes_expected;
    double speed_min;                 /* NodeEntry.speed of the slowest node; 1 if none is known */
    uint64_t experts_without_copy;    /* over all layers of the table */
    uint64_t experts_with_few_copies; /* with at least one, but fewer than wanted */
    ep_health_problem problems[EP_HEALTH_PROBLEMS_MAX];
} ep_health;

void ep_health_judge(const ep_health_facts *facts, ep_health *out_health);
/* The worst problem that ends service; NULL: calls can be answered. */
const ep_health_problem *ep_health_end_of_service(const ep_health *health);
/* Problems of one severity, kept or not. */
uint32_t ep_health_count(const ep_health *health, bool errors);

#endif
