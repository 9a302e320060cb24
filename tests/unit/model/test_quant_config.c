/* SPDX-License-Identifier: Apache-2.0 */
/* quantization_config as public checkpoints have it; a key or a value that nobody knows is refused
 * wherever it stands. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/model_config.h"

#define CT(format, group)                                                                          \
    "{\"quant_method\":\"compressed-tensors\",\"config_groups\":{\"group_0\":" group               \
    "},\"format\":\"" format "\","                                                                 \
    "\"global_compression_ratio\":null,\"ignore\":[\"lm_head\"],\"kv_cache_scheme\":{\"num_"       \
    "bits\":8},"                                                                                   \
    "\"quantization_status\":\"compressed\",\"sparsity_config\":{\"format\":\"dense\",\"global_"   \
    "sparsity\":0.1},"                                                                             \
    "\"transform_config\":{},\"version\":\"0.20.0\"}"
#define WEIGHTS(bits, type, group, strategy, symmetric, block)                                     \
    "{\"actorder\":null,\"block_structure\":" block ",\"dynamic\":false,\"group_size\":" group     \
    ",\"num_bits\":" bits ",\"observer\":\"minmax\",\"observer_kwargs\":{\"averaging\":1},"        \
    "\"scale_dtype\":null,\"strategy\":\"" strategy "\",\"symmetric\":" symmetric                  \
    ",\"type\":\"" type "\",\"zp_dtype\":\"torch.int8\"}"
#define GROUP(weights)                                                                             \
    "{\"format\":null,\"input_activations\":{\"dynamic\":true,\"num_bits\":8},\"output_"           \
    "activations\":null,"                                                                          \
    "\"targets\":[\"Linear\"],\"weights\":" weights "}"

static const struct {
    const char *text;
    ep_quant_config wanted;
} configs[] = {
    {"{\"quant_method\":\"fp8\",\"activation_scheme\":\"dynamic\",\"fmt\":\"e4m3\","
     "\"weight_block_size\":[128,128]}",
     {.sizes = {{128, 128}}, .sizes_count = 1}},
    {"{\"quant_method\":\"fp8\",\"activation_scheme\":\"dynamic\",\"modules_to_not_convert\":null,"
     "\"weight_block_size\":[64,32],\"dequantize\":false,\"scale_fmt\":\"ue8m0\","
     "\"expert_dtype\":\"fp4\"}",
     {.sizes = {{64, 32}}, .sizes_count = 1}},
    {"{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\",\"weight_block_size\":null,"
     "\"ignored_layers\":[\"lm_head\"]}",
     {.sizes_count = 0}},
    {"{\"quant_method\":\"mxfp4\",\"modules_to_not_convert\":[\"model.layers.*.self_attn\"]}",
     {.sizes_count = 0}},
    {"{\"quant_method\":\"w8a8\"}", {.sizes_count = 0}},
    {"{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\",\"kv_cache_quant_algo\":\"FP8\","
     "\"group_size\":16,\"exclude_modules\":[\"lm_head\"],\"producer\":{\"name\":\"modelopt\"}}",
     {.sizes = {{1, 16}}, .sizes_count = 1}},
    {"{\"bits\":4,\"checkpoint_format\":\"gptq\",\"desc_act\":true,\"dynamic\":{\"-:.*gate.*\":{}},"
     "\"group_size\":128,\"lm_head\":false,\"meta\":{\"quantizer\":[\"gptqmodel:2.2.0\"]},\"pack_"
     "dtype\":\"int32\",\"quant_method\":\"gptq\",\"sym\":true,\"damp_percent\":0.1,\"true_"
     "sequential\":true,\"static_groups\":false,\"amp\":false,\"gradient_accumulate_steps\":4}",
     {.sizes = {{1, 128}},
      .sizes_count = 1,
      .words = EP_QUANT_WORDS_GPTQ,
      .symmetric = true,
      .has_order = true}},
    {"{\"bits\":8,\"checkpoint_format\":\"gptq_v2\",\"desc_act\":false,\"group_size\":-1,"
     "\"quant_method\":\"gptq\",\"sym\":false}",
     {.sizes = {{1, 0}}, .sizes_count = 1, .words = EP_QUANT_WORDS_GPTQ_V2}},
    {"{\"quant_method\":\"awq\",\"zero_point\":true,\"group_size\":64,\"bits\":4,"
     "\"version\":\"gemm\",\"modules_to_not_convert\":null,\"amp\":false}",
     {.sizes = {{1, 64}}, .sizes_count = 1, .words = EP_QUANT_WORDS_AWQ}},
    {CT("pack-quantized", "{\"input_activations\":null,\"weights\":" WEIGHTS(
                              "8", "int", "null", "channel", "false", "null") "}"),
     {.sizes = {{1, 0}}, .sizes_count = 1, .weights_only = true, .asymmetric = true}},
    {CT("pack-quantized", GROUP(WEIGHTS("4", "int", "32", "group", "true", "null"))),
     {.sizes = {{1, 32}}, .sizes_count = 1, .weights_only = true}},
    {CT("pack-quantized",
        "{\"weights\":{\"num_bits\":4,\"group_size\":32,\"actorder\":\"group\"}}"),
     {.sizes = {{1, 32}}, .sizes_count = 1, .weights_only = true, .has_order = true}},
    {CT("pack-quantized",
        "{\"weights\":{\"num_bits\":4,\"group_size\":32,\"actorder\":\"weight\"}}"),
     {.sizes = {{1, 32}}, .sizes_count = 1, .weights_only = true}},
    {CT("int-quantized", GROUP(WEIGHTS("8", "int", "null", "channel", "true", "null"))),
     {.sizes = {{1, 0}}, .sizes_count = 1}},
    {CT("float-quantized", GROUP(WEIGHTS("8", "float", "null", "block", "true", "[128,64]"))),
     {.sizes = {{128, 64}}, .sizes_count = 1, .weights_only = true}},
    {CT("mixed-precision",
        GROUP(WEIGHTS("4", "int", "32", "group", "true", "null")) ",\"group_1\":" GROUP(
            WEIGHTS("8", "int", "128", "group", "false", "null")) ",\"group_2\":" GROUP("null")),
     {.sizes = {{1, 32}, {1, 128}}, .sizes_count = 2, .weights_only = true}},
    {"{\"quant_method\":\"compressed-tensors\",\"config_groups\":{\"W4A16\":{\"input_activations\":"
     "null,\"weights\":{\"num_bits\":4,\"group_size\":32}}}}",
     {.sizes = {{1, 32}}, .sizes_count = 1, .weights_only = true, .wide_inputs = true}},
    {"{\"quant_method\":\"compressed-tensors\","
     "\"config_groups\":{\"W4A16_ASYM\":{\"weights\":{\"num_bits\":4,\"group_size\":32}}}}",
     {.sizes = {{1, 32}}, .sizes_count = 1, .weights_only = true, .wide_inputs = true}},
    {CT("mxfp4-pack-quantized",
        "{\"input_activations\":{\"num_bits\":16,\"type\":\"float\"},\"weights\":{\"num_bits\":4,"
        "\"type\":\"float\",\"group_size\":32}}"),
     {.sizes = {{1, 32}}, .sizes_count = 1, .weights_only = true, .wide_inputs = true}},
};

/* Parses a model's config with this quantization_config, at the top or one level down. */
static ep_err parse(json_t *quantised, bool is_nested, ep_quant_config *out_config, ep_error *error)
{
    static const char model[] = "{\"model_type\":\"mixtral\",\"hidden_size\":64,"
                                "\"intermediate_size\":32,\"num_hidden_layers\":4,"
                                "\"num_local_experts\":8,\"num_experts_per_tok\":2}";
    ep_model_config config = {0};
    json_t *root = json_loads(model, 0, NULL);
    json_object_set(root, "quantization_config", quantised);
    if (is_nested) {
        json_t *outer = json_object();
        json_object_set_new(outer, "text_config", root);
        root = outer;
    }
    char *text = json_dumps(root, 0);
    const ep_err err = ep_model_config_parse("config.json", text, strlen(text), &config, error);
    *out_config = config.quant;
    ep_model_config_fini(&config);
    free(text);
    json_decref(root);
    return err;
}

