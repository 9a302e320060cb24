/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plain safetensors and checkpoint reader for the oracle's programs. It reads whole files into
 * memory, and prints an error and exits on any fault: these are test programs with trusted input.
 * The reader for untrusted input is in lib/model.
 */
#ifndef TESTS_REFERENCE_REF_CHECKPOINT_H
#define TESTS_REFERENCE_REF_CHECKPOINT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "reference_layer.h"

enum { REF_RANK_MAX = 4, REF_SHARDS_MAX = 1024 };

struct ref_file {
    char *bytes;
    size_t data_offset; /* where the tensor data begins, in bytes */
    json_t *header;
};

struct ref_block;

struct ref_tensor {
    enum ref_dtype dtype;
    /* a GGUF block type (ref_gguf.h), with which dtype and count mean nothing; NULL: none */
    const struct ref_block *block;
    size_t rank;
    size_t shape[REF_RANK_MAX];
    size_t count; /* elements */
    const void *data;
};

struct ref_checkpoint {
    char *folder;
    json_t *config;
    size_t file_count;
    struct ref_file files[REF_SHARDS_MAX];
};

/* Prints "program: text" to stderr and exits with 1. */
void ref_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* One safetensors file. */
void ref_file_open(const char *path, struct ref_file *out_file);
void ref_file_close(struct ref_file *file);
/* False: there is no such tensor. */
bool ref_file_find(const struct ref_file *file, const char *name, struct ref_tensor *out_tensor);
/* Writes a file with one tensor, here y: {"y":{"dtype":..,"shape":[..],"data_offsets":[..]}},
 * padded with spaces to 8 bytes. */
void ref_file_write(const char *path, const char *name, enum ref_dtype dtype, size_t rank,
                    const size_t *shape, const void *data);

/* Opens config.json and every shard that the index names (or model.safetensors); without a
 * config.json every file *.gguf. */
void ref_checkpoint_open(const char *folder, struct ref_checkpoint *out_checkpoint);
void ref_checkpoint_close(struct ref_checkpoint *checkpoint);
bool ref_checkpoint_find(const struct ref_checkpoint *checkpoint, const char *name,
                         struct ref_tensor *out_tensor);
/* Returns the tensor widened to f32, to be freed. Dies if it is missing or of another size. */
float *ref_checkpoint_load(const struct ref_checkpoint *checkpoint, const char *name, size_t count);
/* Returns an integer of config.json; dies if it is missing. */
size_t ref_checkpoint_size(const struct ref_checkpoint *checkpoint, const char *key);

/* Loads the routed and shared experts of one layer, by any tensor names and in any format of public
 * checkpoints. Their family is ref_family_default(). Free them with ref_layer_free. */
void ref_layer_load(const struct ref_checkpoint *checkpoint, size_t layer,
                    struct ref_layer *out_layer);
/* Sets the family of the layer's experts; ref_format_family replaces it where it lacks a format. */
void ref_layer_set_family(struct ref_layer *layer, enum ref_family family);
void ref_layer_free(struct ref_layer *layer);

#endif
