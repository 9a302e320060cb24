/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quantization_config of a config.json. Tensors say what their values are; this says what they
 * cannot: how large the groups and blocks are that share a scale. Every key of it is used, or is
 * known to change no weight's meaning, or is refused.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_QUANT_CONFIG_H
#define EP_MODEL_QUANT_CONFIG_H

#include "model/config_reader.h"

#define EP_QUANT_SIZES_MAX 4

typedef struct ep_quant_size {
    uint32_t rows;    /* 1 of groups */
    uint32_t columns; /* 0: all of a row */
} ep_quant_size;

/* How words of qweight, qzeros and scales are laid out. */
typedef enum ep_quant_words {
    EP_QUANT_WORDS_NONE,
    EP_QUANT_WORDS_GPTQ,
    EP_QUANT_WORDS_GPTQ_V2,
    EP_QUANT_WORDS_AWQ
} ep_quant_words;

typedef struct ep_quant_config {
    /* of groups and blocks, each once: those that the config states for some weights */
    ep_quant_size sizes[EP_QUANT_SIZES_MAX];
    uint32_t sizes_count;
    bool wide_inputs;  /* a group names activations of 16 bits (ep_quant_config_read) */
    bool weights_only; /* no config of w8a8: rows of inputs stay as they are */
    ep_quant_words words;
    bool symmetric;  /* gptq: zero points are the middle of the range */
    bool asymmetric; /* compressed-tensors: integers have zero points */
    bool has_order;  /* integers' columns are in groups in an order of their own */
} ep_quant_config;

/*
 * wide_inputs: the name of a group has A16 in it, as the presets W4A16 and MXFP4A16, or its
 * input_activations have num_bits 16. Without input_activations, or with null, a group asks for
 * nothing.
 *
 * root: of the whole file; the reader may stand one level down. False: the file has none. Errors,
 * kept in the reader: UNIMPLEMENTED (the key, its value, what is allowed).
 */
bool ep_quant_config_read(ep_config_reader *reader, json_t *root, ep_quant_config *out_config);

#endif
