/* SPDX-License-Identifier: Apache-2.0 */
/* The library that bench_hf.py loads: a layer computed in its own process (layer_local.h). */
#include "base/error.h"
#include "bench/layer_local.h"

#define EXPORTED __attribute__((visibility("default")))

EXPORTED layer_local *hf_local_open(const char *checkpoint, uint32_t layer, uint32_t threads,
                                    ep_error *out_error);
EXPORTED ep_err hf_local_run(layer_local *local, const void *x, const int64_t *ids,
                             const float *scales, uint32_t tokens, void *out);

/* NULL: out_error says why. */
layer_local *hf_local_open(const char *checkpoint, uint32_t layer, uint32_t threads,
                           ep_error *out_error)
{
    layer_local *local = NULL;
    return layer_local_open(checkpoint, layer, threads, &local, out_error) == EP_OK ? local : NULL;
}

/* x and out [T,H] of bf16, ids and scales [T,K]; contiguous. */
ep_err hf_local_run(layer_local *local, const void *x, const int64_t *ids, const float *scales,
                    uint32_t tokens, void *out)
{
    const ep_layer_shape *shape = layer_local_shape(local);
    const ep_batch batch = {
        .tokens = tokens,
        .top_k = shape->top_k,
        .hidden = shape->hidden,
        .x = {.data = x, .stride_bytes = shape->hidden * 2, .dtype = EP_DTYPE_BF16},
        .ids = {.data = ids, .stride_bytes = shape->top_k * 8, .dtype = EP_DTYPE_I64},
        .scales = {.data = scales, .stride_bytes = shape->top_k * 4, .dtype = EP_DTYPE_F32},
        .shared_source = EP_SHARED_NONE,
        .wire_dtype = EP_DTYPE_BF16,
        .out_dtype = EP_DTYPE_BF16};
    return layer_local_run(local, &batch, out);
}
