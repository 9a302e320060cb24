/* SPDX-License-Identifier: Apache-2.0 */
#include "call/call_steps.h"

#include <string.h>

#include "base/clock.h"

_Static_assert((int)EP_MOE_COMM_WHY_ALONE == (int)EP_HOST_ALONE &&
                   (int)EP_MOE_COMM_WHY_NO_BYTES == (int)EP_HOST_NO_BYTES &&
                   (int)EP_MOE_COMM_WHY_REFUSED == (int)EP_HOST_REFUSED &&
                   (int)EP_MOE_COMM_WHY_LEARNING == (int)EP_HOST_LEARNING &&
                   (int)EP_MOE_COMM_WHY_TRIED == (int)EP_HOST_TRIED &&
                   (int)EP_MOE_COMM_WHY_MEASURED == (int)EP_HOST_MEASURED,
               "why of auto");

/* A node that refused to pass rows on may do so after its next heartbeat. */
#define REFUSED_NS EP_NS_PER_S

/* ---- which way ---- */

void ep_call_begin_hosts(ep_call *call)
{
    const ep_view *view = call->at.view;
    ep_moe_comm comm_alg = call->spec.comm_alg;
    /* Nodes pass rows on only to neighbours named by a coordinator; a local table has none. */
    if (comm_alg == EP_MOE_COMM_DEFAULT || view->table->epoch.term == 0 ||
        (comm_alg == EP_MOE_COMM_AUTO && ep_batch_row_per_slot(&call->spec.batch))) {
        comm_alg = EP_MOE_COMM_FULLMESH;
    }
    call->comm_alg = comm_alg;
    call->knows_hosts = view->has_groups;
    if (call->knows_hosts) {
        memset(call->hosts, 0, view->table->nodes_count * sizeof(*call->hosts));
    }
}

static ep_ways *ways_of(const ep_call *call, uint32_t host)
{
    return &call->at.view->peers[host]->links[call->class_index].ways;
}

static void choose_host(ep_call *call, uint32_t host, uint64_t now_ns, ep_host_choice *out_choice)
{
    const ep_batch *batch = &call->spec.batch;
    const ep_ways *ways = ways_of(call, host);
    const uint64_t refused_ns = __atomic_load_n(&ways->refused_ns, __ATOMIC_RELAXED);
    ep_host_question question = {
        .load = call->host_loads[host],
        .row_bytes = call->flow.row_bytes,
        .slot_bytes = call->flow.cut.slot_bytes,
        .reply_row_bytes = call->flow.reply_row_bytes,
        .is_sums = batch->node_sum,
        .is_local = call->client->host[0] != 0 &&
                    strcmp(call->client->host, call->at.view->table->nodes[host].host) == 0,
        .is_refused = refused_ns != 0 && now_ns < refused_ns + REFUSED_NS,
        .turn = call->spread};
    ep_way_speed_read(&ways->speeds[batch->node_sum][EP_WAY_STRAIGHT], &question.straight);
    ep_way_speed_read(&ways->speeds[batch->node_sum][EP_WAY_BY_HOST], &question.by_host);
    ep_host_choose(&question, out_choice);
}

/* Chooses for each host. They work in parallel, so the call's expected time is the slowest
 * one's. */
static void choose_all(ep_call *call)
{
    ep_moe_result *result = &call->result;
    const uint64_t now_ns = ep_clock_now_ns();
    uint64_t most_bytes = 0;
    double straight_us = 0, by_host_us = 0;
    bool is_known = true;
    result->comm_why = EP_MOE_COMM_WHY_ALONE;
    for (uint32_t n = 0; n < call->at.view->table->nodes_count; n++) {
        ep_call_host *host = &call->hosts[n];
        ep_host_choice choice;
        host->by_host = false;
        if (call->host_loads[n].slots == 0) {
            continue;
        }
        choose_host(call, n, now_ns, &choice);
        host->by_host = choice.by_host;
        if (choice.by_host) {
            result->comm_alg = EP_MOE_COMM_HIERARCHY;
        }
        if (choice.why == EP_HOST_ALONE) {
            continue;
        }
        is_known &= choice.straight_us > 0 && choice.by_host_us > 0;
        straight_us = choice.straight_us > straight_us ? choice.straight_us : straight_us;
        by_host_us = choice.by_host_us > by_host_us ? choice.by_host_us : by_host_us;
        if (choice.straight_bytes > most_bytes) {
            most_bytes = choice.straight_bytes;
            result->comm_why = (ep_moe_comm_why)choice.why;
        }
    }
    result->fullmesh_us = is_known ? (uint64_t)straight_us : 0;
    result->hierarchy_us = is_known ? (uint64_t)by_host_us : 0;
}

