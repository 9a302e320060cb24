/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One safetensors file: 8 bytes of little-endian header length, a JSON header, then the data.
 *
 * The header is accepted only if all of this holds:
 *   length   file >= 8 bytes; header length <= limit and <= file; the file ends exactly where the
 *            last tensor ends
 *   JSON     starts with '{', ends with '}' and then only spaces; depth, values, tensors and names
 *            are bounded; no duplicate keys, no NUL or control bytes in names, valid UTF-8;
 *            __metadata__ maps strings to strings
 *   entry    exactly dtype, shape, data_offsets; a known dtype; rank <= 8; plain integers
 *            0..2^63-1; shape product x bits checked for overflow; end - begin is exactly that many
 *            bytes
 *   layout   sorted by offset there is neither hole nor overlap, from 0 to the end
 * Tensors may be at any address: widen with memcpy, never by casting a pointer.
 * A file that begins with GGUF is also handled here: gguf.h says how its head is checked, the rest
 * is the same.
 *
 * Threads  immutable after open; reads from any thread.
 */
#ifndef EP_MODEL_SAFETENSORS_H
#define EP_MODEL_SAFETENSORS_H

#include <sys/stat.h>

#include "base/error.h"
#include "expertd/tensor.h"
#include "model/model_files.h"

#define EP_SAFETENSORS_HEADER_BYTES_MAX ((size_t)16 << 20)    /* of files that are read */
#define EP_SAFETENSORS_HEADER_BYTES_LIMIT ((size_t)100000000) /* the format's own */
#define EP_SAFETENSORS_TENSORS_MAX ((size_t)200000)
#define EP_SAFETENSORS_NAME_BYTES_MAX 512
#define EP_SAFETENSORS_DIGEST_BYTES 32

typedef struct ep_safetensors_tensor {
    const char *name;
    const char *dtype_text; /* as in the file: "BF16", "F8_E4M3" */
    ep_dtype dtype;         /* NONE for a type that we do not compute with */
    uint32_t rank;
    uint64_t shape[EP_TENSOR_RANK_MAX];
    uint64_t begin; /* relative to the data */
    uint64_t end;
} ep_safetensors_tensor;

/* A checked header. Zero it before use. */
typedef struct ep_safetensors_header {
    ep_safetensors_tensor *tensors; /* sorted by name */
    size_t tensors_count;
    char *names; /* private: storage of all names */
} ep_safetensors_header;

/*
 * Checks header bytes against the data_bytes of data that follow. Pure; the fuzzer calls it. file:
 * name of the file in messages. Errors: BAD_FILE, NO_MEMORY; *out_header is then untouched.
 */
ep_err ep_safetensors_header_parse(const char *file, const char *bytes, size_t count,
                                   uint64_t data_bytes, size_t tensors_max,
                                   ep_safetensors_header *out_header, ep_error *out_error);
void ep_safetensors_header_fini(ep_safetensors_header *header);
/* NULL when there is none. */
const ep_safetensors_tensor *ep_safetensors_header_find(const ep_safetensors_header *header,
                                                        const char *name);

/* "BF16" for EP_DTYPE_BF16; NULL for NONE. */
const char *ep_safetensors_dtype_text(ep_dtype dtype);

typedef struct ep_safetensors ep_safetensors;
struct json_t;

/* Errors: NOT_FOUND, BAD_FILE, IO, NO_MEMORY. */
ep_err ep_safetensors_open(const ep_model_dir *dir, const char *name, ep_safetensors **out_file,
                           ep_error *out_error);
/* The same for a path that an operator named; links are followed. */
ep_err ep_safetensors_open_path(const char *path, ep_safetensors **out_file, ep_error *out_error);
void ep_safetensors_close(ep_safetensors *file);

const char *ep_safetensors_name(const ep_safetensors *file);
/* Keys of a GGUF file (gguf.h); otherwise NULL. */
const struct json_t *ep_safetensors_keys(const ep_safetensors *file);
/* Status of the open file; false when fstat fails. */
bool ep_safetensors_stat(const ep_safetensors *file, struct stat *out_status);
uint64_t ep_safetensors_bytes(const ep_safetensors *file);
/* SHA-256 of the header and of samples spread over the data: tells files apart without reading them
 * whole. */
const uint8_t *ep_safetensors_identity_digest(const ep_safetensors *file);
size_t ep_safetensors_count(const ep_safetensors *file);
/* index < count; ordered by name. */
const ep_safetensors_tensor *ep_safetensors_at(const ep_safetensors *file, size_t index);
const ep_safetensors_tensor *ep_safetensors_find(const ep_safetensors *file, const char *name);

static inline size_t ep_safetensors_tensor_bytes(const ep_safetensors_tensor *tensor)
{
    return (size_t)(tensor->end - tensor->begin);
}

/* Reads exactly bytes of the tensor from offset; offset + bytes <= its size. Errors: BAD_FILE (file
 * changed since open), IO. If the file was only truncated, the remaining part can be read. */
ep_err ep_safetensors_read(const ep_safetensors *file, const ep_safetensors_tensor *tensor,
                           size_t offset, void *out, size_t bytes, ep_error *out_error);
/* The same by offset in the file, including the head. */
ep_err ep_safetensors_read_raw(const ep_safetensors *file, uint64_t begin, void *out, size_t bytes,
                               ep_error *out_error);
/* For a mirror: fetches all that a read needs, before the read; whether it is all here. */
ep_err ep_safetensors_need(const ep_safetensors *file, const ep_safetensors_tensor *tensor,
                           size_t offset, size_t bytes, ep_error *out_error);
bool ep_safetensors_has_raw(const ep_safetensors *file, uint64_t begin, size_t bytes);

#endif
