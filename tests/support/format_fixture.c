/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the experts as sources, then each container from them. */
#include "support/format_fixture.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"

enum { GATE, UP, DOWN, MATRICES };
#define E EP_FORMAT_EXPERTS
#define OAI "\"swiglu_limit\":0.5,"

#define CT(weights)                                                                                \
    "{\"quant_method\":\"compressed-tensors\",\"config_groups\":{\"group_0\":{\"input_"            \
    "activations\":null,"                                                                          \
    "\"targets\":[\"Linear\"],\"weights\":" weights "}}}"
#define CT_INT(bits, group, strategy, symmetric)                                                   \
    CT("{\"num_bits\":" bits ",\"type\":\"int\",\"group_size\":" group ",\"strategy\":\"" strategy \
       "\",\"symmetric\":" symmetric "}")
#define CT_INT8_ASYM CT_INT("8", "null", "channel", "false")
#define FP8(block)                                                                                 \
    "{\"quant_method\":\"fp8\",\"activation_scheme\":\"dynamic\",\"weight_block_size\":" block "}"
#define GPTQ(bits, group, sym, more)                                                               \
    "{\"quant_method\":\"gptq\",\"bits\":" bits ",\"group_size\":" group ",\"sym\":" sym           \
    ",\"lm_head\":false" more "}"
#define AWQ(group)                                                                                 \
    "{\"quant_method\":\"awq\",\"bits\":4,\"group_size\":" group                                   \
    ",\"zero_point\":true,\"version\":\"gemm\"}"
#define BLK(called, spelled, form, wide, narrow, ...)                                              \
    {                                                                                              \
        .name = (called), .names = EP_FORMAT_##spelled, .format = EP_WEIGHTS_##form,               \
        .hidden = (wide), .inner = (narrow), .config = "qwen3moe", .container = EP_FORMAT_GGUF,    \
        __VA_ARGS__                                                                                \
    }
#define USUAL(called, spelled, form, wide, narrow, keys, ...)                                      \
    {                                                                                              \
        .name = (called), .names = EP_FORMAT_##spelled, .format = EP_WEIGHTS_##form,               \
        .hidden = (wide), .inner = (narrow), .config = (keys), .activation = EP_ACT_##__VA_ARGS__  \
    }
#define QUANT(called, spelled, form, wide, narrow, tool, columns, type, ...)                       \
    {                                                                                              \
        .name = (called), .names = EP_FORMAT_##spelled, .format = EP_WEIGHTS_##form,               \
        .hidden = (wide), .inner = (narrow), .config = "", .container = EP_FORMAT_##tool,          \
        .group = (columns), .scales = EP_DTYPE_##type, .quantised = __VA_ARGS__                    \
    }
#define MODELOPT "{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\",\"group_size\":16}"

