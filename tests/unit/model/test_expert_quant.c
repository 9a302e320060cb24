/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint whose experts are put into another format while they are read: what it says of
 * itself, what is read, what is refused. */
#include "unit/model/model_test.h"

#include <math.h>

#include "base/check.h"
#include "base/numeric.h"
#include "support/format_fixture.h"

static ep_error error; /* of the last call */

TestSuite(expert_quant, .init = make_test_dir, .fini = remove_test_dir);

static const char *const names[] = {"int8-g32", "int4-g32", "mxfp4", "q4_k"};

static ep_checkpoint *open_quantised(const char *name)
{
    ep_checkpoint *checkpoint = NULL;
    ASSERT_OK(ep_checkpoint_open(test_dir, &checkpoint, &error), error);
    ASSERT_OK(ep_checkpoint_quantize(checkpoint, ep_weight_quant_find(name), &error), error);
    return checkpoint;
}

static void expect_matrix(const ep_weight_quant *quant, ep_dtype dtype, const void *filed,
                          uint32_t rows, uint32_t columns, const void *codes, const void *scales)
{
    const size_t code_bytes = rows * ep_weight_row_bytes(quant->format, columns);
    const size_t scale_bytes = ep_weight_scales_bytes(quant->format, rows, columns);
    uint8_t *wanted = malloc(code_bytes + scale_bytes);
    ep_weight_quant_result result;
    cr_assert_eq(ep_weight_quantize(quant, dtype, filed, rows, columns, wanted, wanted + code_bytes,
                                    &result),
                 EP_OK);
    cr_expect_eq(memcmp(codes, wanted, code_bytes), 0);
    cr_expect_eq(memcmp(scales, wanted + code_bytes, scale_bytes), 0);
    free(wanted);
}

/* In a room (NULL: a block of its own), whatever was read there before. */
static void expect_expert_in(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                             ep_expert_room *room)
{
    const ep_weight_quant *quant = ep_checkpoint_info(checkpoint)->quant;
    ep_expert_data made = {0}, filed = {0};
    ep_expert_source outline;
    if (room == NULL) {
        ASSERT_OK(ep_checkpoint_read_expert(checkpoint, layer, index, &made, &error), error);
    } else {
        ASSERT_OK(ep_checkpoint_read_expert_in(checkpoint, layer, index, room, &made, &error),
                  error);
        cr_expect(ep_expert_room_trim(room, &made), "the block that it was changed from");
        cr_expect_not(ep_expert_room_trim(room, &made));
    }
    ASSERT_OK(ep_checkpoint_read_expert_as_filed(checkpoint, layer, index, &filed, &error), error);
    ASSERT_OK(ep_checkpoint_outline_expert(checkpoint, layer, index, &outline, &error), error);
    const ep_expert_source *to = &made.source, *from = &filed.source;
    const ep_dtype dtype = ep_weight_format_dtype(from->format);
    cr_expect_eq(to->format, quant->format);
    cr_expect_eq(ep_expert_down_format(to), quant->format);
    cr_expect_eq(outline.format, quant->format);
    cr_expect_eq(ep_expert_down_format(&outline), quant->format);
    cr_expect_eq(outline.gate_scales != NULL, to->gate_scales != NULL);
    cr_expect_not_null(outline.up_scales);
    cr_expect_eq(to->activation, from->activation);
    cr_expect_eq(to->inner, from->inner);
    if (from->gate != NULL) {
        expect_matrix(quant, dtype, from->gate, to->inner, to->hidden, to->gate, to->gate_scales);
    }
    expect_matrix(quant, dtype, from->up, to->inner, to->hidden, to->up, to->up_scales);
    const ep_dtype down_dtype = ep_weight_format_dtype(ep_expert_down_format(from));
    expect_matrix(quant, down_dtype, from->down, to->hidden, to->inner, to->down, to->down_scales);
    const size_t bias_bytes = ep_dtype_bytes(from->bias_dtype);
    cr_expect_eq(to->up_bias != NULL, from->up_bias != NULL);
    cr_expect(from->up_bias == NULL ||
              memcmp(to->up_bias, from->up_bias, to->inner * bias_bytes) == 0);
    cr_expect(from->down_bias == NULL ||
              memcmp(to->down_bias, from->down_bias, to->hidden * bias_bytes) == 0);
    cr_expect_eq(to->shared_gate != NULL, from->shared_gate != NULL);
    cr_expect(from->shared_gate == NULL ||
              memcmp(to->shared_gate, from->shared_gate,
                     to->hidden * ep_dtype_bytes(from->shared_gate_dtype)) == 0);
    cr_expect(made.quant_error > 0 && made.quant_error < quant->error_max);
    if (room == NULL) {
        ep_expert_data_free(&made);
    }
    ep_expert_data_free(&filed);
}

