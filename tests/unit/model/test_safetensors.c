/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors reader and writer on good files, and every rule of the header on bad ones,
 * message included. */
#include "unit/model/model_test.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>

#include "base/check.h"
#include "model/safetensors.h"
#include "model/safetensors_writer.h"
#include "support/json_refusal.h"

static ep_error error; /* of the last call */

TestSuite(safetensors, .init = make_test_dir, .fini = remove_test_dir);

#define E(name, dtype, shape, offsets)                                                             \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

typedef struct header_case {
    const char *header;
    uint64_t data_bytes;
    const char *text; /* NULL: good */
} header_case;

static const header_case header_cases[] = {
    /* good */
    {"{}", 0, NULL},
    {"{}       ", 0, NULL},
    {"{" E("a", "BF16", "[2,3]", "[0,12]") "}", 12, NULL},
    {"{" E("a", "F32", "[]", "[0,4]") "}", 4, NULL},
    {"{" E("b", "F4", "[2]", "[0,1]") "}", 1, NULL},
    {"{" E("b", "F6_E2M3", "[4]", "[0,3]") "}", 3, NULL},
    {"{" E("e", "F32", "[0,7]", "[4,4]") "," E("a", "F32", "[1]", "[0,4]") "," E("z", "U8", "[2]",
                                                                                 "[4,6]") "}",
     6, NULL},
    {"{ \"__metadata__\" : {\"format\":\"pt\"},\n" E("a", "U8", "[1,1,1,1,1,1,1,1]", "[0,1]") "}",
     1, NULL},
    {"{" E("a", "U8", "[0,9223372036854775807]", "[0,0]") "}", 0, NULL},
    /* frame and JSON */
    {"", 0, "t.safetensors: header: starts with byte 0x00, allowed '{'"},
    {" {}", 0, "header: starts with byte 0x20, allowed '{'"},
    {"[]", 0, "header: starts with byte 0x5b, allowed '{'"},
    {"{}\n", 0, "header: ends with byte 0x0a, allowed '}' and then spaces"},
    {"{}x", 0, "header: ends with byte 0x78"},
    {"{} {}", 0, "header: line 1 column 4: end of file expected near '{'"},
    {"{\"a\":}", 0, "header: line 1 column 6: unexpected token near '}'"},
    {"{\"a\"}", 0, "header: line 1"},
    {"{'a':1}", 0, "header: line 1 column 2: string or '}' expected"},
    {"{" E("a", "U8", "[1]", "[0,1]") ",}", 1, "header: line 1"},
    {"{" E("a", "U8", "[1]", "[0,1]") "," E("a", "U8", "[1]", "[0,1]") "}", 1,
     "duplicate object key near '\"a\"'"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "duplicate object key"},
    {"{\"a\\u0000b\":{}}", 0, "NUL byte in object key not supported"},
    {"{\"__metadata__\":{\"k\":\"a\\u0000b\"}}", 0, "\\u0000 is not allowed"},
    {"{\"a\xff\":{}}", 0, "unable to decode byte 0xff"},
    {"{\"a\xc0\xaf\":{}}", 0, "unable to decode byte 0xc0"},
    {"{\"\\ud800\":{}}", 0, "header: line 1 column 9: invalid Unicode '\\uD800'"},
    {"{\"a\nb\":{}}", 0, "header: line 1"},
    {"{\"a\":{\"b\":{\"c\":{\"d\":{}}}}}", 0, "header: byte 20: nesting depth 5, allowed 1..4"},
    /* names */
    {"{" E("", "U8", "[1]", "[0,1]") "}", 1, "its name has 0 bytes, allowed 1..512"},
    {"{" E("a\\nb", "U8", "[1]", "[0,1]") "}", 1,
     "tensor a?b: its name has control byte 0x0a at 1"},
    {"{" E("a\\u007f", "U8", "[1]", "[0,1]") "}", 1, "its name has control byte 0x7f at 1"},
    /* metadata */
    {"{\"__metadata__\":[]}", 0, "__metadata__ is an array of 0, allowed an object of strings"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "__metadata__ key k is 1, allowed a string"},
    {"{\"__metadata__\":{\"k\":{}}}", 0, "__metadata__ key k is an object, allowed a string"},
    {"{\"__metadata__\":null}", 0, "__metadata__ is null, allowed an object of strings"},
    /* entry */
    {"{\"a\":1}", 0,
     "t.safetensors: tensor a: is 1, allowed an object with dtype, shape, data_offsets"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "tensor a: dtype is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "tensor a: shape is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "tensor a: data_offsets is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1,
     "tensor a: has 4 keys, allowed: exactly"},
    /* dtype */
    {"{" E("a", "F128", "[1]", "[0,16]") "}", 16, "tensor a: dtype is \"F128\", allowed BOOL F4"},
    {"{" E("a", "bf16", "[1]", "[0,2]") "}", 2, "tensor a: dtype is \"bf16\", allowed BOOL"},
    {"{\"a\":{\"dtype\":3,\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "tensor a: dtype is 3, allowed BOOL"},
    /* shape */
    {"{" E("a", "U8", "1", "[0,1]") "}", 1, "tensor a: shape is 1, allowed an array of integers"},
    {"{" E("a", "U8", "[-1]", "[0,1]") "}", 1,
     "tensor a: shape[0] is -1, allowed an integer 0..9223372036854775807"},
    {"{" E("a", "U8", "[1.0]", "[0,1]") "}", 1,
     "tensor a: shape[0] is 1.0, allowed an integer 0.."},
    {"{" E("a", "U8", "[1,1e3]", "[0,1]") "}", 1, "tensor a: shape[1] is 1000.0"},
    {"{" E("a", "U8", "[\"1\"]", "[0,1]") "}", 1,
     "tensor a: shape[0] is \"1\", allowed an integer"},
    {"{" E("a", "U8", "[true]", "[0,1]") "}", 1, "tensor a: shape[0] is true"},
    {"{" E("a", "U8", "[null]", "[0,1]") "}", 1, "tensor a: shape[0] is null"},
    {"{" E("a", "U8", "[[1]]", "[0,1]") "}", 1, "tensor a: shape[0] is an array of 1"},
    {"{" E("a", "U8", "[-0]", "[0,0]") "}", 0, "-0 is not a plain integer"},
    {"{" E("a", "U8", "[01]", "[0,1]") "}", 1, "header: line 1"},
    {"{" E("a", "U8", "[+1]", "[0,1]") "}", 1, "header: line 1"},
    {"{" E("a", "U8", "[0x1]", "[0,1]") "}", 1, "header: line 1"},
    {"{" E("a", "U8", "[9223372036854775808]", "[0,1]") "}", 1, "too big integer"},
    {"{" E("a", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", 1,
     "tensor a: shape has rank 9, allowed 0..8"},
    {"{" E("a", "U8", "[4194305,4194305,211106198978564]", "[0,4]") "}", 4,
     "tensor a: its shape's product overflows at dimension 2 (211106198978564), allowed up to "
     "2^64-1 bits"},
    {"{" E("a", "U8", "[9223372036854775807]", "[0,1]") "}", 1,
     "tensor a: its shape's product overflows at dimension 0"},
    {"{" E("a", "F64", "[4294967296,4294967296]", "[0,0]") "}", 0,
     "tensor a: its shape's product overflows at dimension 1"},
    {"{" E("a", "F4", "[3]", "[0,1]") "}", 1, "tensor a: 12 bits of F4 are not whole bytes"},
    /* offsets */
    {"{" E("a", "U8", "[1]", "[0]") "}", 1,
     "tensor a: data_offsets is an array of 1, allowed an array of 2 integers"},
    {"{" E("a", "U8", "[1]", "[0,1,2]") "}", 1, "tensor a: data_offsets is an array of 3"},
    {"{" E("a", "U8", "[1]", "{}") "}", 1, "tensor a: data_offsets is an object"},
    {"{" E("a", "U8", "[1]", "[0,1.5]") "}", 1,
     "tensor a: data_offsets[1] is 1.5, allowed an integer"},
    {"{" E("a", "U8", "[1]", "[-1,0]") "}", 1,
     "tensor a: data_offsets[0] is -1, allowed an integer 0.."},
    {"{" E("a", "U8", "[1]", "[5,4]") "}", 8, "tensor a: data_offsets end 4 is before begin 5"},
    {"{" E("a", "U8", "[4096]", "[0,4096]") "}", 1024,
     "t.safetensors: tensor a: data_offsets end 4096 is beyond the data (1024 bytes)"},
    {"{" E("a", "U8", "[1]", "[9223372036854775806,9223372036854775807]") "}", 8,
     "is beyond the data (8 bytes)"},
    {"{" E("a", "U8", "[3]", "[0,4]") "}", 4,
     "tensor a: data_offsets span 4 bytes, its shape and dtype need 3"},
    {"{" E("a", "BF16", "[3]", "[0,5]") "}", 5,
     "tensor a: data_offsets span 5 bytes, its shape and dtype need 6"},
    /* layout */
    {"{" E("a", "U8", "[4]", "[0,4]") "," E("b", "U8", "[4]", "[3,7]") "}", 7,
     "tensor b: data_offsets begin 3 overlaps tensor a, which ends at 4"},
    {"{" E("a", "U8", "[4]", "[0,4]") "," E("b", "U8", "[4]", "[0,4]") "}", 4,
     "tensor b: data_offsets begin 0 overlaps tensor a"},
    {"{" E("a", "U8", "[4]", "[0,4]") "," E("b", "U8", "[4]", "[5,9]") "}", 9,
     "tensor b: data_offsets begin 5 leaves a hole, allowed 4"},
    {"{" E("a", "U8", "[4]", "[1,5]") "}", 5,
     "tensor a: data_offsets begin 1 leaves a hole, allowed 0"},
    {"{" E("a", "U8", "[4]", "[0,4]") "," E("e", "U8", "[0]", "[2,2]") "}", 4,
     "tensor e: data_offsets begin 2 overlaps tensor a"},
    {"{" E("a", "U8", "[4]", "[0,4]") "}", 5,
     "t.safetensors: its tensors end at 4, the data has 5 bytes; both must be equal"},
    {"{}", 1, "its tensors end at 0, the data has 1 bytes"},
};

Test(safetensors, header_rules_and_their_messages)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(header_cases); i++) {
        const header_case *c = &header_cases[i];
        ep_safetensors_header header = {0};
        size_t count = strlen(c->header);
        char *exact = malloc(count > 0 ? count : 1); /* no byte beyond, so that a read past the end
                                                        is caught */
        memcpy(exact, c->header, count);
        ep_err err = ep_safetensors_header_parse("t.safetensors", exact, count, c->data_bytes,
                                                 EP_SAFETENSORS_TENSORS_MAX, &header, &error);
        free(exact);
        if (c->text == NULL) {
            cr_expect_eq(err, EP_OK, "%s: %s", c->header, error.text);
        } else {
            cr_expect_eq(err, EP_ERR_BAD_FILE, "%s: code %d", c->header, (int)err);
            cr_expect(err == EP_OK || strstr(error.text, c->text) != NULL,
                      "%s\n expected %s\n got      %s", c->header, c->text, error.text);
            cr_expect(err == EP_OK || strncmp(error.text, "t.safetensors: ", 15) == 0,
                      "no file name in: %s", error.text);
            cr_expect_null(header.tensors, "output written on failure");
        }
        ep_safetensors_header_fini(&header);
    }
}

