/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checkpoint on disk: config.json, safetensors shards and their index, opened and verified,
 * experts found by name. Files are not trusted: every length, offset, shape and name is checked
 * before use (see safetensors.h), and data is read into memory we own, so a file that is truncated
 * or replaced later cannot kill the process.
 *
 * Threads    an ep_checkpoint is immutable after open; all reads are safe from any thread.
 */
#ifndef EP_MODEL_MODEL_H
#define EP_MODEL_MODEL_H

#include "base/error.h"
#include "expertd/gate.h"
#include "expertd/tensor.h"
#include "model/weight_quant.h"
#include "moe/flow.h"

#define EP_MODEL_LAYERS_MAX 1024
#define EP_SHA256_BYTES 32

typedef struct ep_checkpoint ep_checkpoint;
struct ep_mirror;

/* A layer's router, as known from config.json and the model's type; ep_checkpoint_read_gate adds
 * what is in tensors. */
typedef struct ep_router_info {
    /* "", or why this build cannot compute it. The experts can still serve callers that route */
    char why_not[96];
    ep_gate_score select;
    ep_gate_score weight;
    float softcap;
    uint32_t groups;
    uint32_t groups_kept;
    uint32_t group_best;
    ep_group_mask group_mask;
    bool renormalise;
    float epsilon;
    float sum_min;
    float scaling_factor;
    float jitter;
    bool has_bias;    /* a bias of the selection score exists, in a tensor */
    bool has_factors; /* a factor for each expert exists, in a tensor */
    bool weight_on_input;
    uint32_t zero_experts; /* ids after the routed ones whose experts give 0 */
    uint32_t copy_experts; /* ids after those whose experts give the input */
} ep_router_info;

/* Explained in tensor_names.h. */
typedef enum ep_name_family {
    EP_NAMES_N1 = 1,
    EP_NAMES_N2 = 2,
    EP_NAMES_N3 = 3,
    EP_NAMES_N4 = 4,
    EP_NAMES_N7 = 7,
    EP_NAMES_N8 = 8,
    EP_NAMES_N9 = 9,
    EP_NAMES_N10 = 10,
    EP_NAMES_N11 = 11,
    EP_NAMES_N2M = 12,
    EP_NAMES_N13 = 13,
    EP_NAMES_N14 = 14,
    EP_NAMES_GGUF = 15
} ep_name_family;

typedef struct ep_layer_numbers {
    ep_activation_numbers routed;
    ep_activation_numbers shared;
} ep_layer_numbers;

/* Formats of a layer's routed experts: of gate and up, and of down. */
typedef struct ep_layer_formats {
    ep_weight_format format;
    ep_weight_format down_format;
    /* formats in the file if they differ, else NONE */
    ep_weight_format file_format;
    ep_weight_format file_down_format;
} ep_layer_formats;

typedef struct ep_model_info {
    char model_type[64];
    uint32_t hidden; /* hidden_size */
    /* num_hidden_layers: all layers, also dense ones; encoder and decoder together */
    uint32_t layers_count;
    uint32_t first_stack_layers; /* the encoder's, numbered before the decoder's; 0: one stack */
    uint32_t vocab;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    float rms_norm_eps;
    float rope_theta;
    bool tie_embeddings;
    ep_dtype dtype;          /* torch_dtype or, if absent, the type of plain experts */
    ep_weight_format format; /* of gate and up of the first MoE layer's routed experts */
    uint32_t formats;        /* bits (1 << format) of all formats of routed experts */
    bool wide_inputs;        /* as in ep_expert_source */
    ep_name_family names;
    ep_router_info router;
    uint32_t moe_layers_count;
    ep_layer_shape *moe_layers; /* [moe_layers_count], ascending layer; owned by the checkpoint */
    uint32_t *shared_inner;     /* [moe_layers_count], I of the shared expert; 0 none */
    ep_layer_numbers *numbers;  /* [moe_layers_count], of the activation */
    ep_layer_formats *layer_formats; /* [moe_layers_count] */
    /* 16 hex digits of a SHA-256 over config.json and every shard's size, header and samples of its
     * data. If experts are kept in another format than the files', its name follows:
     * "0011223344556677-mxfp4" */
    char version[EP_MODEL_VERSION_BYTES];
    char files_version[17];       /* the digits alone: equal digits mean equal files */
    const ep_weight_quant *quant; /* NULL: experts keep the files' formats */
    char config_hash[17];         /* 16 hex digits of the SHA-256 of config.json */
    uint32_t positions_max;       /* max_position_embeddings; 0 when absent */
    /* false: an unknown type, accepted because names and keys fit, but without its router */
    bool model_type_known;
} ep_model_info;

