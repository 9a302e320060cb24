/* SPDX-License-Identifier: Apache-2.0 */
/* Bad checkpoints: what is wrong is named, and a damaged expert takes down only itself. */
#include "unit/model/model_test.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "model/safetensors_writer.h"

static ep_checkpoint *checkpoint;
static ep_error error;

static void close_opened(void)
{
    ep_checkpoint_close(checkpoint);
    checkpoint = NULL;
}

static void close_and_remove(void)
{
    close_opened();
    remove_test_dir();
}

TestSuite(checkpoint_damage, .init = make_test_dir, .fini = close_and_remove);

/* As the directory is now. */
static void open_written(void)
{
    close_opened();
    ASSERT_OK(ep_checkpoint_open(test_dir, &checkpoint, &error), error);
}

#define INDEX "model.safetensors.index.json"
#define SHARD_1 "model-00001-of-00002.safetensors"
#define SHARD_2 "model-00002-of-00002.safetensors"

static void write_fixture(uint32_t shards)
{
    ep_fixture_config config = ep_fixture_default();
    config.shards = shards;
    ASSERT_OK(ep_fixture_write(&config, test_dir, &error), error);
}

static void expect_open_fails(ep_err err, const char *text)
{
    ep_err got = ep_checkpoint_open(test_dir, &checkpoint, &error);
    cr_assert_eq(got, err, "code %s: %s", ep_err_name(got), got == EP_OK ? "" : error.text);
    ASSERT_TEXT(error, text);
    cr_assert_null(checkpoint);
    cr_assert_eq(ep_checkpoint_open(test_dir, &checkpoint, NULL), err, "without an error to fill");
}

typedef struct index_case {
    const char *index;
    ep_err err;
    const char *text;
} index_case;

#define MAP(file) "{\"weight_map\":{\"a\":" file "}}"

static const index_case index_cases[] = {
    {"", EP_ERR_BAD_FILE, INDEX ": line 1"},
    {"[]", EP_ERR_BAD_FILE, INDEX ": is a JSON array, allowed: an object"},
    {"{}", EP_ERR_BAD_FILE, INDEX ": weight_map is missing, allowed an object: tensor -> file"},
    {"{\"weight_map\":[]}", EP_ERR_BAD_FILE,
     INDEX ": weight_map is an array of 0, allowed an object"},
    {"{\"weight_map\":{}}", EP_ERR_BAD_FILE,
     INDEX ": weight_map has 0 tensors, allowed 1..2000000"},
    {"{\"weight_map\":{\"a\":\"" SHARD_1 "\",\"a\":\"" SHARD_2 "\"}}", EP_ERR_BAD_FILE,
     "duplicate object key near '\"a\"'"},
    {MAP("1"), EP_ERR_BAD_FILE,
     INDEX
     ": tensor a: its file is 1, allowed a plain file name of 1..255 bytes ending in .safetensors"},
    {MAP("\"\""), EP_ERR_BAD_FILE, "tensor a: its file is \"\", allowed a plain file name"},
    {MAP("\"../x.safetensors\""), EP_ERR_BAD_FILE,
     "tensor a: its file is \"../x.safetensors\", allowed a plain file name"},
    {MAP("\"/etc/x.safetensors\""), EP_ERR_BAD_FILE,
     "tensor a: its file is \"/etc/x.safetensors\", allowed a plain file name"},
    {MAP("\"sub/x.safetensors\""), EP_ERR_BAD_FILE, "its file is \"sub/x.safetensors\""},
    {MAP("\"..\""), EP_ERR_BAD_FILE, "its file is \"..\""},
    {MAP("\".safetensors\""), EP_ERR_BAD_FILE, "its file is \".safetensors\""},
    {MAP("\"config.json\""), EP_ERR_BAD_FILE, "its file is \"config.json\""},
    {MAP("\"x\\n.safetensors\""), EP_ERR_BAD_FILE, "its file is \"x?.safetensors\""},
    {MAP("\"x\\u0000.safetensors\""), EP_ERR_BAD_FILE, "\\u0000 is not allowed"},
    {MAP("\"gone.safetensors\""), EP_ERR_NOT_FOUND,
     INDEX " names a file that is missing: gone.safetensors: there is no such file in "},
    {MAP("\"" SHARD_1 "\""), EP_ERR_BAD_FILE,
     INDEX ": tensor a: is not in " SHARD_1 ", which the index names for it"},
    {"{\"weight_map\":{\"a\":\"" SHARD_1 "\"}", EP_ERR_BAD_FILE, INDEX ": line 1"},
};

