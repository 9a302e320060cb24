/* SPDX-License-Identifier: Apache-2.0 */
#include "random_batch.h"

#include <inttypes.h>

#include "bench.h"
#include "placement.h"

ep_err ep_cli_batch_random(const ep_cli_connect *connect, const ep_moe_args *args, uint32_t tokens,
                           uint64_t seed, ep_cli_batch *out_batch, ep_error *out_error)
{
    ep_cli_control *control = NULL;
    ep_routing_table *table = NULL;
    ep_cli_bench_batch random = {0};
    uint32_t model = 0;
    ep_err err = ep_cli_control_open(connect, &control, out_error);
    err = err != EP_OK ? err : ep_cli_placement_read(control, connect, &table, out_error);
    ep_cli_control_close(control);
    if (err != EP_OK) {
        return err;
    }
    const bool has_model =
        ep_routing_table_find_model(table, args->model, args->version, &model) != NULL;
    const ep_routing_layer *layer =
        has_model ? ep_routing_table_find_layer(table, model, args->layer) : NULL;
    if (layer == NULL) {
        err = ep_cli_placement_missing(table, args->model, args->version,
                                       has_model ? (int64_t)args->layer : -1, out_error);
        ep_routing_table_unref(table);
        return err;
    }
    const ep_layer_shape *shape = &layer->shape;
    const ep_layer_desc desc = {.hidden = shape->hidden, .experts = shape->experts};
    if (!ep_cli_bench_batch_fill(&random, &desc, tokens, shape->top_k, seed)) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY,
                           "no memory for %" PRIu32 " tokens of %" PRIu32 " values", tokens,
                           shape->hidden);
    } else {
        *out_batch = (ep_cli_batch){
            .tokens = tokens,
            .top_k = shape->top_k,
            .hidden = shape->hidden,
            .x = ep_tensor_2d(random.x, EP_DTYPE_BF16, tokens, shape->hidden),
            .expert_ids = ep_tensor_2d(random.ids, EP_DTYPE_I32, tokens, shape->top_k),
            .expert_scales = ep_tensor_2d(random.scales, EP_DTYPE_F32, tokens, shape->top_k),
            .logits = ep_tensor_none(),
            .x_scales = ep_tensor_none(),
            .active_mask = ep_tensor_none()};
    }
    ep_routing_table_unref(table);
    return err;
}
