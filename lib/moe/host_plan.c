/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/host_plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

typedef struct named_node {
    const char *host;
    uint32_t node;
} named_node;

static int by_host(const void *a, const void *b)
{
    const named_node *x = a;
    const named_node *y = b;
    int order = strcmp(x->host, y->host);
    return order != 0 ? order : (x->node > y->node) - (x->node < y->node);
}

ep_err ep_host_groups(const ep_routing_table *table, uint32_t members_max, uint32_t *out_groups)
{
    named_node *nodes = calloc((size_t)table->nodes_count + 1, sizeof(*nodes));
    uint32_t members = 0;
    EP_ASSERT(members_max > 0);
    if (nodes == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        nodes[n] = (named_node){table->nodes[n].host, n};
    }
    qsort(nodes, table->nodes_count, sizeof(*nodes), by_host);
    for (uint32_t i = 0; i < table->nodes_count; i++) {
        bool joins = i > 0 && nodes[i].host[0] != '\0' && members < members_max &&
                     strcmp(nodes[i].host, nodes[i - 1].host) == 0;
        members = joins ? members + 1 : 1;
        out_groups[nodes[i].node] = joins ? out_groups[nodes[i - 1].node] : nodes[i].node;
    }
    free(nodes);
    return EP_OK;
}

/* Counts the slots of each owner; parts are ordered by ascending node. */
static uint32_t find_owners(const ep_plan_slot *slots, uint32_t count, const uint32_t *chosen,
                            ep_host_part *parts, uint32_t parts_max)
{
    uint32_t parts_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t owner = chosen[slots[i].expert];
        uint32_t p = parts_count;
        while (p > 0 && parts[p - 1].node > owner) {
            p--;
        }
        if (p == 0 || parts[p - 1].node != owner) {
            EP_ASSERT(parts_count < parts_max);
            memmove(parts + p + 1, parts + p, (parts_count - p) * sizeof(*parts));
            parts[p++] = (ep_host_part){.node = owner};
            parts_count++;
        }
        parts[p - 1].count++;
    }
    return parts_count;
}

uint32_t ep_host_plan_split(ep_routing_plan *plan, uint32_t chunk_index, const uint32_t *chosen,
                            uint64_t spread, ep_plan_slot *scratch, ep_host_part *parts,
                            uint32_t parts_max)
{
    ep_plan_chunk *chunk = &plan->chunks[chunk_index];
    ep_plan_slot *slots = plan->slots + chunk->slots_begin;
    uint32_t parts_count = find_owners(slots, chunk->slots_count, chosen, parts, parts_max);
    uint32_t receiver = (uint32_t)(spread % parts_count);
    ep_host_part first = parts[receiver];
    memmove(parts + 1, parts, receiver * sizeof(*parts));
    parts[0] = first;
    chunk->node = first.node;
    uint32_t place = 0;
    for (uint32_t p = 0; p < parts_count; p++) {
        parts[p].begin = place;
        for (uint32_t i = 0; i < chunk->slots_count; i++) {
            if (chosen[slots[i].expert] == parts[p].node) {
                scratch[place++] = slots[i];
            }
        }
    }
    memcpy(slots, scratch, chunk->slots_count * sizeof(*slots));
    return parts_count;
}
