/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The head of a GGUF file: "GGUF", a version, keys with values, and a list of tensors, all
 * little-endian; then their data, each at a multiple of an alignment.
 *
 * The head is believed only after all of this holds: version 2 or 3; every length fits into what is
 * left of the file; keys and names are printable, bounded and not given twice; known value types,
 * arrays of plain values only; known tensor types; at most 4 dimensions, whose product does not
 * overflow and whose first holds whole blocks; data of tensors aligned, inside the file, and not
 * overlapping.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_GGUF_H
#define EP_MODEL_GGUF_H

#include <jansson.h>

#include "model/safetensors.h"

#define EP_GGUF_MAGIC "GGUF"
#define EP_GGUF_HEAD_BYTES_MAX ((size_t)256 << 20) /* vocabularies stand in it */

/* A checked head. */
typedef struct ep_gguf_head {
    /* shapes with the outermost dimension first; types by their names: "Q4_K" */
    ep_safetensors_header header;
    uint64_t data_begin; /* in the file */
    /* an object: numbers, booleans, strings, arrays of up to 1024 numbers; of others * words in
     * brackets */
    json_t *keys;
} ep_gguf_head;

/*
 * Checks the head of a file of file_bytes, of which the first count are given. *out_is_short: these
 * do not hold it all; then BAD_FILE.
 * Errors: BAD_FILE, NO_MEMORY; *out_head is then untouched.
 */
ep_err ep_gguf_head_parse(const char *file, const uint8_t *bytes, size_t count, uint64_t file_bytes,
                          const ep_safetensors_limits *limits, ep_gguf_head *out_head,
                          bool *out_is_short, ep_error *out_error);
void ep_gguf_head_fini(ep_gguf_head *head);

/* What a model's keys say, as a config.json says it; free() it. Errors: BAD_FILE (a count),
 * UNIMPLEMENTED (architecture, score), NO_MEMORY. */
ep_err ep_gguf_config(const char *file, const json_t *keys, char **out_text, ep_error *out_error);

/* Files of a model. */
typedef struct ep_gguf_files {
    char first[EP_MODEL_FILE_NAME_BYTES];
    uint32_t count; /* 0: it is no GGUF model */
} ep_gguf_files;

/*
 * Opens the directory that path names, or that the file is in: path ends in .gguf, or it is a
 * directory without a config.json and with one model. Errors: as ep_model_dir_open; BAD_FILE (more
 * than one model; a part that is not the first).
 */
ep_err ep_gguf_files_find(const char *path, ep_model_dir *out_dir, ep_gguf_files *out_files,
                          ep_error *out_error);
/* In an open directory; files as they were where a config.json is, or none is found. */
ep_err ep_gguf_files_find_in(const ep_model_dir *dir, ep_gguf_files *files, ep_error *out_error);
/* Whether the keys of file index < count say that it is this part of so many. Errors: BAD_FILE. */
ep_err ep_gguf_files_check(const ep_gguf_files *files, uint32_t index, const json_t *keys,
                           ep_error *out_error);
/* Of file index < count. */
void ep_gguf_files_name(const ep_gguf_files *files, uint32_t index,
                        char out_name[EP_MODEL_FILE_NAME_BYTES]);

#endif