/* Opens the directory path: config.json, model.safetensors.index.json or model.safetensors. path
 * may also be a GGUF file, or a directory with one model in such files (NAME-00001-of-0000N.gguf,
 * all of them). Reads and checks all headers.
 * Errors: NOT_FOUND, BAD_FILE (file, tensor or line, value, allowed range in the text), IO,
 * NO_MEMORY, UNIMPLEMENTED (an activation, a quantisation or tensor names that this build does not
 * know). */
ep_err ep_checkpoint_open(const char *path, ep_checkpoint **out_checkpoint, ep_error *out_error);
/* The same for a mirror (mirror.h), which must outlive the checkpoint: a read fetches what is
 * missing. Further errors: those of a fetch; BAD_FILE when the files are not of the announced
 * version. */
ep_err ep_checkpoint_open_mirror(struct ep_mirror *mirror, ep_checkpoint **out_checkpoint,
                                 ep_error *out_error);
void ep_checkpoint_close(ep_checkpoint *checkpoint);
/*
 * Makes all experts, also shared ones, available in quant's format. Call it once, right after open.
 * NULL: they keep their format. Errors: BAD_CONFIG (they are not bf16, f16 or f32).
 */
ep_err ep_checkpoint_quantize(ep_checkpoint *checkpoint, const ep_weight_quant *quant,
                              ep_error *out_error);
const ep_model_info *ep_checkpoint_info(const ep_checkpoint *checkpoint);

/* SHA-256 over the version and every shard's name, device, inode, size and times: equal as long as
 * no file was touched. Errors: IO, INTERNAL. */
ep_err ep_checkpoint_identity(const ep_checkpoint *checkpoint,
                              uint8_t out_identity[EP_SHA256_BYTES], ep_error *out_error);

/* The files it was opened from, as on disk: config.json and the index, if any, then the shards. */
size_t ep_checkpoint_files_count(const ep_checkpoint *checkpoint);
void ep_checkpoint_file(const ep_checkpoint *checkpoint, size_t index, const char **out_name,
                        uint64_t *out_bytes);
/* Reads exactly bytes of a file from offset, which must be inside. Fetches nothing. Errors:
 * UNAVAILABLE (not yet in the mirror), BAD_FILE (the file changed since open), IO. */
ep_err ep_checkpoint_read_file(const ep_checkpoint *checkpoint, size_t index, uint64_t offset,
                               void *out, size_t bytes, ep_error *out_error);

/* A tensor's type, shape and size. */
typedef struct ep_tensor_info {
    const char *name;
    ep_dtype dtype; /* NONE for a type that we do not compute with */
    uint32_t rank;
    int64_t shape[EP_TENSOR_RANK_MAX];
    size_t bytes;
} ep_tensor_info;

/* NOT_FOUND names the tensor. */
ep_err ep_checkpoint_find(const ep_checkpoint *checkpoint, const char *name,
                          ep_tensor_info *out_info, ep_error *out_error);
/* Reads the whole tensor into out (exactly info.bytes). Errors: NOT_FOUND, IO, BAD_FILE (file
 * shorter than at open). */
ep_err ep_checkpoint_read(const ep_checkpoint *checkpoint, const char *name, void *out,
                          size_t bytes, ep_error *out_error);

/* Memory for reading experts one after the other. Blocks are kept for the next expert, because the
 * system clears memory whenever it provides it. Zero it first. */
typedef struct ep_expert_room {
    struct {
        void *memory;
        size_t bytes;
    } blocks[2]; /* private: an expert is converted from one into the other */
} ep_expert_room;
void ep_expert_room_free(ep_expert_room *room);
bool ep_expert_room_is_empty(const ep_expert_room *room);