Test(safetensors, header_limits_are_exact)
{
    ep_safetensors_header header = {0};
    const char *three = "{" E("a", "U8", "[0]", "[0,0]") "," E("b", "U8", "[0]", "[0,0]") "," E(
        "c", "U8", "[0]", "[0,0]") "}";
    ASSERT_FAILS(ep_safetensors_header_parse("t", three, strlen(three), 0, 2, &header, &error),
                 EP_ERR_BAD_FILE, error, "t: has 3 tensors, allowed 0..2");
    ASSERT_OK(ep_safetensors_header_parse("t", three, strlen(three), 0, 3, &header, &error), error);
    cr_assert_eq(header.tensors_count, 3);
    ep_safetensors_header_fini(&header);

    char long_name[700];
    for (size_t length = 512; length <= 513; length++) {
        char name[520];
        memset(name, 'n', length);
        name[length] = '\0';
        snprintf(long_name, sizeof(long_name),
                 "{\"%s\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", name);
        ep_err err =
            ep_safetensors_header_parse("t", long_name, strlen(long_name), 0, 3, &header, &error);
        cr_assert_eq(err, length == 512 ? EP_OK : EP_ERR_BAD_FILE);
        ep_safetensors_header_fini(&header);
    }
    ASSERT_TEXT(error, "its name has 513 bytes, allowed 1..512");
}

