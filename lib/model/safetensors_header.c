/* SPDX-License-Identifier: Apache-2.0 */
/* The parser of safetensors headers: every rule of safetensors.h, in the order of checking. */
#include "model/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/json_reader.h"

#define HEADER_DEPTH_MAX 4
/* An entry of rank 8 has 3 members, 8 + 2 elements and their brackets: fewer than 24 values. */
#define VALUES_PER_TENSOR 24
#define METADATA_KEY "__metadata__"

typedef struct dtype_format {
    const char *text;
    uint32_t bits;
    ep_dtype dtype;
} dtype_format;

static const dtype_format formats[] = {
    {"BOOL", 8, EP_DTYPE_BOOL},
    {"F4", 4, EP_DTYPE_NONE},
    {"F6_E2M3", 6, EP_DTYPE_NONE},
    {"F6_E3M2", 6, EP_DTYPE_NONE},
    {"U8", 8, EP_DTYPE_U8},
    {"I8", 8, EP_DTYPE_I8},
    {"F8_E5M2", 8, EP_DTYPE_NONE},
    {"F8_E4M3", 8, EP_DTYPE_F8E4M3},
    {"F8_E8M0", 8, EP_DTYPE_NONE},
    {"F8_E4M3FNUZ", 8, EP_DTYPE_NONE},
    {"F8_E5M2FNUZ", 8, EP_DTYPE_NONE},
    {"I16", 16, EP_DTYPE_NONE},
    {"U16", 16, EP_DTYPE_NONE},
    {"F16", 16, EP_DTYPE_F16},
    {"BF16", 16, EP_DTYPE_BF16},
    {"I32", 32, EP_DTYPE_I32},
    {"U32", 32, EP_DTYPE_NONE},
    {"F32", 32, EP_DTYPE_F32},
    {"C64", 64, EP_DTYPE_NONE},
    {"F64", 64, EP_DTYPE_NONE},
    {"I64", 64, EP_DTYPE_I64},
    {"U64", 64, EP_DTYPE_NONE},
};
#define FORMAT_NAMES                                                                               \
    "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 "   \
    "BF16 I32 "                                                                                    \
    "U32 F32 C64 F64 I64 U64"

/* The present place, for messages. */
typedef struct place {
    const char *file;
    const char *tensor;
    uint64_t data_bytes;
    ep_error *error;
} place;

/* Sets the error "<file>: tensor <name>: ..." and returns BAD_FILE. */
#define BAD_ENTRY(at, format, ...)                                                                 \
    ep_error_set((at)->error, EP_ERR_BAD_FILE, "%s: tensor %.200s: " format, (at)->file,           \
                 (at)->tensor, __VA_ARGS__)

const char *ep_safetensors_dtype_text(ep_dtype dtype)
{
    for (size_t i = 0; dtype != EP_DTYPE_NONE && i < EP_ARRAY_COUNT(formats); i++) {
        if (formats[i].dtype == dtype) {
            return formats[i].text;
        }
    }
    return NULL;
}

static ep_err read_integer(const place *at, const char *key, size_t index, const json_t *value,
                           uint64_t *out)
{
    char text[EP_JSON_TEXT_BYTES];
    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        return BAD_ENTRY(at, "%s[%zu] is %s, allowed an integer 0..%" PRId64, key, index,
                         ep_json_describe(value, text), INT64_MAX);
    }
    *out = (uint64_t)json_integer_value(value);
    return EP_OK;
}

static ep_err read_dtype(const place *at, const json_t *value, const dtype_format **out)
{
    char text[EP_JSON_TEXT_BYTES];
    for (size_t i = 0; json_is_string(value) && i < EP_ARRAY_COUNT(formats); i++) {
        if (strcmp(json_string_value(value), formats[i].text) == 0) {
            *out = &formats[i];
            return EP_OK;
        }
    }
    return BAD_ENTRY(at, "dtype is %s, allowed " FORMAT_NAMES, ep_json_describe(value, text));
}