/* One expert in one block, in the form that backends take. */
typedef struct ep_expert_data {
    ep_expert_source source; /* points into the block */
    /* digest of its tensors' bytes as in the file: gate, up, down (values, scales and bias of
     * each), then the shared gate. If quantised here: of the quantised bytes in the same order */
    uint8_t sha256[EP_SHA256_BYTES];
    /* the largest of its matrices' errors (weight_quant.h); 0: as in the file */
    double quant_error;
    /* private */
    uint32_t block;   /* the room's block that it is in */
    void *allocation; /* NULL: its block belongs to the room */
    size_t bytes;
} ep_expert_data;

/*
 * Reads expert `index` (table index: [0,E) routed, [E,E+S) shared) of an MoE layer, checks shapes
 * and types against the config, and hashes while reading. A bad tensor is an error only for this
 * expert. Errors: NOT_FOUND, BAD_FILE (also: it cannot be quantised within the error bound), IO,
 * NO_MEMORY, INVALID_ARGUMENT (layer or index out of range), UNIMPLEMENTED (a bias). Except for
 * INVALID_ARGUMENT the error's layer and expert fields are set.
 */
ep_err ep_checkpoint_read_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                                 ep_expert_data *out_expert, ep_error *out_error);
/* The same into the caller's room. The expert is valid until the room is used again or freed, and
 * must not be freed. */
ep_err ep_checkpoint_read_expert_in(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                                    ep_expert_room *room, ep_expert_data *out_expert,
                                    ep_error *out_error);
/* Frees the room's block that the last expert is not in. False: there is none. */
bool ep_expert_room_trim(ep_expert_room *room, const ep_expert_data *expert);
/* Reads an expert in the files' format into a block of its own. If the checkpoint is quantised,
 * sha256 is not set. */
ep_err ep_checkpoint_read_expert_as_filed(const ep_checkpoint *checkpoint, uint32_t layer,
                                          uint32_t index, ep_expert_data *out_expert,
                                          ep_error *out_error);
void ep_expert_data_free(ep_expert_data *expert);
/*
 * The shapes and types that the expert's data will have, from names, types and shapes only. A
 * pointer is NULL where there is no array, otherwise it must not be followed. Errors: as
 * ep_checkpoint_read_expert.
 */
ep_err ep_checkpoint_outline_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                                    ep_expert_source *out_outline, ep_error *out_error);

/* Checks for how many experts a plan can be made from names, types and shapes, and why the first
 * failure failed. Reads no weights. */
typedef struct ep_checkpoint_survey {
    uint64_t experts; /* routed and shared, of all layers */
    uint64_t unreadable;
    ep_error first; /* of the first unreadable one, with its layer and expert */
} ep_checkpoint_survey;
void ep_checkpoint_survey_experts(const ep_checkpoint *checkpoint,
                                  ep_checkpoint_survey *out_survey);

/* Reads the router's weight [E,H] and bias [E] of an MoE layer, widened to f32; free() both.
 * *out_bias is NULL when there is none. */
ep_err ep_checkpoint_read_router(const ep_checkpoint *checkpoint, uint32_t layer,
                                 float **out_weight, float **out_bias, ep_error *out_error);

/* The router of an MoE layer as a gate. */
typedef struct ep_checkpoint_gate {
    /* chosen is NULL; for a hash layer, the caller, who has the token ids, sets it */
    ep_gate_config config;
    float *bias;
    float *factors;
    int32_t *table; /* [table_rows,K] experts by token id of a hash layer; otherwise NULL */
    uint32_t table_rows;
} ep_checkpoint_gate;

/* Errors: INVALID_ARGUMENT (no such MoE layer), UNIMPLEMENTED (a router this build does not
 * compute, and why), NOT_FOUND and BAD_FILE (a tensor the router needs), IO, NO_MEMORY. */
ep_err ep_checkpoint_read_gate(const ep_checkpoint *checkpoint, uint32_t layer,
                               ep_checkpoint_gate *out_gate, ep_error *out_error);
void ep_checkpoint_gate_fini(ep_checkpoint_gate *gate);

#endif
