/* SPDX-License-Identifier: Apache-2.0 */
/* Good checkpoints of every flavour: each expert, shared expert, gate and router read bit for
 * bit. */
#include "unit/model/model_test.h"

#include <sys/stat.h>
#include <unistd.h>

#include <openssl/evp.h>

#include "base/check.h"
#include "base/numeric.h"
#include "model/tensor_names.h"

static ep_error error; /* of the last call */

TestSuite(checkpoint, .init = make_test_dir, .fini = remove_test_dir);

static ep_checkpoint *write_and_open(const ep_fixture_config *config)
{
    ep_checkpoint *checkpoint = NULL;
    ASSERT_OK(ep_fixture_write(config, test_dir, &error), error);
    ASSERT_OK(ep_checkpoint_open(test_dir, &checkpoint, &error), error);
    return checkpoint;
}

static void expect_tensor(const ep_fixture_config *config, const char *name, const void *bytes,
                          size_t count, EVP_MD_CTX *hash)
{
    size_t size = count * ep_dtype_bytes(config->dtype);
    uint8_t *want = malloc(size);
    ep_fixture_fill(config->seed, name, config->dtype, count, want);
    cr_expect(memcmp(want, bytes, size) == 0, "%s differs", name);
    cr_expect_eq((uintptr_t)bytes % 64, 0, "%s is not aligned", name);
    EVP_DigestUpdate(hash, want, size);
    free(want);
}

static void expect_expert(const ep_fixture_config *config, const ep_checkpoint *checkpoint,
                          uint32_t layer, uint32_t index)
{
    ep_tensor_names names = {.family = config->names,
                             .prefix = config->prefix == NULL ? "model." : config->prefix};
    bool shared = index >= config->experts;
    uint32_t inner = shared ? config->shared_inner : config->inner;
    uint32_t spelling = config->shared_gate && config->names == EP_NAMES_N1 ? 1 : 0;
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    uint8_t digest[EP_SHA256_BYTES];
    char name[EP_TENSOR_NAME_BYTES];
    ep_expert_data data;

    EVP_DigestInit_ex(hash, EVP_sha256(), NULL);
    ASSERT_OK(ep_checkpoint_read_expert(checkpoint, layer, index, &data, &error), error);
    cr_expect_eq(data.source.hidden, config->hidden);
    cr_expect_eq(data.source.inner, inner);
    cr_expect_eq(data.source.format, ep_weight_format_of(config->dtype));
    const void *matrices[EP_MATRIX_COUNT] = {data.source.gate, data.source.up, data.source.down};
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        if (shared) {
            ep_tensor_name_shared(&names, spelling, layer, m, "weight", name);
        } else {
            ep_tensor_name_expert(&names, layer, index, m, "weight", name);
        }
        expect_tensor(config, name, matrices[m], (size_t)inner * config->hidden, hash);
    }
    cr_expect_eq(data.source.shared_gate != NULL, shared && config->shared_gate);
    if (data.source.shared_gate != NULL) {
        ep_tensor_name_shared_gate(&names, layer, name);
        expect_tensor(config, name, data.source.shared_gate, config->hidden, hash);
        cr_expect_eq(data.source.shared_gate_dtype, config->dtype);
    }
    EVP_DigestFinal_ex(hash, digest, NULL);
    cr_expect_arr_eq(digest, data.sha256, sizeof(digest));
    EVP_MD_CTX_free(hash);
    ep_expert_data_free(&data);
    ep_expert_data_free(&data); /* again: harmless */
}

