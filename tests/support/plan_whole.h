/* SPDX-License-Identifier: Apache-2.0 */
/* A routing plan in one call: what is listed is built at once. */
#ifndef EP_TESTS_PLAN_WHOLE_H
#define EP_TESTS_PLAN_WHOLE_H

#include "moe/routing_plan.h"

static inline ep_err plan_whole(ep_routing_plan *plan, const ep_batch *batch,
                                const ep_routing_layer *layer, uint32_t nodes_count,
                                const uint32_t *chosen, const ep_plan_cut *cut,
                                uint32_t token_begin, uint32_t token_end,
                                const uint32_t *slot_numbers, uint32_t slot_numbers_count,
                                ep_error *out_error)
{
    ep_err err = ep_routing_plan_list(plan, batch, &layer->shape, token_begin, token_end,
                                      slot_numbers, slot_numbers_count, out_error);
    return err == EP_OK
               ? ep_routing_plan_build(plan, batch, layer, nodes_count, chosen, cut, out_error)
               : err;
}

#endif