static ep_expert_room room; /* of all experts of a test */

static void expect_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index)
{
    expect_expert_in(checkpoint, layer, index, NULL);
    expect_expert_in(checkpoint, layer, index, &room);
}

/* Each has a version of its own that begins with the files', and no two experts one digest. */
Test(expert_quant, all_experts_are_in_the_format_and_the_version_says_so)
{
    ep_fixture_config config = ep_fixture_default();
    uint8_t digests[4][EP_SHA256_BYTES];
    char files[17];
    config.router = EP_ROUTER_R2;
    config.names = EP_NAMES_N1;
    config.hidden = 72;
    config.shared_inner = 40;
    config.shared_gate = true;
    ASSERT_OK(ep_fixture_write(&config, test_dir, &error), error);
    for (size_t q = 0; q < 4; q++) {
        ep_expert_data data = {0};
        ep_checkpoint *checkpoint = NULL;
        ASSERT_OK(ep_checkpoint_open(test_dir, &checkpoint, &error), error);
        const ep_model_info *info = ep_checkpoint_info(checkpoint);
        if (q == 3) {
            ASSERT_OK(ep_checkpoint_quantize(checkpoint, NULL, &error), error);
            cr_expect_str_eq(info->version, info->files_version);
            cr_expect_eq(info->format, EP_WEIGHTS_BF16);
        } else {
            const ep_weight_quant *quant = ep_weight_quant_find(names[q]);
            char version[64];
            ASSERT_OK(ep_checkpoint_quantize(checkpoint, quant, &error), error);
            snprintf(version, sizeof(version), "%s-%s", info->files_version, names[q]);
            cr_expect_str_eq(info->version, version);
            cr_expect_eq(info->format, quant->format);
            cr_expect_eq(info->formats, 1u << quant->format);
            cr_expect_eq(info->layer_formats[1].down_format, quant->format);
            cr_expect_eq(info->layer_formats[1].file_format, EP_WEIGHTS_BF16);
            cr_expect_eq(info->layer_formats[1].file_down_format, EP_WEIGHTS_BF16);
            for (uint32_t e = 0; e <= config.experts; e++) {
                expect_expert(checkpoint, 1, e);
            }
        }
        if (q == 0) {
            strcpy(files, info->files_version);
        }
        cr_expect_str_eq(info->files_version, files);
        ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 0, 3, &data, &error), error);
        memcpy(digests[q], data.sha256, sizeof(digests[q]));
        for (size_t other = 0; other < q; other++) {
            cr_expect_neq(memcmp(digests[q], digests[other], EP_SHA256_BYTES), 0);
        }
        ep_expert_data_free(&data);
        ep_checkpoint_close(checkpoint);
    }
}

static ep_format_model *make_case(const char *name)
{
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        if (strcmp(ep_format_cases[i].name, name) == 0) {
            return ep_format_model_make(&ep_format_cases[i], 9);
        }
    }
    cr_assert_fail("no case %s", name);
    return NULL;
}

