/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/tenants.h"

#include <stddef.h>
#include <string.h>

#include "base/check.h"

#define FIRST_LISTED (1 + EP_TENANT_BUCKETS)

void ep_tenants_init(ep_tenants *tenants)
{
    memset(tenants, 0, sizeof(*tenants));
    tenants->count = 1;
    for (uint32_t i = 0; i < FIRST_LISTED; i++) {
        tenants->limits[i].weight = 1;
    }
}

void ep_tenants_add(ep_tenants *tenants, const char *name, const ep_tenant_limits *limits)
{
    tenants->count = tenants->count < FIRST_LISTED ? FIRST_LISTED : tenants->count;
    if (strcmp(name, EP_TENANT_REST) == 0) {
        for (uint32_t i = 0; i < FIRST_LISTED; i++) {
            tenants->limits[i] = *limits;
        }
        return;
    }
    EP_ASSERT(tenants->count < EP_TENANTS_MAX);
    tenants->names[tenants->count] = name;
    tenants->limits[tenants->count++] = *limits;
}

/* FNV-1a */
static uint32_t hash(const char *text)
{
    uint32_t h = 2166136261u;
    for (; *text != 0; text++) {
        h = (h ^ (uint8_t)*text) * 16777619u;
    }
    return h;
}

uint32_t ep_tenants_find(const ep_tenants *tenants, const char *name)
{
    if (tenants->count == 1 || name == NULL || name[0] == 0) {
        return 0;
    }
    for (uint32_t i = FIRST_LISTED; i < tenants->count; i++) {
        if (strcmp(tenants->names[i], name) == 0) {
            return i;
        }
    }
    return 1 + hash(name) % EP_TENANT_BUCKETS;
}

const char *ep_tenants_label(const ep_tenants *tenants, uint32_t tenant)
{
    return tenant >= FIRST_LISTED ? tenants->names[tenant] : tenant == 0 ? "none" : "other";
}
