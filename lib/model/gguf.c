/* SPDX-License-Identifier: Apache-2.0 */
#include "model/gguf.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/json_reader.h"

#define KEYS_MAX 65536u
#define KEY_BYTES_MAX 256u
#define NAME_BYTES_MAX 128u
#define DIMENSIONS_MAX 4u
#define ALIGNMENT_MAX 65536u
#define ARRAY_KEPT_MAX 1024u                  /* enough for one number per layer */
#define ARRAYS_KEPT_MAX (32 * ARRAY_KEPT_MAX) /* of all arrays: a kept number has 40 bytes */
#define TENSOR_BYTES_MIN (8 + 1 + 4 + 4 + 8)  /* name, number of dimensions, type, offset */

/* Value types. */
enum { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64, VALUE_TYPES };
static const uint8_t value_bytes[VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* Tensor types: elements of a row per block, and bytes of a block. */
typedef struct tensor_type {
    const char *name;
    uint32_t elements;
    uint32_t bytes;
    ep_dtype dtype;
} tensor_type;

static const tensor_type types[] = {
    [0] = {"F32", 1, 4, EP_DTYPE_F32},          [1] = {"F16", 1, 2, EP_DTYPE_F16},
    [2] = {"Q4_0", 32, 18, EP_DTYPE_NONE},      [3] = {"Q4_1", 32, 20, EP_DTYPE_NONE},
    [6] = {"Q5_0", 32, 22, EP_DTYPE_NONE},      [7] = {"Q5_1", 32, 24, EP_DTYPE_NONE},
    [8] = {"Q8_0", 32, 34, EP_DTYPE_NONE},      [9] = {"Q8_1", 32, 40, EP_DTYPE_NONE},
    [10] = {"Q2_K", 256, 84, EP_DTYPE_NONE},    [11] = {"Q3_K", 256, 110, EP_DTYPE_NONE},
    [12] = {"Q4_K", 256, 144, EP_DTYPE_NONE},   [13] = {"Q5_K", 256, 176, EP_DTYPE_NONE},
    [14] = {"Q6_K", 256, 210, EP_DTYPE_NONE},   [15] = {"Q8_K", 256, 292, EP_DTYPE_NONE},
    [16] = {"IQ2_XXS", 256, 66, EP_DTYPE_NONE}, [17] = {"IQ2_XS", 256, 74, EP_DTYPE_NONE},
    [18] = {"IQ3_XXS", 256, 98, EP_DTYPE_NONE}, [19] = {"IQ1_S", 256, 50, EP_DTYPE_NONE},
    [20] = {"IQ4_NL", 32, 18, EP_DTYPE_NONE},   [21] = {"IQ3_S", 256, 110, EP_DTYPE_NONE},
    [22] = {"IQ2_S", 256, 82, EP_DTYPE_NONE},   [23] = {"IQ4_XS", 256, 136, EP_DTYPE_NONE},
    [24] = {"I8", 1, 1, EP_DTYPE_I8},           [25] = {"I16", 1, 2, EP_DTYPE_NONE},
    [26] = {"I32", 1, 4, EP_DTYPE_I32},         [27] = {"I64", 1, 8, EP_DTYPE_I64},
    [28] = {"F64", 1, 8, EP_DTYPE_NONE},        [29] = {"IQ1_M", 256, 56, EP_DTYPE_NONE},
    [30] = {"BF16", 1, 2, EP_DTYPE_BF16},       [34] = {"TQ1_0", 256, 54, EP_DTYPE_NONE},
    [35] = {"TQ2_0", 256, 66, EP_DTYPE_NONE},   [39] = {"MXFP4", 32, 17, EP_DTYPE_NONE},
    [40] = {"NVFP4", 64, 36, EP_DTYPE_NONE},
};

/* The bytes still to be read. The caller tells a file that ends early from too few bytes given. */
typedef struct cursor {
    const char *file;
    const uint8_t *bytes;
    size_t count;
    size_t at;
    uint64_t kept; /* numbers of arrays */
    bool is_short;
    ep_error *error;
} cursor;

static ep_err bad(const cursor *c, const char *what, uint64_t value, const char *allowed)
{
    return ep_error_set(c->error, EP_ERR_BAD_FILE, "%s: byte %zu: %s is %" PRIu64 ", allowed %s",
                        c->file, c->at, what, value, allowed);
}

static ep_err take(cursor *c, size_t bytes, const uint8_t **out)
{
    if (bytes > c->count - c->at) {
        c->is_short = true;
        return ep_error_set(c->error, EP_ERR_BAD_FILE,
                            "%s: byte %zu: the head ends inside a value of %zu bytes", c->file,
                            c->at, bytes);
    }
    *out = c->bytes + c->at;
    c->at += bytes;
    return EP_OK;
}

static ep_err take_number(cursor *c, size_t bytes, uint64_t *out)
{
    const uint8_t *from;
    ep_err err = take(c, bytes, &from);
    uint64_t value = 0;
    for (size_t i = bytes; err == EP_OK && i-- > 0;) {
        value = value << 8 | from[i];
    }
    *out = value;
    return err;
}

/* The string is not terminated by a zero byte. */
static ep_err take_string(cursor *c, const char **out, size_t *out_count)
{
    const uint8_t *from = NULL;
    uint64_t count;
    ep_err err = take_number(c, 8, &count);
    if (err == EP_OK && count > SIZE_MAX / 2) {
        return bad(c, "the length of a string", count, "at most what the file holds");
    }
    err = err == EP_OK ? take(c, (size_t)count, &from) : err;
    *out = (const char *)from;
    *out_count = (size_t)count;
    return err;
}

/* Reads a printable name of at most `most` bytes. out: room for most + 1. */
static ep_err take_name(cursor *c, const char *what, size_t most, char *out)
{
    const char *text;
    size_t count;
    const size_t at = c->at;
    ep_err err = take_string(c, &text, &count);
    if (err != EP_OK) {
        return err;
    }
    bool good = count > 0 && count <= most;
    for (size_t i = 0; good && i < count; i++) {
        good = text[i] > ' ' && text[i] < 127;
    }
    if (!good) {
        return ep_error_set(c->error, EP_ERR_BAD_FILE,
                            "%s: byte %zu: %s is not 1 to %zu printable characters", c->file, at,
                            what, most);
    }
    memcpy(out, text, count);
    out[count] = 0;
    return EP_OK;
}

/* A value that cannot be kept is replaced by words: a reader that wants a number or a name refuses
 * them, and the key still counts as present. */
static json_t *real_of(double value)
{
    return isfinite(value) ? json_real(value) : json_string("(a number that is not finite)");
}

static json_t *number_of(uint32_t type, uint64_t raw)
{
    float single;
    double wide;
    const uint32_t bits = (uint32_t)raw;
    switch (type) {
    case I8:
        return json_integer((int8_t)raw);
    case I16:
        return json_integer((int16_t)raw);
    case I32:
        return json_integer((int32_t)raw);
    case F32:
        memcpy(&single, &bits, sizeof(single));
        return real_of((double)single);
    case F64:
        memcpy(&wide, &raw, sizeof(wide));
        return real_of(wide);
    case BOOL:
        return json_boolean(raw != 0);
    case U64:
        return raw <= INT64_MAX ? json_integer((json_int_t)raw)
                                : json_sprintf("(%" PRIu64 ")", raw);
    default:
        return json_integer((json_int_t)raw);
    }
}

static ep_err take_plain(cursor *c, uint32_t type, json_t **out)
{
    uint64_t raw;
    ep_err err = take_number(c, value_bytes[type], &raw);
    *out = err == EP_OK ? number_of(type, raw) : NULL;
    return err;
}

/* Skips strings, which are vocabularies, and numbers beyond what is kept. */
static ep_err skip_array(cursor *c, uint64_t type, uint64_t count)
{
    const char *text;
    const uint8_t *skipped;
    size_t length;
    ep_err err = EP_OK;
    if (type != STRING) {
        return count > SIZE_MAX / 16
                   ? bad(c, "the length of an array", count, "at most what the file holds")
                   : take(c, (size_t)count * value_bytes[type], &skipped);
    }
    for (uint64_t i = 0; err == EP_OK && i < count; i++) {
        err = take_string(c, &text, &length);
    }
    return err;
}

static ep_err take_array(cursor *c, json_t **out)
{
    uint64_t type, count;
    ep_err err = take_number(c, 4, &type);
    err = err == EP_OK ? take_number(c, 8, &count) : err;
    if (err != EP_OK) {
        return err;
    }
    if (type >= VALUE_TYPES || type == ARRAY) {
        return bad(c, "the type of an array's values", type, "0..8 and 10..12");
    }
    if (type == STRING || count > ARRAY_KEPT_MAX || c->kept + count > ARRAYS_KEPT_MAX) {
        err = skip_array(c, type, count);
        *out = err == EP_OK ? json_sprintf("(an array of %" PRIu64 ")", count) : NULL;
        return err;
    }
    json_t *array = json_array();
    c->kept += count;
    for (uint64_t i = 0; err == EP_OK && array != NULL && i < count; i++) {
        json_t *item = NULL;
        err = take_plain(c, (uint32_t)type, &item);
        if (err == EP_OK && json_array_append_new(array, item) != 0) {
            json_decref(array);
            array = NULL;
        }
    }
    if (err != EP_OK) {
        json_decref(array);
        return err;
    }
    *out = array;
    return EP_OK;
}

static ep_err take_text(cursor *c, json_t **out)
{
    const char *text;
    size_t count;
    ep_err err = take_string(c, &text, &count);
    if (err == EP_OK) {
        *out = memchr(text, 0, count) == NULL ? json_stringn(text, count) : NULL;
        *out = *out == NULL ? json_sprintf("(%" PRIu64 " bytes that are no text)", count) : *out;
    }
    return err;
}

/* NO_MEMORY: *out stays NULL. */
static ep_err take_value(cursor *c, json_t **out)
{
    uint64_t type;
    ep_err err = take_number(c, 4, &type);
    *out = NULL;
    if (err != EP_OK) {
        return err;
    }
    if (type >= VALUE_TYPES) {
        return bad(c, "a value's type", type, "0..12");
    }
    err = type == ARRAY    ? take_array(c, out)
          : type == STRING ? take_text(c, out)
                           : take_plain(c, (uint32_t)type, out);
    return err == EP_OK && *out == NULL
               ? ep_error_set(c->error, EP_ERR_NO_MEMORY, "%s: no memory for its keys", c->file)
               : err;
}

static ep_err take_keys(cursor *c, uint64_t count, json_t *keys)
{
    char name[KEY_BYTES_MAX + 1];
    if (count > KEYS_MAX) {
        return bad(c, "the number of keys", count, "0..65536");
    }
    ep_err err = EP_OK;
    for (uint64_t i = 0; err == EP_OK && i < count; i++) {
        json_t *value = NULL;
        err = take_name(c, "a key", KEY_BYTES_MAX, name);
        if (err == EP_OK && json_object_get(keys, name) != NULL) {
            return ep_error_set(c->error, EP_ERR_BAD_FILE, "%s: key %s: is there twice", c->file,
                                name);
        }
        err = err == EP_OK ? take_value(c, &value) : err;
        if (err == EP_OK && json_object_set_new(keys, name, value) != 0) {
            err = ep_error_set(c->error, EP_ERR_NO_MEMORY, "%s: no memory for its keys", c->file);
        }
    }
    return err;
}

/* Computes the bytes from type and shape, which the file gives innermost first. */
static ep_err settle_tensor(const cursor *c, uint64_t type, const uint64_t *dimensions,
                            uint32_t rank, uint64_t begin, ep_safetensors_tensor *tensor)
{
    uint64_t bytes;
    if (type >= EP_ARRAY_COUNT(types) || types[type].name == NULL) {
        return ep_error_set(c->error, EP_ERR_BAD_FILE,
                            "%s: tensor %s: type is %" PRIu64 ", which this build does not know",
                            c->file, tensor->name, type);
    }
    if (dimensions[0] % types[type].elements != 0) {
        return ep_error_set(c->error, EP_ERR_BAD_FILE,
                            "%s: tensor %s: %" PRIu64 " columns of %s, allowed multiples of %u",
                            c->file, tensor->name, dimensions[0], types[type].name,
                            types[type].elements);
    }
    bool fits =
        !__builtin_mul_overflow(dimensions[0] / types[type].elements, types[type].bytes, &bytes) &&
        dimensions[0] <= INT64_MAX;
    for (uint32_t i = 1; i < rank; i++) {
        fits = fits && !__builtin_mul_overflow(bytes, dimensions[i], &bytes) &&
               dimensions[i] <= INT64_MAX;
    }
    if (!fits || begin > INT64_MAX || bytes > INT64_MAX - begin) {
        return ep_error_set(c->error, EP_ERR_BAD_FILE, "%s: tensor %s: is larger than any file",
                            c->file, tensor->name);
    }
    for (uint32_t i = 0; i < rank; i++) {
        tensor->shape[i] = dimensions[rank - 1 - i];
    }
    tensor->rank = rank;
    tensor->dtype_text = types[type].name;
    tensor->dtype = types[type].dtype;
    tensor->begin = begin;
    tensor->end = begin + bytes;
    return EP_OK;
}

static ep_err take_tensor(cursor *c, char *name, ep_safetensors_tensor *tensor)
{
    uint64_t rank = 0, type = 0, begin = 0;
    uint64_t dimensions[DIMENSIONS_MAX] = {1, 1, 1, 1};
    ep_err err = take_name(c, "a tensor's name", NAME_BYTES_MAX, name);
    tensor->name = name;
    err = err == EP_OK ? take_number(c, 4, &rank) : err;
    if (err == EP_OK && (rank < 1 || rank > DIMENSIONS_MAX)) {
        return bad(c, "a tensor's number of dimensions", rank, "1..4");
    }
    for (uint64_t i = 0; err == EP_OK && i < rank; i++) {
        err = take_number(c, 8, &dimensions[i]);
    }
    err = err == EP_OK ? take_number(c, 4, &type) : err;
    err = err == EP_OK ? take_number(c, 8, &begin) : err;
    return err == EP_OK ? settle_tensor(c, type, dimensions, (uint32_t)rank, begin, tensor) : err;
}

static int by_begin(const void *a, const void *b)
{
    const ep_safetensors_tensor *x = a;
    const ep_safetensors_tensor *y = b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin)
                                : (x->end > y->end) - (x->end < y->end);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ep_safetensors_tensor *)a)->name,
                  ((const ep_safetensors_tensor *)b)->name);
}

