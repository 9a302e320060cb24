/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The head of a GGUF file: "GGUF", a version, keys with values, and a list of tensors, all
 * little-endian; then the tensors' data, each at a multiple of an alignment.
 *
 * The head is accepted only if all of this holds: version 2 or 3; every length fits into the rest
 * of the file; keys and names are printable, bounded and unique; value types are known, arrays are
 * of plain values; tensor types are known; at most 4 dimensions, whose product does not overflow
 * and whose first holds whole blocks; data of tensors is aligned, inside the file, and does not
 * overlap.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_GGUF_H
#define EP_MODEL_GGUF_H

#include <jansson.h>

#include "model/safetensors.h"

#define EP_GGUF_MAGIC "GGUF"
#define EP_GGUF_HEAD_BYTES_MAX ((size_t)256 << 20) /* it may contain vocabularies */

/* A checked head. */
typedef struct ep_gguf_head {
    /* shapes begin with the outermost dimension; types are named as "Q4_K" */
    ep_safetensors_header header;
    uint64_t data_begin; /* offset in the file */
    /* an object of numbers, booleans, strings, and arrays of up to 1024 numbers; other values are
     * replaced by words in parentheses */
    json_t *keys;
} ep_gguf_head;

/*
 * Checks the head of a file of file_bytes, of which the first count bytes are given. *out_is_short:
 * they do not contain the whole head; the error is then BAD_FILE.
 * Errors: BAD_FILE, NO_MEMORY; *out_head is then untouched.
 */
ep_err ep_gguf_head_parse(const char *file, const uint8_t *bytes, size_t count, uint64_t file_bytes,
                          size_t tensors_max, ep_gguf_head *out_head, bool *out_is_short,
                          ep_error *out_error);
void ep_gguf_head_fini(ep_gguf_head *head);

/* Converts a model's keys to the text of a config.json; free() it. Errors: BAD_FILE (a count),
 * UNIMPLEMENTED (architecture, score), NO_MEMORY. */
ep_err ep_gguf_config(const char *file, const json_t *keys, char **out_text, ep_error *out_error);

/* The files of a model. */
typedef struct ep_gguf_files {
    char first[EP_MODEL_FILE_NAME_BYTES];
    uint32_t count; /* 0: it is no GGUF model */
} ep_gguf_files;

/*
 * Opens the directory that path names, or the directory of the file that it names. path ends in
 * .gguf, or is a directory with one model and without a config.json. Errors: as ep_model_dir_open;
 * BAD_FILE (more than one model; a part that is not the first).
 */
ep_err ep_gguf_files_find(const char *path, ep_model_dir *out_dir, ep_gguf_files *out_files,
                          ep_error *out_error);
/* The same for an open directory. *files is unchanged if there is a config.json or no model. */
ep_err ep_gguf_files_find_in(const ep_model_dir *dir, ep_gguf_files *files, ep_error *out_error);
/* Checks that the keys of file index < count name this part and number of parts. Errors:
 * BAD_FILE. */
ep_err ep_gguf_files_check(const ep_gguf_files *files, uint32_t index, const json_t *keys,
                           ep_error *out_error);
/* The name of file index < count. */
void ep_gguf_files_name(const ep_gguf_files *files, uint32_t index,
                        char out_name[EP_MODEL_FILE_NAME_BYTES]);

#endif
