/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a batch and cutting it into row ranges. */
#include "batch_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/safetensors.h"
#include "wire/gateway_codec.h"

#define SHAPE_BYTES 160

static void describe_shape(const ep_safetensors_tensor *tensor, char *out_text, size_t bytes)
{
    size_t used = (size_t)snprintf(out_text, bytes, "[");
    for (uint32_t i = 0; i < tensor->rank && used < bytes; i++) {
        used += (size_t)snprintf(out_text + used, bytes - used, "%s%" PRIu64, i > 0 ? "," : "",
                                 tensor->shape[i]);
    }
    if (used < bytes) {
        snprintf(out_text + used, bytes - used, "]");
    }
}

static ep_err bad_shape(const char *path, const ep_safetensors_tensor *tensor, ep_error *out_error,
                        const char *allowed)
{
    char shape[SHAPE_BYTES];
    describe_shape(tensor, shape, sizeof(shape));
    return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: tensor %s has shape %s, allowed: %s", path,
                        tensor->name, shape, allowed);
}

static ep_err read_tensor(const ep_safetensors *file, const char *path,
                          const ep_safetensors_tensor *tensor, ep_tensor *out_tensor,
                          ep_error *out_error)
{
    size_t bytes = ep_safetensors_tensor_bytes(tensor);
    if (tensor->dtype == EP_DTYPE_NONE) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: tensor %s has type %s, allowed: BF16 F16 F32 I8 U8 I32 I64 BOOL",
                            path, tensor->name, tensor->dtype_text);
    }
    void *data = malloc(bytes > 0 ? bytes : 1);
    if (data == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu bytes of tensor %s",
                            path, bytes, tensor->name);
    }
    ep_err err = ep_safetensors_read(file, tensor, 0, data, bytes, out_error);
    if (err != EP_OK) {
        free(data);
        return err;
    }
    *out_tensor = tensor->rank == 1 ? ep_tensor_1d(data, tensor->dtype, (int64_t)tensor->shape[0])
                                    : ep_tensor_2d(data, tensor->dtype, (int64_t)tensor->shape[0],
                                                   (int64_t)tensor->shape[1]);
    return EP_OK;
}

static ep_err no_tensor(const ep_safetensors *file, const char *path, const char *name,
                        ep_error *out_error)
{
    char names[SHAPE_BYTES] = "none";
    size_t used = 0;
    for (size_t i = 0; i < ep_safetensors_count(file) && used < sizeof(names); i++) {
        used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", used > 0 ? ", " : "",
                                 ep_safetensors_at(file, i)->name);
    }
    return ep_error_set(out_error, EP_ERR_BAD_FILE,
                        "%s: there is no tensor %s; a batch has x [T,H], expert_ids [T,K] and "
                        "expert_scales [T,K], this file has %s",
                        path, name, names);
}

/* A tensor of the given rank whose first dimension is T (tokens < 0: it defines T). */
static ep_err need(const ep_safetensors *file, const char *path, const char *name, uint32_t rank,
                   int64_t tokens, int64_t columns, ep_tensor *out_tensor, ep_error *out_error)
{
    char allowed[SHAPE_BYTES];
    const ep_safetensors_tensor *tensor = ep_safetensors_find(file, name);
    if (tensor == NULL) {
        return no_tensor(file, path, name, out_error);
    }
    if (tokens < 0) {
        snprintf(allowed, sizeof(allowed), "[T,H], T up to %" PRId64, EP_CLI_BATCH_TOKENS_MAX);
    } else if (rank == 1) {
        snprintf(allowed, sizeof(allowed), "[%" PRId64 "], the tokens of x", tokens);
    } else if (columns < 0) {
        snprintf(allowed, sizeof(allowed), "[%" PRId64 ",K], the tokens of x", tokens);
    } else {
        snprintf(allowed, sizeof(allowed), "[%" PRId64 ",%" PRId64 "], as expert_ids", tokens,
                 columns);
    }
    bool fits =
        tensor->rank == rank && (tokens < 0 ? tensor->shape[0] <= (uint64_t)EP_CLI_BATCH_TOKENS_MAX
                                            : tensor->shape[0] == (uint64_t)tokens);
    if (!fits || (columns >= 0 && tensor->shape[1] != (uint64_t)columns)) {
        return bad_shape(path, tensor, out_error, allowed);
    }
    return read_tensor(file, path, tensor, out_tensor, out_error);
}

static bool is_choice(const char *name)
{
    return strcmp(name, "expert_ids") == 0 || strcmp(name, "expert_scales") == 0;
}

/* Whether ep_moe_args has a tensor of this name and rank. */
static bool is_form(const char *name, uint32_t rank)
{
    ep_moe_tensor row;
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        if (strcmp(row.name, name) == 0 && strlen(row.dims) == rank) {
            return true;
        }
    }
    return false;
}

