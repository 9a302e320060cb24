/* SPDX-License-Identifier: Apache-2.0 */
/* The head of GGUF files: good ones, every rule on bad ones, any damage; what keys become; which
 * files are a model. */
#include "unit/model/model_test.h"

#include "base/check.h"
#include "base/random.h"
#include "model/gguf.h"
#include "model/model_config.h"
#include "support/gguf_writer.h"
#include "support/json_refusal.h"

TestSuite(gguf, .init = make_test_dir, .fini = remove_test_dir);

enum {
    U8 = GGUF_U8,
    U32 = GGUF_U32,
    F32 = GGUF_F32,
    BOOL = GGUF_BOOL,
    TEXT = GGUF_TEXT,
    ARRAY = GGUF_ARRAY,
    U64 = GGUF_U64,
    F64 = GGUF_F64
};

typedef gguf_writer head;

#define put gguf_put
#define put_text gguf_put_text
#define put_key gguf_put_key

static void put_text_key(head *h, const char *name, const char *value)
{
    put_text(h, name);
    put(h, 4, TEXT);
    put_text(h, value);
}

static void put_tensor(head *h, const char *name, uint32_t rank, uint64_t columns, uint64_t rows,
                       uint32_t type, uint64_t at)
{
    gguf_put_tensor(h, name, rank, (const uint64_t[]){columns, rows, 1, 1, 1, 1, 1, 1}, type, at);
}

static void begin(head *h, uint32_t version, uint64_t tensors, uint64_t keys)
{
    h->count = 0;
    gguf_put_head(h, version, tensors, keys);
}

/* Every kind of value, and two tensors. */
static void make_good(head *h)
{
    begin(h, 3, 2, 7);
    put_text_key(h, "general.architecture", "qwen3moe");
    put_key(h, "a.u32", U32, 4, 7);
    put_key(h, "a.f32", F32, 4, 0x3fc00000);
    put_key(h, "a.bool", BOOL, 1, 1);
    put_text(h, "a.texts");
    put(h, 4, ARRAY);
    put(h, 4, TEXT);
    put(h, 8, 2);
    put_text(h, "x");
    put_text(h, "\xff");
    put_text(h, "a.numbers");
    put(h, 4, ARRAY);
    put(h, 4, U8);
    put(h, 8, 3);
    put(h, 3, 0x030201);
    put_key(h, "general.alignment", U32, 4, 64);
    put_tensor(h, "z", 2, 64, 3, 2, 0);     /* Q4_0: 108 bytes */
    put_tensor(h, "b", 3, 256, 2, 12, 128); /* Q4_K: 288 */
}

enum { DATA = 128 + 288 };

static ep_err parse_of(const head *h, uint64_t file_bytes, ep_gguf_head *out, bool *out_is_short,
                       ep_error *error)
{
    return ep_gguf_head_parse("m.gguf", h->bytes, h->count, file_bytes, 5, out, out_is_short,
                              error);
}

static size_t padded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

Test(gguf, a_good_head_gives_its_keys_and_tensors)
{
    head h;
    ep_gguf_head got;
    ep_error error;
    bool is_short = true;
    make_good(&h);
    ASSERT_OK(parse_of(&h, padded(h.count) + DATA, &got, &is_short, &error), error);
    cr_expect(!is_short);
    cr_expect_eq(got.data_begin, padded(h.count));
    cr_assert_eq(got.header.tensors_count, 2u);
    const ep_safetensors_tensor *b = ep_safetensors_header_find(&got.header, "b");
    const ep_safetensors_tensor *z = ep_safetensors_header_find(&got.header, "z");
    cr_expect_str_eq(b->dtype_text, "Q4_K");
    cr_expect(b->rank == 3 && b->shape[0] == 1 && b->shape[1] == 2 && b->shape[2] == 256 &&
              b->begin == 128 && b->end == 416);
    cr_expect(z->rank == 2 && z->shape[0] == 3 && z->shape[1] == 64 && z->begin == 0 &&
              z->end == 108);
    char *text = json_dumps(got.keys, JSON_SORT_KEYS | JSON_COMPACT);
    cr_expect_str_eq(text, "{\"a.bool\":true,\"a.f32\":1.5,\"a.numbers\":[1,2,3],\"a.texts\":\"(an "
                           "array of 2)\",\"a.u32\":7,\"general.alignment\":64,"
                           "\"general.architecture\":\"qwen3moe\"}");
    free(text);
    ep_gguf_head_fini(&got);
}