Test(checkpoint_damage, index_rules_and_their_messages)
{
    write_fixture(2);
    for (size_t i = 0; i < EP_ARRAY_COUNT(index_cases); i++) {
        write_text(INDEX, index_cases[i].index);
        expect_open_fails(index_cases[i].err, index_cases[i].text);
    }
}

Test(checkpoint_damage, an_index_that_swaps_two_shards_is_refused)
{
    write_fixture(2);
    edit_file(INDEX, SHARD_1, SHARD_2);
    expect_open_fails(EP_ERR_BAD_FILE, "is not in " SHARD_2 ", which the index names for it");
}

Test(checkpoint_damage, a_directory_without_its_files_says_which)
{
    expect_open_fails(EP_ERR_NOT_FOUND, "config.json: there is no such file in ");
    write_fixture(1);
    unlink(test_path("model.safetensors"));
    expect_open_fails(EP_ERR_NOT_FOUND, "neither " INDEX " nor model.safetensors is in ");
    ASSERT_FAILS(ep_checkpoint_open(test_path("none"), &checkpoint, &error), EP_ERR_NOT_FOUND,
                 error, "none: cannot open the model directory: No such file or directory");
    ASSERT_FAILS(ep_checkpoint_open(test_path("config.json"), &checkpoint, &error), EP_ERR_BAD_FILE,
                 error,
                 "config.json: is not a directory; give the directory that holds config.json");
}

Test(checkpoint_damage, a_missing_shard_is_named)
{
    write_fixture(2);
    unlink(test_path(SHARD_2));
    expect_open_fails(EP_ERR_NOT_FOUND, INDEX " names a file that is missing: " SHARD_2);
}

Test(checkpoint_damage, pipes_directories_and_foreign_links_are_refused)
{
    write_fixture(2);
    unlink(test_path(SHARD_2));
    cr_assert_eq(mkfifo(test_path(SHARD_2), 0600), 0);
    expect_open_fails(EP_ERR_BAD_FILE, SHARD_2 ": is a pipe, allowed: a regular file");
    unlink(test_path(SHARD_2));
    mkdir(test_path(SHARD_2), 0700);
    expect_open_fails(EP_ERR_BAD_FILE, SHARD_2 ": is a directory, allowed: a regular file");
    rmdir(test_path(SHARD_2));
    cr_assert_eq(symlink("/etc/passwd", test_path(SHARD_2)), 0);
    expect_open_fails(EP_ERR_BAD_FILE,
                      SHARD_2 ": is a symbolic link to /etc/passwd, allowed: a target below ");
    unlink(test_path(SHARD_2));
    cr_assert_eq(rename(test_path("config.json"), test_path("real.json")), 0);
    cr_assert_eq(mkfifo(test_path("config.json"), 0600), 0);
    expect_open_fails(EP_ERR_BAD_FILE, "config.json: is a pipe, allowed: a regular file");
}

/* A directory whose name merely begins with the model's is outside it. */
Test(checkpoint_damage, a_link_to_a_sibling_with_the_same_beginning_is_refused)
{
    char target[EP_FIXTURE_PATH_BYTES + 64];
    write_fixture(2);
    cr_assert_eq(mkdir(test_path("model"), 0700), 0);
    cr_assert_eq(mkdir(test_path("model-other"), 0700), 0);
    cr_assert_eq(rename(test_path("config.json"), test_path("model-other/config.json")), 0);
    snprintf(target, sizeof(target), "%s/model-other/config.json", test_dir);
    cr_assert_eq(symlink(target, test_path("model/config.json")), 0);
    ASSERT_FAILS(ep_checkpoint_open(test_path("model"), &checkpoint, &error), EP_ERR_BAD_FILE,
                 error, "config.json: is a symbolic link to ");
}

