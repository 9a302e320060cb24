/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tensors of one quantised matrix contain, by their types and shapes: the form of its
 * weights in memory (base/expert_form.h), and where each number is in the file.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_WEIGHT_CONTAINER_H
#define EP_MODEL_WEIGHT_CONTAINER_H

#include "base/expert_form.h"
#include "model/checkpoint_private.h"

typedef enum ep_packing {
    EP_PACKING_ROWS,   /* rows of values as in memory */
    EP_PACKING_WORDS,  /* int8 plus 128, four to a little-endian word of a row */
    EP_PACKING_GPTQ,   /* [columns / (32/bits), rows] words, the lowest column in the lowest bits */
    EP_PACKING_BLOCKS, /* rows of blocks of GGUF, codes and scales together */
    EP_PACKING_AWQ     /* [columns, rows / 8] words, rows of eight in the order 0 2 4 6 1 3 5 7 */
} ep_packing;

typedef enum ep_zero_packing {
    EP_ZEROS_NONE,
    EP_ZEROS_INT8, /* [rows,groups] */
    /* z plus half of the range, packed in words down the columns: [rows / (32/bits), groups] */
    EP_ZEROS_WORDS,
    EP_ZEROS_GPTQ, /* [groups, rows / (32/bits)] */
    EP_ZEROS_AWQ   /* [groups, rows / 8], in the order of its values */
} ep_zero_packing;

#define EP_SHARED_BY_ALL UINT32_MAX

/* The scale of weight [n,k] is element n / rows * row_step + k / columns * column_step of its
 * tensor. */
typedef struct ep_scale_layout {
    ep_weight_scales kind;
    uint32_t rows;    /* rows that share a scale; EP_SHARED_BY_ALL */
    uint32_t columns; /* columns that share a scale; EP_SHARED_BY_ALL */
    size_t row_step;
    size_t column_step;
} ep_scale_layout;

/* The types of GGUF blocks that can be read. */
#define EP_BLOCK_TYPES "Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4"
typedef enum ep_block_type {
    EP_BLOCK_NONE,
    EP_BLOCK_Q4_0,
    EP_BLOCK_Q5_0,
    EP_BLOCK_Q8_0,
    EP_BLOCK_Q4_K,
    EP_BLOCK_Q5_K,
    EP_BLOCK_Q6_K,
    EP_BLOCK_MXFP4
} ep_block_type;

typedef struct ep_weight_container {
    ep_weight_format format;
    ep_packing packing;
    uint32_t bits; /* of packed codes */
    ep_scale_layout scales;
    ep_zero_packing zeros;
    int32_t zero_bias;   /* added to stored zero points */
    bool zeros_are_none; /* the form has no offsets, so all zero points must be 0 */
    bool factor_divides;
    ep_block_type block; /* of EP_PACKING_BLOCKS */
} ep_weight_container;

/* The tensors that exist; there are always values. */
typedef struct ep_weight_tensors {
    const ep_checkpoint_entry *values;
    const ep_checkpoint_entry *scales;
    const ep_checkpoint_entry *zeros;
    const ep_checkpoint_entry *factor;
    bool factor_divides;
    bool are_words; /* the tensors qweight, qzeros and scales */
} ep_weight_tensors;

/* Whether the tensor's type is a block of GGUF, which needs no other tensors. Ignores its shape. */
bool ep_weight_container_of_blocks(const ep_checkpoint_entry *values,
                                   ep_weight_container *out_container);
/* Errors: BAD_FILE, UNIMPLEMENTED, NOT_FOUND: file, tensor, what it is, what is allowed. */
ep_err ep_weight_container_make(const ep_quant_config *quant, const ep_weight_tensors *tensors,
                                uint32_t rows, uint32_t columns, ep_weight_container *out_container,
                                ep_error *out_error);

#endif
