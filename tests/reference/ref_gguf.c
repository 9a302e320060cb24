/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref_math.h"

/* ---- blocks ---- */

static float half_at(const uint8_t *block, size_t at)
{
    return ref_load(block + at, REF_F16, 0);
}

/* Reads a nibble of 32 columns at `at`: the first 16 in lower halves. */
static unsigned nibble_of_32(const uint8_t *block, size_t at, size_t k)
{
    return k < 16 ? block[at + k] & 15u : block[at + k - 16] >> 4u;
}

/* Reads a nibble of 256 columns at `at`: of each 64 the first 32 in lower halves. */
static unsigned nibble_of_256(const uint8_t *block, size_t at, size_t k)
{
    const uint8_t *bytes = block + at + 32 * (k / 64);
    return k % 64 < 32 ? bytes[k % 64] & 15u : bytes[k % 64 - 32] >> 4u;
}

static float q4_0_value(const uint8_t *block, size_t k)
{
    return (float)((int)nibble_of_32(block, 2, k) - 8);
}

static float q5_0_value(const uint8_t *block, size_t k)
{
    unsigned fifth = block[2 + k / 8] >> (k % 8) & 1u;
    return (float)((int)(nibble_of_32(block, 6, k) + 16 * fifth) - 16);
}

static float q8_0_value(const uint8_t *block, size_t k)
{
    return ref_load(block + 2, REF_I8, k);
}

static float first_scale(const uint8_t *block, size_t g)
{
    (void)g;
    return half_at(block, 0);
}

static float mxfp4_value(const uint8_t *block, size_t k)
{
    return ref_e2m1(nibble_of_32(block, 1, k));
}

static float mxfp4_scale(const uint8_t *block, size_t g)
{
    (void)g;
    return ref_e8m0(block[0]);
}

/* Reads one of eight parts or eight minima of 6 bits in 12 bytes: the first four of each are stored
 * whole, the others as two and four bits in different bytes. */
static unsigned six_bits(const uint8_t *packed, size_t g, bool is_minimum)
{
    const uint8_t *first = packed + (is_minimum ? 4 : 0);
    if (g < 4) {
        return first[g] & 63u;
    }
    unsigned low = is_minimum ? packed[4 + g] >> 4u : packed[4 + g] & 15u;
    return low | (unsigned)(first[g - 4] >> 6u) << 4u;
}

static float q4_k_value(const uint8_t *block, size_t k)
{
    return (float)nibble_of_256(block, 16, k);
}

static float q5_k_value(const uint8_t *block, size_t k)
{
    unsigned fifth = block[16 + k % 32] >> (k / 32) & 1u;
    return (float)(nibble_of_256(block, 48, k) + 16 * fifth);
}

static float k_scale(const uint8_t *block, size_t g)
{
    return half_at(block, 0) * (float)six_bits(block + 4, g, false);
}

static float k_offset(const uint8_t *block, size_t g)
{
    return half_at(block, 2) * (float)six_bits(block + 4, g, true);
}

/* Two halves of 128 columns, each in four parts of 32: l, l+32, l+64, l+96. */
static float q6_k_value(const uint8_t *block, size_t k)
{
    size_t part = k % 128 / 32;
    size_t l = k % 32;
    uint8_t byte = block[64 * (k / 128) + l + (part % 2 == 1 ? 32 : 0)];
    unsigned low = part < 2 ? byte & 15u : byte >> 4u;
    unsigned high = block[128 + 32 * (k / 128) + l] >> (2 * part) & 3u;
    return (float)((int)(low | high << 4u) - 32);
}

static float q6_k_scale(const uint8_t *block, size_t g)
{
    return half_at(block, 208) * ref_load(block + 192, REF_I8, g);
}

static const struct ref_block blocks[] = {
    {"Q4_0", 32, 18, 32, q4_0_value, first_scale, NULL, REF_FORMAT_INT4},
    {"Q5_0", 32, 22, 32, q5_0_value, first_scale, NULL, REF_FORMAT_CODES},
    {"Q8_0", 32, 34, 32, q8_0_value, first_scale, NULL, REF_FORMAT_CODES},
    {"MXFP4", 32, 17, 32, mxfp4_value, mxfp4_scale, NULL, REF_FORMAT_MXFP4},
    {"Q4_K", 256, 144, 32, q4_k_value, k_scale, k_offset, REF_FORMAT_Q4_K},
    {"Q5_K", 256, 176, 32, q5_k_value, k_scale, k_offset, REF_FORMAT_CODES},
    {"Q6_K", 256, 210, 16, q6_k_value, q6_k_scale, NULL, REF_FORMAT_CODES}};

const struct ref_block *ref_block_find(const char *name)
{
    for (size_t i = 0; i < sizeof(blocks) / sizeof(*blocks); i++) {
        if (strcmp(blocks[i].name, name) == 0) {
            return &blocks[i];
        }
    }
    return NULL;
}

/* ---- the file ---- */

struct reader {
    const char *path;
    const uint8_t *bytes;
    size_t size;
    size_t at;
};