/* Replaces what stands there. */
static void overwrite(head *h, const char *from, const char *to)
{
    for (size_t i = 0; i + strlen(from) <= h->count; i++) {
        if (memcmp(h->bytes + i, from, strlen(from)) == 0) {
            memcpy(h->bytes + i, to, strlen(to));
            return;
        }
    }
    cr_assert_fail("%s is not there", from);
}

static void expect_bad(const head *h, uint64_t more, const char *text)
{
    ep_gguf_head got = {0};
    ep_error error = {0};
    bool is_short = false;
    const ep_err err = parse_of(h, padded(h->count) + more, &got, &is_short, &error);
    cr_expect_eq(err, EP_ERR_BAD_FILE, "%s", text);
    cr_expect(strstr(error.text, text) != NULL && strncmp(error.text, "m.gguf: ", 8) == 0,
              "wanted %s: %s", text, error.text);
    cr_expect(got.keys == NULL && got.header.tensors == NULL);
}

static void expect_bad_tensor(uint32_t rank, uint64_t columns, uint64_t rows, uint32_t type,
                              uint64_t at, uint64_t more, const char *text)
{
    head h;
    begin(&h, 3, 1, 0);
    put_tensor(&h, "t", rank, columns, rows, type, at);
    expect_bad(&h, more, text);
}

Test(gguf, tensors_that_cannot_be_are_refused_by_name)
{
    expect_bad_tensor(0, 1, 1, 0, 0, 64, "a tensor's number of dimensions is 0, allowed 1..4");
    expect_bad_tensor(5, 1, 1, 0, 0, 64, "a tensor's number of dimensions is 5, allowed 1..4");
    expect_bad_tensor(1, 4, 1, 4, 0, 64,
                      "tensor t: type is 4, which this build does not know"); /* taken out of the
                                                                                 format */
    expect_bad_tensor(1, 4, 1, 200, 0, 64, "tensor t: type is 200, which");
    expect_bad_tensor(1, 48, 1, 2, 0, 64, "tensor t: 48 columns of Q4_0, allowed multiples of 32");
    expect_bad_tensor(2, 128, 2, 12, 0, 640,
                      "tensor t: 128 columns of Q4_K, allowed multiples of 256");
    expect_bad_tensor(2, UINT64_MAX, UINT64_MAX, 0, 0, 64, "tensor t: is larger than any file");
    expect_bad_tensor(1, 4, 1, 0, UINT64_MAX, 64, "tensor t: is larger than any file");
    expect_bad_tensor(2, 0, UINT64_MAX, 0, 0, 64, "tensor t: is larger than any file");
    expect_bad_tensor(1, 4, 1, 0, 8, 64,
                      "tensor t: data at 8..24, allowed from 0 on in steps of 32 up to 64");
    expect_bad_tensor(1, 4, 1, 0, 64, 64,
                      "tensor t: data at 64..80, allowed from 0 on in steps of 32 up to 64");
    expect_bad_tensor(1, 17, 1, 0, 0, 64, "tensor t: data at 0..68, allowed");
}