/* Checks that data is aligned, inside the file and without overlap, names unique; sorts by name. */
static ep_err check_places(const cursor *c, ep_safetensors_header *header, uint64_t alignment,
                           uint64_t data_bytes)
{
    ep_safetensors_tensor *tensors = header->tensors;
    uint64_t end = 0;
    qsort(tensors, header->tensors_count, sizeof(*tensors), by_begin);
    for (size_t i = 0; i < header->tensors_count; i++) {
        if (tensors[i].begin % alignment != 0 || tensors[i].begin < end ||
            tensors[i].end > data_bytes) {
            return ep_error_set(c->error, EP_ERR_BAD_FILE,
                                "%s: tensor %s: data at %" PRIu64 "..%" PRIu64
                                ", allowed from %" PRIu64 " on in steps of %" PRIu64
                                " up to %" PRIu64 " (the file's end)",
                                c->file, tensors[i].name, tensors[i].begin, tensors[i].end, end,
                                alignment, data_bytes);
        }
        end = tensors[i].end;
    }
    qsort(tensors, header->tensors_count, sizeof(*tensors), by_name);
    for (size_t i = 1; i < header->tensors_count; i++) {
        if (strcmp(tensors[i - 1].name, tensors[i].name) == 0) {
            return ep_error_set(c->error, EP_ERR_BAD_FILE, "%s: tensor %s: is there twice", c->file,
                                tensors[i].name);
        }
    }
    return EP_OK;
}

