/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF for the oracle: reads a file's head into JSON as in safetensors, and its blocks. The input
 * is trusted, as in ref_checkpoint.h. */
#ifndef TESTS_REFERENCE_REF_GGUF_H
#define TESTS_REFERENCE_REF_GGUF_H

#include "ref_checkpoint.h"
#include "ref_format.h"

/* A block of columns of a row. Its weight k: value(k) * scale(k / group) - offset(k / group). */
struct ref_block {
    const char *name;
    size_t columns;
    size_t bytes;
    size_t group;
    float (*value)(const uint8_t *block, size_t k);
    float (*scale)(const uint8_t *block, size_t g);
    float (*offset)(const uint8_t *block, size_t g); /* NULL: none */
    enum ref_format format;
};

/* Returns the block type of this name; NULL: none. */
const struct ref_block *ref_block_find(const char *name);
/* Opens a file and puts its keys into config, by the names of config.json. */
void ref_gguf_open(const char *path, struct ref_file *out_file, json_t *config);

/* In ref_checkpoint.c: returns a file's bytes, to be freed. */
char *ref_read_whole(const char *path, size_t *out_size);

#endif
