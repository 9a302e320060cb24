/* SPDX-License-Identifier: Apache-2.0 */
/* What checkpoint.c (opening, names) and checkpoint_experts.c (reading experts) share. */
#ifndef EP_MODEL_CHECKPOINT_PRIVATE_H
#define EP_MODEL_CHECKPOINT_PRIVATE_H

#include "model/model_config.h"
#include "model/safetensors.h"
#include "model/tensor_names.h"

typedef struct ep_checkpoint_entry {
    const char *name; /* owned by the shard */
    const ep_safetensors *shard;
    const ep_safetensors_tensor *tensor;
} ep_checkpoint_entry;

struct ep_checkpoint {
    ep_model_config config;
    ep_tensor_names names;
    ep_model_file texts[2]; /* config.json and the index, if they exist */
    size_t texts_count;
    ep_safetensors **shards; /* sorted by name */
    size_t shards_count;
    ep_checkpoint_entry *entries; /* sorted by name */
    size_t entries_count;
};

/* NULL when there is none. */
const ep_checkpoint_entry *ep_checkpoint_entry_find(const ep_checkpoint *checkpoint,
                                                    const char *name);
/* NOT_FOUND. */
ep_err ep_checkpoint_missing(const ep_checkpoint *checkpoint, const char *name,
                             ep_error *out_error);
/* INVALID_ARGUMENT when it is no MoE layer. */
ep_err ep_checkpoint_layer(const ep_checkpoint *checkpoint, uint32_t layer,
                           const ep_layer_shape **out_shape, ep_error *out_error);
/* One matrix of a source, with the addresses of its pointers. */
typedef struct ep_source_matrix {
    uint32_t rows;
    uint32_t columns;
    ep_weight_format format;
    const void **values;
    const void **scales;
    const void **bias;
} ep_source_matrix;

ep_source_matrix ep_source_matrix_of(ep_expert_source *source, ep_matrix which);
/* Places count parts in a block of the room, each on its own cache line; the former content is
 * lost. Each size is at most that of a tensor in a checked file. Errors: NO_MEMORY. */
ep_err ep_expert_parts_place(ep_expert_room *room, uint32_t block, const size_t *bytes,
                             size_t count, uint8_t **places, ep_error *out_error);

#endif