bool ep_call_choose_hosts(ep_call *call, uint32_t token_begin, uint32_t token_end)
{
    const ep_view *view = call->at.view;
    const uint32_t nodes = view->table->nodes_count;
    if (!call->chose_hosts && call->comm_alg == EP_MOE_COMM_HIERARCHY) {
        for (uint32_t n = 0; n < nodes; n++) {
            call->hosts[n].by_host = true;
        }
    } else if (!call->chose_hosts) {
        /* the loads of the first window are taken for all windows */
        ep_host_count_loads(&call->spec.batch, &call->at.layer->shape, call->chosen, view->groups,
                            nodes, token_begin, token_end, call->spec.batch.tokens,
                            call->host_scratch, call->host_loads);
        choose_all(call);
    }
    call->chose_hosts = true;
    return call->result.comm_alg == EP_MOE_COMM_HIERARCHY;
}

void ep_call_group_hosts(ep_call *call)
{
    const uint32_t *groups = call->at.view->groups;
    uint32_t experts = call->at.layer->shape.experts + call->at.layer->shape.shared_experts;
    for (uint32_t n = 0; n < call->at.view->table->nodes_count; n++) {
        uint64_t *group_room = &call->room_bytes[groups[n]];
        if (call->hosts[groups[n]].by_host && call->usable[n] != 0 &&
            call->room_bytes[n] < *group_room) {
            *group_room = call->room_bytes[n];
        }
    }
    for (uint32_t e = 0; e < experts; e++) {
        const uint32_t node = call->chosen[e];
        call->grouped[e] =
            node != EP_NO_EXPERT && call->hosts[groups[node]].by_host ? groups[node] : node;
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

/* ---- what hosts took ---- */

void ep_call_note_sent(ep_call *call, const ep_call_frame *frame)
{
    ep_call_host *host = &call->hosts[frame->host];
    host->ways |= 1u << (call->is_by_host && host->by_host ? EP_WAY_BY_HOST : EP_WAY_STRAIGHT);
    host->bytes += frame->bytes;
    if (host->first_ns == 0 || frame->sent_ns < host->first_ns) {
        host->first_ns = frame->sent_ns;
    }
}

void ep_call_note_answer(ep_call *call, const ep_call_frame *frame, uint64_t now_ns)
{
    ep_call_host *host = &call->hosts[frame->host];
    host->bytes += frame->reply->bytes;
    host->last_ns = now_ns;
}

void ep_call_note_refusal(ep_call *call, const ep_call_frame *frame, uint64_t now_ns)
{
    if (frame->is_relayed && frame->error.code == EP_ERR_UNAVAILABLE) {
        __atomic_store_n(&ways_of(call, frame->host)->refused_ns, now_ns, __ATOMIC_RELAXED);
    }
}

void ep_call_learn_hosts(ep_call *call)
{
    const ep_moe_result *result = &call->result;
    if (call->state.code != EP_OK || result->rerouted_frames != 0 || result->hedged_frames != 0 ||
        result->missing_count != 0) {
        return; /* its times would measure the failures */
    }
    for (uint32_t n = 0; n < call->at.view->table->nodes_count; n++) {
        const ep_call_host *host = &call->hosts[n];
        const ep_way way = host->ways == 1u << EP_WAY_BY_HOST ? EP_WAY_BY_HOST : EP_WAY_STRAIGHT;
        if (host->ways == 1u << way && host->last_ns > host->first_ns) {
            ep_way_speed_add(&ways_of(call, n)->speeds[call->spec.batch.node_sum][way], host->bytes,
                             (double)(host->last_ns - host->first_ns) / EP_NS_PER_US);
        }
    }
}
