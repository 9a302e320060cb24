/* SPDX-License-Identifier: Apache-2.0 */
#include "gate_options.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/error.h"
#include "model/model.h"

#define EPSILON 1e-20f /* as in the models' reference code */

static const ep_layer_shape *find_layer(const ep_model_info *info, uint32_t layer)
{
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        if (info->moe_layers[i].layer == layer) {
            return &info->moe_layers[i];
        }
    }
    return NULL;
}

static ep_err read_gate(const ep_checkpoint *checkpoint, const char *path, uint32_t layer, ep_gate_config *out_gate, float **out_bias,
                        ep_error *out_error)
{
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    const ep_layer_shape *shape = find_layer(info, layer);
    float *weight = NULL;
    float *bias = NULL;
    if (shape == NULL) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND, "%s: layer %" PRIu32 " is no MoE layer of this model", path, layer);
    }
    if (info->router.family == EP_ROUTER_OTHER) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "%s: this build does not compute the router of model type %s", path, info->model_type);
    }
    ep_err err = ep_checkpoint_read_router(checkpoint, layer, &weight, &bias, out_error);
    if (err != EP_OK) {
        return err;
    }
    free(weight);
    static const ep_gate_score select[] = {[EP_ROUTER_R1] = EP_GATE_LOGIT, [EP_ROUTER_R2] = EP_GATE_SOFTMAX,
                                           [EP_ROUTER_R3] = EP_GATE_SOFTMAX, [EP_ROUTER_R4] = EP_GATE_SIGMOID};
    const ep_router_family family = info->router.family;
    const bool grouped = family == EP_ROUTER_R3 || family == EP_ROUTER_R4;
    *out_gate = (ep_gate_config){
        .struct_bytes = sizeof(*out_gate),
        .experts = shape->experts,
        .top_k = shape->top_k,
        .select = select[family],
        .weight = family == EP_ROUTER_R1 ? EP_GATE_SOFTMAX_SELECTED : select[family],
        .bias = bias,
        .groups = grouped ? info->router.groups : 1,
        .groups_kept = grouped ? info->router.groups_kept : 1,
        .group_best = family == EP_ROUTER_R3 ? 1 : 2,
        .renormalise = info->router.renormalise && family != EP_ROUTER_R1,
        .epsilon = grouped ? EPSILON : 0.0f,
        .scaling_factor = family == EP_ROUTER_R4 || (family == EP_ROUTER_R3 && !info->router.renormalise) ? info->router.scaling_factor : 1.0f,
    };
    *out_bias = bias;
    return EP_OK;
}

ep_err ep_cli_gate_read(const char *checkpoint_path, uint32_t layer, ep_gate_config *out_gate, float **out_bias, ep_error *out_error)
{
    ep_checkpoint *checkpoint = NULL;
    ep_err err = ep_checkpoint_open(checkpoint_path, &checkpoint, out_error);
    if (err == EP_OK) {
        err = read_gate(checkpoint, checkpoint_path, layer, out_gate, out_bias, out_error);
        ep_checkpoint_close(checkpoint);
    }
    return err;
}
