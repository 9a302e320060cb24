/* SPDX-License-Identifier: Apache-2.0 */
/* The arguments that say how rows are quantised for their way to the nodes and back. */
#include <inttypes.h>

#include "common/args.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

_Static_assert((int)EP_MOE_DISPATCH_INT8 == (int)EP_DISPATCH_INT8 &&
                   (int)EP_MOE_DISPATCH_FP8 == (int)EP_DISPATCH_FP8,
               "dispatch_quant");
_Static_assert((int)EP_MOE_COMBINE_INT8 == (int)EP_COMBINE_INT8, "combine_quant");

static ep_err fill_smooth(const ep_moe_args *args, const ep_layer_shape *shape, ep_batch *batch,
                          ep_error *out_error)
{
    static const ep_dtype f32_types[] = {EP_DTYPE_F32, EP_DTYPE_NONE};
    const ep_tensor *smooth = &args->smooth_scales;
    uint32_t rows = shape->shared_experts + shape->experts;
    if (args->dispatch_quant != EP_MOE_DISPATCH_INT8) {
        return BAD("smooth_scales are given, but dispatch_quant is %u: allowed with 2 (int8) only",
                   (unsigned)args->dispatch_quant);
    }
    /* Each slot brings a row of its own then: there is no row that a host or a node could share. */
    if (args->comm_alg == EP_MOE_COMM_HIERARCHY || args->combine_at == EP_MOE_COMBINE_NODE_SUM) {
        return BAD("smooth_scales are given with %s: allowed with comm_alg 0 (auto), 1 (fullmesh) "
                   "and combine_at 0 (rows)",
                   args->comm_alg == EP_MOE_COMM_HIERARCHY ? "comm_alg 2 (hierarchy)"
                                                           : "combine_at 1 (node_sum)");
    }
    ep_err err = ep_tensor_check("smooth_scales", smooth, 2, f32_types, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (smooth->shape[0] != rows || smooth->shape[1] != shape->hidden) {
        return BAD("smooth_scales are %" PRId64 " x %" PRId64 ": layer %" PRIu32 " has %" PRIu32
                   " shared and %" PRIu32 " routed experts of hidden %" PRIu32 ", so %" PRIu32
                   " x %" PRIu32 " is needed",
                   smooth->shape[0], smooth->shape[1], shape->layer, shape->shared_experts,
                   shape->experts, shape->hidden, rows, shape->hidden);
    }
    if ((uintptr_t)smooth->data % sizeof(float) != 0 ||
        smooth->stride_bytes[0] % (int64_t)sizeof(float) != 0) {
        return BAD("smooth_scales begin at %p with stride %" PRId64 ": allowed multiples of %zu",
                   smooth->data, smooth->stride_bytes[0], sizeof(float));
    }
    batch->smooth = (ep_rows){smooth->data, smooth->stride_bytes[0], smooth->dtype};
    batch->smooth_first = shape->shared_experts;
    return EP_OK;
}

ep_err ep_args_fill_quant(const ep_moe_args *args, const ep_layer_shape *shape, ep_batch *batch,
                          ep_error *out_error)
{
    unsigned dispatch = (unsigned)args->dispatch_quant;
    if (dispatch != EP_MOE_DISPATCH_PLAIN && dispatch != EP_MOE_DISPATCH_INT8 &&
        dispatch != EP_MOE_DISPATCH_FP8) {
        return BAD("dispatch_quant %u: allowed 0 (plain), 2 (int8), 3 (fp8)", dispatch);
    }
    if (args->combine_quant != EP_MOE_COMBINE_PLAIN && args->combine_quant != EP_MOE_COMBINE_INT8) {
        return BAD("combine_quant %u: allowed 0 (plain), 2 (int8)", (unsigned)args->combine_quant);
    }
    if (dispatch != EP_MOE_DISPATCH_PLAIN && args->x.dtype == EP_DTYPE_I8) {
        return BAD("dispatch_quant is %u, but x is i8 already: allowed with bf16, f16, f32 only",
                   dispatch);
    }
    batch->dispatch_quant = (ep_dispatch_quant)dispatch;
    batch->combine_quant = (ep_combine_quant)args->combine_quant;
    return args->smooth_scales.rank != 0 ? fill_smooth(args, shape, batch, out_error) : EP_OK;
}
