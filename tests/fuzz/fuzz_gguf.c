/* SPDX-License-Identifier: Apache-2.0 */
/* Heads of GGUF files, and what their keys become. The first 8 bytes say how many more bytes the
 * file has, the rest is its beginning. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "model/gguf.h"
#include "model/model_config.h"
#include "support/gguf_writer.h"

#define ARCHITECTURE "deepseek2"

static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    static const uint64_t numbers[] = {0,         1,          2,         3,         8,    9,
                                       31,        32,         255,       1024,      1025, 65536,
                                       INT32_MAX, UINT32_MAX, INT64_MAX, UINT64_MAX};
    const uint64_t number = numbers[random % 16];
    if (bytes < 16 || random % 32 < 16) {
        return fuzz_mutate_bytes(data, bytes, bytes_max);
    }
    const size_t width = random / 32 % 2 == 0 ? 4 : 8; /* of counts, types and offsets */
    memcpy(data + random / 64 % (bytes - width), &number, width);
    return bytes;
}

size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;

static void begin(gguf_writer *w, uint64_t more, uint64_t tensors, uint64_t keys)
{
    gguf_put(w, 8, more);
    gguf_put_head(w, 3, tensors, keys);
}

static void put_model(gguf_writer *w)
{
    static const struct {
        const char *name;
        uint32_t value;
    } counts[] = {{"embedding_length", 64},  {"block_count", 4},
                  {"expert_count", 8},       {"expert_used_count", 2},
                  {"expert_gating_func", 2}, {"expert_shared_count", 1},
                  {"expert_group_count", 4}, {"expert_group_used_count", 2}};
    const size_t counts_count = sizeof(counts) / sizeof(counts[0]);
    begin(w, 4096, 2, counts_count + 7);
    gguf_put_text(w, "general.architecture");
    gguf_put(w, 4, GGUF_TEXT);
    gguf_put_text(w, ARCHITECTURE);
    for (size_t i = 0; i < counts_count; i++) {
        char name[64] = ARCHITECTURE ".";
        strcat(name, counts[i].name);
        gguf_put_key(w, name, GGUF_U32, 4, counts[i].value);
    }
    gguf_put_key(w, ARCHITECTURE ".expert_weights_scale", GGUF_F32, 4, 0x40200000);
    gguf_put_key(w, ARCHITECTURE ".expert_weights_norm", GGUF_BOOL, 1, 1);
    gguf_put_key(w, ARCHITECTURE ".rope.freq_base", GGUF_F64, 8, 0x40c3880000000000);
    gguf_put_key(w, "general.alignment", GGUF_U32, 4, 64);
    gguf_put_array(w, "tokens", GGUF_TEXT, 2);
    gguf_put_text(w, "a");
    gguf_put_text(w, "");
    gguf_put_array(w, ARCHITECTURE ".expert_feed_forward_length", GGUF_U64, 4);
    for (int i = 0; i < 4; i++) {
        gguf_put(w, 8, 32);
    }
    gguf_put_key(w, "split.count", GGUF_U8, 1, 2);
    for (uint64_t i = 0; i < 2; i++) {
        gguf_put_tensor(w, i == 0 ? "blk.0.ffn_up_exps.weight" : "exp_probs_b.bias", 3,
                        (const uint64_t[]){256, 2, 2}, i == 0 ? 12 : 2, i * 1024);
    }
}

size_t fuzz_seed(size_t index, uint8_t *out)
{
    static gguf_writer w;
    w.count = 0;
    if (index == 0) {
        put_model(&w);
    } else if (index == 1) {
        begin(&w, 0, 0, 0);
    }
    memcpy(out, w.bytes, w.count);
    return w.count;
}

static void check(const ep_gguf_head *head, uint64_t file_bytes)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < head->header.tensors_count; i++) {
        const ep_safetensors_tensor *tensor = &head->header.tensors[i];
        FUZZ_CHECK(tensor->begin <= tensor->end && tensor->end <= file_bytes - head->data_begin);
        FUZZ_CHECK(tensor->rank >= 1 && tensor->rank <= 4 && tensor->dtype_text != NULL);
        FUZZ_CHECK(ep_safetensors_header_find(&head->header, tensor->name) == tensor);
        sum += tensor->end - tensor->begin;
    }
    /* no overlap */
    FUZZ_CHECK(head->data_begin <= file_bytes && sum <= file_bytes - head->data_begin);
}

/* Keys are a config that is read, or are refused in words. */
static void check_keys(const json_t *keys)
{
    ep_model_config config = {0};
    ep_error error = {0};
    char *text = NULL;
    ep_err err = ep_gguf_config("fuzz.gguf", keys, &text, &error);
    FUZZ_CHECK((err == EP_OK) == (text != NULL));
    err = err == EP_OK ? ep_model_config_parse("fuzz.gguf", text, strlen(text), &config, &error)
                       : err;
    FUZZ_CHECK(err == EP_OK ? config.info.moe_layers_count > 0 : error.text[0] != 0);
    ep_model_config_fini(&config);
    free(text);
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    ep_gguf_head head = {0};
    ep_error error = {0};
    bool is_short = false;
    uint64_t more;
    if (bytes < 8) {
        return;
    }
    memcpy(&more, data, 8);
    const uint64_t file_bytes = bytes - 8 + more % ((uint64_t)1 << 40);
    const ep_err err = ep_gguf_head_parse("fuzz.gguf", data + 8, bytes - 8, file_bytes, 50, &head,
                                          &is_short, &error);
    if (err != EP_OK) {
        FUZZ_CHECK(error.text[0] != 0 && head.keys == NULL && head.header.tensors == NULL);
        return;
    }
    FUZZ_CHECK(!is_short);
    check(&head, file_bytes);
    check_keys(head.keys);
    ep_gguf_head_fini(&head);
}
