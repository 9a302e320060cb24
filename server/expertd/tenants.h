/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who pays for a request. Tenants are listed in the configuration; the name a caller gives is not
 * proven, so all others share EP_TENANT_BUCKETS places by a hash of their name, and callers without
 * a name have one: the number of tenants never grows. Without a list everybody is tenant 0.
 * Threads    immutable.
 */
#ifndef EP_EXPERTD_TENANTS_H
#define EP_EXPERTD_TENANTS_H

#include <stdint.h>

#define EP_TENANT_BUCKETS 15
#define EP_TENANTS_LISTED_MAX 128
#define EP_TENANTS_MAX (1 + EP_TENANT_BUCKETS + EP_TENANTS_LISTED_MAX)
/* in the list: what holds for all that are not in it, for each place */
#define EP_TENANT_REST "*"

typedef struct ep_tenant_limits {
    uint32_t weight;          /* of backend time */
    uint32_t inflight_tokens; /* in work at once; 0: the node's budgets only */
    uint32_t tokens_per_s;    /* 0: no limit */
} ep_tenant_limits;

typedef struct ep_tenants {
    uint32_t count;                    /* 1, or all places */
    const char *names[EP_TENANTS_MAX]; /* borrowed; the places before the listed ones have none */
    ep_tenant_limits limits[EP_TENANTS_MAX];
} ep_tenants;

/* Nobody is listed. */
void ep_tenants_init(ep_tenants *tenants);
/* Adds one to the list; EP_TENANT_REST sets the places of the others. The caller has checked the
 * count. */
void ep_tenants_add(ep_tenants *tenants, const char *name, const ep_tenant_limits *limits);
/* name "" or NULL: without a name. */
uint32_t ep_tenants_find(const ep_tenants *tenants, const char *name);
/* For metrics and messages: the listed name, "other" or "none". */
const char *ep_tenants_label(const ep_tenants *tenants, uint32_t tenant);

#endif
