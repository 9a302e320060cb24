/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/reference/reference_weights.h"

#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"

static size_t matrix_bytes(const ep_expert_source *source)
{
    return (size_t)source->hidden * source->inner * ep_dtype_bytes(source->dtype);
}

static size_t shared_gate_bytes(const ep_expert_source *source)
{
    return source->shared_gate == NULL ? 0 : source->hidden * ep_dtype_bytes(source->shared_gate_dtype);
}

size_t ep_reference_weights_bytes(const ep_expert_source *source)
{
    return 3 * matrix_bytes(source) + shared_gate_bytes(source);
}

ep_err ep_reference_weights_create(const ep_expert_source *source, ep_reference_weights **out_weights,
                                   ep_error *out_error)
{
    ep_reference_weights *weights = calloc(1, sizeof(*weights));
    size_t bytes = ep_reference_weights_bytes(source);
    uint8_t *memory = ep_host_alloc(bytes);
    if (weights == NULL || memory == NULL) {
        free(weights);
        free(memory);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert of %zu bytes", bytes);
    }
    const size_t one = matrix_bytes(source);
    memcpy(memory, source->gate, one);
    memcpy(memory + one, source->up, one);
    memcpy(memory + 2 * one, source->down, one);

    weights->base =
        (ep_backend_weights){.hidden = source->hidden, .inner = source->inner, .dtype = source->dtype};
    weights->matrices = ep_expert_source_matrices(source);
    weights->matrices.gate = memory;
    weights->matrices.up = memory + one;
    weights->matrices.down = memory + 2 * one;
    if (source->shared_gate != NULL) {
        memcpy(memory + 3 * one, source->shared_gate, shared_gate_bytes(source));
        weights->matrices.shared_gate = memory + 3 * one;
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
