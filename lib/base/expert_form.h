/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words about an expert that every layer shares: in which form its weights are kept, and what it computes
 * between its matrices.
 *
 * Weight formats. A matrix is [rows,columns], y = x * W^T; a row is contiguous and starts at its own byte:
 *   bf16 f16 f32      values only
 *   f8_block          f8e4m3; scales f32 [ceil(rows/128), ceil(columns/128)], one for each 128 x 128 weights
 *   f8_channel        f8e4m3; scales f32 [rows]
 *   mxfp4             two e2m1 codes per byte, the even column in the low half; scales e8m0 [rows, ceil(columns/32)]
 *   mxfp8             f8e4m3; scales e8m0 [rows, ceil(columns/32)]
 *   int4              q + 8, eight to a little-endian word, the lowest column in the lowest bits, rows padded to whole
 *                     words; scales bf16 [rows, ceil(columns/32)]
 *   w8a8              int8; scales f32 [rows]. The rows of x and of the inner product are rounded to int8 too
 * Scales multiply. Codes of f8e4m3 that mean NaN and e8m0 255 do not occur: the reader refuses them.
 */
#ifndef EP_BASE_EXPERT_FORM_H
#define EP_BASE_EXPERT_FORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "expertd/tensor.h"

/* name, number, text in numerics ids and messages */
#define EP_WEIGHTS_MAP(X)                                                                                    \
    X(NONE, 0, "none")                                                                                       \
    X(BF16, 1, "bf16")                                                                                       \
    X(F16, 2, "f16")                                                                                         \
    X(F32, 3, "f32")                                                                                         \
    X(F8_BLOCK, 4, "f8e4m3-block128")                                                                        \
    X(F8_CHANNEL, 5, "f8e4m3-channel")                                                                       \
    X(MXFP4, 6, "mxfp4")                                                                                     \
    X(MXFP8, 7, "mxfp8")                                                                                     \
    X(INT4, 8, "int4-g32")                                                                                   \
    X(W8A8, 9, "w8a8")

typedef enum ep_weight_format {
#define EP_WEIGHTS_ROW(name, number, text) EP_WEIGHTS_##name = number,
    EP_WEIGHTS_MAP(EP_WEIGHTS_ROW)
#undef EP_WEIGHTS_ROW
    EP_WEIGHTS_COUNT
} ep_weight_format;

#define EP_F8_BLOCK 128 /* rows and columns of f8_block that share a scale */
#define EP_MX_GROUP 32  /* columns of mxfp4, mxfp8 and int4 that share a scale */
/* w8a8: 127 * 128 * columns stays below 2^31. */
#define EP_W8A8_COLUMNS_MAX 131072

/* "mxfp4"; "unknown" for unknown numbers. */
const char *ep_weight_format_name(ep_weight_format format);
/* Of a plain type; NONE for types that need scales. */
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

/* Whether it is codes with a scale for each group of a row's columns. */
static inline bool ep_weight_format_has_groups(ep_weight_format format)
{
    return format >= EP_WEIGHTS_F8_BLOCK && format <= EP_WEIGHTS_INT4;
}

/* Whether scales are powers of two, one for each EP_MX_GROUP columns. */
static inline bool ep_weight_format_is_mx(ep_weight_format format)
{
    return format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_MXFP8;
}

/* Columns that share a scale in formats with groups; f8_channel repeats its scale. */
static inline uint32_t ep_weight_group_columns(ep_weight_format format)
{
    return format == EP_WEIGHTS_F8_BLOCK || format == EP_WEIGHTS_F8_CHANNEL ? EP_F8_BLOCK : EP_MX_GROUP;
}

/* Bytes of one row of values. */
size_t ep_weight_row_bytes(ep_weight_format format, uint32_t columns);
/* Bytes of all scales of a matrix; 0 for plain formats. */
size_t ep_weight_scales_bytes(ep_weight_format format, uint32_t rows, uint32_t columns);

static inline size_t ep_weight_matrix_bytes(ep_weight_format format, uint32_t rows, uint32_t columns)
{
    return rows * ep_weight_row_bytes(format, columns) + ep_weight_scales_bytes(format, rows, columns);
}

/*
 * What an expert computes from g (gate row) and u (up row), biases added: names and numbers are on the wire.
 *   silu             silu(g) * u
 *   gelu, gelu_tanh  gelu(g) * u by erf, by tanh
 *   swiglu_oai       g' sigmoid(alpha g') (u' + beta), g' = min(g, limit), u' = clamp(u, +-limit)
 *   swiglu_limit     silu(min(g, limit)) clamp(u, +-limit)
 *   swiglu_step      min(silu(g), limit) clamp(u, +-limit)
 *   situ             alpha tanh(g / alpha) sigmoid(g) beta tanh(u / beta)
 *   ..._no_gate      two matrices: of u alone
 * A limit of 0 means none.
 */
#define EP_ACTIVATION_MAP(X)                                                                                 \
    X(SILU, 0, "silu")                                                                                       \
    X(GELU, 1, "gelu")                                                                                       \
    X(GELU_TANH, 2, "gelu_tanh")                                                                             \
    X(SWIGLU_OAI, 3, "swiglu_oai")                                                                           \
    X(SWIGLU_LIMIT, 4, "swiglu_limit")                                                                       \
    X(SWIGLU_STEP, 5, "swiglu_step")                                                                         \
    X(SITU, 6, "situ")                                                                                       \
    X(SILU_NO_GATE, 7, "silu_no_gate")                                                                       \
    X(GELU_NO_GATE, 8, "gelu_no_gate")                                                                       \
    X(GELU_TANH_NO_GATE, 9, "gelu_tanh_no_gate")                                                             \
    X(RELU_NO_GATE, 10, "relu_no_gate")                                                                      \
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

/* The numbers of a layer's activation; those its formula does not name are 0. */
typedef struct ep_activation_numbers {
    float alpha;
    float beta;
    float limit;
} ep_activation_numbers;

/* One expert as it stands in memory: matrices in the layout above, any alignment of all pointers. Borrowed. */
typedef struct ep_expert_source {
    uint32_t hidden; /* H >= 1 */
    uint32_t inner;  /* I >= 1 */
    ep_weight_format format;
    ep_activation activation;
    ep_activation_numbers numbers;
    const void *gate;        /* [I,H]; NULL when the activation has no gate */
    const void *up;          /* [I,H] */
    const void *down;        /* [H,I] */
    const void *gate_scales; /* as the format says; NULL for plain formats */
    const void *up_scales;
    const void *down_scales;
    ep_dtype bias_dtype;        /* bf16, f16 or f32; looked at when there is a bias */
    const void *gate_bias;      /* [I]; each bias may be NULL */
    const void *up_bias;        /* [I] */
    const void *down_bias;      /* [H] */
    ep_dtype shared_gate_dtype; /* bf16, f16 or f32; looked at when shared_gate is set */
    const void *shared_gate;    /* [H], a shared expert's own gate; NULL none */
} ep_expert_source;

#endif
