/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.safetensors.index.json: which shard holds which tensor. Shards must be plain file names in
 * the model's own directory.
 *
 * Threads  immutable after parse.
 */
#ifndef EP_MODEL_SHARD_INDEX_H
#define EP_MODEL_SHARD_INDEX_H

#include "base/error.h"
#include "model/model_files.h"

#define EP_SHARD_INDEX_NAME "model.safetensors.index.json"
#define EP_SHARD_INDEX_BYTES_MAX ((size_t)256 << 20)
#define EP_MODEL_TENSORS_MAX ((size_t)2000000)
#define EP_MODEL_SHARDS_MAX 1024

typedef struct ep_shard_entry {
    const char *tensor; /* owned by the index */
    uint32_t shard;     /* index into shards */
} ep_shard_entry;

typedef struct ep_shard_index {
    char (*shards)[EP_MODEL_FILE_NAME_BYTES]; /* sorted by name */
    size_t shards_count;
    ep_shard_entry *entries; /* sorted by tensor */
    size_t entries_count;
    void *root; /* private: the parsed JSON, which holds the names */
} ep_shard_index;

/* Errors: BAD_FILE, NO_MEMORY; *out_index is then untouched. */
ep_err ep_shard_index_parse(const char *file, const char *bytes, size_t count,
                            ep_shard_index *out_index, ep_error *out_error);
void ep_shard_index_fini(ep_shard_index *index);

#endif