static ep_err take_tensors(cursor *c, uint64_t count, size_t tensors_max,
                           ep_safetensors_header *header)
{
    if (count > tensors_max) {
        return ep_error_set(c->error, EP_ERR_BAD_FILE,
                            "%s: has %" PRIu64 " tensors, allowed 0..%zu", c->file, count,
                            tensors_max);
    }
    if (count > (c->count - c->at) / TENSOR_BYTES_MIN) { /* checked before the array is allocated */
        c->is_short = true;
        return bad(c, "the number of tensors", count, "as many as the file holds");
    }
    header->tensors = calloc(count > 0 ? (size_t)count : 1, sizeof(header->tensors[0]));
    header->names = calloc(count > 0 ? (size_t)count : 1, NAME_BYTES_MAX + 1);
    if (header->tensors == NULL || header->names == NULL) {
        return ep_error_set(c->error, EP_ERR_NO_MEMORY, "%s: no memory for %" PRIu64 " tensors",
                            c->file, count);
    }
    ep_err err = EP_OK;
    for (uint64_t i = 0; err == EP_OK && i < count; i++) {
        err = take_tensor(c, header->names + i * (NAME_BYTES_MAX + 1), &header->tensors[i]);
        header->tensors_count += err == EP_OK ? 1 : 0;
    }
    return err;
}

