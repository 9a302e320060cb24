/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every layer must know about an expert: the form of its weights, and what it computes between
 * its matrices.
 *
 * Weight formats. A matrix is [rows,columns], y = x * W^T; a row of values is contiguous and starts
 * at a byte of its own:
 *   bf16 f16 f32      values only
 *   w8a8              int8; scales f32 [rows]. The rows of x and of the inner product are rounded
 *                     to int8 too
 *   all others        codes; G columns of a row are a group (the last may be shorter), which shares
 *                     a scale and perhaps an offset: weight = code * scale - offset
 * Codes         e4m3: a byte; e2m1: two per byte; int4: two per byte, stored as value + 8; uint4:
 *               two per byte; int8: a byte. Of two codes the even column is in the low half. Rows
 *               of int4 and uint4 are padded to whole words of 4 bytes
 * Scales        f32, bf16, f16 or e8m0 [rows,groups]; f8_block f32 [ceil(rows/128),groups];
 *               f8_channel f32 [rows].
 *               Two-level scales: part [rows,groups] (uint8, int8 or e4m3), times a factor, f32
 *               [rows,ceil(columns/256)]
 * Offsets       zero: int8 z [rows,groups], offset = scale * z. minimum: uint8 [rows,groups], times
 *               a factor, f32 [rows,ceil(columns/256)]
 * A matrix's scales are one block of memory: scales or parts; z or minima; factors of parts;
 * factors of minima. Their products are rounded once to f32. All are exact except those of f32
 * scales with more than 16 bits, and of e4m3 parts. NaN codes of e4m3 and e8m0 255 do not occur:
 * the reader refuses them.
 */
#ifndef EP_BASE_EXPERT_FORM_H
#define EP_BASE_EXPERT_FORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "expertd/tensor.h"

/* name, number, text in numerics ids and messages; codes, columns per group, scales, offsets as
 * above */
#define EP_WEIGHTS_MAP(X)                                                                          \
    X(NONE, 0, "none", NONE, 0, NONE, NONE)                                                        \
    X(BF16, 1, "bf16", NONE, 0, NONE, NONE)                                                        \
    X(F16, 2, "f16", NONE, 0, NONE, NONE)                                                          \
    X(F32, 3, "f32", NONE, 0, NONE, NONE)                                                          \
    X(F8_BLOCK, 4, "f8e4m3-block128", E4M3, 128, F32, NONE)                                        \
    X(F8_CHANNEL, 5, "f8e4m3-channel", E4M3, 128, F32, NONE)                                       \
    X(MXFP4, 6, "mxfp4", E2M1, 32, E8M0, NONE)                                                     \
    X(MXFP8, 7, "mxfp8", E4M3, 32, E8M0, NONE)                                                     \
    X(INT4, 8, "int4-g32", INT4, 32, BF16, NONE)                                                   \
    X(W8A8, 9, "w8a8", NONE, 0, NONE, NONE)                                                        \
    X(INT4_F16, 10, "int4-g32-f16", INT4, 32, F16, NONE)                                           \
    X(INT4_ZERO, 11, "int4-g32-zero", INT4, 32, F32, ZERO)                                         \
    X(INT4_128, 12, "int4-g128", INT4, 128, F32, NONE)                                             \
    X(INT4_128_ZERO, 13, "int4-g128-zero", INT4, 128, F32, ZERO)                                   \
    X(INT8_F16, 14, "int8-g32-f16", INT8, 32, F16, NONE)                                           \
    X(INT8_ZERO, 15, "int8-g32-zero", INT8, 32, F32, ZERO)                                         \
    X(INT8_128, 16, "int8-g128", INT8, 128, F32, NONE)                                             \
    X(INT8_128_ZERO, 17, "int8-g128-zero", INT8, 128, F32, ZERO)                                   \
    X(F8_32, 18, "f8e4m3-g32", E4M3, 32, F32, NONE)                                                \
    X(NVFP4, 19, "nvfp4", E2M1, 16, E4M3_PARTS, NONE)                                              \
    X(Q4_K, 20, "q4_k", UINT4, 32, UINT8_PARTS, MINIMUM)                                           \
    X(Q6_K, 21, "q6_k", INT8, 16, INT8_PARTS, NONE)                                                \
    X(Q5_K, 22, "q5_k", INT8, 32, UINT8_PARTS, MINIMUM)

typedef enum ep_weight_format {
#define EP_WEIGHTS_ROW(name, number, text, codes, group, scales, offsets)                          \
    EP_WEIGHTS_##name = number,
    EP_WEIGHTS_MAP(EP_WEIGHTS_ROW)
#undef EP_WEIGHTS_ROW
        EP_WEIGHTS_COUNT
} ep_weight_format;