/* Reads the optional tensors. */
static ep_err read_optional(const ep_safetensors *file, const char *path, ep_cli_batch *batch,
                            ep_error *out_error)
{
    ep_moe_tensor row;
    ep_err err = EP_OK;
    for (uint32_t at = 0; err == EP_OK && ep_moe_tensor_next(&at, &row);) {
        const ep_safetensors_tensor *tensor = ep_safetensors_find(file, row.name);
        ep_tensor *out_tensor = ep_moe_tensor_of(&row, &batch->args);
        const uint32_t rank = (uint32_t)strlen(row.dims);
        const bool is_scales = strcmp(row.name, "x_scales") == 0; /* only with x in i8 */
        if (tensor == NULL || out_tensor->rank != 0 || is_choice(row.name) || is_scales ||
            (tensor->rank != rank && is_form(row.name, tensor->rank))) {
            continue;
        }
        if (row.dims[0] == 'T') {
            const int64_t columns = row.dims[1] == 'K' && batch->top_k > 0 ? batch->top_k : -1;
            err = need(file, path, row.name, rank, batch->tokens, columns, out_tensor, out_error);
        } else if (tensor->rank != rank) {
            err = bad_shape(path, tensor, out_error, "two dimensions");
        } else {
            err = read_tensor(file, path, tensor, out_tensor, out_error);
        }
    }
    return err;
}

static ep_err read_choice(const ep_safetensors *file, const char *path, ep_cli_batch *batch,
                          ep_error *out_error)
{
    ep_err err =
        need(file, path, "expert_ids", 2, batch->tokens, -1, &batch->args.expert_ids, out_error);
    if (err != EP_OK) {
        return err;
    }
    batch->top_k = batch->args.expert_ids.shape[1];
    return need(file, path, "expert_scales", 2, batch->tokens, batch->top_k,
                &batch->args.expert_scales, out_error);
}

static ep_err read_all(const ep_safetensors *file, const char *path, ep_cli_batch *batch,
                       ep_error *out_error)
{
    ep_err err = need(file, path, "x", 2, -1, -1, &batch->args.x, out_error);
    if (err != EP_OK) {
        return err;
    }
    batch->tokens = batch->args.x.shape[0];
    batch->hidden = batch->args.x.shape[1];
    bool has_logits = ep_safetensors_find(file, "logits") != NULL;
    if (has_logits) {
        err = need(file, path, "logits", 2, batch->tokens, -1, &batch->logits, out_error);
    }
    if (err == EP_OK && (!has_logits || ep_safetensors_find(file, "expert_ids") != NULL)) {
        err = read_choice(file, path, batch, out_error);
    }
    if (err == EP_OK && batch->args.x.dtype == EP_DTYPE_I8) {
        err = need(file, path, "x_scales", 1, batch->tokens, -1, &batch->args.x_scales, out_error);
    }
    if (err == EP_OK && ep_safetensors_find(file, "token_ids") != NULL) {
        err = need(file, path, "token_ids", 1, batch->tokens, -1, &batch->token_ids, out_error);
    }
    return err == EP_OK ? read_optional(file, path, batch, out_error) : err;
}

static bool is_known(const char *name)
{
    ep_moe_tensor row;
    bool found = strcmp(name, "logits") == 0 || strcmp(name, "token_ids") == 0;
    for (uint32_t at = 0; !found && ep_moe_tensor_next(&at, &row);) {
        found = strcmp(name, row.name) == 0;
    }
    return found;
}

/* Notes unused tensors, since a misspelt optional one would go unnoticed. */
static void note_ignored(const ep_safetensors *file, ep_cli_batch *batch)
{
    size_t used = 0;
    for (size_t i = 0; i < ep_safetensors_count(file) && used < sizeof(batch->ignored); i++) {
        const char *name = ep_safetensors_at(file, i)->name;
        /* useless because x is not i8 */
        bool is_useless = strcmp(name, "x_scales") == 0 && batch->args.x_scales.rank == 0;
        if (is_useless || !is_known(name)) {
            used += (size_t)snprintf(batch->ignored + used, sizeof(batch->ignored) - used, "%s%s",
                                     used > 0 ? ", " : "", name);
        }
    }
}

ep_err ep_cli_batch_read(const char *path, ep_cli_batch *out_batch, ep_error *out_error)
{
    ep_safetensors *file = NULL;
    ep_cli_batch batch = {.logits = ep_tensor_none(), .token_ids = ep_tensor_none()};
    ep_moe_args_init(&batch.args);
    ep_err err = ep_safetensors_open_path(path, &file, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = read_all(file, path, &batch, out_error);
    note_ignored(file, &batch);
    ep_safetensors_close(file);
    if (err != EP_OK) {
        ep_cli_batch_free(&batch);
        return err;
    }
    *out_batch = batch;
    return EP_OK;
}

void ep_cli_batch_free(ep_cli_batch *batch)
{
    ep_moe_tensor row;
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        ep_tensor *tensor = ep_moe_tensor_of(&row, &batch->args);
        free(tensor->data);
        *tensor = ep_tensor_none();
    }
    free(batch->logits.data);
    free(batch->token_ids.data);
    batch->logits = batch->token_ids = ep_tensor_none();
}

ep_tensor ep_cli_tensor_rows(const ep_tensor *tensor, int64_t first, int64_t count)
{
    ep_tensor rows = *tensor;
    if (tensor->rank > 0) {
        rows.data = (uint8_t *)tensor->data + first * tensor->stride_bytes[0];
        rows.shape[0] = count;
    }
    return rows;
}

size_t ep_cli_tensor_bytes(const ep_tensor *tensor)
{
    size_t bytes = tensor->rank > 0 ? ep_dtype_bytes(tensor->dtype) : 0;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}