Test(gguf, heads_that_cannot_be_are_refused)
{
    head h;
    begin(&h, 3, 6, 0);
    expect_bad(&h, 0, "has 6 tensors, allowed 0..5");
    begin(&h, 3, 5, 0);
    expect_bad(&h, 0, "the number of tensors is 5, allowed as many as the file holds");
    begin(&h, 1, 0, 0);
    expect_bad(&h, 0, "the version is 1, allowed 2, 3");
    begin(&h, 0x03000000, 0, 0);
    expect_bad(&h, 0, "the version is 50331648, allowed 2, 3 (little-endian)");
    begin(&h, 3, 0, 70000);
    expect_bad(&h, 0, "the number of keys is 70000, allowed 0..65536");
    begin(&h, 3, 0, 1);
    put_key(&h, "k", 13, 8, 0);
    expect_bad(&h, 0, "a value's type is 13, allowed 0..12");
    begin(&h, 3, 0, 1);
    put_key(&h, "k", ARRAY, 4, ARRAY);
    put(&h, 8, 1);
    expect_bad(&h, 0, "the type of an array's values is 9");
    begin(&h, 3, 0, 1);
    put_key(&h, "k", ARRAY, 4, F64);
    put(&h, 8, UINT64_MAX / 2);
    expect_bad(&h, 0, "the length of an array is 9223372036854775807");
    begin(&h, 3, 0, 2);
    put_key(&h, "k", U32, 4, 1);
    put_key(&h, "k", U32, 4, 2);
    expect_bad(&h, 0, "key k: is there twice");
    begin(&h, 3, 0, 1);
    put_key(&h, "a b", U32, 4, 1);
    expect_bad(&h, 0, "a key is not 1 to 256 printable characters");
    begin(&h, 3, 0, 1);
    put_key(&h, "general.alignment", U32, 4, 48);
    expect_bad(&h, 0, "general.alignment is 48, allowed powers of two up to 65536");
    begin(&h, 3, 0, 1);
    put_key(&h, "general.alignment", F32, 4, 0x42000000);
    expect_bad(&h, 0, "general.alignment is 32.0, allowed powers of two up to 65536");
    begin(&h, 3, 0, 2);
    put_key(&h, "k", ARRAY, 4, TEXT);
    put(&h, 8, 0);
    put_key(&h, "k", U32, 4, 2);
    expect_bad(&h, 0, "key k: is there twice");
    begin(&h, 3, 2, 0);
    put_tensor(&h, "t", 1, 4, 1, 0, 0);
    put_tensor(&h, "t", 1, 4, 1, 0, 32);
    expect_bad(&h, 64, "tensor t: is there twice");
    begin(&h, 3, 2, 0);
    put_tensor(&h, "t", 1, 16, 1, 0, 0);
    put_tensor(&h, "u", 1, 4, 1, 0, 32);
    expect_bad(&h, 64, "tensor u: data at 32..48, allowed from 64 on");
    make_good(&h);
    overwrite(&h, "GGUF", "GGML");
    expect_bad(&h, DATA, "does not begin with GGUF");
}

/* A key that says something is there, whatever it says: who reads it refuses what it does not
 * understand. */
Test(gguf, values_that_are_not_kept_stand_there_in_words)
{
    head h;
    ep_gguf_head got;
    ep_error error;
    bool is_short;
    begin(&h, 3, 0, 6);
    put_key(&h, "a", F32, 4, 0x7fc00000);
    put_key(&h, "b", F64, 8, 0xfff0000000000000);
    put_key(&h, "c", U64, 8, UINT64_MAX);
    put_text_key(&h, "d", "\xff");
    put_key(&h, "e", ARRAY, 4, U8);
    put(&h, 8, 1025);
    h.count += 1025;
    put_key(&h, "f", TEXT, 8, 2);
    put(&h, 2, 'x');
    ASSERT_OK(parse_of(&h, padded(h.count), &got, &is_short, &error), error);
    char *text = json_dumps(got.keys, JSON_SORT_KEYS | JSON_COMPACT);
    cr_expect_str_eq(text, "{\"a\":\"(a number that is not finite)\",\"b\":\"(a number that is not "
                           "finite)\",\"c\":\"(18446744073709551615)\","
                           "\"d\":\"(1 bytes that are no text)\",\"e\":\"(an array of "
                           "1025)\",\"f\":\"(2 bytes that are no text)\"}");
    free(text);
    ep_gguf_head_fini(&got);
}