static void expect_router(const ep_fixture_config *config, const ep_checkpoint *checkpoint,
                          uint32_t layer)
{
    ep_tensor_names names = {.family = config->names,
                             .prefix = config->prefix == NULL ? "model." : config->prefix};
    char name[EP_TENSOR_NAME_BYTES];
    float *weight = NULL;
    float *bias = NULL;
    float want[4096];
    uint8_t raw[4 * 4096];
    size_t count = (size_t)config->experts * config->hidden;

    ASSERT_OK(ep_checkpoint_read_router(checkpoint, layer, &weight, &bias, &error), error);
    ep_tensor_name_router(&names, 0, layer, name);
    ep_fixture_fill(config->seed, name, config->dtype, count, raw);
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, raw + 2 * i, 2);
        memcpy(&want[i], raw + 4 * i, 4);
        want[i] = config->dtype == EP_DTYPE_F32   ? want[i]
                  : config->dtype == EP_DTYPE_F16 ? ep_f16_to_f32(half)
                                                  : ep_bf16_to_f32(half);
    }
    cr_expect_arr_eq(weight, want, count * sizeof(float));
    cr_expect_eq(bias != NULL, config->router_bias);
    if (bias != NULL) {
        ep_tensor_name_router_bias(&names, 0, layer, name);
        ep_fixture_fill(config->seed, name, EP_DTYPE_F32, config->experts, want);
        cr_expect_arr_eq(bias, want, config->experts * sizeof(float));
    }
    free(weight);
    free(bias);
}

#define FLAVOUR(number, family, gate, type, l, h, i, e, k, files, ...)                             \
    {                                                                                              \
        .seed = (number), .names = EP_NAMES_##family, .router = EP_ROUTER_##gate,                  \
        .dtype = EP_DTYPE_##type, .layers = (l), .hidden = (h), .inner = (i), .experts = (e),      \
        .top_k = (k), .shards = (files), __VA_ARGS__                                               \
    }

static const ep_fixture_config flavours[] = {
    FLAVOUR(1, N2, R1, BF16, 2, 32, 16, 8, 2, 1),
    FLAVOUR(2, N2, R4, F16, 2, 24, 40, 6, 3, 5, .router_bias = true, .shared_inner = 80),
    FLAVOUR(3, N1, R2, F32, 3, 32, 8, 5, 2, 3, .shared_inner = 20, .shared_gate = true),
    FLAVOUR(4, N1, R3, BF16, 3, 32, 8, 8, 2, 2, .dense_layers = 1, .shared_inner = 16, .groups = 4,
            .groups_kept = 2, .scaling_factor = 16.0f, .prefix = "language_model.model."),
    FLAVOUR(5, N1, R4, BF16, 4, 16, 8, 8, 4, 7, .dense_layers = 2, .shared_inner = 8, .groups = 2,
            .groups_kept = 1, .scaling_factor = 2.5f, .renormalise = true, .router_bias = true,
            .prefix = ""),
    FLAVOUR(6, N1, R1, F32, 1, 1, 1, 1, 1, 1, .prefix = "model.language_model."),
    FLAVOUR(7, N2, R2, F16, 1, 16, 12, 4, 1, 1, .shared_inner = 12, .shared_gate = true,
            .vocab = 20, .heads = 2, .kv_heads = 1, .head_dim = 8),
};

Test(checkpoint, every_flavour_is_read_bit_for_bit)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(flavours); i++) {
        const ep_fixture_config *config = &flavours[i];
        ep_checkpoint *checkpoint = write_and_open(config);
        const ep_model_info *info = ep_checkpoint_info(checkpoint);
        cr_expect_eq(info->names, config->names);
        cr_expect_str_eq(info->router.why_not, "");
        cr_expect_eq(info->dtype, config->dtype);
        cr_expect_eq(info->layers_count, config->layers);
        cr_assert_eq(info->moe_layers_count, config->layers - config->dense_layers);
        for (uint32_t l = 0; l < info->moe_layers_count; l++) {
            const ep_layer_shape *shape = &info->moe_layers[l];
            cr_expect_eq(shape->layer, l + config->dense_layers);
            cr_expect_eq(info->shared_inner[l], config->shared_inner);
            for (uint32_t e = 0; e < shape->experts + shape->shared_experts; e++) {
                expect_expert(config, checkpoint, shape->layer, e);
            }
            expect_router(config, checkpoint, shape->layer);
        }
        ep_checkpoint_close(checkpoint);
        remove_test_dir();
        mkdir(test_dir, 0700);
    }
}

