/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of one expert. */
#include "base/check.h"
#include "base/large_memory.h"
#include "base/numeric.h"
#include "model/checkpoint_private.h"

#define MATRIX_ALIGN 64

static void free_block(ep_expert_room *room, uint32_t block)
{
    ep_large_free(room->blocks[block].memory, room->blocks[block].bytes);
    room->blocks[block].memory = NULL;
    room->blocks[block].bytes = 0;
}

void ep_expert_room_free(ep_expert_room *room)
{
    for (uint32_t b = 0; b < EP_ARRAY_COUNT(room->blocks); b++) {
        free_block(room, b);
    }
}

bool ep_expert_room_is_empty(const ep_expert_room *room)
{
    bool is_empty = true;
    for (uint32_t b = 0; b < EP_ARRAY_COUNT(room->blocks); b++) {
        is_empty = is_empty && room->blocks[b].memory == NULL;
    }
    return is_empty;
}

bool ep_expert_room_trim(ep_expert_room *room, const ep_expert_data *expert)
{
    bool has_other = false;
    for (uint32_t b = 0; b < EP_ARRAY_COUNT(room->blocks); b++) {
        if (b != expert->block && room->blocks[b].memory != NULL) {
            has_other = true;
            free_block(room, b);
        }
    }
    return has_other;
}

ep_err ep_expert_parts_place(ep_expert_room *room, uint32_t block, const size_t *bytes,
                             size_t count, uint8_t **places, ep_error *out_error)
{
    size_t total = 0;
    bool fits = true;
    for (size_t i = 0; i < count; i++) {
        fits = fits && ep_add_size(total, bytes[i], &total) && total <= SIZE_MAX - MATRIX_ALIGN;
        total = fits ? ep_align_up(total, MATRIX_ALIGN) : total;
    }
    if (fits && room->blocks[block].bytes < total) {
        free_block(room, block);
        room->blocks[block].memory = ep_large_alloc(total, MATRIX_ALIGN);
        room->blocks[block].bytes = room->blocks[block].memory != NULL ? total : 0;
    }
    if (!fits || room->blocks[block].memory == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert of %zu bytes",
                            total);
    }
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        places[i] = (uint8_t *)room->blocks[block].memory + at;
        at = ep_align_up(at + bytes[i], MATRIX_ALIGN);
    }
    return EP_OK;
}

void ep_expert_data_free(ep_expert_data *expert)
{
    if (expert != NULL) {
        ep_large_free(expert->allocation, expert->bytes);
        *expert = (ep_expert_data){0};
    }
}