/* A head of small arrays must not become many times its bytes in memory. */
Test(gguf, arrays_beyond_what_is_kept_stand_there_in_words)
{
    head h = {.count = 0};
    ep_gguf_head got;
    ep_error error;
    bool is_short;
    char name[8];
    begin(&h, 3, 0, 33);
    for (int i = 0; i < 33; i++) {
        snprintf(name, sizeof(name), "a%d", i);
        gguf_put_array(&h, name, U8, 1024);
        h.count += 1024;
    }
    ASSERT_OK(parse_of(&h, padded(h.count), &got, &is_short, &error), error);
    cr_expect_eq(json_array_size(json_object_get(got.keys, "a31")), 1024u);
    const char *last = json_string_value(json_object_get(got.keys, "a32"));
    cr_expect(last != NULL && strcmp(last, "(an array of 1024)") == 0);
    ep_gguf_head_fini(&got);
}

Test(gguf, a_head_that_is_cut_is_short_when_the_file_has_more)
{
    head h;
    make_good(&h);
    const size_t whole = h.count;
    for (h.count = 0; h.count < whole; h.count++) {
        ep_gguf_head got = {0};
        ep_error error;
        bool is_short = false;
        cr_assert_eq(parse_of(&h, padded(whole) + DATA, &got, &is_short, &error), EP_ERR_BAD_FILE,
                     "%zu", h.count);
        cr_expect(is_short, "%zu", h.count);
        cr_assert_eq(parse_of(&h, h.count, &got, &is_short, &error), EP_ERR_BAD_FILE, "%zu",
                     h.count);
        cr_expect(!is_short, "%zu", h.count);
    }
}

/* Whatever the bytes: refused with a reason, or tensors inside the file. */
Test(gguf, damage_is_refused_or_stays_inside_the_file)
{
    head good, h;
    uint64_t state = 5;
    int refused = 0;
    make_good(&good);
    for (int i = 0; i < 20000; i++) {
        ep_gguf_head got = {0};
        ep_error error = {0};
        bool is_short = false;
        h = good;
        for (uint64_t n = 1 + ep_splitmix64(&state) % 3; n > 0; n--) {
            h.bytes[ep_splitmix64(&state) % h.count] = (uint8_t)(ep_splitmix64(&state) >> 56);
        }
        const uint64_t file_bytes = padded(h.count) + DATA;
        if (parse_of(&h, file_bytes, &got, &is_short, &error) != EP_OK) {
            cr_assert(error.text[0] != 0 && got.keys == NULL);
            refused++;
            continue;
        }
        for (size_t t = 0; t < got.header.tensors_count; t++) {
            cr_assert(got.header.tensors[t].begin <= got.header.tensors[t].end &&
                      got.data_begin + got.header.tensors[t].end <= file_bytes);
        }
        ep_gguf_head_fini(&got);
    }
    cr_expect(refused > 2000 && refused < 20000, "%d", refused);
}

/* ---- keys ---- */

static ep_err config_of(const char *keys, ep_model_config *out_config, ep_error *error)
{
    char *text = NULL;
    json_t *object = json_loads(keys, 0, NULL);
    cr_assert_not_null(object, "%s", keys);
    ep_err err = ep_gguf_config("m.gguf", object, &text, error);
    err =
        err == EP_OK ? ep_model_config_parse("m.gguf", text, strlen(text), out_config, error) : err;
    free(text);
    json_decref(object);
    return err;
}

#define KEYS(architecture, more)                                                                   \
    "{\"general.architecture\":\"" architecture "\",\"" architecture                               \
    ".embedding_length\":64,\"" architecture ".block_count\":4,\"" architecture                    \
    ".expert_count\":8,\"" architecture ".expert_used_count\":2,\"" architecture                   \
    ".expert_feed_forward_length\":32,\"" architecture ".attention.head_count_kv\":[2,2,2,2]" more \
    "}"