typedef enum ep_weight_codes {
    EP_CODES_NONE,
    EP_CODES_E4M3,
    EP_CODES_E2M1,
    EP_CODES_INT4,
    EP_CODES_UINT4,
    EP_CODES_INT8
} ep_weight_codes;
typedef enum ep_weight_scales {
    EP_SCALES_NONE,
    EP_SCALES_F32,
    EP_SCALES_BF16,
    EP_SCALES_F16,
    EP_SCALES_E8M0,
    EP_SCALES_UINT8_PARTS,
    EP_SCALES_INT8_PARTS,
    EP_SCALES_E4M3_PARTS
} ep_weight_scales;
typedef enum ep_weight_offsets {
    EP_OFFSETS_NONE,
    EP_OFFSETS_ZERO,
    EP_OFFSETS_MINIMUM
} ep_weight_offsets;

#define EP_F8_BLOCK 128 /* rows and columns of f8_block that share a scale */
/* columns of MX formats that share a scale; also columns that family w4a8 rounds together */
#define EP_MX_GROUP 32
#define EP_SCALE_BLOCK 256 /* columns that share a factor of two-level scales */
/* With this limit for w8a8, 127 * 128 * columns stays below 2^31. */
#define EP_W8A8_COLUMNS_MAX 131072

/* "mxfp4"; "unknown" for unknown numbers. */
const char *ep_weight_format_name(ep_weight_format format);
/* The format of a plain type; NONE for types that need scales. */
ep_weight_format ep_weight_format_of(ep_dtype dtype);

static inline bool ep_weight_format_is_float(ep_weight_format format)
{
    return format == EP_WEIGHTS_BF16 || format == EP_WEIGHTS_F16 || format == EP_WEIGHTS_F32;
}

/* The element type of a plain format; NONE for the others. */
static inline ep_dtype ep_weight_format_dtype(ep_weight_format format)
{
    return format == EP_WEIGHTS_BF16  ? EP_DTYPE_BF16
           : format == EP_WEIGHTS_F16 ? EP_DTYPE_F16
           : format == EP_WEIGHTS_F32 ? EP_DTYPE_F32
                                      : EP_DTYPE_NONE;
}

/* A row of the table; NONE and 0 for formats without groups. */
typedef struct ep_weight_form {
    ep_weight_codes codes;
    uint32_t group_columns;
    ep_weight_scales scales;
    ep_weight_offsets offsets;
} ep_weight_form;