static ep_err parse(cursor *c, uint64_t file_bytes, size_t tensors_max, ep_gguf_head *head)
{
    const uint8_t *magic;
    uint64_t version = 0, tensors = 0, keys = 0;
    char text[EP_JSON_TEXT_BYTES];
    ep_err err = take(c, 4, &magic);
    if (err == EP_OK && memcmp(magic, EP_GGUF_MAGIC, 4) != 0) {
        return ep_error_set(c->error, EP_ERR_BAD_FILE, "%s: does not begin with GGUF", c->file);
    }
    err = err == EP_OK ? take_number(c, 4, &version) : err;
    if (err == EP_OK && version != 2 && version != 3) {
        return bad(c, "the version", version, "2, 3 (little-endian)");
    }
    err = err == EP_OK ? take_number(c, 8, &tensors) : err;
    err = err == EP_OK ? take_number(c, 8, &keys) : err;
    err = err == EP_OK ? take_keys(c, keys, head->keys) : err;
    err = err == EP_OK ? take_tensors(c, tensors, tensors_max, &head->header) : err;
    if (err != EP_OK) {
        return err;
    }
    const json_t *stated = json_object_get(head->keys, "general.alignment");
    /* 0 if it is no integer */
    const json_int_t alignment = stated == NULL ? 32 : json_integer_value(stated);
    if (alignment < 1 || alignment > ALIGNMENT_MAX || (alignment & (alignment - 1)) != 0) {
        return ep_error_set(c->error, EP_ERR_BAD_FILE,
                            "%s: general.alignment is %s, allowed powers of two up to %u", c->file,
                            ep_json_describe(stated, text), ALIGNMENT_MAX);
    }
    head->data_begin =
        (c->at + (uint64_t)alignment - 1) / (uint64_t)alignment * (uint64_t)alignment;
    if (head->data_begin > file_bytes) {
        head->data_begin = file_bytes; /* when the file has no data */
    }
    return check_places(c, &head->header, (uint64_t)alignment, file_bytes - head->data_begin);
}

ep_err ep_gguf_head_parse(const char *file, const uint8_t *bytes, size_t count, uint64_t file_bytes,
                          size_t tensors_max, ep_gguf_head *out_head, bool *out_is_short,
                          ep_error *out_error)
{
    cursor c = {.file = file, .bytes = bytes, .count = count, .error = out_error};
    ep_gguf_head head = {.keys = json_object()};
    ep_err err = head.keys == NULL
                     ? ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for its keys", file)
                     : parse(&c, file_bytes, tensors_max, &head);
    *out_is_short = c.is_short && count < file_bytes;
    if (err != EP_OK) {
        ep_gguf_head_fini(&head);
        return err;
    }
    *out_head = head;
    return EP_OK;
}

void ep_gguf_head_fini(ep_gguf_head *head)
{
    ep_safetensors_header_fini(&head->header);
    json_decref(head->keys);
    *head = (ep_gguf_head){0};
}