Test(gguf, no_refused_allocation_loses_a_key)
{
    char *whole = NULL;
    ep_error error;
    json_t *object = json_loads(KEYS("qwen3moe", ""), 0, NULL);
    ASSERT_OK(ep_gguf_config("m.gguf", object, &whole, &error), error);
    do {
        char *text = NULL;
        json_refusal_begin();
        const ep_err err = ep_gguf_config("m.gguf", object, &text, &error);
        json_refusal_end();
        cr_expect_eq(err, text == NULL ? EP_ERR_NO_MEMORY : EP_OK);
        cr_expect(text == NULL || strcmp(text, whole) == 0, "allocation %zu: %s", json_refused_at,
                  text);
        free(text);
    } while (json_refusal_was_reached());
    cr_expect_gt(json_refused_at, 10);
    free(whole);
    json_decref(object);
}

Test(gguf, keys_become_those_of_a_config)
{
    ep_model_config config;
    ep_error error;
    ASSERT_OK(config_of(KEYS("qwen3moe", ""), &config, &error), error);
    cr_expect(config.info.hidden == 64 && config.info.moe_layers_count == 4 &&
              config.info.moe_layers[0].experts == 8 && config.info.moe_layers[0].inner == 32 &&
              config.info.moe_layers[0].top_k == 2 && config.info.kv_heads == 2);
    cr_expect(config.info.router.renormalise, "llama.cpp norms it always");
    ep_model_config_fini(&config);
    ASSERT_OK(
        config_of(
            KEYS("deepseek2",
                 ",\"deepseek2.expert_gating_func\":2,\"deepseek2.expert_weights_norm\":true,"
                 "\"deepseek2.expert_weights_scale\":2.5,\"deepseek2.expert_shared_count\":1,"
                 "\"deepseek2.leading_dense_block_count\":1,\"deepseek2.nextn_predict_layers\":1"),
            &config, &error),
        error);
    cr_expect(config.info.moe_layers_count == 2 && config.info.moe_layers[0].layer == 1 &&
              config.info.moe_layers[0].shared_experts == 1);
    cr_expect(config.info.router.select == EP_GATE_SIGMOID && config.info.router.renormalise &&
              config.info.router.scaling_factor == 2.5f);
    ep_model_config_fini(&config);
    ASSERT_OK(config_of(KEYS("deepseek2", ",\"deepseek2.expert_gating_func\":1"), &config, &error),
              error);
    cr_expect(config.info.router.select == EP_GATE_SOFTMAX && !config.info.router.renormalise);
    ep_model_config_fini(&config);
    ASSERT_OK(config_of(KEYS("gpt-oss", ""), &config, &error), error);
    cr_expect(config.info.moe_layers[0].activation == EP_ACT_SWIGLU_OAI &&
              config.info.numbers[0].routed.limit == 7.0f);
    ep_model_config_fini(&config);
}

/* Function 3: a softmax of the selected logits. */
Test(gguf, a_softmax_of_the_selected_is_that_of_types_which_have_it)
{
    ep_model_config config;
    ep_error error;
    ASSERT_OK(config_of(KEYS("gpt-oss", ",\"gpt-oss.expert_gating_func\":3"), &config, &error),
              error);
    cr_expect(config.info.router.weight == EP_GATE_SOFTMAX_SELECTED &&
                  config.info.router.why_not[0] == 0,
              "%s", config.info.router.why_not);
    ep_model_config_fini(&config);
    ASSERT_OK(config_of(KEYS("qwen2moe", ",\"qwen2moe.expert_gating_func\":3"), &config, &error),
              error);
    cr_expect_str_eq(config.info.router.why_not,
                     "scoring_func is softmax of the selected, which is not the rule of its type");
    ep_model_config_fini(&config);
}

