/* SPDX-License-Identifier: Apache-2.0 */
/* Counts and words about a drain. */
#include "coordinator/drain_report.h"

#include <stdio.h>
#include <string.h>

uint32_t ep_table_copies_on(const ep_routing_table *table, const char *node)
{
    uint32_t count = 0;
    uint32_t index = 0;
    while (table != NULL && index < table->nodes_count && strcmp(table->nodes[index].name, node) != 0) {
        index++;
    }
    if (table == NULL || index == table->nodes_count) {
        return 0;
    }
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        uint32_t copies = layer->offsets[layer->shape.experts + layer->shape.shared_experts];
        for (uint32_t c = 0; c < copies; c++) {
            count += layer->copies[c] == index;
        }
    }
    return count;
}

static uint32_t experts_short(const ep_routing_table *table, uint32_t copies_wanted)
{
    uint32_t count = 0;
    for (uint32_t l = 0; table != NULL && l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        for (uint32_t e = 0; e < layer->shape.experts + layer->shape.shared_experts; e++) {
            count += layer->offsets[e + 1] - layer->offsets[e] < copies_wanted;
        }
    }
    return count;
}

void ep_drain_report_complete(const ep_coordinator_state *cluster, const ep_coordinator_state_config *config,
                              const ep_routing_table *served, bool undo, ep_coordinator_drain *io_drain)
{
    const ep_error *problem = ep_coordinator_state_placement_error(cluster);
    io_drain->note[0] = 0;
    if (undo && io_drain->is_leaving) {
        snprintf(io_drain->note, sizeof(io_drain->note),
                 "node %s itself asks to be emptied: take that back at its own admin listener", io_drain->node);
        return;
    }
    if (undo) {
        return;
    }
    uint32_t listed = ep_table_copies_on(served, io_drain->node); /* behind the state while a table is being written */
    io_drain->copies_to_move = listed > io_drain->copies_to_move ? listed : io_drain->copies_to_move;
    uint32_t fewer = config->expert_map == NULL ? experts_short(served, config->copies) : 0;
    if (io_drain->copies_to_move > 0 && problem->code != EP_OK) {
        snprintf(io_drain->note, sizeof(io_drain->note), "%s", problem->text);
    } else if (fewer > 0) {
        snprintf(io_drain->note, sizeof(io_drain->note),
                 "%u experts have fewer than %u copies: too few other nodes can hold them, start one or lower copies", fewer, config->copies);
    }
}
