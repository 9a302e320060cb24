/* SPDX-License-Identifier: Apache-2.0 */
/* The options of one layer call on a batch from a file: which layer, which file, and what the
 * caller wishes.
 */
#ifndef EP_CLI_LAYER_OPTIONS_H
#define EP_CLI_LAYER_OPTIONS_H

#include <argp.h>
#include <stdbool.h>

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

void ep_cli_layer_options_init(ep_cli_layer_options *out_options);

/* Its input is an ep_cli_layer_options. Texts are borrowed from argv. */
extern const struct argp ep_cli_layer_argp;

/* Ends the program when --model or --layer is missing. */
void ep_cli_layer_require(struct argp_state *state, const ep_cli_layer_options *options);

/* The type of y: what was asked for, else that of x, bf16 for int8. */
ep_dtype ep_cli_layer_out_dtype(const ep_cli_layer_options *options, const ep_cli_batch *batch);

/* The tensor that the options need and the batch lacks; NULL: none. */
const char *ep_cli_layer_missing(const ep_cli_layer_options *options, const ep_cli_batch *batch);

/* The wishes and rows first .. first+count of the batch. With logits ids and scales stay absent.
 * Borrows. */
void ep_cli_layer_args(const ep_cli_layer_options *options, const ep_cli_batch *batch,
                       int64_t first, int64_t count, ep_moe_args *out_args);

#endif