Test(gguf, keys_that_nobody_reads_are_refused_by_name)
{
    static const struct {
        const char *keys;
        ep_err code;
        const char *text;
    } cases[] = {
        {KEYS("mamba", ""), EP_ERR_UNIMPLEMENTED,
         "m.gguf: general.architecture is mamba, allowed llama, qwen2moe"},
        {"{}", EP_ERR_UNIMPLEMENTED, "m.gguf: general.architecture is missing"},
        {KEYS("qwen3moe", ",\"qwen3moe.experts_per_group\":2"), EP_ERR_UNIMPLEMENTED,
         "experts_per_group is 2"},
        {KEYS("qwen3moe", ",\"qwen3moe.swiglu_clamp_exp\":[1.0,2.0]"), EP_ERR_UNIMPLEMENTED,
         "swiglu_clamp_exp"},
        {KEYS("qwen3moe", ",\"qwen3moe.moe_latent_length\":16"), EP_ERR_UNIMPLEMENTED,
         "moe_latent_length is 16"},
        {KEYS("qwen3moe", ",\"qwen3moe.num_experts_per_tok\":1"), EP_ERR_UNIMPLEMENTED,
         "qwen3moe.num_experts_per_tok is 1, a key about"},
        {KEYS("qwen3moe", ",\"qwen3moe.expert_tables\":\"(an array of 9)\""), EP_ERR_UNIMPLEMENTED,
         "expert_tables is \"(an array of 9)\""},
        {KEYS("deepseek2", ",\"deepseek2.expert_weights_scale\":\"(a number that is not finite)\""),
         EP_ERR_BAD_FILE,
         "routed_scaling_factor is \"(a number that is not finite)\", allowed a number"},
        {KEYS("deepseek2", ",\"deepseek2.expert_gating_func\":\"sigmoid\""), EP_ERR_BAD_FILE,
         "deepseek2.expert_gating_func is \"sigmoid\", allowed an integer 0..2147483647"},
        {KEYS("deepseek2", ",\"deepseek2.leading_dense_block_count\":[1,2]"), EP_ERR_BAD_FILE,
         "first_k_dense_replace is an array of 2"},
        {KEYS("glm4moe", ",\"glm4moe.nextn_predict_layers\":-9223372036854775807"), EP_ERR_BAD_FILE,
         "glm4moe.nextn_predict_layers is -9223372036854775807, allowed an integer 0..2147483647"},
        {KEYS("glm4moe", ",\"glm4moe.nextn_predict_layers\":1.0"), EP_ERR_BAD_FILE,
         "nextn_predict_layers is 1.0, allowed an integer"},
        {KEYS("qwen3moe", ",\"qwen3moe.expert_gating_func\":9"), EP_ERR_UNIMPLEMENTED,
         "qwen3moe.expert_gating_func is 9, allowed 1..4"},
        {"{\"general.architecture\":\"qwen3moe\",\"qwen3moe.embedding_length\":64,\"qwen3moe.block_"
         "count\":4}",
         EP_ERR_BAD_FILE, "m.gguf"},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        ep_model_config config;
        ep_error error = {0};
        cr_expect_eq(config_of(cases[i].keys, &config, &error), cases[i].code, "%s", cases[i].keys);
        EXPECT_TEXT(error, cases[i].text);
    }
}

/* ---- files ---- */

static ep_err find(const char *name, ep_gguf_files *out, ep_error *error)
{
    char path[EP_FIXTURE_PATH_BYTES + 64];
    ep_model_dir opened;
    snprintf(path, sizeof(path), "%s%s", test_dir, name);
    const ep_err err = ep_gguf_files_find(path, &opened, out, error);
    if (err == EP_OK) {
        ep_model_dir_close(&opened);
    }
    return err;
}