Test(checkpoint, the_number_of_shards_changes_the_version_but_no_expert)
{
    char version[17] = "";
    uint8_t digest[EP_SHA256_BYTES] = {0};
    for (uint32_t shards = 1; shards <= 4; shards++) {
        ep_fixture_config config = ep_fixture_default();
        ep_expert_data data;
        config.shards = shards;
        remove_test_dir();
        mkdir(test_dir, 0700);
        ep_checkpoint *checkpoint = write_and_open(&config);
        const ep_model_info *info = ep_checkpoint_info(checkpoint);
        cr_expect_eq(strlen(info->version), 16);
        cr_expect_eq(strspn(info->version, "0123456789abcdef"), 16);
        cr_expect_str_neq(info->version, version);
        memcpy(version, info->version, sizeof(version));
        ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 1, 3, &data, &error), error);
        cr_expect(shards == 1 || memcmp(digest, data.sha256, sizeof(digest)) == 0);
        memcpy(digest, data.sha256, sizeof(digest));
        ep_expert_data_free(&data);
        ep_checkpoint_close(checkpoint);
    }
}

Test(checkpoint, version_is_stable_and_follows_the_config)
{
    ep_fixture_config config = ep_fixture_default();
    ep_checkpoint *one = write_and_open(&config);
    ep_checkpoint *two = NULL;
    ASSERT_OK(ep_checkpoint_open(test_dir, &two, &error), error);
    cr_expect_str_eq(ep_checkpoint_info(one)->version, ep_checkpoint_info(two)->version);
    cr_expect_str_eq(ep_checkpoint_info(one)->config_hash, ep_checkpoint_info(two)->config_hash);
    ep_checkpoint_close(two);
    edit_file("config.json", "1e-05", "2e-05");
    ASSERT_OK(ep_checkpoint_open(test_dir, &two, &error), error);
    cr_expect_str_neq(ep_checkpoint_info(one)->version, ep_checkpoint_info(two)->version);
    cr_expect_str_neq(ep_checkpoint_info(one)->config_hash, ep_checkpoint_info(two)->config_hash);
    ep_checkpoint_close(two);
    ep_checkpoint_close(one);
}

Test(checkpoint, tensors_are_found_and_read_by_name)
{
    ep_checkpoint *checkpoint = write_and_open(&flavours[6]);
    ep_tensor_info info;
    uint8_t want[20 * 16 * 2];
    uint8_t read[20 * 16 * 2];
    ASSERT_OK(ep_checkpoint_find(checkpoint, "model.embed_tokens.weight", &info, &error), error);
    cr_assert_eq(info.dtype, EP_DTYPE_F16);
    cr_assert_eq(info.rank, 2);
    cr_assert_eq(info.shape[0], 20);
    cr_assert_eq(info.shape[1], 16);
    cr_assert_eq(info.bytes, sizeof(read));
    ASSERT_OK(ep_checkpoint_read(checkpoint, info.name, read, sizeof(read), &error), error);
    ep_fixture_fill(7, info.name, EP_DTYPE_F16, 20 * 16, want);
    cr_assert_arr_eq(read, want, sizeof(want));
    ASSERT_FAILS(ep_checkpoint_read(checkpoint, info.name, read, sizeof(read) - 1, &error),
                 EP_ERR_INVALID_ARGUMENT, error,
                 "tensor model.embed_tokens.weight: 639 bytes of room, allowed exactly 640");
    ASSERT_FAILS(ep_checkpoint_find(checkpoint, "nope", &info, &error), EP_ERR_NOT_FOUND, error,
                 "tensor nope: is in none of the checkpoint's 1 files");
    cr_assert_eq(ep_checkpoint_read(checkpoint, "nope", read, 1, &error), EP_ERR_NOT_FOUND);
    ep_checkpoint_close(checkpoint);
}