Test(checkpoint_damage, a_shard_cut_at_any_kilobyte_is_refused_by_name)
{
    struct stat st;
    write_fixture(2);
    cr_assert_eq(stat(test_path(SHARD_2), &st), 0);
    for (off_t keep = (st.st_size - 1) / 1024 * 1024; keep >= 0; keep -= 1024) {
        cr_assert_eq(truncate(test_path(SHARD_2), keep), 0);
        expect_open_fails(EP_ERR_BAD_FILE, SHARD_2 ": ");
    }
}

Test(checkpoint_damage, the_config_must_fit_the_tensors)
{
    write_fixture(1);
    edit_file("config.json", "\"num_local_experts\": 8", "\"num_local_experts\": 7");
    expect_open_fails(
        EP_ERR_BAD_FILE,
        "config.json: layer 0 has 7 experts by its config, but tensor "
        "model.layers.0.block_sparse_moe.experts.7.w2.weight exists; allowed experts 0..6");
    ep_fixture_config config = ep_fixture_default();
    config.shared_inner = config.inner;
    ASSERT_OK(ep_fixture_write(&config, test_dir, &error), error);
    edit_file("config.json", "\"n_shared_experts\": 1", "\"n_shared_experts\": 0");
    expect_open_fails(EP_ERR_BAD_FILE, "config.json: layer 0 has no shared expert by its config");
}

/* One tensor of these files; the rest of the model is left away. */
static void write_one(const char *name, int64_t rows, int64_t columns)
{
    static uint16_t zeros[4096];
    ep_named_tensor tensor = {name, ep_tensor_2d(zeros, EP_DTYPE_BF16, rows, columns)};
    ASSERT_OK(ep_safetensors_write(test_path("model.safetensors"), &tensor, 1, NULL, 0, &error),
              error);
}

