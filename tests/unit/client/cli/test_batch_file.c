/* SPDX-License-Identifier: Apache-2.0 */
/* Batch files: what is read, what is refused and with which words, and cutting into parts. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "cli/batch_file.h"
#include "model/safetensors_writer.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"

static ep_error error; /* of the last call */

static uint16_t x_data[6 * 4];
static int32_t ids_data[6 * 2];
static float scales_data[6 * 2];
static uint8_t mask_data[6 * 2];

static char dir[EP_FIXTURE_PATH_BYTES];
static char path[EP_FIXTURE_PATH_BYTES + 16];

static void setup(void)
{
    ep_fixture_temp_dir(dir);
    snprintf(path, sizeof(path), "%s/in", dir);
}

static void teardown(void)
{
    ep_fixture_remove(dir);
}

TestSuite(batch_file, .init = setup, .fini = teardown);

static void write_batch(const ep_named_tensor *tensors, size_t count)
{
    ASSERT_OK(ep_safetensors_write(path, tensors, count, NULL, 0, &error), error);
}

typedef struct refusal {
    const char *what;
    ep_tensor x, ids, scales, mask;
    const char *text;
} refusal;

Test(batch_file, reads_all_tensors_and_cuts_them)
{
    ep_cli_batch batch;
    for (int i = 0; i < 24; i++) {
        x_data[i] = (uint16_t)i;
    }
    ids_data[2 * 3] = 9;
    const ep_named_tensor tensors[] = {
        {"x", ep_tensor_2d(x_data, EP_DTYPE_BF16, 6, 4)},
        {"expert_ids", ep_tensor_2d(ids_data, EP_DTYPE_I32, 6, 2)},
        {"expert_scales", ep_tensor_2d(scales_data, EP_DTYPE_F32, 6, 2)},
        {"active_mask", ep_tensor_1d(mask_data, EP_DTYPE_BOOL, 6)},
        {"activ_mask", ep_tensor_1d(mask_data, EP_DTYPE_BOOL, 6)},
        {"x_scales", ep_tensor_1d(scales_data, EP_DTYPE_F32, 6)},
    };
    write_batch(tensors, 6);
    ASSERT_OK(ep_cli_batch_read(path, &batch, &error), error);
    cr_assert(batch.tokens == 6 && batch.hidden == 4 && batch.top_k == 2);
    cr_assert_eq(batch.args.active_mask.rank, 1);
    cr_assert_eq(batch.args.x_scales.rank, 0);
    cr_assert(strstr(batch.ignored, "activ_mask") != NULL &&
                  strstr(batch.ignored, "x_scales") != NULL,
              "%s", batch.ignored);
    cr_assert_null(strstr(batch.ignored, "expert_ids"), "%s", batch.ignored);
    ep_tensor part = ep_cli_tensor_rows(&batch.args.x, 3, 2);
    cr_assert(part.shape[0] == 2 && part.shape[1] == 4);
    cr_assert_eq(((uint16_t *)part.data)[0], 12);
    part = ep_cli_tensor_rows(&batch.args.expert_ids, 3, 3);
    cr_assert_eq(((int32_t *)part.data)[0], 9);
    part = ep_cli_tensor_rows(&batch.args.x_scales, 3, 2);
    cr_assert_eq(part.rank, 0);
    ep_cli_batch_free(&batch);
}