Test(checkpoint, layers_and_experts_out_of_range_are_named)
{
    ep_checkpoint *checkpoint = write_and_open(&flavours[3]);
    ep_expert_data data = {0};
    float *weight = NULL;
    float *bias = NULL;
    ASSERT_FAILS(ep_checkpoint_read_expert(checkpoint, 0, 0, &data, &error),
                 EP_ERR_INVALID_ARGUMENT, error,
                 "layer 0 is not an MoE layer of this model, allowed 1..2 (2 of 3 layers)");
    cr_assert_eq(ep_checkpoint_read_expert(checkpoint, 3, 0, &data, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_checkpoint_read_expert(checkpoint, UINT32_MAX, 0, &data, &error),
                 EP_ERR_INVALID_ARGUMENT);
    ASSERT_FAILS(ep_checkpoint_read_expert(checkpoint, 1, 9, &data, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "expert 9 of layer 1, allowed 0..8");
    cr_assert_eq(ep_checkpoint_read_expert(checkpoint, 1, UINT32_MAX, &data, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_checkpoint_read_router(checkpoint, 0, &weight, &bias, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_null(data.allocation);
    ep_checkpoint_close(checkpoint);
    ep_checkpoint_close(NULL);
}

Test(checkpoint, a_config_without_dtype_takes_it_from_the_experts)
{
    ep_fixture_config config = ep_fixture_default();
    ASSERT_OK(ep_fixture_write(&config, test_dir, &error), error);
    edit_file("config.json", "  \"torch_dtype\": \"bfloat16\",\n", "");
    ep_checkpoint *checkpoint = NULL;
    ASSERT_OK(ep_checkpoint_open(test_dir, &checkpoint, &error), error);
    cr_assert_eq(ep_checkpoint_info(checkpoint)->dtype, EP_DTYPE_BF16);
    expect_expert(&config, checkpoint, 1, 0);
    ep_checkpoint_close(checkpoint);
}

/* The layout of the Hugging Face cache: snapshots/<revision>/<name> -> ../../blobs/<hash>. */
Test(checkpoint, opens_a_snapshot_of_links_into_blobs)
{
    static const char *const names[] = {"config.json", "model.safetensors.index.json",
                                        "model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors"};
    char from[EP_FIXTURE_PATH_BYTES + 256];
    char target[64];
    ep_fixture_config config = ep_fixture_default();
    config.shards = 2;
    mkdir(test_path("blobs"), 0700);
    mkdir(test_path("snapshots"), 0700);
    mkdir(test_path("snapshots/abc"), 0700);
    ASSERT_OK(ep_fixture_write(&config, test_path("snapshots/abc"), &error), error);
    for (size_t i = 0; i < EP_ARRAY_COUNT(names); i++) {
        char to[EP_FIXTURE_PATH_BYTES + 256];
        snprintf(from, sizeof(from), "%s/snapshots/abc/%s", test_dir, names[i]);
        snprintf(to, sizeof(to), "%s/blobs/%zu", test_dir, i);
        cr_assert_eq(rename(from, to), 0);
        snprintf(target, sizeof(target), "../../blobs/%zu", i);
        cr_assert_eq(symlink(target, from), 0);
    }
    ep_checkpoint *checkpoint = NULL;
    ASSERT_OK(ep_checkpoint_open(test_path("snapshots/abc"), &checkpoint, &error), error);
    expect_expert(&config, checkpoint, 1, 7);
    ep_checkpoint_close(checkpoint);

    /* without blobs/ beside snapshots/ it is no cache, and links may not leave the directory */
    cr_assert_eq(rename(test_path("blobs"), test_path("snapshots/abc/blobs")), 0);
    unlink(test_path("snapshots/abc/config.json"));
    cr_assert_eq(symlink("../../x", test_path("snapshots/abc/config.json")), 0);
    write_text("x", "{}");
    ASSERT_FAILS(ep_checkpoint_open(test_path("snapshots/abc"), &checkpoint, &error),
                 EP_ERR_BAD_FILE, error, "config.json: is a symbolic link to ");
    ASSERT_TEXT(error, "allowed: a target below ");
}
