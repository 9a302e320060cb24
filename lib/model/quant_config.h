/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quantization_config of a config.json. Tensors show what their values are. The config adds
 * what they do not show: the sizes of groups and blocks that share a scale. Every key is used, or
 * known not to change the meaning of weights, or refused.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_QUANT_CONFIG_H
#define EP_MODEL_QUANT_CONFIG_H

#include "model/config_reader.h"

#define EP_QUANT_SIZES_MAX 4

typedef struct ep_quant_size {
    uint32_t rows;    /* 1 for groups */
    uint32_t columns; /* 0: a whole row */
} ep_quant_size;

/* Layout of the words of qweight, qzeros and scales. */
typedef enum ep_quant_words {
    EP_QUANT_WORDS_NONE,
    EP_QUANT_WORDS_GPTQ,
    EP_QUANT_WORDS_GPTQ_V2,
    EP_QUANT_WORDS_AWQ
} ep_quant_words;

typedef struct ep_quant_config {
    /* sizes of groups and blocks that the config states for some weights, each once */
    ep_quant_size sizes[EP_QUANT_SIZES_MAX];
    uint32_t sizes_count;
    bool wide_inputs;  /* a group names activations of 16 bits (ep_quant_config_read) */
    bool weights_only; /* not a config of w8a8: inputs are not quantised */
    ep_quant_words words;
    bool symmetric;  /* gptq: zero points are the middle of the range */
    bool asymmetric; /* compressed-tensors: integers have zero points */
    bool has_order;  /* columns of integers are grouped in an order of their own */
} ep_quant_config;

/*
 * wide_inputs: the name of a group contains A16 (presets W4A16 and MXFP4A16), or its
 * input_activations have num_bits 16. A group with no or null input_activations does not count.
 * root: the whole file; the reader may be one level down. False: there is no such config. Errors,
 * kept in the reader: UNIMPLEMENTED (the key, its value, what is allowed).
 */
bool ep_quant_config_read(ep_config_reader *reader, json_t *root, ep_quant_config *out_config);

#endif