/* clang-format off */
const ep_format_case ep_format_cases[] = {
    USUAL("n1-bf16", N1, BF16, 70, 45, "", SILU),
    USUAL("n1-deep-f16-gelu", N1_DEEP, F16, 64, 33, "\"hidden_act\":\"gelu\",", GELU),
    USUAL("n1-f32-bias", N1, F32, 40, 24, "\"hidden_act\":\"gelu_pytorch_tanh\",", GELU_TANH,
          .biases = true),
    USUAL("n1-f8-block", N1, F8_BLOCK, 200, 136, "", SILU),
    USUAL("n1-f8-channel", N1, F8_CHANNEL, 96, 64, "", SILU),
    USUAL("n1-f8-channel-bf16", N1, F8_CHANNEL, 96, 65, "", SILU, .bf16_scales = true),
    USUAL("n2m-f8-block", N2M, F8_BLOCK, 130, 64, "", SILU),
    USUAL("n5-int4", N1_DEEP, INT4, 96, 64, "", SILU),
    USUAL("n1-int4-odd", N1, INT4, 72, 40, "", SILU),
    USUAL("n1-w8a8", N1, W8A8, 96, 50, "", SILU),
    USUAL("n2-bf16", N2, BF16, 64, 32, "", SILU),
    USUAL("n2-mxfp8-oai", N2, MXFP8, 96, 64, OAI "\"swiglu_alpha\":1.702,", SWIGLU_OAI,
          .numbers = {1.702f, 1, 0.5f}),
    USUAL("n6-mxfp4-situ", N2, MXFP4, 96, 64, "\"activation_situ_beta\":4.0,", SITU,
          .numbers = {4, 25, 0}),
    USUAL("n2-mxfp4-odd", N2, MXFP4, 77, 45, "", SILU, .biases = true),
    USUAL("n4-mxfp4-limit", N4, MXFP4, 64, 96, OAI, SWIGLU_LIMIT, .numbers = {0, 0, 0.5f}),
    USUAL("n3-bf16", N3, BF16, 48, 20, "", SILU),
    USUAL("n3-transposed", N3_TRANSPOSED, BF16, 70, 90, "", SILU),
    USUAL("n3-transposed-h-is-i", N3_TRANSPOSED, BF16, 32, 32, "", SILU),
    USUAL("n3-h-is-i", N3, BF16, 32, 32, "", SILU),
    USUAL("n3-transposed-h-is-2i", N3_TRANSPOSED, F16, 64, 32, "", SILU),
    USUAL("n3-h-is-2i", N3, F32, 64, 32, "", SILU),
    USUAL("n7-mxfp4", N7, MXFP4, 64, 64, OAI "\"model_type\":\"gpt_oss\",", SWIGLU_OAI,
          .numbers = {1.702f, 1, 0.5f}, .biases = true),
    USUAL("n7-bf16", N7_PLAIN, BF16, 64, 64, OAI "\"model_type\":\"gpt_oss\",", SWIGLU_OAI,
          .numbers = {1.702f, 1, 0.5f}, .biases = true),
    USUAL("n8-bf16", N8, BF16, 40, 72, "", SILU),
    USUAL("n9-bf16", N9, BF16, 40, 24, "", SILU),
    USUAL("n11-step", N11, BF16, 40, 24, "\"swiglu_limits\":[0,0.25],", SWIGLU_STEP,
          .numbers = {0, 0, 0.25f}),
    USUAL("mixer-relu2", MIXER, BF16, 64, 40, "\"mlp_hidden_act\":\"relu2\",", RELU2_NO_GATE),
    USUAL("two-matrices-relu", N1, BF16, 64, 100, "\"hidden_act\":\"relu\",", RELU_NO_GATE,
          .biases = true),
    USUAL("two-matrices-silu", N1, F8_CHANNEL, 64, 40, "", SILU_NO_GATE),
    USUAL("two-matrices-gelu", N1, W8A8, 64, 70, "\"hidden_act\":\"gelu\",", GELU_NO_GATE),
    USUAL("two-matrices-gelu-tanh", N1, F16, 64, 70, "\"hidden_act\":\"gelu_new\",",
          GELU_TANH_NO_GATE),
    QUANT("ct-int4-g128", N1, INT4_128, 200, 136, PACKED, 128, BF16,
          CT_INT("4", "128", "group", "true")),
    QUANT("ct-int4-g256", N1, INT4_128, 320, 60, PACKED, 256, F16,
          CT_INT("4", "256", "group", "true")),
    QUANT("ct-int4-channel", N1, INT4_128, 200, 136, PACKED, 0, BF16,
          CT_INT("4", "null", "channel", "true")),
    QUANT("ct-int4-g64", N2, INT4, 192, 128, PACKED, 64, BF16, CT_INT("4", "64", "group", "true")),
    QUANT("ct-int4-g32-f16", N1, INT4_F16, 96, 72, PACKED, 32, F16,
          CT_INT("4", "32", "group", "true")),
    QUANT("ct-int4-g64-f32", N1, INT4_ZERO, 128, 64, PACKED, 64, F32,
          CT_INT("4", "64", "group", "true")),
    QUANT("ct-int4-g32-asym", N1, INT4_ZERO, 96, 75, PACKED, 32, BF16,
          CT_INT("4", "32", "group", "false")),
    QUANT("ct-int4-g128-asym", N1, INT4_128_ZERO, 200, 136, PACKED, 128, BF16,
          CT_INT("4", "128", "group", "false")),
    QUANT("ct-int4-channel-asym", N1_DEEP, INT4_128_ZERO, 136, 69, PACKED, 0, F16,
          CT_INT("4", "null", "channel", "false")),
    QUANT("ct-int8-channel", N1, INT8_128, 200, 70, PACKED, 0, BF16,
          CT_INT("8", "null", "channel", "true")),
    QUANT("ct-int8-g128", N1, INT8_128, 256, 136, PACKED, 128, F16,
          CT_INT("8", "128", "group", "true")),
    QUANT("ct-int8-g32", N1, INT8_F16, 96, 64, PACKED, 32, F16, CT_INT("8", "32", "group", "true")),
    QUANT("ct-int8-g64-asym", N1, INT8_ZERO, 128, 70, PACKED, 64, BF16,
          CT_INT("8", "64", "group", "false")),
    QUANT("ct-int8-channel-asym", N2, INT8_128_ZERO, 136, 67, PACKED, 0, BF16,
          CT_INT("8", "null", "channel", "false")),
    QUANT("ct-int8-plain", N1, INT8_128, 130, 48, INT8, 0, BF16,
          CT_INT("8", "null", "channel", "true")),
    QUANT("ct-int8-plain-asym", N1, INT8_128_ZERO, 130, 48, INT8, 0, F32, CT_INT8_ASYM),
    QUANT("ct-int8-plain-g128", N1, INT8_128, 256, 48, INT8, 128, F32,
          CT_INT("8", "128", "group", "true")),
    QUANT("f8-tensor", N1, F8_CHANNEL, 130, 64, F8, 0, F32, FP8("null")),
    QUANT("f8-tensor-bf16", N1, F8_CHANNEL, 96, 140, F8, 0, BF16,
          CT("{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"tensor\"}")),
    QUANT("f8-block64", N1, F8_32, 200, 136, F8, 64, F32, FP8("[64,64]")),
    QUANT("f8-block96", N2, F8_32, 200, 136, F8, 96, BF16, FP8("[96,96]")),
    QUANT("f8-block32", N1, F8_32, 72, 40, F8, 32, F32, FP8("[32,32]")),
    QUANT("nvfp4-ct", N1, NVFP4, 96, 72, NVFP4, 16, F8E4M3,
          CT("{\"num_bits\":4,\"type\":\"float\",\"strategy\":\"tensor_group\","
             "\"group_size\":16}")),
    QUANT("nvfp4-modelopt", N1, NVFP4, 80, 300, MODELOPT, 16, F8E4M3, MODELOPT),
    QUANT("ct-w4a8-g64", N1, INT8_ZERO, 128, 64, INT8, 64, BF16,
          "{\"quant_method\":\"compressed-tensors\",\"config_groups\":{\"group_0\":{"
          "\"input_activations\":{\"num_bits\":8,\"type\":\"int\"},"
          "\"weights\":{\"num_bits\":4,\"group_size\":64,\"symmetric\":true}}}}"),
    QUANT("ct-int4-g32-order", N1, INT4, 96, 72, PACKED, 32, BF16,
          CT("{\"num_bits\":4,\"group_size\":32,\"symmetric\":true,\"actorder\":\"group\"}")),
    QUANT("gptq-g128", N1, INT4_128, 256, 136, GPTQ, 128, F16,
          GPTQ("4", "128", "true", ",\"desc_act\":false")),
    QUANT("gptq-g32", N2, INT4_F16, 96, 64, GPTQ, 32, F16, GPTQ("4", "32", "true", "")),
    QUANT("gptq-g128-asym", N1, INT4_128_ZERO, 136, 128, GPTQ, 128, F16,
          GPTQ("4", "128", "false", ",\"desc_act\":false,\"checkpoint_format\":\"gptq\"")),
    QUANT("gptq-v2-g64", N1, INT4_ZERO, 96, 128, GPTQ, 64, BF16,
          GPTQ("4", "64", "false", ",\"desc_act\":false,\"checkpoint_format\":\"gptq_v2\"")),
    QUANT("gptq-row", N1, INT4_128, 104, 72, GPTQ, 0, F16, GPTQ("4", "-1", "true", "")),
    QUANT("gptq-int8", N1, INT8_128, 136, 64, GPTQ, 128, F16, GPTQ("8", "128", "true", "")),
    QUANT("gptq-int8-asym", N1, INT8_ZERO, 64, 72, GPTQ, 32, F16, GPTQ("8", "32", "false", "")),
    QUANT("gptq-order", N1, INT4_128, 264, 136, GPTQ, 128, F16,
          GPTQ("4", "128", "true", ",\"desc_act\":true")),
    QUANT("gptq-order-asym", N1, INT4_ZERO, 96, 64, GPTQ, 32, F16,
          GPTQ("4", "32", "false", ",\"desc_act\":true")),
    QUANT("awq-g128", N1, INT4_128_ZERO, 136, 136, AWQ, 128, F16, AWQ("128")),
    QUANT("awq-g64", N2, INT4_ZERO, 72, 64, AWQ, 64, F16, AWQ("64")),
    BLK("gguf-q4_k-q6_k", BLK, Q4_K, 256, 256, .type = "Q4_K",
        .down_type = "Q6_K", .down = EP_WEIGHTS_Q6_K),
    BLK("gguf-q4_k-fused", BLK_FUSED, Q4_K, 512, 256, .type = "Q4_K"),
    BLK("gguf-q5_k-q8_0", BLK, Q5_K, 256, 96, .type = "Q5_K",
        .down_type = "Q8_0", .down = EP_WEIGHTS_INT8_F16),
    BLK("gguf-q6_k-f16", BLK_FUSED, Q6_K, 256, 35, .type = "Q6_K",
        .down_type = "F16", .down = EP_WEIGHTS_F16),
    BLK("gguf-q4_0", BLK, INT4_F16, 96, 64, .type = "Q4_0"),
    BLK("gguf-q5_0-q4_0", BLK, INT8_F16, 64, 96, .type = "Q5_0",
        .down_type = "Q4_0", .down = EP_WEIGHTS_INT4_F16),
    BLK("gguf-q8_0", BLK_FUSED, INT8_F16, 96, 64, .type = "Q8_0"),
    BLK("gguf-bf16-f32", BLK, BF16, 50, 30, .type = "BF16",
        .down_type = "F32", .down = EP_WEIGHTS_F32),
    BLK("gguf-f16", BLK_FUSED, F16, 50, 30, .type = "F16"),
    USUAL("gguf-mxfp4", BLK, MXFP4, 64, 96, "gpt-oss", SWIGLU_OAI, .numbers = {1.702f, 1, 7},
          .biases = true, .container = EP_FORMAT_GGUF, .type = "MXFP4"),
    USUAL("gguf-mxfp4-q8_0", BLK, MXFP4, 96, 64, "gpt-oss", SWIGLU_OAI, .numbers = {1.702f, 1, 7},
          .biases = true, .container = EP_FORMAT_GGUF, .type = "MXFP4", .down_type = "Q8_0",
          .down = EP_WEIGHTS_INT8_F16),
    QUANT("ct-w4a16-g32", N1, INT4, 96, 72, PACKED, 32, BF16,
          "{\"quant_method\":\"compressed-tensors\",\"config_groups\":{\"W4A16\":{"
          "\"input_activations\":null,"
          "\"weights\":{\"num_bits\":4,\"group_size\":32,\"symmetric\":true}}}}"),
    /* clang-format on */
};
const size_t ep_format_cases_count = EP_ARRAY_COUNT(ep_format_cases);

