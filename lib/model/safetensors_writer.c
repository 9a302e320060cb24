/* SPDX-License-Identifier: Apache-2.0 */
/* Writes safetensors: checks first, then a temporary file, which is renamed when complete. */
#include "model/safetensors_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "base/check.h"
#include "base/random.h"
#include "model/safetensors.h"

#define HEADER_ALIGN 8

static ep_err bad_tensor(const ep_named_tensor *named, ep_error *out_error, const char *what)
{
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "tensor %.200s: %s", named->name, what);
}

static ep_err check_name(const ep_named_tensor *named, ep_error *out_error)
{
    if (named->name == NULL || named->name[0] == '\0' ||
        strlen(named->name) > EP_SAFETENSORS_NAME_BYTES_MAX) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT, "a tensor's name has %zu bytes, allowed 1..%d",
            named->name == NULL ? (size_t)0 : strlen(named->name), EP_SAFETENSORS_NAME_BYTES_MAX);
    }
    if (strcmp(named->name, "__metadata__") == 0) {
        return bad_tensor(named, out_error, "this name is reserved by the format");
    }
    for (const char *c = named->name; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "a tensor's name has control byte 0x%02x",
                                (unsigned)(unsigned char)*c);
        }
    }
    return EP_OK;
}

/* Returns the size in bytes. */
static ep_err check_tensor(const ep_named_tensor *named, size_t *out_bytes, ep_error *out_error)
{
    const ep_tensor *tensor = &named->tensor;
    ep_err err = check_name(named, out_error);
    if (err != EP_OK) {
        return err;
    }
    size_t bytes = ep_dtype_bytes(tensor->dtype);
    if (bytes == 0 || ep_safetensors_dtype_text(tensor->dtype) == NULL) {
        return bad_tensor(named, out_error,
                          "it has no element type, allowed bf16 f16 f32 i8 u8 i32 i64 bool");
    }
    if (tensor->memory != EP_MEMORY_HOST) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "tensor %.200s: memory kind %d, allowed: host memory", named->name,
                            (int)tensor->memory);
    }
    if (tensor->rank == 0 || tensor->rank > EP_TENSOR_RANK_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "tensor %.200s: rank %" PRIu32 ", allowed 1..%d", named->name,
                            tensor->rank, EP_TENSOR_RANK_MAX);
    }
    if (tensor->shape[tensor->rank - 1] > 1 &&
        tensor->stride_bytes[tensor->rank - 1] != (int64_t)bytes) {
        return bad_tensor(named, out_error, "its innermost dimension is not contiguous");
    }
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] < 0 || !ep_mul_size(bytes, (size_t)tensor->shape[i], &bytes)) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "tensor %.200s: dimension %" PRIu32 " is %" PRId64
                                ", allowed 0 up to what fits in memory",
                                named->name, i, tensor->shape[i]);
        }
    }
    if (bytes > 0 && tensor->data == NULL) {
        return bad_tensor(named, out_error, "it has elements but no data");
    }
    *out_bytes = bytes;
    return EP_OK;
}

static int compare_order(const void *a, const void *b)
{
    const ep_named_tensor *x = *(const ep_named_tensor *const *)a;
    const ep_named_tensor *y = *(const ep_named_tensor *const *)b;
    size_t x_bytes = ep_dtype_bytes(x->tensor.dtype);
    size_t y_bytes = ep_dtype_bytes(y->tensor.dtype);
    /* wide elements first, so that every tensor is aligned to its elements */
    if (x_bytes != y_bytes) {
        return x_bytes > y_bytes ? -1 : 1;
    }
    return strcmp(x->name, y->name);
}

/* NULL when out of memory. */
static json_t *entry_json(const ep_named_tensor *named, size_t begin, size_t end)
{
    json_t *shape = json_array();
    for (uint32_t i = 0; i < named->tensor.rank; i++) {
        json_array_append_new(shape, json_integer(named->tensor.shape[i]));
    }
    if (json_array_size(shape) != named->tensor.rank) {
        json_decref(shape);
        return NULL;
    }
    return json_pack("{s:s, s:o, s:[I,I]}", "dtype", ep_safetensors_dtype_text(named->tensor.dtype),
                     "shape", shape, "data_offsets", (json_int_t)begin, (json_int_t)end);
}

static ep_err add_metadata(json_t *root, const ep_metadata_pair *metadata, size_t count,
                           ep_error *out_error)
{
    json_t *object = json_object();
    if (object == NULL || json_object_set(root, "__metadata__", object) != 0) {
        json_decref(object);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "allocation failed");
    }
    for (size_t i = 0; i < count; i++) {
        if (json_object_set_new(object, metadata[i].key, json_string(metadata[i].value)) != 0) {
            json_decref(object);
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "metadata pair %zu is not valid UTF-8 text", i);
        }
    }
    json_decref(object);
    return EP_OK;
}

/* Checks every tensor and assigns offsets in this order. */
static ep_err build_header(const ep_named_tensor *const *order, size_t count, json_t *root,
                           ep_error *out_error)
{
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes = 0;
        size_t end = 0;
        ep_err err = check_tensor(order[i], &bytes, out_error);
        if (err != EP_OK) {
            return err;
        }
        if (!ep_add_size(at, bytes, &end) || end > INT64_MAX) {
            return bad_tensor(order[i], out_error, "the file would exceed 2^63-1 bytes");
        }
        if (json_object_get(root, order[i]->name) != NULL) {
            return bad_tensor(order[i], out_error, "there are two tensors of this name");
        }
        if (json_object_set_new(root, order[i]->name, entry_json(order[i], at, end)) != 0) {
            return bad_tensor(order[i], out_error,
                              "its name is not valid UTF-8, or there is no memory");
        }
        at = end;
    }
    return EP_OK;
}