Test(quant_config, known_configs_are_read)
{
    for (size_t i = 0; i < 2 * EP_ARRAY_COUNT(configs); i++) {
        ep_error error;
        ep_quant_config got;
        const ep_quant_config *wanted = &configs[i / 2].wanted;
        json_t *quantised = json_loads(configs[i / 2].text, 0, NULL);
        cr_assert_not_null(quantised, "%zu", i / 2);
        cr_assert_eq(parse(quantised, i % 2 == 1, &got, &error), EP_OK, "%zu: %s", i / 2,
                     error.text);
        cr_expect(got.sizes_count == wanted->sizes_count &&
                      got.weights_only == wanted->weights_only && got.words == wanted->words &&
                      got.symmetric == wanted->symmetric && got.asymmetric == wanted->asymmetric &&
                      got.has_order == wanted->has_order && got.wide_inputs == wanted->wide_inputs,
                  "%zu: %u", i / 2, got.sizes_count);
        for (uint32_t k = 0; k < wanted->sizes_count; k++) {
            cr_expect(got.sizes[k].rows == wanted->sizes[k].rows &&
                          got.sizes[k].columns == wanted->sizes[k].columns,
                      "%zu: %u x %u", i / 2, got.sizes[k].rows, got.sizes[k].columns);
        }
        json_decref(quantised);
    }
}

