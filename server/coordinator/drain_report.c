/* SPDX-License-Identifier: Apache-2.0 */
/* Counts copies and writes the note about a drain. */
#include "coordinator/drain_report.h"

#include <stdio.h>
#include <string.h>

#include "base/quantity.h"

/* The number of copies on the node in the table; table NULL: 0. */
static uint32_t copies_on(const ep_routing_table *table, const char *node)
{
    uint32_t count = 0;
    uint32_t index = 0;
    while (table != NULL && index < table->nodes_count &&
           strcmp(table->nodes[index].name, node) != 0) {
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

/* Notes why experts have fewer copies: some wait for move_rate, others are being loaded, or there
 * is no room. */
static void note_fewer(const ep_coordinator_state *cluster,
                       const ep_coordinator_state_config *config, uint32_t fewer,
                       char out[EP_ERROR_TEXT_BYTES])
{
    const uint32_t waiting = ep_coordinator_state_copies_waiting(cluster, NULL, NULL);
    const bool is_loading = ep_epoch_compare(ep_coordinator_state_committed_epoch(cluster),
                                             ep_coordinator_state_assignment_epoch(cluster)) < 0;
    const size_t used = (size_t)snprintf(
        out, EP_ERROR_TEXT_BYTES, "%u experts have fewer than %u copies: ", fewer, config->copies);
    if (waiting > 0) {
        char rate[EP_QUANTITY_BYTES];
        snprintf(out + used, EP_ERROR_TEXT_BYTES - used, "%u copies wait for move_rate %s", waiting,
                 ep_quantity_format(config->move_rate, EP_UNIT_BYTES, rate));
    } else {
        snprintf(out + used, EP_ERROR_TEXT_BYTES - used, "%s",
                 is_loading ? "other nodes still load"
                            : "too few other nodes can hold them, start one or lower copies");
    }
}

void ep_drain_report_complete(const ep_coordinator_state *cluster,
                              const ep_coordinator_state_config *config,
                              const ep_routing_table *served, bool undo,
                              ep_coordinator_drain *io_drain)
{
    const ep_error *problem = ep_coordinator_state_placement_error(cluster);
    io_drain->note[0] = 0;
    if (undo && io_drain->is_leaving) {
        snprintf(io_drain->note, sizeof(io_drain->note),
                 "node %s itself asks to be emptied: take that back at its own admin listener",
                 io_drain->node);
        return;
    }
    if (undo) {
        return;
    }
    /* the served table is behind the state while a new one is being written */
    uint32_t listed = copies_on(served, io_drain->node);
    io_drain->copies_to_move =
        listed > io_drain->copies_to_move ? listed : io_drain->copies_to_move;
    uint32_t fewer = config->expert_map == NULL ? experts_short(served, config->copies) : 0;
    if (io_drain->copies_to_move > 0 && problem->code != EP_OK) {
        snprintf(io_drain->note, sizeof(io_drain->note), "%s", problem->text);
    } else if (fewer > 0) {
        note_fewer(cluster, config, fewer, io_drain->note);
    }
}
