/* SPDX-License-Identifier: Apache-2.0 */
/* The checkpoint writer. The safetensors header is padded to 8 bytes and the tensors follow it
 * without holes.
 */
#include "checkpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHARD_BYTES_MAX = 2600000, HEADER_BYTES_MAX = 64 * 1024, PATH_BYTES_MAX = 4096 };

static uint16_t bf16_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void checkpoint_round(struct weights *weights)
{
    for (size_t i = 0; i < weights->count; i++) {
        uint32_t bits = (uint32_t)bf16_bits(weights->flat[i]) << 16;
        memcpy(&weights->flat[i], &bits, sizeof(bits));
    }
}

static size_t elements(const struct tensor_info *t)
{
    return t->rows * (t->columns > 0 ? t->columns : 1);
}

static FILE *open_file(const char *folder, const char *name)
{
    char path[PATH_BYTES_MAX];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (file == NULL) {
        fprintf(stderr, "train: cannot write %s: %s\n", path, strerror(errno));
    }
    return file;
}

static int close_file(FILE *file, const char *name)
{
    int bad = ferror(file);
    if (fclose(file) != 0 || bad) {
        fprintf(stderr, "train: writing %s failed: %s\n", name, strerror(errno));
        return -1;
    }
    return 0;
}

static int write_shard(const char *folder, const char *name, const struct tensor_info *tensors,
                       size_t count)
{
    static char header[HEADER_BYTES_MAX];
    size_t used = (size_t)snprintf(header, sizeof(header), "{\"__metadata__\":{\"format\":\"pt\"}");
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        const struct tensor_info *t = &tensors[i];
        char shape[64];
        if (t->columns > 0) {
            snprintf(shape, sizeof(shape), "%zu,%zu", t->rows, t->columns);
        } else {
            snprintf(shape, sizeof(shape), "%zu", t->rows);
        }
        size_t end = at + 2 * elements(t);
        used += (size_t)snprintf(
            header + used, sizeof(header) - used,
            ",\"%s\":{\"dtype\":\"BF16\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", t->name,
            shape, at, end);
        at = end;
    }
    header[used++] = '}';
    while (used % 8 != 0) {
        header[used++] = ' ';
    }

    FILE *file = open_file(folder, name);
    if (file == NULL) {
        return -1;
    }
    for (int i = 0; i < 8; i++) {
        fputc((int)(((uint64_t)used >> (8 * i)) & 0xff), file);
    }
    fwrite(header, 1, used, file);
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < elements(&tensors[i]); j++) {
            uint16_t bits = bf16_bits(tensors[i].data[j]);
            fputc(bits & 0xff, file);
            fputc(bits >> 8, file);
        }
    }
    return close_file(file, name);
}

static int write_config(const char *folder)
{
    FILE *file = open_file(folder, "config.json");
    if (file == NULL) {
        return -1;
    }
    fprintf(file,
            "{\n"
            "  \"architectures\": [\"MixtralForCausalLM\"],\n"
            "  \"model_type\": \"mixtral\",\n"
            "  \"attention_dropout\": 0.0,\n"
            "  \"bos_token_id\": null,\n"
            "  \"eos_token_id\": null,\n"
            "  \"head_dim\": %d,\n"
            "  \"hidden_act\": \"silu\",\n"
            "  \"hidden_size\": %d,\n"
            "  \"initializer_range\": 0.02,\n"
            "  \"intermediate_size\": %d,\n"
            "  \"max_position_embeddings\": %d,\n"
            "  \"num_attention_heads\": %d,\n"
            "  \"num_experts_per_tok\": %d,\n"
            "  \"num_hidden_layers\": %d,\n"
            "  \"num_key_value_heads\": %d,\n"
            "  \"num_local_experts\": %d,\n"
            "  \"output_router_logits\": false,\n"
            "  \"rms_norm_eps\": 1e-05,\n"
            "  \"rope_theta\": 10000.0,\n"
            "  \"router_aux_loss_coef\": 0.01,\n"
            "  \"router_jitter_noise\": 0.0,\n"
            "  \"sliding_window\": null,\n"
            "  \"tie_word_embeddings\": false,\n"
            "  \"torch_dtype\": \"bfloat16\",\n"
            "  \"use_cache\": true,\n"
            "  \"vocab_size\": %d\n"
            "}\n",
            MODEL_HEAD_DIM, MODEL_HIDDEN, MODEL_INNER, MODEL_CONTEXT, MODEL_HEADS,
            MODEL_EXPERTS_PER_TOKEN, MODEL_LAYERS, MODEL_KV_HEADS, MODEL_EXPERTS, MODEL_VOCAB);
    return close_file(file, "config.json");
}

/* Fills shard_of and returns how many shards there are; tensors stay in list order. */
static size_t plan_shards(const struct tensor_info *tensors, size_t shard_of[MODEL_TENSORS])
{
    size_t shard = 0;
    size_t bytes = 0;
    for (size_t i = 0; i < MODEL_TENSORS; i++) {
        size_t size = 2 * elements(&tensors[i]);
        if (bytes + size > SHARD_BYTES_MAX) {
            shard++;
            bytes = 0;
        }
        bytes += size;
        shard_of[i] = shard;
    }
    return shard + 1;
}

static void shard_name(size_t shard, size_t shards, char out[64])
{
    snprintf(out, 64, "model-%05zu-of-%05zu.safetensors", shard + 1, shards);
}

int checkpoint_write(const struct weights *weights, const char *folder)
{
    static struct tensor_info tensors[MODEL_TENSORS];
    size_t shard_of[MODEL_TENSORS];
    char name[64];

    weights_list(weights, tensors);
    size_t shards = plan_shards(tensors, shard_of);
    for (size_t first = 0, end; first < MODEL_TENSORS; first = end) {
        for (end = first; end < MODEL_TENSORS && shard_of[end] == shard_of[first];) {
            end++;
        }
        shard_name(shard_of[first], shards, name);
        if (write_shard(folder, name, tensors + first, end - first) != 0) {
            return -1;
        }
    }

    FILE *file = open_file(folder, "model.safetensors.index.json");
    if (file == NULL) {
        return -1;
    }
    fprintf(file, "{\n  \"metadata\": {\n    \"total_size\": %zu\n  },\n  \"weight_map\": {\n",
            2 * weights->count);
    for (size_t i = 0; i < MODEL_TENSORS; i++) {
        shard_name(shard_of[i], shards, name);
        fprintf(file, "    \"%s\": \"%s\"%s\n", tensors[i].name, name,
                i + 1 < MODEL_TENSORS ? "," : "");
    }
    fprintf(file, "  }\n}\n");
    if (close_file(file, "model.safetensors.index.json") != 0) {
        return -1;
    }
    return write_config(folder);
}