/* The bytes before the data: length, JSON, spaces. free() it. */
static ep_err encode_header(const json_t *root, char **out_bytes, size_t *out_count,
                            ep_error *out_error)
{
    size_t json_bytes = json_dumpb(root, NULL, 0, JSON_COMPACT);
    size_t padded = ep_align_up(json_bytes, HEADER_ALIGN);
    if (json_bytes == 0 || padded > EP_SAFETENSORS_HEADER_BYTES_LIMIT) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "the header has %zu bytes, allowed 2..%zu", padded,
                            EP_SAFETENSORS_HEADER_BYTES_LIMIT);
    }
    char *bytes = malloc(sizeof(uint64_t) + padded);
    if (bytes == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a header of %zu bytes",
                            padded);
    }
    for (size_t i = 0; i < sizeof(uint64_t); i++) {
        bytes[i] = (char)(unsigned char)((uint64_t)padded >> (8 * i));
    }
    if (json_dumpb(root, bytes + sizeof(uint64_t), json_bytes, JSON_COMPACT) != json_bytes) {
        free(bytes);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to write a header");
    }
    memset(bytes + sizeof(uint64_t) + json_bytes, ' ', padded - json_bytes);
    *out_bytes = bytes;
    *out_count = sizeof(uint64_t) + padded;
    return EP_OK;
}

/* Writes contiguous bytes at a time, rows in order. */
static bool write_rows(FILE *file, const ep_tensor *tensor, uint32_t dimension, const uint8_t *at)
{
    size_t count = (size_t)tensor->shape[dimension];
    if (dimension + 1 == tensor->rank) {
        return count == 0 || fwrite(at, ep_dtype_bytes(tensor->dtype), count, file) == count;
    }
    for (size_t i = 0; i < count; i++) {
        if (!write_rows(file, tensor, dimension + 1,
                        at + (int64_t)i * tensor->stride_bytes[dimension])) {
            return false;
        }
    }
    return true;
}

static bool is_empty(const ep_tensor *tensor)
{
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] == 0) {
            return true;
        }
    }
    return false;
}

static bool write_file(int fd, const char *header, size_t header_bytes,
                       const ep_named_tensor *const *order, size_t count)
{
    FILE *file = fdopen(fd, "wb");
    if (file == NULL) {
        close(fd);
        return false;
    }
    bool good = fwrite(header, 1, header_bytes, file) == header_bytes;
    for (size_t i = 0; good && i < count; i++) {
        good = is_empty(&order[i]->tensor) ||
               write_rows(file, &order[i]->tensor, 0, order[i]->tensor.data);
    }
    good = good && fflush(file) == 0 && fsync(fd) == 0;
    int number = errno;
    good = fclose(file) == 0 && good;
    errno = number != 0 ? number : errno;
    return good;
}

static ep_err write_error(const char *path, const char *verb, ep_error *out_error)
{
    int number = errno;
    char text[128];
    return ep_error_set(out_error, number == ENOENT ? EP_ERR_NOT_FOUND : EP_ERR_IO,
                        "%s: cannot %s: %s", path, verb, strerror_r(number, text, sizeof(text)));
}

/* Makes the new name durable. A file system that cannot sync a directory is ignored. */
static void sync_directory(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    int length = slash == NULL ? 1 : (int)(slash - path) + 1;
    snprintf(folder, sizeof(folder), "%.*s", length, slash == NULL ? "." : path);
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

static ep_err replace_file(const char *path, const char *header, size_t header_bytes,
                           const ep_named_tensor *const *order, size_t count, ep_error *out_error)
{
    char temporary[PATH_MAX];
    int n = snprintf(temporary, sizeof(temporary), "%s.tmp-%016" PRIx64, path, ep_random_id());
    if (n < 0 || (size_t)n >= sizeof(temporary)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%.100s...: the path is too long, allowed %d bytes", path,
                            PATH_MAX - 22);
    }
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        return write_error(path, "create a file beside it", out_error);
    }
    errno = 0;
    if (!write_file(fd, header, header_bytes, order, count)) {
        ep_err err = write_error(path, "write", out_error);
        unlink(temporary);
        return err;
    }
    if (rename(temporary, path) != 0) {
        ep_err err = write_error(path, "replace it", out_error);
        unlink(temporary);
        return err;
    }
    sync_directory(path);
    return EP_OK;
}

ep_err ep_safetensors_write(const char *path, const ep_named_tensor *tensors, size_t tensors_count,
                            const ep_metadata_pair *metadata, size_t metadata_count,
                            ep_error *out_error)
{
    ep_err err = EP_OK;
    char *header = NULL;
    size_t header_bytes = 0;
    json_t *root = json_object();
    const ep_named_tensor **order = malloc((tensors_count + 1) * sizeof(order[0]));
    if (root == NULL || order == NULL) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu tensors", path,
                           tensors_count);
    }
    for (size_t i = 0; err == EP_OK && i < tensors_count; i++) {
        order[i] = &tensors[i];
        err = check_name(order[i], out_error); /* checked before names are compared */
    }
    if (err == EP_OK && metadata_count > 0) {
        err = add_metadata(root, metadata, metadata_count, out_error);
    }
    if (err == EP_OK) {
        qsort(order, tensors_count, sizeof(order[0]), compare_order);
        err = build_header(order, tensors_count, root, out_error);
    }
    if (err == EP_OK) {
        err = encode_header(root, &header, &header_bytes, out_error);
    }
    if (err == EP_OK) {
        err = replace_file(path, header, header_bytes, order, tensors_count, out_error);
    }
    free(header);
    free(order);
    json_decref(root);
    return err;
}