static uint64_t take(struct reader *r, size_t bytes)
{
    uint64_t value = 0;
    if (bytes > r->size - r->at) {
        ref_die("%s: ends in its head", r->path);
    }
    for (size_t i = 0; i < bytes; i++) {
        value |= (uint64_t)r->bytes[r->at + i] << (8 * i);
    }
    r->at += bytes;
    return value;
}

static char *take_text(struct reader *r)
{
    size_t length = (size_t)take(r, 8);
    if (length > r->size - r->at) {
        ref_die("%s: ends in its head", r->path);
    }
    char *text = strndup((const char *)r->bytes + r->at, length);
    r->at += length;
    return text;
}

/* Reads integers of 32 and 64 bits and texts; skips other values and returns NULL. */
static json_t *take_value(struct reader *r, unsigned type)
{
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (type == 8) {
        char *text = take_text(r);
        json_t *value = json_string(text);
        free(text);
        return value;
    }
    if (type == 9) {
        unsigned each = (unsigned)take(r, 4);
        uint64_t count = take(r, 8);
        for (uint64_t i = 0; i < count; i++) {
            json_decref(take_value(r, each));
        }
        return NULL;
    }
    if (type >= sizeof(sizes)) {
        ref_die("%s: a value of type %u", r->path, type);
    }
    uint64_t number = take(r, sizes[type]);
    return type == 6 || type == 12 ? NULL : json_integer((json_int_t)number);
}

static const char *type_name(uint64_t type)
{
    static const char *const names[] = {
        [0] = "F32",   [1] = "F16",   [2] = "Q4_0",  [6] = "Q5_0",  [8] = "Q8_0",
        [12] = "Q4_K", [13] = "Q5_K", [14] = "Q6_K", [30] = "BF16", [39] = "MXFP4"};
    return type < sizeof(names) / sizeof(*names) && names[type] != NULL ? names[type] : "unknown";
}

/* Adds a tensor's entry as in safetensors, the outermost dimension first. */
static void take_tensor(struct reader *r, json_t *header)
{
    size_t shape[REF_RANK_MAX];
    char *name = take_text(r);
    size_t rank = (size_t)take(r, 4);
    size_t count = 1;
    json_t *dims = json_array();
    for (size_t i = 0; i < rank && rank <= REF_RANK_MAX; i++) {
        shape[i] = (size_t)take(r, 8);
        count *= shape[i];
    }
    for (size_t i = rank; i-- > 0;) {
        json_array_append_new(dims, json_integer((json_int_t)shape[i]));
    }
    const char *type = type_name(take(r, 4));
    const struct ref_block *block = ref_block_find(type);
    json_int_t begin = (json_int_t)take(r, 8);
    size_t bytes = block != NULL ? count / block->columns * block->bytes
                                 : count * (strcmp(type, "F32") == 0 ? 4 : 2);
    json_object_set_new(header, name,
                        json_pack("{s:s,s:o,s:[I,I]}", "dtype", type, "shape", dims, "data_offsets",
                                  begin, begin + (json_int_t)bytes));
    free(name);
}

static void rename_key(json_t *config, const json_t *keys, const char *architecture,
                       const char *end, const char *name)
{
    char key[256];
    snprintf(key, sizeof(key), "%s.%s", architecture, end);
    json_t *value = json_object_get(keys, key);
    if (value != NULL) {
        json_object_set(config, name, value);
    }
}

void ref_gguf_open(const char *path, struct ref_file *out_file, json_t *config)
{
    size_t size;
    char *bytes = ref_read_whole(path, &size);
    struct reader r = {path, (const uint8_t *)bytes, size, 0};
    json_t *keys = json_object();
    json_t *header = json_object();
    if (take(&r, 4) != 0x46554747 || take(&r, 4) != 3) {
        ref_die("%s: not GGUF of version 3", path);
    }
    uint64_t tensors = take(&r, 8);
    uint64_t count = take(&r, 8);
    for (uint64_t i = 0; i < count; i++) {
        char *name = take_text(&r);
        json_t *value = take_value(&r, (unsigned)take(&r, 4));
        json_object_set_new(keys, name, value != NULL ? value : json_null());
        free(name);
    }
    for (uint64_t i = 0; i < tensors; i++) {
        take_tensor(&r, header);
    }
    const char *architecture = json_string_value(json_object_get(keys, "general.architecture"));
    if (architecture != NULL) {
        bool is_oss = strcmp(architecture, "gpt-oss") == 0;
        json_object_set_new(config, "model_type", json_string(is_oss ? "gpt_oss" : architecture));
        rename_key(config, keys, architecture, "embedding_length", "hidden_size");
        rename_key(config, keys, architecture, "feed_forward_length", "intermediate_size");
        rename_key(config, keys, architecture, "expert_feed_forward_length",
                   "moe_intermediate_size");
    }
    json_int_t stated = json_integer_value(json_object_get(keys, "general.alignment"));
    size_t alignment = stated > 0 ? (size_t)stated : 32;
    *out_file = (struct ref_file){bytes, (r.at + alignment - 1) / alignment * alignment, header};
    json_decref(keys);
}