static uint32_t rows_of(const ep_format_case *form, int matrix)
{
    return matrix == DOWN ? form->hidden : form->inner;
}

static uint32_t columns_of(const ep_format_case *form, int matrix)
{
    return matrix == DOWN ? form->inner : form->hidden;
}

/* Draws multiples of 1/64 within +-1/2: exact in every plain type. */
static void fill_plain(uint64_t *state, ep_dtype dtype, size_t count, uint8_t *to)
{
    for (size_t i = 0; i < count; i++) {
        float v = (float)((int)(ep_splitmix64(state) % 65) - 32) / 64.0f;
        uint16_t half = dtype == EP_DTYPE_F16 ? ep_f32_to_f16(v) : ep_f32_to_bf16(v);
        if (dtype == EP_DTYPE_F32) {
            memcpy(to + 4 * i, &v, 4);
        } else {
            memcpy(to + 2 * i, &half, 2);
        }
    }
}

static bool is_f8(ep_weight_format format)
{
    return ep_weight_format_codes(format) == EP_CODES_E4M3;
}

/* Maps any byte to a code that the GGUF type has. */
static uint8_t in_range(const char *type, uint8_t code)
{
    return type == NULL                ? code
           : strcmp(type, "Q5_K") == 0 ? code & 31u
           : strcmp(type, "Q5_0") == 0 ? (uint8_t)((code & 31u) - 16u)
           : strcmp(type, "Q6_K") == 0 ? (uint8_t)((code & 63u) - 32u)
                                       : code;
}