/* Objects beneath these are about activations, or say how weights were found. */
static bool is_free(const char *key)
{
    static const char *const names[] = {"kv_cache_scheme",    "input_activations",
                                        "output_activations", "observer_kwargs",
                                        "producer",           "meta"};
    bool is_one = false;
    for (size_t i = 0; i < EP_ARRAY_COUNT(names); i++) {
        is_one = is_one || strcmp(key, names[i]) == 0;
    }
    return is_one;
}

/* Puts a key that nobody knows into every object in turn. Returns how many there were. */
static int expect_unknown_refused(json_t *whole, json_t *object, const char *path)
{
    int count = 1;
    ep_error error;
    ep_quant_config got;
    char inner[256];
    const char *key;
    json_t *value;
    json_object_set_new(object, "codebook", json_integer(1));
    cr_expect_eq(parse(whole, false, &got, &error), EP_ERR_UNIMPLEMENTED, "%s", path);
    snprintf(inner, sizeof(inner), "config.json: %s.codebook", path);
    cr_expect_eq(strncmp(error.text, inner, strlen(inner)), 0, "%s: %s", inner, error.text);
    json_object_del(object, "codebook");
    json_object_foreach(object, key, value)
    {
        snprintf(inner, sizeof(inner), "%s.%s", path, key);
        count += json_is_object(value) && !is_free(key) && strncmp(key, "-:", 2) != 0
                     ? expect_unknown_refused(whole, value, inner)
                     : 0;
    }
    return count;
}

Test(quant_config, an_unknown_key_at_any_level_is_refused_by_name)
{
    int count = 0;
    for (size_t i = 0; i < EP_ARRAY_COUNT(configs); i++) {
        json_t *quantised = json_loads(configs[i].text, 0, NULL);
        count += expect_unknown_refused(quantised, quantised, "quantization_config");
        json_decref(quantised);
    }
    cr_expect_gt(count, 20, "%d", count);
}