static ep_err read_shape(const place *at, const json_t *value, ep_safetensors_tensor *tensor)
{
    char text[EP_JSON_TEXT_BYTES];
    if (!json_is_array(value)) {
        return BAD_ENTRY(at, "shape is %s, allowed an array of integers",
                         ep_json_describe(value, text));
    }
    if (json_array_size(value) > EP_TENSOR_RANK_MAX) {
        return BAD_ENTRY(at, "shape has rank %zu, allowed 0..%d", json_array_size(value),
                         EP_TENSOR_RANK_MAX);
    }
    tensor->rank = (uint32_t)json_array_size(value);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        ep_err err = read_integer(at, "shape", i, json_array_get(value, i), &tensor->shape[i]);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

static ep_err read_offsets(const place *at, const json_t *value, ep_safetensors_tensor *tensor)
{
    char text[EP_JSON_TEXT_BYTES];
    if (!json_is_array(value) || json_array_size(value) != 2) {
        return BAD_ENTRY(at, "data_offsets is %s, allowed an array of 2 integers",
                         ep_json_describe(value, text));
    }
    ep_err err = read_integer(at, "data_offsets", 0, json_array_get(value, 0), &tensor->begin);
    if (err == EP_OK) {
        err = read_integer(at, "data_offsets", 1, json_array_get(value, 1), &tensor->end);
    }
    if (err != EP_OK) {
        return err;
    }
    if (tensor->end < tensor->begin) {
        return BAD_ENTRY(at, "data_offsets end %" PRIu64 " is before begin %" PRIu64, tensor->end,
                         tensor->begin);
    }
    if (tensor->end > at->data_bytes) {
        return BAD_ENTRY(at,
                         "data_offsets end %" PRIu64 " is beyond the data (%" PRIu64
                         " bytes): the file is cut short, "
                         "copy it again",
                         tensor->end, at->data_bytes);
    }
    return EP_OK;
}

static ep_err check_size(const place *at, const dtype_format *format,
                         const ep_safetensors_tensor *tensor)
{
    uint64_t bits = format->bits;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (__builtin_mul_overflow(bits, tensor->shape[i], &bits)) {
            return BAD_ENTRY(at,
                             "its shape's product overflows at dimension %u (%" PRIu64
                             "), allowed up to 2^64-1 bits",
                             i, tensor->shape[i]);
        }
    }
    if (bits % 8 != 0) {
        return BAD_ENTRY(at, "%" PRIu64 " bits of %s are not whole bytes", bits, format->text);
    }
    if (tensor->end - tensor->begin != bits / 8) {
        return BAD_ENTRY(at,
                         "data_offsets span %" PRIu64 " bytes, its shape and dtype need %" PRIu64,
                         tensor->end - tensor->begin, bits / 8);
    }
    return EP_OK;
}

static ep_err check_name(const place *at, const char *name)
{
    size_t length = strlen(name);
    if (length == 0 || length > EP_SAFETENSORS_NAME_BYTES_MAX) {
        return ep_error_set(at->error, EP_ERR_BAD_FILE,
                            "%s: tensor %.80s: its name has %zu bytes, allowed 1..%d", at->file,
                            at->tensor, length, EP_SAFETENSORS_NAME_BYTES_MAX);
    }
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c < 0x20 || c == 0x7f) {
            return BAD_ENTRY(at, "its name has control byte 0x%02x at %zu, allowed: printable text",
                             c, i);
        }
    }
    return EP_OK;
}

