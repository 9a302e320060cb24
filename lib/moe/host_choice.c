/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/host_choice.h"

#include <string.h>

static void scale_load(ep_host_load *load, uint64_t times, uint64_t of)
{
    load->node_rows = load->node_rows * times / of;
    load->host_rows = load->host_rows * times / of;
    load->slots = load->slots * times / of;
}

void ep_host_count_loads(const ep_batch *batch, const ep_layer_shape *shape, const uint32_t *chosen,
                         const uint32_t *groups, uint32_t nodes_count, uint32_t token_begin,
                         uint32_t token_end, uint32_t tokens, uint32_t *scratch,
                         ep_host_load *out_loads)
{
    const uint32_t per_token = ep_batch_slots_per_token(batch, shape);
    const uint32_t all = token_end - token_begin;
    const uint32_t counted = all < EP_HOST_COUNTED_TOKENS ? all : EP_HOST_COUNTED_TOKENS;
    const uint32_t stride = counted > 0 ? all / counted : 1;
    uint32_t *node_seen = scratch; /* the last counted token with a slot there, plus one */
    uint32_t *host_seen = scratch + nodes_count;
    memset(scratch, 0, 2 * (size_t)nodes_count * sizeof(*scratch));
    memset(out_loads, 0, nodes_count * sizeof(*out_loads));
    for (uint32_t i = 0; i < counted; i++) {
        /* at a pseudo-random place in its part, because batches may be periodic */
        const uint32_t t = token_begin + i * stride + (i * 2654435761u >> 8) % stride;
        for (uint32_t k = 0; k < per_token; k++) {
            uint32_t expert;
            const ep_slot_kind kind = ep_batch_slot(batch, shape, t, k, &expert);
            if ((kind != EP_SLOT_ROUTED && kind != EP_SLOT_SHARED) ||
                chosen[expert] >= nodes_count) {
                continue;
            }
            const uint32_t node = chosen[expert];
            ep_host_load *load = &out_loads[groups[node]];
            load->slots++;
            load->nodes += node_seen[node] == 0;
            load->node_rows += node_seen[node] != t + 1;
            load->host_rows += host_seen[groups[node]] != t + 1;
            node_seen[node] = t + 1;
            host_seen[groups[node]] = t + 1;
        }
    }
    for (uint32_t n = 0; n < nodes_count && counted > 0 && counted != tokens; n++) {
        scale_load(&out_loads[n], tokens, counted);
    }
}

static uint64_t bytes_of(const ep_host_question *q, uint64_t rows)
{
    const uint64_t back = q->is_sums ? rows : q->load.slots;
    return rows * q->row_bytes + q->load.slots * q->slot_bytes + back * q->reply_row_bytes;
}

static double time_of(const ep_host_way *way, uint64_t bytes)
{
    return way->samples > 0 ? way->round_trip_us + way->us_per_byte * (double)bytes : 0;
}

/* Whether this call tries the other way. The slower that is, the rarer. */
static bool is_try(uint64_t turn, double chosen_us, double other_us)
{
    const double ratio = chosen_us > 0 && other_us > chosen_us ? other_us / chosen_us : 1;
    const uint64_t every = ratio < 1e6 ? (uint64_t)(EP_HOST_TRY_OF * ratio) : UINT64_MAX;
    return turn % every == every - 1;
}

static void decide_by_time(const ep_host_question *q, ep_host_choice *choice)
{
    const bool has_straight = q->straight.samples >= EP_HOST_SAMPLES_MIN;
    const bool has_by_host = q->by_host.samples >= EP_HOST_SAMPLES_MIN;
    if (!has_straight || !has_by_host) {
        const bool is_turn = q->turn % EP_HOST_LEARN_OF == 0;
        choice->why = EP_HOST_LEARNING;
        choice->by_host = !has_by_host && is_turn;
        return;
    }
    const bool by_host = choice->by_host_us < choice->straight_us * (1 - EP_HOST_GAIN_MIN);
    const bool is_other = by_host ? is_try(q->turn, choice->by_host_us, choice->straight_us)
                                  : is_try(q->turn, choice->straight_us, choice->by_host_us);
    choice->by_host = by_host != is_other;
    choice->why = is_other ? EP_HOST_TRIED : EP_HOST_MEASURED;
}

void ep_host_choose(const ep_host_question *q, ep_host_choice *out_choice)
{
    ep_host_choice choice = {.why = EP_HOST_ALONE,
                             .straight_bytes = bytes_of(q, q->load.node_rows),
                             .by_host_bytes = bytes_of(q, q->load.host_rows)};
    choice.straight_us = time_of(&q->straight, choice.straight_bytes);
    choice.by_host_us = time_of(&q->by_host, choice.by_host_bytes);
    if (q->load.nodes > 1 && !q->is_local) {
        if ((double)choice.by_host_bytes > (double)choice.straight_bytes * (1 - EP_HOST_GAIN_MIN)) {
            choice.why = EP_HOST_NO_BYTES;
        } else if (q->is_refused) {
            choice.why = EP_HOST_REFUSED;
        } else {
            decide_by_time(q, &choice);
        }
    }
    *out_choice = choice;
}
