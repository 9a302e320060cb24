/* SPDX-License-Identifier: Apache-2.0 */
/* config.json of a model, and the index of its shards. First byte: which of the two. */
#include <string.h>

#include "fuzz.h"
#include "model/model_config.h"
#include "model/shard_index.h"
#include "moe/routing_table.h"

static const char *const seeds[] = {
    "c{\"model_type\":\"mixtral\",\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_"
    "layers\":2,"
    "\"num_local_experts\":8,\"num_experts_per_tok\":2,\"hidden_act\":\"silu\",\"torch_dtype\":"
    "\"bfloat16\"}",
    "c{\"model_type\":\"qwen2_moe\",\"hidden_size\":64,\"moe_intermediate_size\":32,\"shared_"
    "expert_intermediate_size\":64,"
    "\"num_hidden_layers\":4,\"num_experts\":16,\"num_experts_per_tok\":4,\"norm_topk_prob\":true,"
    "\"hidden_act\":\"silu\","
    "\"decoder_sparse_step\":2,\"mlp_only_layers\":[1]}",
    "c{\"model_type\":\"deepseek_v3\",\"hidden_size\":64,\"moe_intermediate_size\":32,\"num_hidden_"
    "layers\":4,"
    "\"first_k_dense_replace\":1,\"n_routed_experts\":32,\"n_shared_experts\":1,\"num_experts_per_"
    "tok\":8,\"n_group\":4,"
    "\"topk_group\":2,\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\",\"routed_scaling_"
    "factor\":2.5,"
    "\"norm_topk_prob\":true,\"hidden_act\":\"silu\",\"moe_layer_freq\":1}",
    "c{\"model_type\":\"deepseek_v2\",\"hidden_size\":64,\"moe_intermediate_size\":32,\"num_hidden_"
    "layers\":3,"
    "\"first_k_dense_replace\":1,\"n_routed_experts\":8,\"n_shared_experts\":2,\"num_experts_per_"
    "tok\":2,\"n_group\":2,"
    "\"topk_group\":1,\"scoring_func\":\"softmax\",\"topk_method\":\"group_limited_greedy\","
    "\"routed_scaling_factor\":1.0}",
    "c{\"model_type\":\"kimi_vl\",\"text_config\":{\"hidden_size\":8,\"moe_intermediate_size\":[4,"
    "4],\"num_hidden_layers\":2,"
    "\"num_experts\":[4,2],\"num_experts_per_tok\":1}}",
    "c{\"model_type\":\"mixtral\",\"hidden_size\":64,\"num_hidden_layers\":1,\"num_local_experts\":"
    "8,"
    "\"quantization_config\":{\"quant_method\":\"fp8\"}}",
    "c{\"model_type\":\"step3p5\",\"hidden_size\":64,\"moe_intermediate_size\":32,\"num_hidden_"
    "layers\":4,\"moe_num_experts\":8,"
    "\"moe_top_k\":2,\"moe_layers_enum\":\"1,2,3\",\"swiglu_limits\":[0,1,2,3],\"norm_expert_"
    "weight\":true,\"quantization_config\":"
    "{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":128,\"sym\":true,\"desc_act\":true,"
    "\"dynamic\":{\"-:x\":{}},"
    "\"checkpoint_format\":\"gptq\"}}",
    "c{\"model_type\":\"nemotron_h\",\"hidden_size\":64,\"moe_intermediate_size\":32,\"n_routed_"
    "experts\":8,\"num_experts_per_tok\":2,"
    "\"hybrid_override_pattern\":\"ME*-\",\"mlp_hidden_act\":\"relu2\",\"quantization_config\":{"
    "\"quant_method\":\"compressed-tensors\","
    "\"format\":\"int-quantized\",\"sparsity_config\":{\"format\":\"dense\"},\"transform_config\":{"
    "\"config_groups\":{}},\"config_groups\":"
    "{\"g\":{\"input_activations\":{\"num_bits\":8,\"type\":\"int\"},\"weights\":{\"num_bits\":8,"
    "\"type\":\"int\",\"actorder\":\"group\","
    "\"block_structure\":[64,32],\"symmetric\":false}}}}}",
    "c{\"model_type\":\"deepseek_v4\",\"hidden_size\":64,\"moe_intermediate_size\":32,\"num_hidden_"
    "layers\":4,\"n_routed_experts\":8,"
    "\"num_experts_per_tok\":2,\"mlp_layer_types\":[\"dense\",\"sparse\",\"moe\",\"hash_moe\"],"
    "\"scoring_func\":\"sqrtsoftplus\","
    "\"swiglu_limit\":10.0,\"zero_expert_num\":2,\"expert_layer_period\":2,\"moe_layer_end_index\":"
    "-1,\"moe_layer_freq\":[0,1,1,1]}",
    "i{\"metadata\":{\"total_size\":100},\"weight_map\":{\"a\":\"model-1.safetensors\",\"b\":"
    "\"model-2.safetensors\"}}",
    "i{\"weight_map\":{\"a\":\"../x\",\"b\":7}}",
};

size_t fuzz_seed(size_t index, uint8_t *out)
{
    return index < sizeof(seeds) / sizeof(seeds[0]) ? fuzz_seed_text(seeds[index], out) : 0;
}

static void check_config(const ep_model_config *config)
{
    const ep_model_info *info = &config->info;
    FUZZ_CHECK(info->layers_count > 0 && info->moe_layers_count <= info->layers_count);
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        const ep_layer_shape *shape = &info->moe_layers[i];
        ep_error error;
        FUZZ_CHECK(ep_layer_shape_check(shape, &error) == EP_OK &&
                   shape->layer < info->layers_count);
        FUZZ_CHECK(i == 0 || info->moe_layers[i - 1].layer < shape->layer);
    }
}

static void check_index(const ep_shard_index *index)
{
    for (size_t i = 0; i < index->entries_count; i++) {
        FUZZ_CHECK(index->entries[i].shard < index->shards_count);
        FUZZ_CHECK(i == 0 || strcmp(index->entries[i - 1].tensor, index->entries[i].tensor) < 0);
    }
    for (size_t i = 0; i < index->shards_count; i++) {
        const char *name = index->shards[i]; /* one of the directory's own files */
        FUZZ_CHECK(name[0] != 0 && strchr(name, '/') == NULL && strcmp(name, ".") != 0 &&
                   strcmp(name, "..") != 0);
    }
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    ep_error error = {0};
    if (bytes == 0) {
        return;
    }
    const char *text = (const char *)data + 1;
    if (data[0] == 'i') {
        ep_shard_index index = {0};
        if (ep_shard_index_parse("index.json", text, bytes - 1, &index, &error) == EP_OK) {
            check_index(&index);
            ep_shard_index_fini(&index);
            return;
        }
    } else {
        ep_model_config config = {0};
        if (ep_model_config_parse("config.json", text, bytes - 1, &config, &error) == EP_OK) {
            check_config(&config);
            ep_model_config_fini(&config);
            return;
        }
    }
    FUZZ_CHECK(error.text[0] != 0);
}