static const ep_weight_form ep_weight_forms[EP_WEIGHTS_COUNT] = {
#define EP_WEIGHTS_ROW(name, number, text, codes, group, scales, offsets)                          \
    [number] = {EP_CODES_##codes, group, EP_SCALES_##scales, EP_OFFSETS_##offsets},
    EP_WEIGHTS_MAP(EP_WEIGHTS_ROW)
#undef EP_WEIGHTS_ROW
};

/* Unknown numbers count as NONE. */
static inline const ep_weight_form *ep_weight_form_of(ep_weight_format format)
{
    return &ep_weight_forms[(unsigned)format < EP_WEIGHTS_COUNT ? format : EP_WEIGHTS_NONE];
}

static inline ep_weight_codes ep_weight_format_codes(ep_weight_format format)
{
    return ep_weight_form_of(format)->codes;
}

static inline ep_weight_scales ep_weight_format_scales(ep_weight_format format)
{
    return ep_weight_form_of(format)->scales;
}

static inline ep_weight_offsets ep_weight_format_offsets(ep_weight_format format)
{
    return ep_weight_form_of(format)->offsets;
}

/* Columns that share a scale; f8_channel repeats its scale for each group. */
static inline uint32_t ep_weight_group_columns(ep_weight_format format)
{
    return ep_weight_form_of(format)->group_columns;
}

/* Whether the format has codes with a scale for each group of a row's columns. */
static inline bool ep_weight_format_has_groups(ep_weight_format format)
{
    return ep_weight_format_codes(format) != EP_CODES_NONE;
}

static inline bool ep_weight_codes_are_nibbles(ep_weight_codes codes)
{
    return codes == EP_CODES_E2M1 || codes == EP_CODES_INT4 || codes == EP_CODES_UINT4;
}

/* Whether scales are powers of two, one per EP_MX_GROUP columns. */
static inline bool ep_weight_format_is_mx(ep_weight_format format)
{
    return format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_MXFP8;
}

static inline bool ep_weight_scales_have_levels(ep_weight_scales scales)
{
    return scales >= EP_SCALES_UINT8_PARTS;
}

/* Bytes of one scale, or of one part. */
static inline size_t ep_weight_scale_bytes(ep_weight_scales scales)
{
    return scales == EP_SCALES_F32                               ? 4
           : scales == EP_SCALES_BF16 || scales == EP_SCALES_F16 ? 2
                                                                 : 1;
}

/* The block of a matrix's scales: the bytes of each of its arrays, in their order. */
typedef struct ep_scale_arrays {
    size_t scales;
    size_t offsets;
    size_t scale_factors;
    size_t offset_factors;
} ep_scale_arrays;
ep_scale_arrays ep_weight_scale_arrays(ep_weight_format format, uint32_t rows, uint32_t columns);

/* Bytes of one row of values. */
size_t ep_weight_row_bytes(ep_weight_format format, uint32_t columns);
/* Bytes of all scales of a matrix; 0 for plain formats. */
size_t ep_weight_scales_bytes(ep_weight_format format, uint32_t rows, uint32_t columns);

static inline size_t ep_weight_matrix_bytes(ep_weight_format format, uint32_t rows,
                                            uint32_t columns)
{
    return rows * ep_weight_row_bytes(format, columns) +
           ep_weight_scales_bytes(format, rows, columns);
}

/*
 * What an expert computes from g (gate row) and u (up row), with biases added. Names and numbers
 * are used on the wire.
 *   silu             silu(g) * u
 *   gelu, gelu_tanh  gelu(g) * u by erf, by tanh
 *   swiglu_oai       g' sigmoid(alpha g') (u' + beta), g' = min(g, limit), u' = clamp(u, +-limit)
 *   swiglu_limit     silu(min(g, limit)) clamp(u, +-limit)
 *   swiglu_step      min(silu(g), limit) clamp(u, +-limit)
 *   situ             alpha tanh(g / alpha) sigmoid(g) beta tanh(u / beta)
 *   ..._no_gate      two matrices: the function of u alone
 * A limit of 0 means none.
 */
#define EP_ACTIVATION_MAP(X)                                                                       \
    X(SILU, 0, "silu")                                                                             \
    X(GELU, 1, "gelu")                                                                             \
    X(GELU_TANH, 2, "gelu_tanh")                                                                   \
    X(SWIGLU_OAI, 3, "swiglu_oai")                                                                 \
    X(SWIGLU_LIMIT, 4, "swiglu_limit")                                                             \
    X(SWIGLU_STEP, 5, "swiglu_step")                                                               \
    X(SITU, 6, "situ")                                                                             \
    X(SILU_NO_GATE, 7, "silu_no_gate")                                                             \
    X(GELU_NO_GATE, 8, "gelu_no_gate")                                                             \
    X(GELU_TANH_NO_GATE, 9, "gelu_tanh_no_gate")                                                   \
    X(RELU_NO_GATE, 10, "relu_no_gate")                                                            \
    X(RELU2_NO_GATE, 11, "relu2_no_gate")

typedef enum ep_activation {
#define EP_ACTIVATION_ROW(name, number, text) EP_ACT_##name = number,
    EP_ACTIVATION_MAP(EP_ACTIVATION_ROW)
#undef EP_ACTIVATION_ROW
        EP_ACT_COUNT
} ep_activation;

/* "silu"; "unknown" for unknown numbers. */
const char *ep_activation_name(ep_activation activation);

static inline bool ep_activation_has_gate(ep_activation activation)
{
    return activation < EP_ACT_SILU_NO_GATE;
}

/* The numbers of a layer's activation; those that its formula does not use are 0. */
typedef struct ep_activation_numbers {
    float alpha;
    float beta;
    float limit;
} ep_activation_numbers;

/* One expert in memory: matrices in the layout above; pointers may have any alignment. Borrowed. */
typedef struct ep_expert_source {
    uint32_t hidden;              /* H >= 1 */
    uint32_t inner;               /* I >= 1 */
    ep_weight_format format;      /* of gate and up */
    ep_weight_format down_format; /* of down; NONE: the same. For w8a8 both are w8a8 */
    ep_activation activation;
    ep_activation_numbers numbers;
    /* the checkpoint asks for 16-bit activations, so EP_NUMERICS_AUTO avoids int8 for them */
    bool wide_inputs;
    /* uint32 [H]: which column of gate, up and the shared gate belongs to x[i]; NULL: column i */
    const void *places;
    const void *gate;        /* [I,H]; NULL when the activation has no gate */
    const void *up;          /* [I,H] */
    const void *down;        /* [H,I] */
    const void *gate_scales; /* as the format says; NULL for plain formats */
    const void *up_scales;
    const void *down_scales;
    ep_dtype bias_dtype;        /* bf16, f16 or f32; used when there is a bias */
    const void *gate_bias;      /* [I]; each bias may be NULL */
    const void *up_bias;        /* [I] */
    const void *down_bias;      /* [H] */
    ep_dtype shared_gate_dtype; /* bf16, f16 or f32; used when shared_gate is set */
    const void *shared_gate;    /* [H], a shared expert's own gate; NULL none */
} ep_expert_source;

static inline ep_weight_format ep_expert_down_format(const ep_expert_source *source)
{
    return source->down_format == EP_WEIGHTS_NONE ? source->format : source->down_format;
}

#endif