Test(safetensors, many_values_in_a_small_header_are_refused_before_they_are_built)
{
    ep_safetensors_header header = {0};
    char text[1200] = "{\"a\":{\"shape\":[";
    while (strlen(text) < 1000) {
        strcat(text, "1,");
    }
    strcat(text, "1]}}");
    ASSERT_FAILS(ep_safetensors_header_parse("t", text, strlen(text), 0, 2, &header, &error),
                 EP_ERR_BAD_FILE, error, "more than 72 values, allowed 0..72");
}

Test(safetensors, every_dtype_of_the_format_is_known_by_its_size)
{
    static const struct {
        const char *text;
        unsigned bits;
        ep_dtype dtype;
    } dtypes[] = {{"BOOL", 8, EP_DTYPE_BOOL},
                  {"F4", 4, 0},
                  {"F6_E2M3", 6, 0},
                  {"F6_E3M2", 6, 0},
                  {"U8", 8, EP_DTYPE_U8},
                  {"I8", 8, EP_DTYPE_I8},
                  {"F8_E5M2", 8, 0},
                  {"F8_E4M3", 8, EP_DTYPE_F8E4M3},
                  {"F8_E8M0", 8, 0},
                  {"F8_E4M3FNUZ", 8, 0},
                  {"F8_E5M2FNUZ", 8, 0},
                  {"I16", 16, 0},
                  {"U16", 16, 0},
                  {"F16", 16, EP_DTYPE_F16},
                  {"BF16", 16, EP_DTYPE_BF16},
                  {"I32", 32, EP_DTYPE_I32},
                  {"U32", 32, 0},
                  {"F32", 32, EP_DTYPE_F32},
                  {"C64", 64, 0},
                  {"F64", 64, 0},
                  {"I64", 64, EP_DTYPE_I64},
                  {"U64", 64, 0}};
    for (size_t i = 0; i < EP_ARRAY_COUNT(dtypes); i++) {
        char text[200];
        ep_safetensors_header header = {0};
        unsigned bytes = dtypes[i].bits; /* of 8 elements */
        snprintf(text, sizeof(text),
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[2,4],\"data_offsets\":[0,%u]}}",
                 dtypes[i].text, bytes);
        ASSERT_OK(ep_safetensors_header_parse("t", text, strlen(text), bytes,
                                              EP_SAFETENSORS_TENSORS_MAX, &header, &error),
                  error);
        cr_expect_eq(header.tensors[0].dtype, dtypes[i].dtype);
        cr_expect_str_eq(header.tensors[0].dtype_text, dtypes[i].text);
        ep_safetensors_header_fini(&header);
    }
}

