/* SPDX-License-Identifier: Apache-2.0 */
/* Headers of safetensors files: the first 8 bytes say how much data follows, the rest is the
 * header's text. */
#include <string.h>

#include "fuzz.h"
#include "model/safetensors.h"

static const struct {
    uint64_t data_bytes;
    const char *text;
} seeds[] = {
    {48, "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2,4],\"data_offsets\":[0,16]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[8],\"data_offsets\":[16,48]}}    "},
    {4, "{\"__metadata__\":{\"format\":\"pt\"},\"x\":{\"dtype\":\"F32\",\"shape\":[],\"data_"
        "offsets\":[0,4]}}"},
    {0, "{}"},
    {0, "{\"e\":{\"dtype\":\"I8\",\"shape\":[0,7],\"data_offsets\":[0,0]}}"},
    {3, "{\"q\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[0,3]}}"},
    {2, "{\"\\u00e9\\n\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,2],\"data_offsets\":[0,2]}}"},
    {8, "{\"a\":{\"dtype\":\"I64\",\"shape\":[9223372036854775807,2],\"data_offsets\":[0,8]}}"},
    {8, "{\"a\":{\"dtype\":\"BOOL\",\"shape\":[4],\"data_offsets\":[4,8]},\"a\":{\"dtype\":"
        "\"BOOL\",\"shape\":[4],"
        "\"data_offsets\":[0,4]}}"},
    {8, "{\"a\":{\"dtype\":\"F4\",\"shape\":[16],\"data_offsets\":[0,8],\"more\":[[[[1.5e3,null,"
        "true,\"\\ud800\"]]]]}}"},
};

size_t fuzz_seed(size_t index, uint8_t *out)
{
    if (index >= sizeof(seeds) / sizeof(seeds[0])) {
        return 0;
    }
    size_t bytes = strlen(seeds[index].text);
    memcpy(out, &seeds[index].data_bytes, 8);
    memcpy(out + 8, seeds[index].text, bytes);
    return 8 + bytes;
}

static void check(const ep_safetensors_header *header, uint64_t data_bytes)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < header->tensors_count; i++) {
        const ep_safetensors_tensor *tensor = &header->tensors[i];
        FUZZ_CHECK(tensor->begin <= tensor->end && tensor->end <= data_bytes);
        FUZZ_CHECK(tensor->rank <= EP_TENSOR_RANK_MAX &&
                   strlen(tensor->name) <= EP_SAFETENSORS_NAME_BYTES_MAX);
        FUZZ_CHECK(ep_safetensors_header_find(header, tensor->name) == tensor);
        if (tensor->dtype != EP_DTYPE_NONE) {
            FUZZ_CHECK(strcmp(ep_safetensors_dtype_text(tensor->dtype), tensor->dtype_text) == 0);
        }
        sum += tensor->end - tensor->begin;
    }
    FUZZ_CHECK(sum == data_bytes); /* neither hole nor overlap */
    FUZZ_CHECK(ep_safetensors_header_find(header, "no such tensor") == NULL);
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    ep_safetensors_header header = {0};
    uint64_t data_bytes;
    ep_error error;
    if (bytes < 8) {
        return;
    }
    memcpy(&data_bytes, data, 8);
    ep_err err = ep_safetensors_header_parse("fuzz.safetensors", (const char *)data + 8, bytes - 8,
                                             data_bytes, 50, &header, &error);
    if (err == EP_OK) {
        check(&header, data_bytes);
        ep_safetensors_header_fini(&header);
    } else {
        FUZZ_CHECK(error.text[0] != 0 && header.tensors == NULL);
    }
}