Test(batch_file, no_tokens_at_all)
{
    ep_cli_batch batch;
    const ep_named_tensor tensors[] = {
        {"x", ep_tensor_2d(NULL, EP_DTYPE_I8, 0, 4)},
        {"expert_ids", ep_tensor_2d(NULL, EP_DTYPE_I64, 0, 2)},
        {"expert_scales", ep_tensor_2d(NULL, EP_DTYPE_BF16, 0, 2)},
        {"x_scales", ep_tensor_1d(NULL, EP_DTYPE_F32, 0)},
    };
    write_batch(tensors, 4);
    ASSERT_OK(ep_cli_batch_read(path, &batch, &error), error);
    cr_assert(batch.tokens == 0 && batch.hidden == 4 && batch.top_k == 2 &&
              batch.args.x_scales.rank == 1);
    ep_cli_batch_free(&batch);
    /* bytes of a row that none has are more than 64 bits count */
    const ep_named_tensor wide[] = {
        {"x", ep_tensor_2d(NULL, EP_DTYPE_F32, 0, INT64_MAX)},
        {"expert_ids", ep_tensor_2d(NULL, EP_DTYPE_I64, 0, 2)},
        {"expert_scales", ep_tensor_2d(NULL, EP_DTYPE_BF16, 0, 2)},
    };
    write_batch(wide, 3);
    ASSERT_OK(ep_cli_batch_read(path, &batch, &error), error);
    cr_assert_eq(batch.hidden, INT64_MAX);
    ep_cli_batch_free(&batch);
}

Test(batch_file, refuses_what_does_not_fit)
{
    ep_tensor x = ep_tensor_2d(x_data, EP_DTYPE_BF16, 6, 4);
    ep_tensor ids = ep_tensor_2d(ids_data, EP_DTYPE_I32, 6, 2);
    ep_tensor scales = ep_tensor_2d(scales_data, EP_DTYPE_F32, 6, 2);
    const refusal cases[] = {
        {"no x", ep_tensor_none(), ids, scales, ep_tensor_none(), "in: there is no tensor x"},
        {"x of rank 1", ep_tensor_1d(x_data, EP_DTYPE_BF16, 6), ids, scales, ep_tensor_none(),
         "in: tensor x has shape [6], allowed: [T,H], T up to 16777216"},
        {"no ids", x, ep_tensor_none(), scales, ep_tensor_none(),
         "in: there is no tensor expert_ids"},
        {"ids of 5 tokens", x, ep_tensor_2d(ids_data, EP_DTYPE_I32, 5, 2), scales, ep_tensor_none(),
         "in: tensor expert_ids has shape [5,2], allowed: [6,K], the tokens of x"},
        {"scales of another K", x, ids, ep_tensor_2d(scales_data, EP_DTYPE_F32, 6, 1),
         ep_tensor_none(),
         "in: tensor expert_scales has shape [6,1], allowed: [6,2], as expert_ids"},
        {"mask of 4 tokens", x, ids, scales, ep_tensor_1d(mask_data, EP_DTYPE_BOOL, 4),
         "in: tensor active_mask has shape [4], allowed: [6], the tokens of x"},
        {"mask of another K", x, ids, scales, ep_tensor_2d(mask_data, EP_DTYPE_BOOL, 6, 1),
         "in: tensor active_mask has shape [6,1], allowed: [6,2], as expert_ids"},
        {"int8 without its scales", ep_tensor_2d(x_data, EP_DTYPE_I8, 6, 4), ids, scales,
         ep_tensor_none(), "in: there is no tensor x_scales"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const ep_named_tensor all[] = {{"x", cases[i].x},
                                       {"expert_ids", cases[i].ids},
                                       {"expert_scales", cases[i].scales},
                                       {"active_mask", cases[i].mask}};
        ep_named_tensor present[4];
        size_t count = 0;
        ep_cli_batch batch;
        for (size_t t = 0; t < 4; t++) {
            if (all[t].tensor.rank > 0) {
                present[count++] = all[t];
            }
        }
        write_batch(present, count);
        cr_assert_eq(ep_cli_batch_read(path, &batch, &error), EP_ERR_BAD_FILE, "%s", cases[i].what);
        cr_assert_eq(strncmp(error.text + strlen(dir) + 1, cases[i].text, strlen(cases[i].text)), 0,
                     "%s: %s", cases[i].what, error.text);
    }
}

Test(batch_file, a_missing_file)
{
    ep_cli_batch batch;
    ASSERT_FAILS(ep_cli_batch_read("/nonexistent/in", &batch, &error), EP_ERR_NOT_FOUND, error,
                 "/nonexistent/in");
}