static const char *type_of_matrix(const ep_format_case *form, int m)
{
    return m == DOWN && form->down_type != NULL ? form->down_type : form->type;
}

static uint8_t *make_values(uint64_t *state, const char *type, ep_weight_format format,
                            uint32_t rows, uint32_t columns)
{
    size_t bytes = rows * ep_weight_row_bytes(format, columns);
    uint8_t *values = calloc(1, bytes);
    if (ep_weight_format_is_float(format)) {
        fill_plain(state, ep_weight_format_dtype(format), (size_t)rows * columns, values);
        return values;
    }
    for (size_t i = 0; i < bytes; i++) {
        uint8_t code = (uint8_t)(ep_splitmix64(state) >> 56);
        values[i] = is_f8(format) && (code & 0x7fu) == 0x7fu ? 0x30 : in_range(type, code);
    }
    return values;
}

/* Draws a small number with few bits, exact in f32, bf16 and f16. */
static float few_bits(uint64_t *state, ep_weight_format format)
{
    const bool is_nibbles = ep_weight_codes_are_nibbles(ep_weight_format_codes(format));
    return (float)(64 + ep_splitmix64(state) % 64) * (is_nibbles ? 0x1p-11f : 0x1p-16f);
}

static void put_scale(uint64_t *state, ep_weight_format format, uint8_t *to)
{
    const ep_weight_scales kind = ep_weight_format_scales(format);
    if (kind == EP_SCALES_E8M0) {
        *to = (uint8_t)((format == EP_WEIGHTS_MXFP4 ? 122 : 117) + ep_splitmix64(state) % 4);
    } else if (kind == EP_SCALES_E4M3_PARTS) {
        *to = (uint8_t)(0x40 + ep_splitmix64(state) % 32);
    } else if (ep_weight_scales_have_levels(kind)) {
        *to = (uint8_t)(kind == EP_SCALES_INT8_PARTS ? ep_splitmix64(state) >> 56
                                                     : ep_splitmix64(state) % 64);
    } else {
        const float scale = few_bits(state, format);
        const uint16_t half = kind == EP_SCALES_F16 ? ep_f32_to_f16(scale) : ep_f32_to_bf16(scale);
        memcpy(to,
               kind == EP_SCALES_BF16 || kind == EP_SCALES_F16 ? (const void *)&half
                                                               : (const void *)&scale,
               kind == EP_SCALES_BF16 || kind == EP_SCALES_F16 ? 2 : 4);
    }
}

bool ep_format_case_has_zeros(const ep_format_case *form)
{
    return form->quantised != NULL && ep_weight_format_offsets(form->format) == EP_OFFSETS_ZERO &&
           strstr(form->quantised, "\"symmetric\":true") == NULL &&
           strstr(form->quantised, "\"sym\":true") == NULL;
}

bool ep_format_case_has_order(const ep_format_case *form)
{
    return form->quantised != NULL && (strstr(form->quantised, "\"desc_act\":true") != NULL ||
                                       strstr(form->quantised, "\"actorder\":\"group\"") != NULL);
}

static int ascending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a;
    const uint32_t y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Draws an order of columns in which those of a group keep the file's order. */
static uint32_t *make_order(uint64_t *state, uint32_t columns, uint32_t group)
{
    uint32_t *order = malloc(columns * sizeof(*order));
    for (uint32_t k = 0; k < columns; k++) {
        const uint32_t other = (uint32_t)(ep_splitmix64(state) % (k + 1));
        order[k] = order[other];
        order[other] = k;
    }
    for (uint32_t k = 0; k < columns; k += group) {
        qsort(order + k, columns - k < group ? columns - k : group, sizeof(*order), ascending);
    }
    return order;
}

/*
 * Makes one block of scales. Where rows, or more columns, share a scale in the file, the ones in
 * memory repeat. Zero points are within the range of 4 bits. factor: the file's scale for the whole
 * matrix.
 */