Test(safetensors, what_is_written_is_read_back)
{
    float f32[6] = {1, 2, 3, 4, 5, 6};
    uint16_t bf16[4] = {0x3f80, 0x4000, 0x4040, 0x4080};
    int64_t i64[2] = {-1, 1ll << 40};
    uint8_t u8[3] = {7, 8, 9};
    ep_named_tensor tensors[] = {
        {"u8", ep_tensor_1d(u8, EP_DTYPE_U8, 3)},
        {"weird \"name\" \xc3\xa9", ep_tensor_2d(f32, EP_DTYPE_F32, 2, 3)},
        {"bf16", ep_tensor_2d(bf16, EP_DTYPE_BF16, 2, 2)},
        {"empty", ep_tensor_2d(NULL, EP_DTYPE_F32, 0, 5)},
        {"i64", ep_tensor_1d(i64, EP_DTYPE_I64, 2)},
    };
    ep_metadata_pair metadata = {"format", "pt"};
    ep_safetensors *file = NULL;
    ASSERT_OK(ep_safetensors_write(test_path("t.safetensors"), tensors, 5, &metadata, 1, &error),
              error);
    ASSERT_OK(ep_safetensors_open_path(test_path("t.safetensors"), &file, &error), error);
    cr_assert_eq(ep_safetensors_count(file), 5);
    for (size_t i = 0; i < 5; i++) {
        const ep_safetensors_tensor *t = ep_safetensors_find(file, tensors[i].name);
        char read[64];
        cr_assert_not_null(t, "%s", tensors[i].name);
        cr_assert_eq(t->dtype, tensors[i].tensor.dtype);
        cr_assert_eq(t->rank, tensors[i].tensor.rank);
        ASSERT_OK(ep_safetensors_read(file, t, 0, read, ep_safetensors_tensor_bytes(t), &error),
                  error);
        cr_assert(ep_safetensors_tensor_bytes(t) == 0 ||
                  memcmp(read, tensors[i].tensor.data, ep_safetensors_tensor_bytes(t)) == 0);
        cr_assert_eq(t->begin % ep_dtype_bytes(t->dtype), 0, "%s is not aligned", tensors[i].name);
    }
    cr_assert_null(ep_safetensors_find(file, "none"));
    ep_safetensors_close(file);

    size_t count = 0;
    char *raw = read_raw("t.safetensors", &count);
    cr_assert_eq((unsigned char)raw[0] % 8, 0, "the header is not padded to 8 bytes");
    free(raw);
}

