/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a gate of the router of a checkpoint's layer, for the tokens of a batch. */
#ifndef EP_CLI_GATE_OPTIONS_H
#define EP_CLI_GATE_OPTIONS_H

#include "batch_file.h"
#include "expertd/client.h"
#include "layer_options.h"
#include "model/model.h"

typedef struct ep_cli_gate {
    ep_checkpoint_gate layer;
    ep_router_info router;
    int32_t *chosen; /* [T,K] in a layer that chooses experts by token id; else NULL */
} ep_cli_gate;

/* Errors: as ep_checkpoint_open and ep_checkpoint_read_gate. */
ep_err ep_cli_gate_read(const char *checkpoint_path, uint32_t layer, ep_cli_gate *out_gate,
                        ep_error *out_error);
/* Looks up experts by the batch's token_ids if the layer needs it. Errors: BAD_FILE (no token_ids,
 * an id without a row), NO_MEMORY. */
ep_err ep_cli_gate_choose(ep_cli_gate *gate, const char *batch_path, const ep_cli_batch *batch,
                          ep_error *out_error);
/* The gate for the batch's tokens from first on, with noise and dropout of the options. Sets what
 * the router requires in args: weight on the input, zero and copy experts. */
ep_gate_config ep_cli_gate_config(const ep_cli_gate *gate, int64_t first, ep_moe_args *args);
void ep_cli_gate_fini(ep_cli_gate *gate);

#endif