static uint8_t *make_scales(uint64_t *state, const ep_format_case *form, ep_weight_format format,
                            uint32_t rows, uint32_t columns, float factor)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, rows, columns);
    const bool is_row = format == EP_WEIGHTS_F8_CHANNEL || format == EP_WEIGHTS_W8A8;
    const size_t element = is_row ? 4 : ep_weight_scale_bytes(ep_weight_format_scales(format));
    const size_t group = is_row ? columns : ep_weight_group_columns(format);
    const size_t groups = (columns + group - 1) / group;
    const bool is_gguf = form->container == EP_FORMAT_GGUF;
    const bool repeats = form->container != EP_FORMAT_USUAL && !is_gguf;
    const bool begins_at_one =
        form->container == EP_FORMAT_GPTQ && strstr(form->quantised, "gptq_v2") == NULL;
    const size_t in_file = !repeats || form->group != 0 ? form->group : columns;
    const size_t rows_each = form->container != EP_FORMAT_F8 ? 1
                             : form->group != 0              ? form->group
                                                             : rows;
    uint8_t *scales = calloc(1, ep_weight_scales_bytes(format, rows, columns) + 1);
    uint8_t *offsets = scales + arrays.scales;
    for (size_t i = 0; i < arrays.scales / element; i++) {
        const size_t n = i / groups;
        const size_t g = i % groups;
        const size_t first = repeats && n % rows_each != 0 ? i - groups
                             : repeats ? i - g + g * group / in_file * in_file / group
                                       : i;
        if (first != i) {
            memcpy(scales + i * element, scales + first * element, element);
        } else {
            put_scale(state, format, scales + i * element);
        }
        if (ep_format_case_has_zeros(form)) {
            offsets[i] =
                (uint8_t)(first != i ? offsets[first]
                                     : ep_splitmix64(state) % 16 - (begins_at_one ? 7 : 8));
        }
    }
    const float multiplied = form->container == EP_FORMAT_NVFP4 ? 1.0f / factor : factor;
    for (size_t i = 0; ep_weight_format_offsets(format) == EP_OFFSETS_MINIMUM && i < arrays.offsets;
         i++) {
        offsets[i] = (uint8_t)(ep_splitmix64(state) % 64);
    }
    for (size_t i = 0; i < arrays.scale_factors + arrays.offset_factors; i += sizeof(multiplied)) {
        const float own = (float)(64 + ep_splitmix64(state) % 64) * 0x1p-19f; /* exact in f16 */
        memcpy(offsets + arrays.offsets + i, is_gguf ? &own : &multiplied, sizeof(multiplied));
    }
    return scales;
}

static void make_expert(ep_format_model *model, uint32_t e, uint64_t *state)
{
    const ep_format_case *form = model->form;
    const ep_dtype bias_dtype = form->container == EP_FORMAT_GGUF ? EP_DTYPE_F32 : EP_DTYPE_BF16;
    uint8_t **parts = model->parts[e];
    for (int m = ep_activation_has_gate(form->activation) ? GATE : UP; m < MATRICES; m++) {
        const uint32_t rows = rows_of(form, m);
        const ep_weight_format format = ep_format_case_of(form, m);
        parts[3 * m] =
            make_values(state, type_of_matrix(form, m), format, rows, columns_of(form, m));
        if (!ep_weight_format_is_float(format)) {
            model->factors[e][m] = (float)(3 + e + (uint32_t)m) *
                                   (form->container == EP_FORMAT_NVFP4 ? 64.0f : 0x1p-10f);
            parts[3 * m + 1] =
                make_scales(state, form, format, rows, columns_of(form, m), model->factors[e][m]);
        }
        if (form->biases) {
            parts[3 * m + 2] = calloc(rows, ep_dtype_bytes(bias_dtype));
            fill_plain(state, bias_dtype, rows, parts[3 * m + 2]);
        }
    }
    if (ep_format_case_has_order(form)) {
        model->up_order[e] = make_order(state, form->hidden, form->group);
        model->down_order[e] = make_order(state, form->inner, form->group);
        model->places[e] = malloc(form->hidden * sizeof(uint32_t));
        for (uint32_t k = 0; k < form->hidden; k++) {
            model->places[e][model->up_order[e][k]] = k;
        }
    }
    model->experts[e] = (ep_expert_source){
        .places = model->places[e],
        .hidden = form->hidden,
        .inner = form->inner,
        .format = form->format,
        .down_format = form->down,
        .activation = form->activation,
        .numbers = form->numbers,
        .gate = parts[0],
        .gate_scales = parts[1],
        .gate_bias = parts[2],
        .up = parts[3],
        .up_scales = parts[4],
        .up_bias = parts[5],
        .down = parts[6],
        .down_scales = parts[7],
        .down_bias = parts[8],
        .bias_dtype = form->biases ? bias_dtype : EP_DTYPE_NONE,
    };
}

ep_format_tensor *ep_format_model_room(ep_format_model *model)
{
    if (model->tensors_count == model->tensors_capacity) {
        model->tensors_capacity = 2 * model->tensors_capacity + 64;
        model->tensors =
            realloc(model->tensors, model->tensors_capacity * sizeof(model->tensors[0]));
    }
    ep_format_tensor *tensor = &model->tensors[model->tensors_count++];
    memset(tensor, 0, sizeof(*tensor));
    return tensor;
}

ep_format_tensor *ep_format_model_add(ep_format_model *model, const char *name, const char *dtype,
                                      size_t element, const uint64_t dims[4])
{
    ep_format_tensor *tensor = ep_format_model_room(model);
    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    snprintf(tensor->dtype, sizeof(tensor->dtype), "%s", dtype);
    tensor->bytes = element;
    for (; tensor->rank < 4 && dims[tensor->rank] != 0; tensor->rank++) {
        tensor->dims[tensor->rank] = dims[tensor->rank];
        tensor->bytes *= dims[tensor->rank];
    }
    tensor->data = calloc(1, tensor->bytes + 1);
    return tensor;
}

static const char *plain_type(ep_weight_format format)
{
    return format == EP_WEIGHTS_BF16 ? "BF16" : format == EP_WEIGHTS_F16 ? "F16" : "F32";
}