/* Fused, transposed, alternating rows, biases, no gate: whatever the file has. */
Test(expert_quant, every_family_of_float_tensors_is_read)
{
    int count = 0;
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        const ep_format_case *form = &ep_format_cases[i];
        ep_format_model *model = ep_format_model_make(form, 7 + i);
        ep_checkpoint *checkpoint = NULL;
        ASSERT_OK(ep_format_model_write(model, test_dir, &error), error);
        ASSERT_OK(ep_checkpoint_open(test_dir, &checkpoint, &error), error);
        const ep_err err =
            ep_checkpoint_quantize(checkpoint, ep_weight_quant_find("int8-g32"), &error);
        if (ep_weight_format_is_float(form->format) &&
            ep_weight_format_is_float(ep_format_case_of(form, 2))) {
            cr_assert_eq(err, EP_OK, "%s: %s", form->name, error.text);
            expect_expert(checkpoint, EP_FORMAT_LAYER, 2);
            count++;
        } else {
            cr_expect_eq(err, EP_ERR_BAD_CONFIG, "%s", form->name);
            EXPECT_TEXT(error, "take weight_quant out");
            EXPECT_TEXT(error, "the routed ones of layer 1");
            cr_expect_null(ep_checkpoint_info(checkpoint)->quant);
        }
        ep_checkpoint_close(checkpoint);
        ep_format_model_free(model);
        remove_test_dir();
        make_test_dir();
    }
    cr_expect_gt(count, 8);
}

Test(expert_quant, shared_experts_that_are_quantised_already_are_refused)
{
    ep_fixture_config config = ep_fixture_default();
    ep_checkpoint *checkpoint = NULL;
    config.router = EP_ROUTER_R3;
    config.names = EP_NAMES_N1;
    config.shared_inner = 32;
    config.shared_format = EP_WEIGHTS_MXFP4;
    ASSERT_OK(ep_fixture_write(&config, test_dir, &error), error);
    ASSERT_OK(ep_checkpoint_open(test_dir, &checkpoint, &error), error);
    EXPECT_FAILS(ep_checkpoint_quantize(checkpoint, ep_weight_quant_find("mxfp4"), &error),
                 EP_ERR_BAD_CONFIG, error, "the shared ones of layer 0 are in mxfp4 already");
    ep_checkpoint_close(checkpoint);
}

/* A bf16 model whose expert 2 has value at places of its down matrix, from first on. */
static void write_with(float value, size_t first, size_t step)
{
    ep_format_model *model = make_case("n1-bf16");
    ep_format_tensor *tensor = ep_format_model_find(model, "experts.2.down_proj.weight");
    const uint16_t half = ep_f32_to_bf16(value);
    cr_assert_not_null(tensor);
    for (size_t i = first; i < tensor->bytes / sizeof(half); i += step) {
        memcpy(tensor->data + i * sizeof(half), &half, sizeof(half));
    }
    ASSERT_OK(ep_format_model_write(model, test_dir, &error), error);
    ep_format_model_free(model);
}

static void expect_refused(const char *quant, const char *part)
{
    ep_checkpoint *checkpoint = open_quantised(quant);
    ep_expert_data data = {0};
    EXPECT_FAILS(ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, 2, &data, &error),
                 EP_ERR_BAD_FILE, error, part);
    EXPECT_TEXT(error, "experts.2.down_proj.weight");
    EXPECT_TEXT(error, ".safetensors");
    EXPECT_TEXT(error, quant);
    cr_expect_eq(error.layer, EP_FORMAT_LAYER);
    cr_expect_eq(error.expert, 2);
    cr_expect_null(data.allocation);
    cr_expect_eq(ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, 1, &data, &error), EP_OK);
    ep_expert_data_free(&data);
    ep_checkpoint_close(checkpoint);
}

Test(expert_quant, a_weight_that_is_not_finite_costs_its_expert)
{
    write_with(NAN, 5, SIZE_MAX / 2);
    for (size_t q = 0; q < EP_ARRAY_COUNT(names); q++) {
        expect_refused(names[q], "row 0 column 5 of the expert's matrix is nan");
    }
}

Test(expert_quant, an_error_beyond_the_bound_costs_the_expert)
{
    write_with(3000.0f, 3, 45); /* a column of it */
    expect_refused("int4-g32", "allowed 0.25: take int8-g32, or weight_quant out");
    expect_refused("int8-g32", "allowed 0.02: take weight_quant out");
}
