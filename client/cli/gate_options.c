/* SPDX-License-Identifier: Apache-2.0 */
#include "gate_options.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/error.h"

ep_err ep_cli_gate_read(const char *checkpoint_path, uint32_t layer, ep_cli_gate *out_gate,
                        ep_error *out_error)
{
    ep_checkpoint *checkpoint = NULL;
    ep_cli_gate gate = {.chosen = NULL};
    ep_err err = ep_checkpoint_open(checkpoint_path, &checkpoint, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_checkpoint_read_gate(checkpoint, layer, &gate.layer, out_error);
    gate.router = ep_checkpoint_info(checkpoint)->router;
    ep_checkpoint_close(checkpoint);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "%s", checkpoint_path);
    }
    *out_gate = gate;
    return EP_OK;
}

static int64_t token_id(const ep_tensor *ids, int64_t token)
{
    return ids->dtype == EP_DTYPE_I64 ? ((const int64_t *)ids->data)[token]
                                      : ((const int32_t *)ids->data)[token];
}

ep_err ep_cli_gate_choose(ep_cli_gate *gate, const char *batch_path, const ep_cli_batch *batch,
                          ep_error *out_error)
{
    const ep_tensor *ids = &batch->token_ids;
    const size_t top_k = gate->layer.config.top_k;
    if (gate->layer.table == NULL) {
        return EP_OK;
    }
    if (ids->rank != 1 || (ids->dtype != EP_DTYPE_I32 && ids->dtype != EP_DTYPE_I64)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: there is no tensor token_ids [T] of i32 or i64, by which this "
                            "layer takes its experts",
                            batch_path);
    }
    gate->chosen = calloc((size_t)batch->tokens * top_k + 1, sizeof(*gate->chosen));
    if (gate->chosen == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory for the experts of %" PRId64 " tokens", batch->tokens);
    }
    for (int64_t t = 0; t < batch->tokens; t++) {
        const int64_t id = token_id(ids, t);
        if (id < 0 || id >= (int64_t)gate->layer.table_rows) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: token_ids[%" PRId64 "] is %" PRId64 ", allowed 0..%" PRIu32,
                                batch_path, t, id, gate->layer.table_rows - 1);
        }
        for (size_t k = 0; k < top_k; k++) {
            gate->chosen[(size_t)t * top_k + k] = gate->layer.table[(size_t)id * top_k + k];
        }
    }
    return EP_OK;
}

ep_gate_config ep_cli_gate_config(const ep_cli_gate *gate, int64_t first, ep_moe_args *args)
{
    ep_gate_config config = gate->layer.config;
    config.chosen = gate->chosen == NULL ? NULL : gate->chosen + (size_t)first * config.top_k;
    config.noise_temperature = ep_cli_layer_wanted.noise_temperature;
    config.expert_dropout = ep_cli_layer_wanted.expert_dropout;
    /* different draws from those of earlier tokens */
    config.seed = ep_cli_layer_wanted.gate_seed + (uint64_t)first;
    args->weight_on = gate->router.weight_on_input ? EP_MOE_WEIGHT_ON_INPUT : args->weight_on;
    args->zero_experts = gate->router.zero_experts;
    args->copy_experts = gate->router.copy_experts;
    return config;
}

void ep_cli_gate_fini(ep_cli_gate *gate)
{
    ep_checkpoint_gate_fini(&gate->layer);
    free(gate->chosen);
    gate->chosen = NULL;
}