static ep_format_tensor *add_part(ep_format_model *model, const char *stem, const char *part,
                                  const char *dtype, size_t element, uint64_t d0, uint64_t d1)
{
    char name[192];
    snprintf(name, sizeof(name), "%s.%s", stem, part);
    return ep_format_model_add(model, name, dtype, element, (const uint64_t[4]){d0, d1, 0, 0});
}

/* Adds the scales of one matrix in their container. */
static void add_scales(ep_format_model *model, const char *stem, uint32_t rows, uint32_t columns,
                       const uint8_t *scales)
{
    const ep_format_case *form = model->form;
    const bool is_n4 = form->names == EP_FORMAT_N4;
    const uint64_t groups = (columns + 31u) / 32u;
    ep_format_tensor *t;
    switch (form->format) {
    case EP_WEIGHTS_F8_BLOCK:
        t = add_part(model, stem,
                     form->names == EP_FORMAT_N2M ? "weight_scale" : "weight_scale_inv", "F32", 4,
                     (rows + 127u) / 128u, (columns + 127u) / 128u);
        break;
    case EP_WEIGHTS_F8_CHANNEL:
        if (form->bf16_scales) {
            t = add_part(model, stem, "weight_scale", "BF16", 2, rows, 0);
            for (size_t i = 0; i < rows; i++) {
                /* bf16 is the upper half; the lower one is zero */
                memcpy(t->data + 2 * i, scales + 4 * i + 2, 2);
            }
            return;
        }
        t = add_part(model, stem, "weight_scale", "F32", 4, rows, 1);
        break;
    case EP_WEIGHTS_W8A8:
        t = add_part(model, stem, "weight_offset", "F32", 4, rows, 1);
        t = add_part(model, stem, "weight_scale", "F32", 4, rows, 1);
        break;
    case EP_WEIGHTS_MXFP8:
        t = add_part(model, stem, "weight_scale_inv", "U8", 1, rows, groups);
        break;
    case EP_WEIGHTS_MXFP4:
        t = add_part(model, stem, is_n4 ? "scale" : "weight_scale", is_n4 ? "F8_E8M0" : "U8", 1,
                     rows, groups);
        break;
    case EP_WEIGHTS_INT4:
        t = add_part(model, stem, "weight_shape", "I64", 8, 2, 0);
        t = add_part(model, stem, "weight_scale", "BF16", 2, rows, groups);
        break;
    default:
        return;
    }
    memcpy(t->data, scales, t->bytes);
}

static void add_separate(ep_format_model *model, const char *stem, uint32_t e, int m)
{
    const ep_format_case *form = model->form;
    const uint32_t rows = rows_of(form, m);
    const uint32_t columns = columns_of(form, m);
    uint8_t *const *parts = &model->parts[e][3 * m];
    ep_format_tensor *t;
    if (ep_weight_format_is_float(form->format)) {
        t = add_part(model, stem, "weight", plain_type(form->format),
                     ep_dtype_bytes(ep_weight_format_dtype(form->format)), rows, columns);
    } else if (form->format == EP_WEIGHTS_MXFP4) {
        bool is_n4 = form->names == EP_FORMAT_N4;
        t = add_part(model, stem, is_n4 ? "weight" : "weight_packed", is_n4 ? "I8" : "U8", 1, rows,
                     (columns + 1) / 2);
    } else if (form->format == EP_WEIGHTS_INT4) {
        t = add_part(model, stem, "weight_packed", "I32", 4, rows, (columns + 7) / 8);
    } else {
        t = add_part(model, stem, "weight", form->format == EP_WEIGHTS_W8A8 ? "I8" : "F8_E4M3", 1,
                     rows, columns);
    }
    memcpy(t->data, parts[0], t->bytes);
    if (parts[1] != NULL) {
        add_scales(model, stem, rows, columns, parts[1]);
    }
    if (parts[2] != NULL) {
        t = add_part(model, stem, "bias", "BF16", 2, rows, 0);
        memcpy(t->data, parts[2], t->bytes);
    }
}

/* Copies a matrix's row to its place in slab e of a stacked tensor of `all` rows. */
static void put_row(ep_format_tensor *t, uint32_t e, size_t all, size_t place, size_t columns,
                    size_t element, bool transposed, const uint8_t *row)
{
    uint8_t *slab = t->data + e * all * columns * element;
    for (size_t k = 0; k < columns; k++) {
        size_t at = transposed ? k * all + place : place * columns + k;
        memcpy(slab + at * element, row + k * element, element);
    }
}

/* Adds one stacked tensor from matrices first..last of all experts: their part number `part`, in
 * units of `element` bytes. */
static void add_stacked(ep_format_model *model, const char *name, const char *dtype, size_t element,
                        int first, int last, int part, size_t columns, bool transposed,
                        bool alternate)
{
    const size_t rows = rows_of(model->form, first);
    const size_t count = (size_t)(last - first) + 1;
    const size_t all = rows * count;
    const uint64_t dims[4] = {E, transposed ? columns : all, transposed ? all : columns, 0};
    ep_format_tensor *t = ep_format_model_add(model, name, dtype, element, dims);
    for (uint32_t e = 0; e < E; e++) {
        for (size_t m = 0; m < count; m++) {
            const uint8_t *from = model->parts[e][3 * (first + (int)m) + part];
            for (size_t n = 0; n < rows; n++) {
                size_t place = alternate ? n * count + m : m * rows + n;
                put_row(t, e, all, place, columns, element, transposed,
                        from + n * columns * element);
            }
        }
    }
}