Test(quant_config, a_value_that_changes_weights_is_refused)
{
    static const struct {
        const char *text;
        const char *error;
    } cases[] = {
        {"{\"quant_method\":\"bitsandbytes\"}",
         "quantization_config: quant_method is bitsandbytes, allowed: none, fp8"},
        {"{\"quant_method\":[]}", "quantization_config: quant_method is not given"},
        {"{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\"}",
         "quantization_config.fmt is \"e5m2\", allowed e4m3"},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128,\"x\"]}",
         "weight_block_size is an array of 2, allowed a list of integers"},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":96}",
         "weight_block_size is 96, allowed a list of integers"},
        {"{\"quant_method\":\"gptq\",\"group_size\":[64]}",
         "group_size is an array of 1, allowed an integer"},
        {"{\"quant_method\":\"mxfp4\",\"weight_block_size\":[128,128]}",
         "quantization_config.weight_block_size: this build does not know"},
        {"{\"quant_method\":\"gptq\",\"bits\":3}", "quantization_config.bits is 3, allowed 4|8"},
        {"{\"quant_method\":\"gptq\",\"checkpoint_format\":\"marlin\"}",
         "checkpoint_format is \"marlin\", allowed gptq|gptq_v2"},
        {"{\"quant_method\":\"gptq\",\"dynamic\":{\".*up.*\":{\"bits\":8}}}",
         "quantization_config.dynamic..*up.*"},
        {"{\"quant_method\":\"awq\",\"version\":\"gemv\"}",
         "version is \"gemv\", allowed gemm|GEMM"},
        {CT("marlin-24", GROUP("null")),
         "quantization_config.format is \"marlin-24\", allowed dense|"},
        {CT("pack-quantized", "[\"Linear\"]"),
         "config_groups.group_0 is an array of 1, allowed an object"},
        {CT("pack-quantized", GROUP(WEIGHTS("3", "int", "32", "group", "true", "null"))),
         "weights.num_bits is 3, allowed 4|8"},
        {CT("pack-quantized", GROUP(WEIGHTS("4", "int", "32.5", "group", "true", "null"))),
         "weights.group_size is 32.5, allowed an integer"},
        {CT("int-quantized",
            GROUP(WEIGHTS("8", "int", "null", "channel", "true",
                          "null")) ",\"group_1\":{\"weights\":" WEIGHTS("8", "int", "null",
                                                                        "channel", "true",
                                                                        "null") "}"),
         "config_groups: int8 rows of some groups have int8 inputs and of others not"},
        {"{\"quant_method\":\"gptq\",\"checkpoint_format\":\"gptq\",\"format\":\"gptq_v2\"}",
         "quantization_config.checkpoint_format is gptq and format is gptq_v2, allowed the same"},
        {CT("pack-quantized", GROUP(WEIGHTS("4", "int", "32", "attn_head", "true", "null"))),
         "weights.strategy is \"attn_head\", allowed"},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128]}",
         "a block size is not two numbers above 0"},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128,0]}",
         "a block size is not two numbers above 0"},
        {CT("pack-quantized", GROUP("{\"dynamic\":true}")),
         "weights.dynamic is true, allowed false"},
        {CT("pack-quantized", GROUP("{\"actorder\":\"rank\"}")),
         "weights.actorder is \"rank\", allowed"},
        {"{\"quant_method\":\"compressed-tensors\",\"quantization_status\":\"frozen\"}",
         "quantization_status is \"frozen\", allowed compressed"},
        {"{\"quant_method\":\"compressed-tensors\","
         "\"sparsity_config\":{\"format\":\"sparse-24-bitmask\"}}",
         "sparsity_config.format is \"sparse-24-bitmask\", allowed dense"},
        {"{\"quant_method\":\"compressed-tensors\","
         "\"transform_config\":{\"config_groups\":{\"u\":{}}}}",
         "transform_config.config_groups.u: this build does not know what the key means for "
         "weights; allowed: none"},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        ep_error error;
        ep_quant_config got;
        json_t *quantised = json_loads(cases[i].text, 0, NULL);
        cr_assert_not_null(quantised, "%zu", i);
        cr_expect_eq(parse(quantised, false, &got, &error), EP_ERR_UNIMPLEMENTED, "%zu", i);
        cr_expect(strstr(error.text, cases[i].error) != NULL, "%zu: %s", i, error.text);
        json_decref(quantised);
    }
}

/* One of the whole file beside one of the language model counts for nothing that is read. */
Test(quant_config, two_configs_that_differ_are_refused)
{
    static const char model[] = "{\"quantization_config\":%s,\"text_config\":{\"model_type\":"
                                "\"mixtral\",\"hidden_size\":64,\"intermediate_size\":32,"
                                "\"num_hidden_layers\":4,\"num_local_experts\":8,\"num_experts_per_"
                                "tok\":2,\"quantization_config\":%s}}";
    static const char *const pair[] = {"{\"quant_method\":\"fp8\"}",
                                       "{\"quant_method\":\"mxfp4\"}"};
    for (size_t i = 0; i < 2; i++) {
        char text[1024];
        ep_model_config config = {0};
        ep_error error = {0};
        snprintf(text, sizeof(text), model, pair[0], pair[i]);
        cr_expect_eq(ep_model_config_parse("config.json", text, strlen(text), &config, &error),
                     i == 0 ? EP_OK : EP_ERR_UNIMPLEMENTED, "%s", error.text);
        cr_expect(
            i == 0 ||
                strstr(error.text,
                       "quantization_config is not the quantization_config of the whole file") !=
                    NULL,
            "%s", error.text);
        ep_model_config_fini(&config);
    }
}
