/* SPDX-License-Identifier: Apache-2.0 */
/* What quantising costs results: judged on some units of an expert, as on all of them. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "expertd/weight_judge.h"
#include "kernels/expert_ffn.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"

static ep_error error; /* of the last call */

static char dir[EP_FIXTURE_PATH_BYTES];

static void remove_dir(void)
{
    ep_fixture_remove(dir);
}

TestSuite(weight_judge, .fini = remove_dir);

static const char *const names[] = {"int8-g32", "int4-g32", "mxfp4", "q4_k"};

static ep_checkpoint *open_quantised(const char *name)
{
    ep_checkpoint *checkpoint = NULL;
    ASSERT_OK(ep_checkpoint_open(dir, &checkpoint, &error), error);
    ASSERT_OK(ep_checkpoint_quantize(checkpoint, ep_weight_quant_find(name), &error), error);
    return checkpoint;
}

/* Of the whole expert on inputs of our own; they differ from the judge's, so this is near and not
 * equal. */
static double error_of_outputs(const ep_checkpoint *checkpoint, uint32_t expert)
{
    enum { ROWS = 16 };
    static float x[ROWS * 256], out[2][ROWS * 256], scratch[4096];
    ep_expert_data data[2] = {{.allocation = NULL}};
    double errors = 0, squares = 0;
    uint64_t state = 99;
    ASSERT_OK(ep_checkpoint_read_expert_as_filed(checkpoint, 1, expert, &data[0], &error), error);
    ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 1, expert, &data[1], &error), error);
    const uint32_t hidden = data[0].source.hidden;
    cr_assert_leq(hidden, 256);
    for (size_t i = 0; i < (size_t)ROWS * hidden; i++) {
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
        x[i] = 1.7f * ((float)(int32_t)(state >> 32) * 0x1p-31f); /* as far as a normal one */
    }
    for (int s = 0; s < 2; s++) {
        ep_ffn_row rows[ROWS];
        for (size_t r = 0; r < ROWS; r++) {
            rows[r] = (ep_ffn_row){.x = x + r * hidden, .out = out[s] + r * hidden};
        }
        const ep_ffn_batch batch = {
            .rows = rows, .rows_count = ROWS, .x_dtype = EP_DTYPE_F32, .out_dtype = EP_DTYPE_F32};
        ep_ffn_reference(&data[s].source, &batch, scratch);
        ep_expert_data_free(&data[s]);
    }
    for (size_t i = 0; i < (size_t)ROWS * hidden; i++) {
        const double difference = (double)out[1][i] - (double)out[0][i];
        errors += difference * difference;
        squares += (double)out[0][i] * (double)out[0][i];
    }
    return sqrt(errors / squares);
}

static void expect_like_the_whole(uint32_t inner, bool is_all_of_it)
{
    ep_fixture_config config = ep_fixture_default();
    config.hidden = 160;
    config.inner = inner;
    ep_fixture_new(&config, dir);
    for (size_t q = 0; q < EP_ARRAY_COUNT(names); q++) {
        ep_checkpoint *checkpoint = open_quantised(names[q]);
        ep_weight_judgement judgement = {0}, again = {0};
        ep_expert_data data = {.allocation = NULL};
        ASSERT_OK(ep_weight_judge(checkpoint, 1, 3, &judgement, &error), error);
        ASSERT_OK(ep_weight_judge(checkpoint, 1, 3, &again, &error), error);
        cr_expect(judgement.weights == again.weights && judgement.outputs == again.outputs);
        ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 1, 3, &data, &error), error);
        const double outputs = error_of_outputs(checkpoint, 3);
        cr_expect(fabs(judgement.weights / data.quant_error - 1) < 0.1, "%s: %g, of all %g",
                  names[q], judgement.weights, data.quant_error);
        cr_expect(!is_all_of_it || judgement.weights == data.quant_error);
        cr_expect(fabs(judgement.outputs / outputs - 1) < 0.35, "%s: outputs %g, of all %g",
                  names[q], judgement.outputs, outputs);
        cr_expect_gt(judgement.outputs, judgement.weights);
        ep_expert_data_free(&data);
        ep_checkpoint_close(checkpoint);
    }
}

Test(weight_judge, a_small_expert_is_judged_as_a_whole)
{
    expect_like_the_whole(32, true);
}

Test(weight_judge, some_units_stand_for_a_large_one)
{
    expect_like_the_whole(416, false);
}

/* Gives every bf16 of the checkpoint this exponent. */
static void set_exponents(int exponent)
{
    static uint8_t bytes[1 << 20];
    char path[EP_FIXTURE_PATH_BYTES + 32];
    uint64_t header;
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    FILE *file = fopen(path, "r+be");
    cr_assert_not_null(file);
    const size_t count = fread(bytes, 1, sizeof(bytes), file);
    memcpy(&header, bytes, sizeof(header));
    cr_assert(count < sizeof(bytes) && header < count);
    for (size_t i = sizeof(header) + header; i + 1 < count; i += 2) {
        uint16_t value;
        memcpy(&value, bytes + i, sizeof(value));
        value = (uint16_t)((value & 0x807f) | (127 + exponent) << 7);
        memcpy(bytes + i, &value, sizeof(value));
    }
    rewind(file);
    cr_assert_eq(fwrite(bytes, 1, count, file), count);
    cr_assert_eq(fclose(file), 0);
}

Test(weight_judge, rows_beyond_f32_are_no_figure)
{
    const ep_fixture_config config = ep_fixture_default();
    size_t beyond = 0;
    ep_fixture_new(&config, dir);
    for (int exponent = 0; exponent <= 60; exponent += 4) {
        set_exponents(exponent);
        ep_checkpoint *checkpoint = open_quantised("mxfp4");
        ep_weight_judgement judgement = {.outputs = NAN};
        ASSERT_OK(ep_weight_judge(checkpoint, 1, 3, &judgement, &error), error);
        cr_expect_not(isnan(judgement.outputs), "exponent %d", exponent);
        beyond += judgement.outputs == 0;
        ep_checkpoint_close(checkpoint);
    }
    cr_expect_geq(beyond, 2);
}

Test(weight_judge, an_expert_that_cannot_be_read_is_an_error)
{
    ep_fixture_config config = ep_fixture_default();
    ep_weight_judgement judgement;
    ep_fixture_new(&config, dir);
    ep_checkpoint *checkpoint = open_quantised("mxfp4");
    EXPECT_FAILS(ep_weight_judge(checkpoint, 1, 100, &judgement, &error), EP_ERR_INVALID_ARGUMENT,
                 error, "expert 100 of layer 1");
    ep_checkpoint_close(checkpoint);
}
