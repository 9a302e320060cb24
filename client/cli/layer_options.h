/* SPDX-License-Identifier: Apache-2.0 */
/* Options of a layer call on a batch from a file: the layer, the file, and the call's
 * parameters. */
#ifndef EP_CLI_LAYER_OPTIONS_H
#define EP_CLI_LAYER_OPTIONS_H

#include "arguments.h"
#include "batch_file.h"
#include "expertd/client.h"

typedef struct ep_cli_layer_options {
    const char *in;
    /* checkpoint whose router makes ids and scales of logits; NULL: ids are given */
    const char *logits;
    float noise_temperature, expert_dropout; /* for that router, the next too; 0: none */
    uint64_t gate_seed;
    ep_moe_args args; /* parameters; tensors come from the file */
    bool has_layer;
    ep_dtype out_dtype; /* NONE: not given */
} ep_cli_layer_options;

extern const ep_cli_options ep_cli_layer_set;
/* The same under a heading, for a command that makes a frame of the batch. */
extern const ep_cli_options ep_cli_layer_of_frame_set;
/* Values of the command line. Texts are borrowed from argv. */
extern ep_cli_layer_options ep_cli_layer_wanted;
/* ep_dtype of bf16|f16|f32 */
extern const unsigned ep_cli_dtype_numbers[];

/* Ends the program if --model or --layer is missing. */
void ep_cli_layer_require(struct argp_state *state);

/* The type of y: the requested one, else that of x, but bf16 for int8. */
ep_dtype ep_cli_layer_out_dtype(const ep_cli_batch *batch);

/* The tensor that the options need and the batch lacks; NULL: none. */
const char *ep_cli_layer_missing(const ep_cli_batch *batch);
/* Advice to print after its name, or "". */
const char *ep_cli_layer_missing_hint(const char *missing);

/* The parameters with rows first .. first+count of the batch, borrowed. With logits ids and scales
 * stay absent. */
void ep_cli_layer_args(const ep_cli_batch *batch, int64_t first, int64_t count,
                       ep_moe_args *out_args);

#endif
