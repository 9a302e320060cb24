/* SPDX-License-Identifier: Apache-2.0 */
/* Plain reading and writing of safetensors. */
#include "ref_checkpoint.h"

#include "ref_gguf.h"

#include <errno.h>
#include <glob.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 4096 };

static const struct {
    const char *name;
    enum ref_dtype dtype;
} dtype_names[] = {{"BF16", REF_BF16}, {"F16", REF_F16},    {"F32", REF_F32},
                   {"I8", REF_I8},     {"I32", REF_I32},    {"I64", REF_I64},
                   {"U8", REF_U8},     {"F8_E4M3", REF_F8}, {"F8_E8M0", REF_E8M0}};

void ref_die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s: ", program_invocation_short_name);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static void *allocate(size_t bytes)
{
    void *memory = malloc(bytes > 0 ? bytes : 1);
    if (memory == NULL) {
        ref_die("no memory for %zu bytes", bytes);
    }
    return memory;
}

char *ref_read_whole(const char *path, size_t *out_size)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        ref_die("%s: %s", path, strerror(errno));
    }
    long size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    if (size < 0) {
        ref_die("%s: %s", path, strerror(errno));
    }
    rewind(file);
    char *bytes = allocate((size_t)size);
    if (fread(bytes, 1, (size_t)size, file) != (size_t)size) {
        ref_die("%s: short read", path);
    }
    fclose(file);
    *out_size = (size_t)size;
    return bytes;
}

void ref_file_open(const char *path, struct ref_file *out_file)
{
    size_t size;
    json_error_t error;
    char *bytes = ref_read_whole(path, &size);
    uint64_t header_bytes = 0;
    for (size_t i = 0; i < 8 && i < size; i++) {
        header_bytes |= (uint64_t)(unsigned char)bytes[i] << (8 * i);
    }
    if (size < 8 || header_bytes > size - 8) {
        ref_die("%s: not a safetensors file", path);
    }
    json_t *header = json_loadb(bytes + 8, (size_t)header_bytes, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(header)) {
        ref_die("%s: header: %s", path, error.text);
    }
    out_file->bytes = bytes;
    out_file->data_offset = 8 + (size_t)header_bytes;
    out_file->header = header;

    const char *name;
    json_t *entry;
    json_object_foreach(header, name, entry)
    {
        json_t *end = json_array_get(json_object_get(entry, "data_offsets"), 1);
        if (strcmp(name, "__metadata__") != 0 &&
            (json_integer_value(end) < 0 ||
             (size_t)json_integer_value(end) > size - out_file->data_offset)) {
            ref_die("%s: tensor %s ends behind the file", path, name);
        }
    }
}

void ref_file_close(struct ref_file *file)
{
    json_decref(file->header);
    free(file->bytes);
    *file = (struct ref_file){NULL, 0, NULL};
}

bool ref_file_find(const struct ref_file *file, const char *name, struct ref_tensor *out_tensor)
{
    const char *dtype_text;
    json_t *shape;
    json_int_t begin, end;
    json_t *entry = json_object_get(file->header, name);
    if (entry == NULL) {
        return false;
    }
    if (json_unpack(entry, "{s:s, s:o, s:[I,I]}", "dtype", &dtype_text, "shape", &shape,
                    "data_offsets", &begin, &end) != 0 ||
        json_array_size(shape) > REF_RANK_MAX) {
        ref_die("tensor %s: bad header entry", name);
    }
    struct ref_tensor tensor = {.rank = json_array_size(shape), .count = 1};
    for (size_t i = 0; i < tensor.rank; i++) {
        tensor.shape[i] = (size_t)json_integer_value(json_array_get(shape, i));
        tensor.count *= tensor.shape[i];
    }
    tensor.data = file->bytes + file->data_offset + (size_t)begin;
    tensor.block = ref_block_find(dtype_text);
    if (tensor.block != NULL) {
        *out_tensor = tensor;
        return true;
    }
    size_t known = sizeof(dtype_names) / sizeof(*dtype_names);
    size_t i = 0;
    while (i < known && strcmp(dtype_names[i].name, dtype_text) != 0) {
        i++;
    }
    if (i == known) {
        ref_die("tensor %s: dtype %s is not known here", name, dtype_text);
    }
    tensor.dtype = dtype_names[i].dtype;
    if (begin < 0 || end < begin ||
        (size_t)(end - begin) != tensor.count * ref_dtype_bytes(tensor.dtype)) {
        ref_die("tensor %s: shape and data_offsets disagree", name);
    }
    *out_tensor = tensor;
    return true;
}

