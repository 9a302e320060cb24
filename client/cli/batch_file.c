/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a batch and cutting it into row ranges. */
#include "batch_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/safetensors.h"

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

static ep_err read_mask(const ep_safetensors *file, const char *path, ep_cli_batch *batch,
                        ep_error *out_error)
{
    const ep_safetensors_tensor *tensor = ep_safetensors_find(file, "active_mask");
    if (tensor == NULL) {
        return EP_OK;
    }
    return need(file, path, "active_mask", tensor->rank == 1 ? 1 : 2, batch->tokens,
                tensor->rank == 1 ? -1 : batch->top_k, &batch->active_mask, out_error);
}

static ep_err read_choice(const ep_safetensors *file, const char *path, ep_cli_batch *batch,
                          ep_error *out_error)
{
    ep_err err =
        need(file, path, "expert_ids", 2, batch->tokens, -1, &batch->expert_ids, out_error);
    if (err != EP_OK) {
        return err;
    }
    batch->top_k = batch->expert_ids.shape[1];
    return need(file, path, "expert_scales", 2, batch->tokens, batch->top_k, &batch->expert_scales,
                out_error);
}

static ep_err read_all(const ep_safetensors *file, const char *path, ep_cli_batch *batch,
                       ep_error *out_error)
{
    ep_err err = need(file, path, "x", 2, -1, -1, &batch->x, out_error);
    if (err != EP_OK) {
        return err;
    }
    batch->tokens = batch->x.shape[0];
    batch->hidden = batch->x.shape[1];
    bool has_logits = ep_safetensors_find(file, "logits") != NULL;
    if (has_logits) {
        err = need(file, path, "logits", 2, batch->tokens, -1, &batch->logits, out_error);
    }
    if (err == EP_OK && (!has_logits || ep_safetensors_find(file, "expert_ids") != NULL)) {
        err = read_choice(file, path, batch, out_error);
    }
    if (err == EP_OK && batch->x.dtype == EP_DTYPE_I8) {
        err = need(file, path, "x_scales", 1, batch->tokens, -1, &batch->x_scales, out_error);
    }
    if (err == EP_OK && ep_safetensors_find(file, "token_ids") != NULL) {
        err = need(file, path, "token_ids", 1, batch->tokens, -1, &batch->token_ids, out_error);
    }
    return err == EP_OK ? read_mask(file, path, batch, out_error) : err;
}

/* A misspelt optional tensor would go unnoticed. */
static void note_ignored(const ep_safetensors *file, ep_cli_batch *batch)
{
    static const char *const known[] = {"x",        "expert_ids",  "expert_scales", "logits",
                                        "x_scales", "active_mask", "token_ids"};
    size_t used = 0;
    for (size_t i = 0; i < ep_safetensors_count(file) && used < sizeof(batch->ignored); i++) {
        const char *name = ep_safetensors_at(file, i)->name;
        /* x is no i8 */
        bool is_useless = strcmp(name, "x_scales") == 0 && batch->x_scales.rank == 0;
        size_t k = 0;
        while (k < sizeof(known) / sizeof(known[0]) && strcmp(known[k], name) != 0) {
            k++;
        }
        if (is_useless || k == sizeof(known) / sizeof(known[0])) {
            used += (size_t)snprintf(batch->ignored + used, sizeof(batch->ignored) - used, "%s%s",
                                     used > 0 ? ", " : "", name);
        }
    }
}

ep_err ep_cli_batch_read(const char *path, ep_cli_batch *out_batch, ep_error *out_error)
{
    ep_safetensors *file = NULL;
    ep_cli_batch batch = {.x = ep_tensor_none(),
                          .expert_ids = ep_tensor_none(),
                          .expert_scales = ep_tensor_none(),
                          .logits = ep_tensor_none(),
                          .x_scales = ep_tensor_none(),
                          .active_mask = ep_tensor_none(),
                          .token_ids = ep_tensor_none()};
    ep_err err = ep_safetensors_open_path(path, NULL, &file, out_error);
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
    ep_tensor *tensors[] = {&batch->x,        &batch->expert_ids,  &batch->expert_scales,
                            &batch->x_scales, &batch->active_mask, &batch->logits,
                            &batch->token_ids};
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
        free(tensors[i]->data);
        *tensors[i] = ep_tensor_none();
    }
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
