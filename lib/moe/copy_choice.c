/* SPDX-License-Identifier: Apache-2.0 */
/* Which copy of an expert serves one call. */
#include "base/random.h"
#include "moe/routing_plan.h"

static uint32_t count_usable(const uint32_t *copies, uint32_t count, const uint8_t *usable)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) {
        n += usable[copies[i]] != 0;
    }
    return n;
}

static uint32_t nth_usable(const uint32_t *copies, const uint8_t *usable, uint32_t nth)
{
    uint32_t i = 0;
    while (usable[copies[i]] == 0 || nth-- > 0) {
        i++;
    }
    return copies[i];
}

void ep_choose_copies(const ep_routing_layer *layer, const uint8_t *usable, uint64_t spread,
                      uint32_t *out_chosen)
{
    uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
    for (uint32_t e = 0; e < experts; e++) {
        const uint32_t *copies = layer->copies + layer->offsets[e];
        uint32_t count = count_usable(copies, layer->offsets[e + 1] - layer->offsets[e], usable);
        uint64_t state = e; /* one step of splitmix64 is the hash */
        out_chosen[e] =
            count == 0 ? EP_NO_EXPERT
                       : nth_usable(copies, usable, (uint32_t)((ep_splitmix64(&state) + spread) % count));
    }
}
