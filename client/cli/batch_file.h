/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One layer call's inputs in a safetensors file:
 *     x [T,H]   expert_ids [T,K]   expert_scales [T,K]
 *     optional: the other tensors of ep_moe_args by their names, logits [T,E], token_ids [T]
 * With logits the ids and scales may be absent.
 * First dimensions that count tokens are checked against x here, all else by the library.
 */
#ifndef EP_CLI_BATCH_FILE_H
#define EP_CLI_BATCH_FILE_H

#include "base/error.h"
#include "expertd/client.h"

#define EP_CLI_BATCH_TOKENS_MAX ((int64_t)1 << 24)

typedef struct ep_cli_batch {
    int64_t tokens;
    int64_t top_k; /* 0 without expert_ids */
    int64_t hidden;
    ep_moe_args args;    /* only its tensors are set; without ids and scales there are logits */
    ep_tensor logits;    /* rank 0: absent */
    ep_tensor token_ids; /* rank 0: absent */
    /* names of tensors that are not used, separated by ", ", perhaps truncated; "": none */
    char ignored[256];
} ep_cli_batch;

/* Errors: NOT_FOUND, BAD_FILE (file, tensor, shape, allowed), IO, NO_MEMORY. */
ep_err ep_cli_batch_read(const char *path, ep_cli_batch *out_batch, ep_error *out_error);
void ep_cli_batch_free(ep_cli_batch *batch);

/* Rows first .. first+count of a tensor, borrowed; the absent tensor stays absent. */
ep_tensor ep_cli_tensor_rows(const ep_tensor *tensor, int64_t first, int64_t count);
/* Size of its elements; 0 for the absent tensor. */
size_t ep_cli_tensor_bytes(const ep_tensor *tensor);

#endif