Test(safetensors, writer_follows_strides)
{
    int32_t grid[3][4] = {{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}};
    ep_named_tensor named = {"t", ep_tensor_2d(&grid[2][1], EP_DTYPE_I32, 3, 2)};
    ep_safetensors *file = NULL;
    int32_t read[6];
    const int32_t want[6] = {9, 10, 5, 6, 1, 2}; /* rows backwards, columns 1..2 */
    named.tensor.stride_bytes[0] = -16;
    ASSERT_OK(ep_safetensors_write(test_path("s.safetensors"), &named, 1, NULL, 0, &error), error);
    ASSERT_OK(ep_safetensors_open_path(test_path("s.safetensors"), &file, &error), error);
    ASSERT_OK(ep_safetensors_read(file, ep_safetensors_at(file, 0), 0, read, sizeof(read), &error),
              error);
    cr_assert_arr_eq(read, want, sizeof(want));
    ASSERT_OK(ep_safetensors_read(file, ep_safetensors_at(file, 0), 8, read, 4, &error), error);
    cr_assert_eq(read[0], 5);
    ep_safetensors_close(file);
}

Test(safetensors, writer_refuses_and_leaves_the_old_file)
{
    uint8_t byte = 1;
    ep_named_tensor good = {"a", ep_tensor_1d(&byte, EP_DTYPE_U8, 1)};
    size_t before = 0;
    size_t after = 0;
    ASSERT_OK(ep_safetensors_write(test_path("w.safetensors"), &good, 1, NULL, 0, &error), error);
    char *old = read_raw("w.safetensors", &before);

    ep_named_tensor twice[2] = {good, good};
    ASSERT_FAILS(ep_safetensors_write(test_path("w.safetensors"), twice, 2, NULL, 0, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "tensor a: there are two tensors of this name");
    static const struct {
        const char *name;
        const char *text;
    } names[] = {{"", "a tensor's name has 0 bytes, allowed 1..512"},
                 {"a\nb", "a tensor's name has control byte 0x0a"},
                 {"__metadata__", "reserved"},
                 {"a\xff", "not valid UTF-8"}};
    for (size_t i = 0; i < EP_ARRAY_COUNT(names); i++) {
        ep_named_tensor bad = {names[i].name, good.tensor};
        ASSERT_FAILS(ep_safetensors_write(test_path("w.safetensors"), &bad, 1, NULL, 0, &error),
                     EP_ERR_INVALID_ARGUMENT, error, names[i].text);
    }
    ep_named_tensor bad = good;
    bad.tensor.rank = 0;
    ASSERT_FAILS(ep_safetensors_write(test_path("w.safetensors"), &bad, 1, NULL, 0, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "tensor a: rank 0, allowed 1..8");
    bad = good;
    bad.tensor.data = NULL;
    cr_expect_eq(ep_safetensors_write(test_path("w.safetensors"), &bad, 1, NULL, 0, &error),
                 EP_ERR_INVALID_ARGUMENT);
    bad = good;
    bad.tensor.memory = EP_MEMORY_ASCEND;
    cr_expect_eq(ep_safetensors_write(test_path("w.safetensors"), &bad, 1, NULL, 0, &error),
                 EP_ERR_UNIMPLEMENTED);
    cr_expect_eq(
        ep_safetensors_write(test_path("no/such/dir.safetensors"), &good, 1, NULL, 0, &error),
        EP_ERR_NOT_FOUND);

    char *now = read_raw("w.safetensors", &after);
    cr_assert_eq(before, after);
    cr_assert_arr_eq(old, now, before);
    free(old);
    free(now);
}

Test(safetensors, no_refused_allocation_changes_what_is_written)
{
    uint8_t values[4] = {1, 2, 3, 4};
    ep_named_tensor named = {"t", ep_tensor_2d(values, EP_DTYPE_U8, 2, 2)};
    ep_safetensors *file = NULL;
    do {
        json_refusal_begin();
        const ep_err err =
            ep_safetensors_write(test_path("t.safetensors"), &named, 1, NULL, 0, &error);
        json_refusal_end();
        if (err == EP_OK) {
            ASSERT_OK(ep_safetensors_open_path(test_path("t.safetensors"), &file, &error), error);
            cr_expect_eq(ep_safetensors_at(file, 0)->rank, 2, "allocation %zu", json_refused_at);
            ep_safetensors_close(file);
        }
        unlink(test_path("t.safetensors"));
    } while (json_refusal_was_reached());
    cr_expect_gt(json_refused_at, 10);
}

Test(safetensors, a_write_that_fails_half_way_leaves_nothing_behind)
{
    static float values[4096];
    ep_named_tensor named = {"t", ep_tensor_1d(values, EP_DTYPE_F32, 4096)};
    struct rlimit limit = {.rlim_cur = 1000, .rlim_max = RLIM_INFINITY};
    struct rlimit before;
    signal(SIGXFSZ, SIG_IGN); /* writes beyond the limit then fail with EFBIG, like a full disk */
    getrlimit(RLIMIT_FSIZE, &before);
    limit.rlim_max = before.rlim_max;
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    ep_err err = ep_safetensors_write(test_path("big.safetensors"), &named, 1, NULL, 0, &error);
    setrlimit(RLIMIT_FSIZE, &before);
    cr_assert_eq(err, EP_ERR_IO);
    ASSERT_TEXT(error, "big.safetensors: cannot write: File too large");
    DIR *dir = opendir(test_dir);
    size_t files = 0;
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        files += entry->d_name[0] != '.';
    }
    closedir(dir);
    cr_assert_eq(files, 0);
}