Test(checkpoint_damage, a_family_without_names_for_shared_experts_may_have_none)
{
    ep_fixture_config config = ep_fixture_default();
    config.shared_inner = config.inner;
    ASSERT_OK(ep_fixture_write(&config, test_dir, &error), error);
    edit_file("config.json", "\"model_type\": \"mixtral\"", "\"model_type\": \"gpt_oss\"");
    edit_file("config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    write_one("model.layers.0.mlp.experts.gate_up_proj", 2, 2);
    expect_open_fails(EP_ERR_UNIMPLEMENTED,
                      "config.json: layer 0 has 1 shared experts by its config (n_shared_experts, "
                      "shared_expert_intermediate_size), but checkpoints whose experts are tensors "
                      "model.layers.0.mlp.experts.down_proj have no known names for those; "
                      "allowed 0");
}

Test(checkpoint_damage, unknown_names_are_said)
{
    write_fixture(1);
    write_one("some.weight", 2, 2);
    expect_open_fails(EP_ERR_UNIMPLEMENTED,
                      "no expert tensors found: neither layers.0.mlp.experts.0.gate_proj.weight "
                      "nor layers.0.block_sparse_moe.experts.0.w1.weight");
}

/* Words of GPTQ or AWQ mean something only with a config that says which. */
Test(checkpoint_damage, words_without_a_method_are_refused)
{
    ep_expert_data data = {0};
    write_fixture(1);
    edit_file("config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    write_one("layers.0.mlp.experts.0.gate_proj.qweight", 2, 2);
    open_written();
    cr_expect_neq(ep_checkpoint_read_expert(checkpoint, 0, 0, &data, &error), EP_OK);
    ASSERT_TEXT(error, "layers.0.mlp.experts.0.gate_proj.qweight: ");
}

/* ---- layers, keys and types ---- */

Test(checkpoint_damage, keys_and_files_must_agree_on_the_moe_layers)
{
    write_fixture(1);
    edit_file("config.json", "\"first_k_dense_replace\": 0", "\"first_k_dense_replace\": 1");
    expect_open_fails(EP_ERR_BAD_FILE,
                      "config.json: layer 0 is no MoE layer by first_k_dense_replace, but tensor "
                      "model.layers.0.block_sparse_moe.experts.");
    write_fixture(1);
    edit_file("config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    expect_open_fails(EP_ERR_BAD_FILE,
                      "config.json: layer 2 is an MoE layer by first_k_dense_replace, but no "
                      "expert of it is there, not even tensor "
                      "model.layers.2.block_sparse_moe.experts.0.w2.weight");
}

Test(checkpoint_damage, without_a_key_the_files_say_which_layers_have_experts)
{
    write_fixture(1);
    edit_file("config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    edit_file("config.json", "\"first_k_dense_replace\"", "\"something_else\"");
    open_written();
    cr_expect_eq(ep_checkpoint_info(checkpoint)->layers_count, 3);
    cr_assert_eq(ep_checkpoint_info(checkpoint)->moe_layers_count, 2);
    cr_expect_eq(ep_checkpoint_info(checkpoint)->moe_layers[1].layer, 1);
}

Test(checkpoint_damage, a_key_about_experts_that_nothing_reads_is_refused)
{
    write_fixture(1);
    edit_file("config.json", "\"rms_norm_eps\"", "\"moe_new_trick\"");
    expect_open_fails(EP_ERR_UNIMPLEMENTED, "config.json: moe_new_trick is 1e-05, a key about "
                                            "experts or router that this build does not use");
}

Test(checkpoint_damage, an_unknown_type_serves_its_experts_and_not_its_router)
{
    ep_checkpoint_gate gate;
    ep_expert_data expert;
    write_fixture(1);
    edit_file("config.json", "\"model_type\": \"mixtral\"", "\"model_type\": \"newtral\"");
    open_written();
    ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 0, 0, &expert, &error), error);
    ep_expert_data_free(&expert);
    cr_assert_eq(ep_checkpoint_read_gate(checkpoint, 0, &gate, &error), EP_ERR_UNIMPLEMENTED);
    cr_assert_str_eq(error.text, "this build does not compute the router of model type 'newtral': "
                                 "its model type has no row in this build's table");
}

Test(checkpoint_damage, a_survey_counts_experts_that_cannot_be_read)
{
    ep_checkpoint_survey survey;
    write_fixture(1);
    open_written();
    ep_checkpoint_survey_experts(checkpoint, &survey);
    cr_expect(survey.experts == 16 && survey.unreadable == 0);
    edit_file("config.json", "\"moe_intermediate_size\": 16", "\"moe_intermediate_size\": 18");
    open_written();
    ep_checkpoint_survey_experts(checkpoint, &survey);
    cr_expect(survey.experts == 16 && survey.unreadable == 16);
    cr_expect(survey.first.layer == 0 && survey.first.expert == 0);
    ASSERT_TEXT(survey.first, "shape is [16,32], allowed [18,32] by config.json");
}

