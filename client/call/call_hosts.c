/* SPDX-License-Identifier: Apache-2.0 */
#include "call/call_hosts.h"

void ep_call_group_hosts(ep_call *call)
{
    const uint32_t *groups = call->at.view->groups;
    uint32_t experts = call->at.layer->shape.experts + call->at.layer->shape.shared_experts;
    for (uint32_t n = 0; n < call->at.view->table->nodes_count; n++) {
        uint64_t *group_room = &call->room_bytes[groups[n]];
        if (call->usable[n] != 0 && call->room_bytes[n] < *group_room) {
            *group_room = call->room_bytes[n];
        }
    }
    for (uint32_t e = 0; e < experts; e++) {
        call->grouped[e] = call->chosen[e] == EP_NO_EXPERT ? EP_NO_EXPERT : groups[call->chosen[e]];
    }
}

void ep_call_split_chunk(ep_call *call, uint32_t chunk, ep_call_relay *out_relay)
{
    uint64_t spread = call->spread + call->state.attempt + chunk;
    uint32_t count = ep_host_plan_split(&call->plan, chunk, call->chosen, spread, call->host_slots,
                                        out_relay->parts, EP_RELAY_PARTS_MAX);
    out_relay->count = count > 1 ? count : 0;
}

void ep_call_fill_relay(const ep_call *call, ep_call_relay *relay,
                        Expertd__V1__ForwardRequest *header)
{
    for (uint32_t i = 0; i < relay->count; i++) {
        const ep_host_part *part = &relay->parts[i];
        const ep_routing_node *node = &call->at.view->table->nodes[part->node];
        Expertd__V1__RelayPart *message = &relay->messages[i];
        expertd__v1__relay_part__init(message);
        /* message fields are char *; packing only reads them */
        message->node = (char *)(uintptr_t)node->name;
        message->url = (char *)(uintptr_t)node->url;
        message->slots_begin = part->begin;
        message->slots_count = part->count;
        relay->list[i] = message;
    }
    header->relay = relay->list;
    header->n_relay = relay->count;
}
