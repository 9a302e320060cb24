/* SPDX-License-Identifier: Apache-2.0 */
/* One expert as the reference kernels read it: the checkpoint's matrices, copied into one block. */
#ifndef EP_BACKENDS_REFERENCE_REFERENCE_WEIGHTS_H
#define EP_BACKENDS_REFERENCE_REFERENCE_WEIGHTS_H

#include "backends/backend.h"

typedef struct ep_reference_weights {
    ep_backend_weights base;
    ep_ffn_source matrices; /* point into memory */
    void *memory;
    size_t bytes;
} ep_reference_weights;

size_t ep_reference_weights_bytes(const ep_expert_source *source);
/* source must have been checked. Errors: NO_MEMORY. */
ep_err ep_reference_weights_create(const ep_expert_source *source,
                                   ep_reference_weights **out_weights, ep_error *out_error);
void ep_reference_weights_destroy(ep_reference_weights *weights);

#endif