/* Rewrites the fixture's tensors with one replaced, or left out when replacement is NULL. */
static void replace_tensor(const char *name, const ep_named_tensor *replacement)
{
    ep_named_tensor tensors[128];
    size_t count = 0;
    write_fixture(1);
    open_written();
    for (uint32_t layer = 0; layer < 2; layer++) {
        for (int i = 0; i < 8 * 3 + 1; i++) {
            static const char *const words[] = {"w1", "w2", "w3"};
            char full[128];
            ep_tensor_info info;
            snprintf(full, sizeof(full), "model.layers.%u.block_sparse_moe.gate.weight", layer);
            if (i < 24) {
                snprintf(full, sizeof(full),
                         "model.layers.%u.block_sparse_moe.experts.%d.%s.weight", layer, i / 3,
                         words[i % 3]);
            }
            ASSERT_OK(ep_checkpoint_find(checkpoint, full, &info, &error), error);
            if (strcmp(full, name) == 0) {
                continue;
            }
            void *data = malloc(info.bytes);
            ASSERT_OK(ep_checkpoint_read(checkpoint, full, data, info.bytes, &error), error);
            tensors[count++] = (ep_named_tensor){
                strdup(full), ep_tensor_2d(data, info.dtype, info.shape[0], info.shape[1])};
        }
    }
    close_opened();
    cr_assert_eq(count, 49, "%s is not in the fixture", name);
    size_t own = count;
    if (replacement != NULL) {
        tensors[count++] = *replacement;
    }
    ASSERT_OK(ep_safetensors_write(test_path("model.safetensors"), tensors, count, NULL, 0, &error),
              error);
    for (size_t i = 0; i < own; i++) {
        free((void *)(uintptr_t)tensors[i].name);
        free(tensors[i].tensor.data);
    }
}

/* Expert bad_layer/bad_expert fails with text; all the others are served. */
static void expect_one_bad(uint32_t bad_layer, uint32_t bad_expert, ep_err bad_err,
                           const char *text)
{
    open_written();
    for (uint32_t layer = 0; layer < 2; layer++) {
        for (uint32_t e = 0; e < 8; e++) {
            ep_expert_data data = {0};
            ep_err err = ep_checkpoint_read_expert(checkpoint, layer, e, &data, &error);
            if (layer == bad_layer && e == bad_expert) {
                cr_expect_eq(err, bad_err, "%s", error.text);
                ASSERT_TEXT(error, text);
                cr_expect_eq(error.layer, (int32_t)layer);
                cr_expect_eq(error.expert, (int32_t)e);
                cr_expect_null(data.allocation, "output written on failure");
            } else {
                EXPECT_OK(err, error);
            }
            ep_expert_data_free(&data);
        }
    }
}

Test(checkpoint_damage, a_bad_tensor_takes_down_its_expert_only)
{
    static float zeros[64 * 64];
    static const char first[] = "model.layers.0.block_sparse_moe.experts.0.w1.weight";
    static const char down[] = "model.layers.1.block_sparse_moe.experts.5.w2.weight";

    ep_named_tensor other = {first, ep_tensor_2d(zeros, EP_DTYPE_BF16, 16, 31)};
    replace_tensor(first, &other);
    expect_one_bad(0, 0, EP_ERR_BAD_FILE,
                   "model.safetensors: tensor model.layers.0.block_sparse_moe.experts.0.w1.weight: "
                   "shape is [16,31], allowed [16,32] by config.json");
    other.tensor = ep_tensor_2d(zeros, EP_DTYPE_F32, 16, 32);
    replace_tensor(first, &other);
    expect_one_bad(0, 0, EP_ERR_BAD_FILE, "experts.0.w1.weight: dtype is F32, allowed BF16");
    other.tensor = ep_tensor_2d(zeros, EP_DTYPE_I8, 16, 32);
    replace_tensor(first, &other);
    expect_one_bad(0, 0, EP_ERR_NOT_FOUND, "experts.0.w1.weight: has no scales");
    replace_tensor(first, NULL);
    expect_one_bad(0, 0, EP_ERR_NOT_FOUND,
                   "tensor model.layers.0.block_sparse_moe.experts.0.w1.weight: is in none of the "
                   "checkpoint's 1 files");

    other = (ep_named_tensor){down, ep_tensor_2d(zeros, EP_DTYPE_BF16, 16, 32)}; /* transposed */
    replace_tensor(down, &other);
    expect_one_bad(1, 5, EP_ERR_BAD_FILE,
                   "experts.5.w2.weight: shape is [16,32], allowed [32,16] by config.json");
    other.tensor = ep_tensor_1d(zeros, EP_DTYPE_BF16, 512);
    replace_tensor(down, &other);
    expect_one_bad(1, 5, EP_ERR_BAD_FILE, "shape is [512], allowed [32,16] by config.json");
    other.tensor = ep_tensor_3d(zeros, EP_DTYPE_BF16, 1, 32, 16);
    replace_tensor(down, &other);
    expect_one_bad(1, 5, EP_ERR_BAD_FILE, "shape is [1,32,16], allowed [32,16] by config.json");
    other.tensor = ep_tensor_2d(zeros, EP_DTYPE_BF16, 0, 16);
    replace_tensor(down, &other);
    expect_one_bad(1, 5, EP_ERR_BAD_FILE, "shape is [0,16], allowed [32,16] by config.json");
}

