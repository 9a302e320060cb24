/* SPDX-License-Identifier: Apache-2.0 */
/* Uniform placement: equal counts per node, incremental. */
#include "placement/placement.h"
#include "placement/placer.h"

static ep_err keep_and_fill(ep_placer *placer, uint32_t copies, ep_error *out_error)
{
    uint32_t layers_count = placer->input->layers_count;
    ep_err err = EP_OK;
    for (uint32_t l = 0; l < layers_count && err == EP_OK; l++) {
        err = ep_placer_keep_owned(placer, l, 0, copies);
    }
    /* Round by round over all layers, so that first copies come first where room is short. */
    for (uint32_t copy = 0; copy < copies && err == EP_OK; copy++) {
        for (uint32_t l = 0; l < layers_count && err == EP_OK; l++) {
            err = ep_placer_fill(placer, l, 0, copy, out_error);
        }
    }
    return err;
}

/* A copy on `from` that may move to `to`, and whose holders have the least in common with `to`;
 * EP_NO_EXPERT if there is none. */
static uint32_t movable_expert(const ep_placer *placer, uint32_t layer, uint32_t from, uint32_t to,
                               bool owned_too)
{
    uint32_t best = EP_NO_EXPERT, least = UINT32_MAX;
    for (uint32_t e = placer->layers[layer].experts; e-- > 0 && least > 0;) {
        if (ep_placer_holds(placer, layer, e, from) && !ep_placer_holds(placer, layer, e, to) &&
            (owned_too || !ep_placer_was_owned(placer, layer, e, from)) &&
            ep_placer_may_move(placer, layer, e, from, to)) {
            const uint32_t common = ep_placer_in_common(placer, layer, e, from);
            best = common < least ? e : best;
            least = common < least ? common : least;
        }
    }
    return best;
}

/* Moves one copy to the emptiest node of the layer, from the fullest node that can give one; false
 * when no move helps. */
static bool balance_step(ep_placer *placer, uint32_t layer, bool owned_too)
{
    const uint32_t *load = placer->layers[layer].load;
    uint32_t to = ep_placer_emptiest(placer, layer, EP_NO_EXPERT);
    uint32_t from = EP_PLACER_NO_NODE;
    uint32_t expert = EP_NO_EXPERT;
    if (to != EP_PLACER_NO_NODE) {
        ep_placer_count_together(placer, layer, to);
    }
    for (uint32_t n = 0; to != EP_PLACER_NO_NODE && n < placer->input->nodes_count; n++) {
        bool fuller = from == EP_PLACER_NO_NODE || load[n] > load[from] ||
                      (load[n] == load[from] && placer->total[n] > placer->total[from]);
        /* One more than `to` is as even as a layer can be. Then a free move may still even out the
         * sum over all layers. */
        bool helps = load[n] > load[to] + 1 || (!owned_too && load[n] == load[to] + 1 &&
                                                placer->total[n] > placer->total[to] + 1);
        if (!helps || !fuller) {
            continue;
        }
        uint32_t candidate = movable_expert(placer, layer, n, to, owned_too);
        if (candidate != EP_NO_EXPERT) {
            from = n;
            expert = candidate;
        }
    }
    if (from == EP_PLACER_NO_NODE) {
        return false;
    }
    ep_placer_remove(placer, layer, expert, from);
    ep_placer_add(placer, layer, expert, to);
    return true;
}

/* Copies that nobody has loaded yet move freely, others within the limit of moves. */
static void balance_layer(ep_placer *placer, uint32_t layer, uint32_t *moves_left)
{
    while (balance_step(placer, layer, false)) {
    }
    while (*moves_left > 0 && balance_step(placer, layer, true)) {
        (*moves_left)--;
    }
}

ep_err ep_placement_uniform(const ep_placement_input *input, ep_placement **out_placement,
                            ep_error *out_error)
{
    ep_placer placer;
    ep_err err = ep_placer_init(&placer, input, input->copies, out_error);
    if (err == EP_OK) {
        err = keep_and_fill(&placer, placer.width, out_error);
    }
    uint32_t moves_left = input->moves_max;
    for (uint32_t l = 0; l < input->layers_count && err == EP_OK; l++) {
        ep_placer_spread(&placer, l, 0);
        balance_layer(&placer, l, &moves_left);
        ep_placer_count_missing(&placer, l, 0, placer.width);
    }
    if (err == EP_OK) {
        err = ep_placer_finish(&placer, out_placement);
    }
    if (err == EP_ERR_NO_MEMORY) {
        ep_error_set(out_error, err, "no memory to place %u layers", input->layers_count);
    }
    ep_placer_fini(&placer);
    return err;
}