Test(gguf, a_file_or_a_directory_with_one_model_is_found)
{
    ep_gguf_files files = {.count = 9};
    ep_error error;
    char name[EP_MODEL_FILE_NAME_BYTES];
    ASSERT_OK(find("", &files, &error), error);
    cr_expect_eq(files.count, 0u, "an empty directory has none");
    write_text("a-00002-of-00012.gguf", "");
    write_text("a-00001-of-00012.gguf", "");
    ASSERT_OK(find("", &files, &error), error);
    cr_expect(files.count == 12);
    ep_gguf_files_name(&files, 11, name);
    cr_expect_str_eq(name, "a-00012-of-00012.gguf");
    ASSERT_OK(find("/a-00001-of-00012.gguf", &files, &error), error);
    cr_expect(files.count == 12);
    EXPECT_FAILS(find("/a-00002-of-00012.gguf", &files, &error), EP_ERR_BAD_FILE, error,
                 "is part 2 of 12, allowed: the first part or its directory");
    write_text("b.gguf", "");
    EXPECT_FAILS(find("", &files, &error), EP_ERR_BAD_FILE, error,
                 "allowed one GGUF model: name the file");
    ASSERT_OK(find("/b.gguf", &files, &error), error);
    ep_gguf_files_name(&files, 0, name);
    cr_expect_str_eq(name, "b.gguf");
    write_text("config.json", "");
    ASSERT_OK(find("", &files, &error), error);
    cr_expect_eq(files.count, 0u, "a config.json is another model's");
    cr_expect_eq(find("/none.gguf", &files, &error), EP_OK, "opening it is the reader's");
}

Test(gguf, a_name_that_cannot_be_opened_is_refused_when_it_is_found)
{
    ep_gguf_files files;
    ep_error error;
    write_text("mod\xc3\xa8le.gguf", "");
    EXPECT_FAILS(find("", &files, &error), EP_ERR_BAD_FILE, error,
                 "allowed 1 to 255 printable ASCII characters: rename the file");
    EXPECT_FAILS(find("/mod\xc3\xa8le.gguf", &files, &error), EP_ERR_BAD_FILE, error,
                 "allowed 1 to 255 printable ASCII characters: rename the file");
}

/* A part whose name hides that there are more would be a model without its other layers. */
Test(gguf, parts_say_which_they_are)
{
    static const struct {
        uint32_t count;
        uint32_t index;
        const char *keys;
        const char *text; /* NULL: good */
    } cases[] = {
        {1, 0, "{}", NULL},
        {2, 1, "{}", NULL},
        {1, 0, "{\"split.count\":0,\"split.no\":0}", NULL}, /* as who merges parts leaves it */
        {1, 0, "{\"split.count\":1,\"split.no\":0}", NULL},
        {3, 2, "{\"split.count\":3,\"split.no\":2}", NULL},
        {1, 0, "{\"split.count\":3,\"split.no\":0}",
         "m.gguf: split.count is 3, allowed 1: parts are named NAME-00001-of-0000N.gguf"},
        {3, 2, "{\"split.count\":3,\"split.no\":1}",
         "m-00003-of-00003.gguf: split.no is 1, allowed 2"},
        {3, 2, "{\"split.count\":3}", "split.no is missing, allowed 2"},
        {3, 2, "{\"split.count\":\"3\"}", "split.count is \"3\", allowed 3"},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        ep_gguf_files files = {.count = cases[i].count};
        ep_error error = {0};
        snprintf(files.first, sizeof(files.first), "%s",
                 cases[i].count > 1 ? "m-00001-of-00003.gguf" : "m.gguf");
        json_t *keys = json_loads(cases[i].keys, 0, NULL);
        const ep_err err = ep_gguf_files_check(&files, cases[i].index, keys, &error);
        cr_expect_eq(err, cases[i].text == NULL ? EP_OK : EP_ERR_BAD_FILE, "%s: %s", cases[i].keys,
                     error.text);
        cr_expect(cases[i].text == NULL || strstr(error.text, cases[i].text) != NULL,
                  "wanted %s: %s", cases[i].text, error.text);
        json_decref(keys);
    }
}