Test(checkpoint_damage, a_bad_router_is_named_and_the_experts_are_served)
{
    static float zeros[64 * 64];
    static const char gate[] = "model.layers.1.block_sparse_moe.gate.weight";
    ep_named_tensor other = {gate, ep_tensor_2d(zeros, EP_DTYPE_BF16, 7, 32)};
    float *weight = NULL;
    float *bias = NULL;
    replace_tensor(gate, &other);
    open_written();
    ASSERT_FAILS(ep_checkpoint_read_router(checkpoint, 1, &weight, &bias, &error), EP_ERR_BAD_FILE,
                 error,
                 "model.layers.1.block_sparse_moe.gate.weight: shape is [7,32], allowed "
                 "[8,32] by config.json");
    cr_assert_null(weight);
    ASSERT_OK(ep_checkpoint_read_router(checkpoint, 0, &weight, &bias, &error), error);
    free(weight);
    replace_tensor(gate, NULL);
    open_written();
    ASSERT_FAILS(ep_checkpoint_read_router(checkpoint, 1, &weight, &bias, &error), EP_ERR_NOT_FOUND,
                 error, "tensor model.layers.1.block_sparse_moe.gate.weight: is in none");
}

Test(checkpoint_damage, a_gate_the_model_type_needs_may_not_be_missing)
{
    ep_fixture_config config = ep_fixture_default();
    ep_expert_data data = {0};
    config.names = EP_NAMES_N1;
    config.router = EP_ROUTER_R2;
    config.shared_inner = config.inner; /* no gate: written as a qwen3_moe with a shared expert */
    ASSERT_OK(ep_fixture_write(&config, test_dir, &error), error);
    edit_file("config.json", "qwen3_moe", "qwen2_moe");
    open_written();
    ASSERT_FAILS(
        ep_checkpoint_read_expert(checkpoint, 0, 8, &data, &error), EP_ERR_NOT_FOUND, error,
        "tensor model.layers.0.mlp.shared_expert_gate.weight: is missing; a qwen2_moe model's "
        "shared expert has a gate");
    ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 0, 7, &data, &error), error);
    ep_expert_data_free(&data);
}

Test(checkpoint_damage, a_bias_does_not_stand_for_the_weight)
{
    static uint16_t zeros[64];
    static const char name[] = "model.layers.0.block_sparse_moe.experts.2.w2.weight";
    ep_named_tensor bias = {"model.layers.0.block_sparse_moe.experts.2.w2.bias",
                            ep_tensor_1d(zeros, EP_DTYPE_BF16, 32)};
    replace_tensor(name, &bias);
    expect_one_bad(0, 2, EP_ERR_NOT_FOUND,
                   "tensor model.layers.0.block_sparse_moe.experts.2.w2.weight: is in none");
}

