/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quantization_config of a config.json. Tensors say what their values are; this says what they cannot: how large the
 * groups and blocks are that share a scale. Every key of it is used, or is known to change no weight's meaning, or is refused.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_QUANT_CONFIG_H
#define EP_MODEL_QUANT_CONFIG_H

#include "model/config_reader.h"

typedef struct ep_quant_config {
    uint32_t group_columns; /* 0: not stated, or not the same for all */
    uint32_t block_rows;    /* likewise, with block_columns */
    uint32_t block_columns;
} ep_quant_config;

/*
 * root: of the whole file; the reader may stand one level down. Errors, kept in the reader: UNIMPLEMENTED (the key, its value, what is
 * allowed).
 */
void ep_quant_config_read(ep_config_reader *reader, json_t *root, ep_quant_config *out_config);

#endif