static ep_err read_entry(const place *at, const char *name, const json_t *entry,
                         ep_safetensors_tensor *tensor)
{
    char text[EP_JSON_TEXT_BYTES];
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    const dtype_format *format = NULL;
    ep_err err = check_name(at, name);
    if (err != EP_OK) {
        return err;
    }
    if (!json_is_object(entry)) {
        return BAD_ENTRY(at, "is %s, allowed an object with dtype, shape, data_offsets",
                         ep_json_describe(entry, text));
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(keys); i++) {
        if (json_object_get(entry, keys[i]) == NULL) {
            return BAD_ENTRY(at, "%s is missing, allowed: exactly dtype, shape, data_offsets",
                             keys[i]);
        }
    }
    if (json_object_size(entry) != EP_ARRAY_COUNT(keys)) {
        return BAD_ENTRY(at, "has %zu keys, allowed: exactly dtype, shape, data_offsets",
                         json_object_size(entry));
    }
    err = read_dtype(at, json_object_get(entry, "dtype"), &format);
    if (err == EP_OK) {
        err = read_shape(at, json_object_get(entry, "shape"), tensor);
    }
    if (err == EP_OK) {
        err = read_offsets(at, json_object_get(entry, "data_offsets"), tensor);
    }
    if (err == EP_OK) {
        err = check_size(at, format, tensor);
    }
    if (err == EP_OK) {
        tensor->dtype_text = format->text;
        tensor->dtype = format->dtype;
    }
    return err;
}

static ep_err check_metadata(const char *file, json_t *metadata, ep_error *out_error)
{
    char text[EP_JSON_TEXT_BYTES];
    char printable[EP_JSON_TEXT_BYTES];
    const char *key;
    json_t *value;
    if (!json_is_object(metadata)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: " METADATA_KEY " is %s, allowed an object of strings", file,
                            ep_json_describe(metadata, text));
    }
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value)) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: " METADATA_KEY " key %s is %s, allowed a string", file,
                                ep_json_printable(key, printable, sizeof(printable)),
                                ep_json_describe(value, text));
        }
    }
    return EP_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    const ep_safetensors_tensor *x = a;
    const ep_safetensors_tensor *y = b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    if (x->end != y->end) { /* an empty tensor has the offset of the next one */
        return x->end < y->end ? -1 : 1;
    }
    return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const ep_safetensors_tensor *)a)->name,
                  ((const ep_safetensors_tensor *)b)->name);
}

/* Leaves the tensors sorted by offset. */
static ep_err check_layout(const char *file, const ep_safetensors_header *header,
                           uint64_t data_bytes, ep_error *out_error)
{
    char name[EP_SAFETENSORS_NAME_BYTES_MAX + 1];
    uint64_t at = 0;
    if (header->tensors_count > 0) {
        qsort(header->tensors, header->tensors_count, sizeof(header->tensors[0]), compare_offsets);
    }
    for (size_t i = 0; i < header->tensors_count; i++) {
        const ep_safetensors_tensor *tensor = &header->tensors[i];
        if (tensor->begin < at) {
            char before[EP_SAFETENSORS_NAME_BYTES_MAX + 1];
            return ep_error_set(
                out_error, EP_ERR_BAD_FILE,
                "%s: tensor %.150s: data_offsets begin %" PRIu64
                " overlaps tensor %.150s, which ends at %" PRIu64,
                file, ep_json_printable(tensor->name, name, sizeof(name)), tensor->begin,
                ep_json_printable(header->tensors[i - 1].name, before, sizeof(before)), at);
        }
        if (tensor->begin > at) {
            return ep_error_set(
                out_error, EP_ERR_BAD_FILE,
                "%s: tensor %.200s: data_offsets begin %" PRIu64 " leaves a hole, allowed %" PRIu64,
                file, ep_json_printable(tensor->name, name, sizeof(name)), tensor->begin, at);
        }
        at = tensor->end;
    }
    if (at != data_bytes) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: its tensors end at %" PRIu64 ", the data has %" PRIu64
                            " bytes; both must be equal",
                            file, at, data_bytes);
    }
    return EP_OK;
}

/* Allocates the tensors and their names. */
static ep_err allocate(const char *file, json_t *root, size_t tensors_max,
                       ep_safetensors_header *header, ep_error *out_error)
{
    const char *key;
    json_t *value;
    size_t tensors = json_object_size(root) - (json_object_get(root, METADATA_KEY) != NULL ? 1 : 0);
    size_t names_bytes = 1;
    if (tensors > tensors_max) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: has %zu tensors, allowed 0..%zu", file,
                            tensors, tensors_max);
    }
    json_object_foreach(root, key, value)
    {
        names_bytes += strlen(key) + 1; /* bounded by the length of the header */
    }
    header->tensors = calloc(tensors > 0 ? tensors : 1, sizeof(header->tensors[0]));
    header->names = malloc(names_bytes);
    if (header->tensors == NULL || header->names == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu tensors", file,
                            tensors);
    }
    return EP_OK;
}

