/* SPDX-License-Identifier: Apache-2.0 */
/* The options of one layer call on a batch from a file: which layer, which file, and what the
 * caller wishes.
 */
#ifndef EP_CLI_LAYER_OPTIONS_H
#define EP_CLI_LAYER_OPTIONS_H

#include "arguments.h"
#include "batch_file.h"
#include "expertd/client.h"

typedef struct ep_cli_layer_options {
    const char *in;
    /* checkpoint whose router turns logits into ids and scales; NULL: ids are given */
    const char *logits;
    float noise_temperature, expert_dropout; /* of that router, as the next; 0: none */
    uint64_t gate_seed;
    ep_moe_args args; /* the wishes; tensors come from the file */
    bool has_layer;
    ep_dtype out_dtype; /* NONE: not given */
} ep_cli_layer_options;

extern const ep_cli_options ep_cli_layer_set;
/* The same below a heading, for who makes a frame of the batch. */
extern const ep_cli_options ep_cli_layer_of_frame_set;
/* What the command line says. Texts are borrowed from argv. */
extern ep_cli_layer_options ep_cli_layer_wanted;
/* ep_dtype of bf16|f16|f32 */
extern const unsigned ep_cli_dtype_numbers[];

/* Ends the program when --model or --layer is missing. */
void ep_cli_layer_require(struct argp_state *state);

/* The type of y: what was asked for, else that of x, bf16 for int8. */
ep_dtype ep_cli_layer_out_dtype(const ep_cli_batch *batch);

/* The tensor that the options need and the batch lacks; NULL: none. */
const char *ep_cli_layer_missing(const ep_cli_batch *batch);
/* What to do about it, to follow its name; or "". */
const char *ep_cli_layer_missing_hint(const char *missing);

/* The wishes and rows first .. first+count of the batch. With logits ids and scales stay absent.
 * Borrows. */
void ep_cli_layer_args(const ep_cli_batch *batch, int64_t first, int64_t count,
                       ep_moe_args *out_args);

#endif