static void add_blocks(ep_format_model *model, const char *stem, int first, int last)
{
    char name[192];
    const size_t groups = columns_of(model->form, first) / 32;
    snprintf(name, sizeof(name), "%s_blocks", stem);
    add_stacked(model, name, "U8", 1, first, last, 0, groups * 16, false, last > first);
    ep_format_tensor *t = &model->tensors[model->tensors_count - 1];
    t->rank = 4;
    t->dims[2] = groups;
    t->dims[3] = 16;
    snprintf(name, sizeof(name), "%s_scales", stem);
    add_stacked(model, name, "U8", 1, first, last, 1, groups, false, last > first);
}

static void add_stacked_bias(ep_format_model *model, const char *stem, int first, int last)
{
    char name[192];
    snprintf(name, sizeof(name), "%s_bias", stem);
    add_stacked(model, name, "BF16", 2, first, last, 2, 1, false, last > first);
    model->tensors[model->tensors_count - 1].rank = 2;
}

static void add_all_stacked(ep_format_model *model, const char *prefix)
{
    const ep_format_case *form = model->form;
    const ep_format_names names = form->names;
    const char *block = names == EP_FORMAT_N8    ? "feed_forward.experts"
                        : names == EP_FORMAT_N9  ? "block_sparse_moe"
                        : names == EP_FORMAT_N11 ? "moe"
                                                 : "mlp.experts";
    const char *words[] = {names == EP_FORMAT_N9    ? "input_linear"
                           : names == EP_FORMAT_N11 ? "gate_proj"
                                                    : "gate_up_proj",
                           "up_proj", names == EP_FORMAT_N9 ? "output_linear" : "down_proj"};
    const char *end = names == EP_FORMAT_N9 || names == EP_FORMAT_N11 ? ".weight" : "";
    const bool transposed =
        names == EP_FORMAT_N3_TRANSPOSED || names == EP_FORMAT_N7_PLAIN || names == EP_FORMAT_N8;
    for (int m = GATE; m < MATRICES; m++) {
        char stem[128];
        char name[192];
        const int last = m == GATE && names != EP_FORMAT_N11 ? UP : m;
        if (m == UP && names != EP_FORMAT_N11) {
            continue;
        }
        snprintf(stem, sizeof(stem), "%slayers.%d.%s.%s", prefix, EP_FORMAT_LAYER, block, words[m]);
        if (names == EP_FORMAT_N7) {
            add_blocks(model, stem, m, last);
        } else {
            snprintf(name, sizeof(name), "%s%s", stem, end);
            add_stacked(model, name, plain_type(form->format),
                        ep_dtype_bytes(ep_weight_format_dtype(form->format)), m, last, 0,
                        columns_of(form, m), transposed, names == EP_FORMAT_N7_PLAIN && last > m);
        }
        if (form->biases) {
            add_stacked_bias(model, stem, m, last);
        }
    }
}

static void add_all(ep_format_model *model)
{
    static const char *const projections[] = {"gate_proj", "up_proj", "down_proj"};
    static const char *const numbered[] = {"w1", "w3", "w2"};
    static const struct {
        const char *prefix;
        const char *block;
        const char *const *words;
    } separate[] = {[EP_FORMAT_N1] = {"model.", "mlp.experts", projections},
                    [EP_FORMAT_N1_DEEP] = {"language_model.model.", "mlp.experts", projections},
                    [EP_FORMAT_MIXER] = {"backbone.", "mixer.experts", projections},
                    [EP_FORMAT_N2] = {"model.", "block_sparse_moe.experts", numbered},
                    [EP_FORMAT_N2M] = {"", "experts", numbered},
                    [EP_FORMAT_N4] = {"", "ffn.experts", numbered}};
    const ep_format_names names = model->form->names;
    if (model->form->container == EP_FORMAT_GGUF) {
        ep_format_gguf_add(model);
        return;
    }
    if (names > EP_FORMAT_N4) {
        add_all_stacked(model,
                        names == EP_FORMAT_N8 ? "language_model.model." : "model.language_model.");
        return;
    }
    for (uint32_t e = 0; e < E; e++) {
        for (int m = ep_activation_has_gate(model->form->activation) ? GATE : UP; m < MATRICES;
             m++) {
            char stem[160];
            snprintf(stem, sizeof(stem), "%slayers.%d.%s.%u.%s", separate[names].prefix,
                     EP_FORMAT_LAYER, separate[names].block, e, separate[names].words[m]);
            (model->form->container == EP_FORMAT_USUAL ? add_separate : ep_format_model_contain)(
                model, stem, e, m);
        }
    }
}

ep_format_model *ep_format_model_make(const ep_format_case *form, uint64_t seed)
{
    ep_format_model *model = calloc(1, sizeof(*model));
    uint64_t state = seed;
    model->form = form;
    for (uint32_t e = 0; e < E; e++) {
        make_expert(model, e, &state);
    }
    add_all(model);
    return model;
}

void ep_format_model_free(ep_format_model *model)
{
    for (uint32_t e = 0; e < E; e++) {
        for (int i = 0; i < 9; i++) {
            free(model->parts[e][i]);
        }
        free(model->up_order[e]);
        free(model->down_order[e]);
        free(model->places[e]);
    }
    for (size_t i = 0; i < model->tensors_count; i++) {
        free(model->tensors[i].data);
    }
    free(model->tensors);
    free(model);
}

ep_format_tensor *ep_format_model_find(ep_format_model *model, const char *end)
{
    for (size_t i = 0; i < model->tensors_count; i++) {
        size_t length = strlen(model->tensors[i].name);
        if (length >= strlen(end) &&
            strcmp(model->tensors[i].name + length - strlen(end), end) == 0) {
            return &model->tensors[i];
        }
    }
    return NULL;
}