void ref_file_write(const char *path, const char *name, enum ref_dtype dtype, size_t rank,
                    const size_t *shape, const void *data)
{
    char header[512];
    size_t bytes = ref_dtype_bytes(dtype);
    const char *dtype_text = "";
    for (size_t i = 0; i < sizeof(dtype_names) / sizeof(*dtype_names); i++) {
        dtype_text = dtype_names[i].dtype == dtype ? dtype_names[i].name : dtype_text;
    }
    size_t used = (size_t)snprintf(header, sizeof(header), "{\"%s\":{\"dtype\":\"%s\",\"shape\":[",
                                   name, dtype_text);
    for (size_t i = 0; i < rank; i++) {
        bytes *= shape[i];
        used += (size_t)snprintf(header + used, sizeof(header) - used, "%s%zu", i > 0 ? "," : "",
                                 shape[i]);
    }
    used += (size_t)snprintf(header + used, sizeof(header) - used, "],\"data_offsets\":[0,%zu]}}",
                             bytes);
    while (used % 8 != 0) {
        header[used++] = ' ';
    }
    FILE *file = fopen(path, "wb");
    if (file == NULL) {
        ref_die("%s: %s", path, strerror(errno));
    }
    for (size_t i = 0; i < 8; i++) {
        fputc((int)(((uint64_t)used >> (8 * i)) & 0xff), file);
    }
    fwrite(header, 1, used, file);
    fwrite(data, 1, bytes, file);
    bool bad = ferror(file) != 0;
    if (fclose(file) != 0 || bad) {
        ref_die("%s: writing failed", path);
    }
}

static json_t *read_json(const char *folder, const char *name)
{
    char path[PATH_BYTES];
    json_error_t error;
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return json_load_file(path, JSON_REJECT_DUPLICATES, &error);
}

static void open_shard(struct ref_checkpoint *checkpoint, const char *name)
{
    char path[PATH_BYTES];
    if (checkpoint->file_count == REF_SHARDS_MAX) {
        ref_die("%s: more than %d shards", checkpoint->folder, REF_SHARDS_MAX);
    }
    snprintf(path, sizeof(path), "%s/%s", checkpoint->folder, name);
    ref_file_open(path, &checkpoint->files[checkpoint->file_count++]);
}

static void open_gguf(struct ref_checkpoint *checkpoint)
{
    char pattern[PATH_BYTES];
    glob_t found = {0};
    snprintf(pattern, sizeof(pattern), "%s/*.gguf", checkpoint->folder);
    if (glob(pattern, 0, NULL, &found) != 0 || found.gl_pathc > REF_SHARDS_MAX) {
        ref_die("%s: neither config.json nor files .gguf", checkpoint->folder);
    }
    checkpoint->config = json_object();
    for (size_t i = 0; i < found.gl_pathc; i++) {
        ref_gguf_open(found.gl_pathv[i], &checkpoint->files[checkpoint->file_count++],
                      checkpoint->config);
    }
    globfree(&found);
}

void ref_checkpoint_open(const char *folder, struct ref_checkpoint *out_checkpoint)
{
    memset(out_checkpoint, 0, sizeof(*out_checkpoint));
    out_checkpoint->folder = strdup(folder);
    if (out_checkpoint->folder == NULL) {
        ref_die("no memory");
    }
    out_checkpoint->config = read_json(folder, "config.json");
    if (out_checkpoint->config == NULL) {
        open_gguf(out_checkpoint);
        return;
    }
    json_t *index = read_json(folder, "model.safetensors.index.json");
    if (index == NULL) {
        open_shard(out_checkpoint, "model.safetensors");
        return;
    }
    json_t *seen = json_object();
    const char *tensor;
    json_t *shard;
    json_object_foreach(json_object_get(index, "weight_map"), tensor, shard)
    {
        const char *name = json_string_value(shard);
        if (name == NULL) {
            ref_die("%s: the index gives no file for %s", folder, tensor);
        }
        if (json_object_get(seen, name) == NULL) {
            json_object_set_new(seen, name, json_true());
            open_shard(out_checkpoint, name);
        }
    }
    json_decref(seen);
    json_decref(index);
}

void ref_checkpoint_close(struct ref_checkpoint *checkpoint)
{
    for (size_t i = 0; i < checkpoint->file_count; i++) {
        ref_file_close(&checkpoint->files[i]);
    }
    json_decref(checkpoint->config);
    free(checkpoint->folder);
}

bool ref_checkpoint_find(const struct ref_checkpoint *checkpoint, const char *name,
                         struct ref_tensor *out_tensor)
{
    for (size_t i = 0; i < checkpoint->file_count; i++) {
        if (ref_file_find(&checkpoint->files[i], name, out_tensor)) {
            return true;
        }
    }
    return false;
}

static float *widen_tensor(const struct ref_tensor *tensor)
{
    float *values = allocate(tensor->count * sizeof(*values));
    for (size_t i = 0; i < tensor->count; i++) {
        values[i] = ref_load(tensor->data, tensor->dtype, i);
    }
    return values;
}

float *ref_checkpoint_load(const struct ref_checkpoint *checkpoint, const char *name, size_t count)
{
    struct ref_tensor tensor;
    if (!ref_checkpoint_find(checkpoint, name, &tensor)) {
        ref_die("%s: no tensor %s", checkpoint->folder, name);
    }
    if (tensor.count != count) {
        ref_die("%s: tensor %s has %zu elements, expected %zu", checkpoint->folder, name,
                tensor.count, count);
    }
    return widen_tensor(&tensor);
}

size_t ref_checkpoint_size(const struct ref_checkpoint *checkpoint, const char *key)
{
    json_t *value = json_object_get(checkpoint->config, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        ref_die("%s/config.json: %s is missing or not a whole number", checkpoint->folder, key);
    }
    return (size_t)json_integer_value(value);
}
