/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tenant that pays for a request. Tenants are listed in the configuration. A caller's tenant
 * name is not proven, so all that are not listed share EP_TENANT_BUCKETS places by a hash of the
 * name, and callers without a name share one place; so the number of tenants never grows. Without a
 * list every caller is tenant 0.
 * Threads    immutable.
 */
#ifndef EP_EXPERTD_TENANTS_H
#define EP_EXPERTD_TENANTS_H

#include <stdint.h>

#define EP_TENANT_BUCKETS 15
#define EP_TENANTS_LISTED_MAX 128
#define EP_TENANTS_MAX (1 + EP_TENANT_BUCKETS + EP_TENANTS_LISTED_MAX)
/* entry of the list with the limits of each place for tenants that are not listed */
#define EP_TENANT_REST "*"

typedef struct ep_tenant_limits {
    uint32_t weight;          /* share of backend time */
    uint32_t inflight_tokens; /* in work at once; 0: only the node's budgets count */
    uint32_t tokens_per_s;    /* 0: no limit */
} ep_tenant_limits;

typedef struct ep_tenants {
    uint32_t count;                    /* 1, or the number of all places */
    const char *names[EP_TENANTS_MAX]; /* borrowed; the places before the listed ones have none */
    ep_tenant_limits limits[EP_TENANTS_MAX];
} ep_tenants;

/* Makes an empty list. */
void ep_tenants_init(ep_tenants *tenants);
/* Adds a tenant to the list; EP_TENANT_REST sets the limits of tenants that are not listed. The
 * caller has checked the count. */
void ep_tenants_add(ep_tenants *tenants, const char *name, const ep_tenant_limits *limits);
/* name "" or NULL: without a name. */
uint32_t ep_tenants_find(const ep_tenants *tenants, const char *name);
/* For metrics and messages: the listed name, "other" or "none". */
const char *ep_tenants_label(const ep_tenants *tenants, uint32_t tenant);

#endif