static FILE *open_file(const char *dir, const char *name)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    return fopen(path, "we");
}

static void print_header(const ep_format_model *model, size_t shard, FILE *file)
{
    size_t at = 0;
    const char *comma = "";
    fputc('{', file);
    for (size_t i = shard; i < model->tensors_count; i += 2) {
        const ep_format_tensor *t = &model->tensors[i];
        if (t->name[0] == 0) {
            continue;
        }
        fprintf(file, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", comma, t->name, t->dtype);
        for (uint32_t d = 0; d < t->rank; d++) {
            fprintf(file, "%s%" PRIu64, d == 0 ? "" : ",", t->dims[d]);
        }
        fprintf(file, "],\"data_offsets\":[%zu,%zu]}", at, at + t->bytes);
        at += t->bytes;
        comma = ",";
    }
    fputc('}', file);
}

static bool write_shard(const ep_format_model *model, size_t shard, const char *dir,
                        const char *name)
{
    char *header = NULL;
    size_t count = 0;
    FILE *text = open_memstream(&header, &count);
    print_header(model, shard, text);
    fclose(text);
    FILE *file = open_file(dir, name);
    bool good = file != NULL;
    if (good) {
        uint64_t length = count;
        fwrite(&length, sizeof(length), 1, file);
        fwrite(header, 1, count, file);
        for (size_t i = shard; i < model->tensors_count; i += 2) {
            fwrite(model->tensors[i].data, 1,
                   model->tensors[i].name[0] == 0 ? 0 : model->tensors[i].bytes, file);
        }
        good = ferror(file) == 0;
        good = fclose(file) == 0 && good;
    }
    free(header);
    return good;
}

/* Returns the model type where only that tells how gate and up lie in one tensor, or which formula
 * a limit belongs to; "" if names tell it. */
static const char *type_of(const ep_format_case *form)
{
    if (strstr(form->config, "model_type") != NULL) {
        return "";
    }
    switch (form->names) {
    case EP_FORMAT_N3:
    case EP_FORMAT_N3_TRANSPOSED:
        return "\"model_type\":\"qwen3_vl_moe\",";
    case EP_FORMAT_N8:
        return "\"model_type\":\"aria_text\",";
    case EP_FORMAT_N9:
        return "\"model_type\":\"granitemoe\",";
    default:
        return form->activation == EP_ACT_SWIGLU_OAI     ? "\"model_type\":\"minimax_m3_vl\","
               : form->activation == EP_ACT_SITU         ? "\"model_type\":\"kimi_k3\","
               : form->activation == EP_ACT_SWIGLU_LIMIT ? "\"model_type\":\"deepseek_v4\","
               : form->activation == EP_ACT_SWIGLU_STEP  ? "\"model_type\":\"step3p5\","
                                                         : "";
    }
}

static void print_config(const ep_format_model *model, FILE *file)
{
    const ep_format_case *form = model->form;
    const char *quantised = form->quantised != NULL ? form->quantised
                            : ep_weight_format_is_float(form->format)
                                ? "null"
                                : "{\"quant_method\":\"compressed-tensors\"}";
    fprintf(file,
            "{%s%s%s\"torch_dtype\":\"%s\",\"quantization_config\":%s,\"hidden_size\":%u,"
            "\"intermediate_size\":%u,\"moe_intermediate_size\":%u,"
            "\"num_hidden_layers\":2,\"first_k_dense_replace\":1,\"num_experts\":%d,\"num_experts_"
            "per_tok\":2}\n",
            type_of(form), form->config,
            strstr(form->config, "_act\"") == NULL ? "\"hidden_act\":\"silu\"," : "",
            form->format == EP_WEIGHTS_F32   ? "float32"
            : form->format == EP_WEIGHTS_F16 ? "float16"
                                             : "bfloat16",
            quantised, form->hidden, form->inner, form->inner, E);
}

ep_err ep_format_model_write(const ep_format_model *model, const char *dir, ep_error *out_error)
{
    static const char *const shards[] = {"model-00001-of-00002.safetensors",
                                         "model-00002-of-00002.safetensors"};
    if (model->form->container == EP_FORMAT_GGUF) {
        return ep_format_gguf_write(model, dir, out_error);
    }
    FILE *config = open_file(dir, "config.json");
    FILE *index = open_file(dir, "model.safetensors.index.json");
    if (config == NULL || index == NULL) {
        if (config != NULL) {
            fclose(config);
        }
        if (index != NULL) {
            fclose(index);
        }
        return ep_error_set(out_error, EP_ERR_IO, "%s: cannot write", dir);
    }
    print_config(model, config);
    const char *comma = "";
    fprintf(index, "{\"metadata\":{},\"weight_map\":{");
    for (size_t i = 0; i < model->tensors_count; i++) {
        if (model->tensors[i].name[0] != 0) {
            fprintf(index, "%s\"%s\":\"%s\"", comma, model->tensors[i].name, shards[i % 2]);
            comma = ",";
        }
    }
    fprintf(index, "}}\n");
    bool good = fclose(config) == 0;
    good = fclose(index) == 0 && good;
    good = good && write_shard(model, 0, dir, shards[0]) && write_shard(model, 1, dir, shards[1]);
    return good ? EP_OK : ep_error_set(out_error, EP_ERR_IO, "%s: cannot write", dir);
}
