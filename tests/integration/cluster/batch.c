/* SPDX-License-Identifier: Apache-2.0 */
/* See batch.h. */
#include "batch.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "model/safetensors_writer.h"

enum { EXPERTS = 8 };

void batch_write(const char *path, uint32_t tokens, uint32_t hidden, bool is_wild, uint64_t seed)
{
    ep_error error;
    uint64_t state = seed;
    const size_t elements = (size_t)tokens * hidden;
    float *x = calloc(elements + 1, sizeof(*x));
    int32_t *ids = calloc((size_t)tokens * 2 + 1, sizeof(*ids));
    float *scales = calloc((size_t)tokens * 2 + 1, sizeof(*scales));
    EP_TEST_CHECK(x != NULL && ids != NULL && scales != NULL, "no memory");
    for (size_t i = 0; i < elements; i++) {
        const uint64_t z = ep_splitmix64(&state);
        const float value = (float)(z >> 40) * 0x1p-23f - 1.0f;
        if (is_wild) {
            x[i] = z % 16 == 0 ? 0x1p-130f : value;
        } else {
            ((uint16_t *)(void *)x)[i] = ep_f32_to_bf16(value);
        }
    }
    for (size_t t = 0; t < tokens; t++) {
        ids[2 * t] = (int32_t)(ep_splitmix64(&state) >> 61);
        ids[2 * t + 1] =
            (ids[2 * t] + 1 + (int32_t)((ep_splitmix64(&state) >> 33) % (EXPERTS - 1))) % EXPERTS;
        scales[2 * t] = is_wild ? 0.75f : (float)(ep_splitmix64(&state) >> 40) * 0x1p-24f;
        scales[2 * t + 1] = 1.0f - scales[2 * t];
    }
    const ep_dtype dtype = is_wild ? EP_DTYPE_F32 : EP_DTYPE_BF16;
    const ep_named_tensor tensors[] = {
        {"x", ep_tensor_2d(x, dtype, tokens, hidden)},
        {"expert_ids", ep_tensor_2d(ids, EP_DTYPE_I32, tokens, 2)},
        {"expert_scales", ep_tensor_2d(scales, EP_DTYPE_F32, tokens, 2)},
    };
    EP_TEST_CHECK(ep_safetensors_write(path, tensors, EP_ARRAY_COUNT(tensors), NULL, 0, &error) ==
                      EP_OK,
                  "%s", error.text);
    free(x);
    free(ids);
    free(scales);
}

void batch_run_oracle(const char *model_dir, uint32_t layer, const char *in, const char *out,
                      const char *more_options)
{
    char number[16];
    char *output = NULL;
    snprintf(number, sizeof(number), "%u", layer);
    int code = ep_test_process_run_line(model_dir, ep_test_ref_forward, NULL, EP_TEST_PATIENCE_MS,
                                        &output, "--model %s --layer %s --in %s --out %s %s",
                                        model_dir, number, in, out, more_options);
    EP_TEST_CHECK(code == 0, "the oracle: exit code %d: %s", code, output);
    free(output);
}
