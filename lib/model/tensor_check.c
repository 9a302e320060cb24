/* SPDX-License-Identifier: Apache-2.0 */
#include "model/tensor_check.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "moe/convert.h"

#define SHAPE_TEXT_BYTES (EP_TENSOR_RANK_MAX * 21 + 3)

bool ep_tensor_has_type(const ep_checkpoint_entry *entry, const char *text)
{
    return strcmp(entry->tensor->dtype_text, text) == 0;
}

bool ep_tensor_has_shape(const ep_checkpoint_entry *entry, const uint64_t *dims, size_t rank)
{
    bool same = entry->tensor->rank == rank;
    for (size_t i = 0; same && i < rank; i++) {
        same = entry->tensor->shape[i] == dims[i];
    }
    return same;
}

static void print_shape(const uint64_t *dims, size_t rank, char out[SHAPE_TEXT_BYTES])
{
    size_t used = (size_t)snprintf(out, SHAPE_TEXT_BYTES, "[");
    for (size_t i = 0; i < rank; i++) {
        used += (size_t)snprintf(out + used, SHAPE_TEXT_BYTES - used, "%s%" PRIu64,
                                 i == 0 ? "" : ",", dims[i]);
    }
    snprintf(out + used, SHAPE_TEXT_BYTES - used, "]");
}

ep_err ep_tensor_shape_error(const ep_checkpoint_entry *entry, const uint64_t *dims, size_t rank,
                             ep_error *out_error)
{
    char got[SHAPE_TEXT_BYTES];
    char want[SHAPE_TEXT_BYTES];
    print_shape(entry->tensor->shape, entry->tensor->rank, got);
    print_shape(dims, rank, want);
    return ep_error_set(out_error, EP_ERR_BAD_FILE,
                        "%s: tensor %.200s: shape is %s, allowed %s by config.json",
                        ep_safetensors_name(entry->shard), entry->name, got, want);
}

ep_err ep_tensor_check_shape(const ep_checkpoint_entry *entry, const uint64_t *dims, size_t rank,
                             ep_error *out_error)
{
    return ep_tensor_has_shape(entry, dims, rank)
               ? EP_OK
               : ep_tensor_shape_error(entry, dims, rank, out_error);
}

ep_err ep_tensor_type_error(const ep_checkpoint_entry *entry, const char *allowed,
                            ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: tensor %.200s: dtype is %s, allowed %s",
                        ep_safetensors_name(entry->shard), entry->name, entry->tensor->dtype_text,
                        allowed);
}

ep_err ep_tensor_check_float(const ep_checkpoint_entry *entry, ep_dtype dtype, ep_error *out_error)
{
    const bool is_any = dtype == EP_DTYPE_NONE;
    const bool is_good =
        is_any ? ep_dtype_is_float(entry->tensor->dtype) : entry->tensor->dtype == dtype;
    return is_good
               ? EP_OK
               : ep_tensor_type_error(entry,
                                      is_any ? "BF16, F16, F32" : ep_safetensors_dtype_text(dtype),
                                      out_error);
}

ep_err ep_tensor_check_plain(const ep_checkpoint_entry *entry, uint64_t rows, uint64_t columns,
                             ep_dtype dtype, ep_error *out_error)
{
    const ep_err err = ep_tensor_check_float(entry, dtype, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (rows != 0) {
        return ep_tensor_check_shape(entry, EP_DIMS(rows, columns), out_error);
    }
    return ep_tensor_has_shape(entry, EP_DIMS(1, columns))
               ? EP_OK
               : ep_tensor_check_shape(entry, EP_DIMS(columns), out_error);
}
