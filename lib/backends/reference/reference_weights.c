/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/reference/reference_weights.h"

#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"

/* One array of an expert: where the source keeps the pointer to it, and its bytes. */
typedef struct piece {
    const void **place;
    size_t bytes;
} piece;

#define PIECES_MAX 11

/* The arrays that a source has, in a fixed order; `place` points into *source. */
static size_t list_pieces(ep_ffn_source *source, piece pieces[PIECES_MAX])
{
    const uint32_t hidden = source->hidden;
    const uint32_t inner = source->inner;
    const ep_weight_format format = source->format;
    const bool has_gate = ep_activation_has_gate(source->activation);
    const ep_weight_format down_format = ep_expert_down_format(source);
    const bool has_scales = !ep_weight_format_is_float(format);
    const size_t wide = inner * ep_weight_row_bytes(format, hidden);
    const size_t wide_scales = ep_weight_scales_bytes(format, inner, hidden);
    const size_t bias = ep_dtype_bytes(source->bias_dtype);
    const struct {
        const void **place;
        size_t bytes;
        bool present;
    } all[PIECES_MAX] = {
        {&source->gate, wide, has_gate},
        {&source->up, wide, true},
        {&source->down, hidden * ep_weight_row_bytes(down_format, inner), true},
        {&source->gate_scales, wide_scales, has_gate && has_scales},
        {&source->up_scales, wide_scales, has_scales},
        {&source->down_scales, ep_weight_scales_bytes(down_format, hidden, inner),
         !ep_weight_format_is_float(down_format)},
        {&source->gate_bias, inner * bias, has_gate && source->gate_bias != NULL},
        {&source->up_bias, inner * bias, source->up_bias != NULL},
        {&source->down_bias, hidden * bias, source->down_bias != NULL},
        {&source->places, hidden * sizeof(uint32_t), source->places != NULL},
        {&source->shared_gate, hidden * ep_dtype_bytes(source->shared_gate_dtype),
         source->shared_gate != NULL},
    };
    size_t count = 0;
    for (size_t i = 0; i < PIECES_MAX; i++) {
        if (all[i].present) {
            pieces[count++] = (piece){all[i].place, all[i].bytes};
        } else {
            *all[i].place = NULL;
        }
    }
    return count;
}

size_t ep_reference_weights_bytes(const ep_expert_source *source)
{
    ep_ffn_source copy = *source;
    piece pieces[PIECES_MAX];
    size_t count = list_pieces(&copy, pieces);
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += pieces[i].bytes;
    }
    return bytes;
}

ep_err ep_reference_weights_create(const ep_expert_source *source,
                                   ep_reference_weights **out_weights, ep_error *out_error)
{
    ep_reference_weights *weights = calloc(1, sizeof(*weights));
    size_t bytes = ep_reference_weights_bytes(source);
    uint8_t *memory = ep_host_alloc(bytes);
    if (weights == NULL || memory == NULL) {
        free(weights);
        free(memory);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert of %zu bytes",
                            bytes);
    }
    weights->base = (ep_backend_weights){.hidden = source->hidden,
                                         .inner = source->inner,
                                         .format = source->format,
                                         .down_format = ep_expert_down_format(source)};
    weights->matrices = *source;
    piece pieces[PIECES_MAX];
    size_t count = list_pieces(&weights->matrices, pieces);
    uint8_t *to = memory;
    for (size_t i = 0; i < count; i++) {
        memcpy(to, *pieces[i].place, pieces[i].bytes);
        *pieces[i].place = to;
        to += pieces[i].bytes;
    }
    weights->memory = memory;
    weights->bytes = bytes;
    *out_weights = weights;
    return EP_OK;
}

void ep_reference_weights_destroy(ep_reference_weights *weights)
{
    if (weights != NULL) {
        free(weights->memory);
        free(weights);
    }
}
