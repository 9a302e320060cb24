/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of one expert. */
#include "base/check.h"
#include "base/large_memory.h"
#include "base/numeric.h"
#include "model/checkpoint_private.h"

#define MATRIX_ALIGN 64

ep_err ep_expert_parts_allocate(const size_t *bytes, size_t count, uint8_t **places,
                                size_t *out_bytes, ep_error *out_error)
{
    size_t total = 0;
    bool fits = true;
    for (size_t i = 0; i < count; i++) {
        fits = fits && ep_add_size(total, bytes[i], &total) && total <= SIZE_MAX - MATRIX_ALIGN;
        total = fits ? ep_align_up(total, MATRIX_ALIGN) : total;
    }
    uint8_t *block = fits ? ep_large_alloc(total, MATRIX_ALIGN) : NULL;
    if (block == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert of %zu bytes",
                            total);
    }
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        places[i] = block + at;
        at = ep_align_up(at + bytes[i], MATRIX_ALIGN);
    }
    *out_bytes = total;
    return EP_OK;
}

void ep_expert_data_free(ep_expert_data *expert)
{
    if (expert != NULL) {
        ep_large_free(expert->allocation, expert->bytes);
        *expert = (ep_expert_data){0};
    }
}