static ep_err read_entries(const char *file, json_t *root, uint64_t data_bytes,
                           ep_safetensors_header *header, ep_error *out_error)
{
    char printable[EP_SAFETENSORS_NAME_BYTES_MAX + 1];
    char *names = header->names;
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value)
    {
        ep_err err;
        if (strcmp(key, METADATA_KEY) == 0) {
            err = check_metadata(file, value, out_error);
        } else {
            place at = {file, ep_json_printable(key, printable, sizeof(printable)), data_bytes,
                        out_error};
            ep_safetensors_tensor *tensor = &header->tensors[header->tensors_count];
            size_t bytes = strlen(key) + 1;
            err = read_entry(&at, key, value, tensor);
            memcpy(names, key, bytes);
            tensor->name = names;
            names += bytes;
            header->tensors_count++;
        }
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

/* Checks that the object starts with '{' and ends with '}', followed only by spaces. Returns the
 * object's length. */
static ep_err check_frame(const char *file, const char *bytes, size_t count, size_t *out_count,
                          ep_error *out_error)
{
    if (count == 0 || bytes[0] != '{') {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: header: starts with byte 0x%02x, allowed '{'", file,
                            count == 0 ? 0u : (unsigned)(unsigned char)bytes[0]);
    }
    while (count > 0 && bytes[count - 1] == ' ') {
        count--;
    }
    if (bytes[count - 1] != '}') {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: header: ends with byte 0x%02x, allowed '}' and then spaces", file,
                            (unsigned)(unsigned char)bytes[count - 1]);
    }
    *out_count = count;
    return EP_OK;
}

ep_err ep_safetensors_header_parse(const char *file, const char *bytes, size_t count,
                                   uint64_t data_bytes, size_t tensors_max,
                                   ep_safetensors_header *out_header, ep_error *out_error)
{
    ep_safetensors_header header = {0};
    json_t *root = NULL;
    char what[EP_MODEL_FILE_NAME_BYTES + 16];
    ep_json_limits limits = {HEADER_DEPTH_MAX, (tensors_max + 1) * VALUES_PER_TENSOR};

    ep_err err = check_frame(file, bytes, count, &count, out_error);
    if (err != EP_OK) {
        return err;
    }
    snprintf(what, sizeof(what), "%s: header", file);
    err = ep_json_parse(what, bytes, count, &limits, &root, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = allocate(file, root, tensors_max, &header, out_error);
    if (err == EP_OK) {
        err = read_entries(file, root, data_bytes, &header, out_error);
    }
    if (err == EP_OK) {
        err = check_layout(file, &header, data_bytes, out_error);
    }
    json_decref(root);
    if (err != EP_OK) {
        ep_safetensors_header_fini(&header);
        return err;
    }
    if (header.tensors_count > 0) {
        qsort(header.tensors, header.tensors_count, sizeof(header.tensors[0]), compare_names);
    }
    *out_header = header;
    return EP_OK;
}

void ep_safetensors_header_fini(ep_safetensors_header *header)
{
    free(header->tensors);
    free(header->names);
    *header = (ep_safetensors_header){0};
}

static int compare_name_with(const void *name, const void *tensor)
{
    return strcmp(name, ((const ep_safetensors_tensor *)tensor)->name);
}

const ep_safetensors_tensor *ep_safetensors_header_find(const ep_safetensors_header *header,
                                                        const char *name)
{
    if (header->tensors_count == 0) {
        return NULL;
    }
    return bsearch(name, header->tensors, header->tensors_count, sizeof(header->tensors[0]),
                   compare_name_with);
}