Test(checkpoint_damage, files_that_change_after_open_fail_their_experts_only)
{
    ep_expert_data data = {0};
    write_fixture(2);
    open_written();
    cr_assert_eq(truncate(test_path(SHARD_2), 100), 0);
    ASSERT_FAILS(ep_checkpoint_read_expert(checkpoint, 1, 7, &data, &error), EP_ERR_BAD_FILE, error,
                 "tensor model.layers.1.block_sparse_moe.experts.7.w1.weight: " SHARD_2
                 ": has 100 bytes, had ");
    cr_assert_null(data.allocation);
    ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 0, 0, &data, &error), error);
    ep_expert_data_free(&data);
    unlink(test_path(SHARD_1)); /* still open: its bytes are still there */
    ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 0, 0, &data, &error), error);
    ep_expert_data_free(&data);
}

/* Of every expert: 1 its bytes are as they were, 0 it is refused by file, tensor and reason. */
static uint32_t count_readable(uint8_t digests[16][EP_SHA256_BYTES], const char *reason)
{
    uint32_t readable = 0;
    for (uint32_t i = 0; i < 16; i++) {
        ep_expert_data data = {0};
        const ep_err err = ep_checkpoint_read_expert(checkpoint, i / 8, i % 8, &data, &error);
        if (err == EP_OK) {
            cr_expect_arr_eq(data.sha256, digests[i], EP_SHA256_BYTES);
            readable++;
        } else {
            cr_expect_eq(err, EP_ERR_BAD_FILE);
            ASSERT_TEXT(error, "tensor model.layers.");
            ASSERT_TEXT(error, "model.safetensors: ");
            ASSERT_TEXT(error, reason);
            cr_expect_eq(error.layer, (int32_t)(i / 8));
            cr_expect_eq(error.expert, (int32_t)(i % 8));
        }
        ep_expert_data_free(&data);
    }
    return readable;
}

Test(checkpoint_damage, a_file_that_loses_its_end_loses_the_experts_there)
{
    uint8_t digests[16][EP_SHA256_BYTES];
    size_t count;
    write_fixture(1);
    char *bytes = read_raw("model.safetensors", &count);
    open_written();
    for (uint32_t i = 0; i < 16; i++) {
        ep_expert_data data = {0};
        ASSERT_OK(ep_checkpoint_read_expert(checkpoint, i / 8, i % 8, &data, &error), error);
        memcpy(digests[i], data.sha256, EP_SHA256_BYTES);
        ep_expert_data_free(&data);
    }
    uint32_t last = 16;
    for (size_t keep = count - 1; keep > count / 4; keep -= count / 8) {
        /* what is cut twice is not read at all */
        write_raw("model.safetensors", bytes, count);
        open_written();
        cr_assert_eq(truncate(test_path("model.safetensors"), (off_t)keep), 0);
        const uint32_t readable = count_readable(digests, " bytes, had ");
        cr_expect(readable <= last, "%zu of %zu bytes: %u, before %u", keep, count, readable, last);
        cr_expect(keep < count - 1 || readable >= 15, "one byte is of one tensor, and %u are left",
                  readable);
        last = readable;
    }
    cr_expect(last > 0 && last < 12, "%u, and less than half of the file is left", last);
    /* Shorter, but written anew: its bytes are another model's. */
    write_raw("model.safetensors", bytes, count);
    open_written();
    for (size_t i = count / 8; i < count; i++) {
        bytes[i] = (char)(bytes[i] ^ 1);
    }
    write_raw("model.safetensors", bytes, count - 1);
    cr_expect_eq(count_readable(digests, " bytes, had "), 0);
    free(bytes);
}

Test(checkpoint_damage, a_tensor_beside_the_experts_that_nothing_reads_is_refused)
{
    const float values[32] = {1.0f};
    ep_named_tensor tensor = {.name = "model.layers.1.block_sparse_moe.post_norm.weight",
                              .tensor = ep_tensor_1d((void *)(uintptr_t)values, EP_DTYPE_F32, 32)};
    replace_tensor("model.layers.1.block_sparse_moe.gate.weight", &tensor);
    expect_open_fails(EP_ERR_UNIMPLEMENTED,
                      "tensor model.layers.1.block_sparse_moe.post_norm.weight is beside the "
                      "experts of layer 1, and this build "
                      "does not know what it does in model type 'mixtral'");
}
