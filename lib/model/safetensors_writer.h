/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a safetensors file: header padded to 8 bytes, tensors sorted by element size (descending)
 * and then by name. */
#ifndef EP_MODEL_SAFETENSORS_WRITER_H
#define EP_MODEL_SAFETENSORS_WRITER_H

#include "base/error.h"
#include "expertd/tensor.h"

typedef struct ep_named_tensor {
    const char *name; /* 1..EP_SAFETENSORS_NAME_BYTES_MAX bytes of UTF-8 without control bytes */
    ep_tensor tensor; /* host memory; outer dimensions may have any stride; rank 0 is refused */
} ep_named_tensor;

typedef struct ep_metadata_pair {
    const char *key;
    const char *value;
} ep_metadata_pair;

/*
 * Writes the whole file or nothing: to a temporary file in the same directory, then fsync and
 * rename. An existing file is replaced. Borrows everything for the call. metadata may be NULL.
 * Errors: INVALID_ARGUMENT (name, dtype, rank, stride, duplicate), UNIMPLEMENTED (memory kind), IO,
 * NO_MEMORY. Threads: any, also for the same path (the last one wins).
 */
ep_err ep_safetensors_write(const char *path, const ep_named_tensor *tensors, size_t tensors_count,
                            const ep_metadata_pair *metadata, size_t metadata_count,
                            ep_error *out_error);

#endif
