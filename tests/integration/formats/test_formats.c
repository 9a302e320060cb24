/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of every name family and weight format: what is read, what is computed, what is
 * refused. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "contract/backend/expert_fixture.h"
#include "model/model.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/format_fixture.h"
#include "support/format_judge.h"

static char dir[EP_FIXTURE_PATH_BYTES];

static void make_dir(void)
{
    ep_fixture_temp_dir(dir);
}

static void remove_dir(void)
{
    ep_fixture_remove(dir);
}

TestSuite(formats, .init = make_dir, .fini = remove_dir);

static void expect_bytes(const ep_format_case *form, const char *what, const void *got,
                         const void *want, size_t bytes)
{
    cr_assert_eq(got == NULL, want == NULL, "%s: %s is %s", form->name, what,
                 got == NULL ? "missing" : "there");
    cr_assert(want == NULL || memcmp(got, want, bytes) == 0, "%s: %s differs", form->name, what);
}

static void expect_source(const ep_format_case *form, const ep_expert_source *got,
                          const ep_expert_source *want)
{
    const uint32_t hidden = form->hidden;
    const uint32_t inner = form->inner;
    const ep_weight_format format = form->format;
    const size_t wide = inner * ep_weight_row_bytes(format, hidden);
    const size_t scales = ep_weight_scales_bytes(format, inner, hidden);
    const ep_weight_format down = ep_format_case_of(form, 2);
    const size_t bias = got->bias_dtype == EP_DTYPE_NONE ? 0 : ep_dtype_bytes(got->bias_dtype);
    cr_assert_eq(got->hidden, hidden);
    cr_assert_eq(got->inner, inner);
    cr_assert_eq(got->format, format, "%s is %s", form->name, ep_weight_format_name(got->format));
    cr_assert_eq(got->activation, form->activation, "%s: %s", form->name,
                 ep_activation_name(got->activation));
    cr_assert(got->numbers.alpha == form->numbers.alpha &&
              got->numbers.beta == form->numbers.beta && got->numbers.limit == form->numbers.limit);
    expect_bytes(form, "places", got->places, want->places, hidden * sizeof(uint32_t));
    expect_bytes(form, "gate", got->gate, want->gate, wide);
    expect_bytes(form, "up", got->up, want->up, wide);
    cr_assert_eq(ep_expert_down_format(got), down, "%s is %s", form->name,
                 ep_weight_format_name(got->down_format));
    cr_assert_eq(got->bias_dtype, want->bias_dtype);
    expect_bytes(form, "down", got->down, want->down, hidden * ep_weight_row_bytes(down, inner));
    expect_bytes(form, "gate scales", got->gate_scales, want->gate_scales, scales);
    expect_bytes(form, "up scales", got->up_scales, want->up_scales, scales);
    expect_bytes(form, "down scales", got->down_scales, want->down_scales,
                 ep_weight_scales_bytes(down, hidden, inner));
    expect_bytes(form, "gate bias", got->gate_bias, want->gate_bias, bias * inner);
    expect_bytes(form, "up bias", got->up_bias, want->up_bias, bias * inner);
    expect_bytes(form, "down bias", got->down_bias, want->down_bias, bias * hidden);
}

static ep_checkpoint *open_written(const ep_format_model *model)
{
    ep_error error;
    ep_checkpoint *checkpoint = NULL;
    ASSERT_OK(ep_format_model_write(model, dir, &error), error);
    cr_assert_eq(ep_checkpoint_open(dir, &checkpoint, &error), EP_OK, "%s: %s", model->form->name,
                 error.text);
    return checkpoint;
}

Test(formats, every_container_gives_the_expert_it_was_made_from)
{
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        uint8_t hashes[EP_FORMAT_EXPERTS][EP_SHA256_BYTES];
        ep_format_model *model = ep_format_model_make(&ep_format_cases[i], 7 + i);
        ep_checkpoint *checkpoint = open_written(model);
        const ep_model_info *info = ep_checkpoint_info(checkpoint);
        cr_assert_eq(info->format, model->form->format, "%s", model->form->name);
        cr_assert_eq(info->formats, 1u << info->format | 1u << ep_format_case_of(model->form, 2),
                     "%s", model->form->name);
        for (uint32_t e = 0; e < EP_FORMAT_EXPERTS; e++) {
            ep_expert_data data = {0};
            ep_error error;
            ep_err err = ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, e, &data, &error);
            cr_assert_eq(err, EP_OK, "%s: %s", model->form->name, error.text);
            expect_source(model->form, &data.source, &model->experts[e]);
            memcpy(hashes[e], data.sha256, sizeof(hashes[e]));
            for (uint32_t other = 0; other < e; other++) {
                cr_assert_neq(memcmp(hashes[e], hashes[other], EP_SHA256_BYTES), 0, "%s",
                              model->form->name);
            }
            ep_expert_data_free(&data);
        }
        ep_checkpoint_close(checkpoint);
        ep_format_model_free(model);
    }
}

enum { ROWS = 5 };

/* Rows of one expert through a backend, f32 in and out. */
static void run_rows(ep_backend *backend, const ep_expert_source *source, const float *x,
                     float *out)
{
    ep_backend_weights *weights = NULL;
    ep_error error;
    ep_job_row rows[ROWS];
    fixture_job job;
    ASSERT_OK(backend->ops->weights_load(backend, source, &weights, &error), error);
    expert_fixture f = {.rows_count = ROWS,
                        .x_dtype = EP_DTYPE_F32,
                        .out_dtype = EP_DTYPE_F32,
                        .out_row_bytes = source->hidden * sizeof(float),
                        .rows = rows};
    for (size_t r = 0; r < ROWS; r++) {
        rows[r] = (ep_job_row){.x = x + r * source->hidden};
    }
    fixture_job_init(&job, &f, weights, 0, ROWS);
    cr_assert_eq(ep_backend_run(backend, &job.job), EP_OK);
    cr_assert_eq(fixture_job_wait(&job), EP_OK);
    for (size_t r = 0; r < ROWS; r++) {
        memcpy(out + r * source->hidden, job.rows[r].out, f.out_row_bytes);
    }
    fixture_job_fini(&job);
    backend->ops->weights_unload(backend, weights);
}

/* A bound means something when it is far below the result; an inner value near halfway may be a
 * step of int8 off, narrowed ones by theirs. */
static double share_of(ep_weight_format format, ep_ffn_family family)
{
    const bool has_integers = format == EP_WEIGHTS_W8A8 || family == EP_FFN_FAMILY_W4A8;
    /* offsets are as large as codes */
    const bool cancels = ep_weight_format_offsets(format) == EP_OFFSETS_MINIMUM;
    return has_integers                      ? 0.02
           : ep_ffn_family_has_pairs(family) ? (cancels ? 0.06 : 0.03)
           : cancels                         ? 0.02
                                             : 5e-3;
}

/*
 * What rounding to int8 costs: root of the squared errors against the expert in double, x and h as
 * they are, over root of the squared results. A step is max / 127 of its 32 columns; its error is
 * spread evenly over one step, so 1/sqrt(12) of it. The greatest of 32 is 2 to 4 times their root
 * mean square: 0.5 to 0.9 % for a row. Gate and up see one such error of x, down one of h: sqrt(3)
 * times that, 0.8 to 1.6 %. The bound leaves room for rows with few large values.
 */
static double error_of_int8(const ep_expert_source *source, const float *x, const float *out)
{
    double *y = malloc(source->hidden * sizeof(*y));
    double *bound = malloc(source->hidden * sizeof(*bound));
    double wrong = 0;
    double length = 0;
    for (size_t r = 0; r < ROWS; r++) {
        ep_format_judge(source, EP_FFN_FAMILY_PORTABLE, x + r * source->hidden, y, bound);
        for (size_t i = 0; i < source->hidden; i++) {
            const double difference = (double)out[r * source->hidden + i] - y[i];
            wrong += difference * difference;
            length += y[i] * y[i];
        }
    }
    free(y);
    free(bound);
    return sqrt(wrong / length);
}

static void expect_near(const ep_format_case *form, const ep_expert_source *source,
                        ep_ffn_family family, double share, const float *x, const float *out)
{
    double *y = malloc(source->hidden * sizeof(*y));
    double *bound = malloc(source->hidden * sizeof(*bound));
    for (size_t r = 0; r < ROWS; r++) {
        double length = 0;
        double slack = 0;
        ep_format_judge(source, family, x + r * source->hidden, y, bound);
        for (size_t i = 0; i < source->hidden; i++) {
            double got = (double)out[r * source->hidden + i];
            cr_assert(fabs(got - y[i]) <= bound[i],
                      "%s %s: row %zu output %zu is %a, in double %a, bound %g", form->name,
                      ep_activation_name(source->activation), r, i, got, y[i], bound[i]);
            length += y[i] * y[i];
            slack += bound[i] * bound[i];
        }
        cr_assert(slack < share * share * length, "%s: bound %g of %g", form->name, sqrt(slack),
                  sqrt(length));
    }
    free(y);
    free(bound);
}

static void expect_equal_and_near(ep_numerics numerics)
{
    static const char *const names[] = {"reference", "cpu"};
    ep_backend *backends[2];
    for (size_t b = 0; b < 2; b++) {
        const ep_backend_config config = {.numerics = numerics, .threads = 1};
        ep_error error;
        ASSERT_OK(ep_backend_by_name(names[b])->open(&config, &backends[b], &error), error);
    }
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        const ep_format_case *form = &ep_format_cases[i];
        ep_format_model *model = ep_format_model_make(form, 7 + i);
        ep_checkpoint *checkpoint = open_written(model);
        ep_expert_data data = {0};
        ep_error error;
        size_t count = (size_t)ROWS * form->hidden;
        float *x = malloc(count * sizeof(*x));
        float *out[2] = {malloc(count * sizeof(*x)), malloc(count * sizeof(*x))};
        uint64_t state = i;
        for (size_t k = 0; k < count; k++) {
            x[k] = (float)((int)(ep_splitmix64(&state) % 257) - 128) / 64.0f;
        }
        ASSERT_OK(ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, 2, &data, &error), error);
        for (size_t b = 0; b < 2; b++) {
            run_rows(backends[b], &data.source, x, out[b]);
        }
        cr_assert_arr_eq(out[0], out[1], count * sizeof(*x), "%s", form->name);
        const ep_ffn_family family = ep_numerics_expert_family(numerics, form->format, form->down);
        expect_near(form, &model->experts[2], family, share_of(form->format, family), x, out[1]);
        if (family == EP_FFN_FAMILY_W4A8) {
            const double cost = error_of_int8(&model->experts[2], x, out[1]);
            cr_assert(cost > 1e-3 && cost < 0.04, "%s: error %g", form->name, cost);
        }
        free(x);
        free(out[0]);
        free(out[1]);
        ep_expert_data_free(&data);
        ep_checkpoint_close(checkpoint);
        ep_format_model_free(model);
    }
    backends[0]->ops->close(backends[0]);
    backends[1]->ops->close(backends[1]);
}

Test(formats, cpu_equals_reference_and_is_near_double_precision)
{
    expect_equal_and_near(EP_NUMERICS_PORTABLE);
    expect_equal_and_near(EP_NUMERICS_BF16DP);
    expect_equal_and_near(EP_NUMERICS_W4A8);
}

/* Codes, scales and next to nothing else; f8 in blocks repeats a block's scale for each row. */
Test(formats, small_weights_stay_small_in_memory)
{
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO, .threads = 1};
    ep_backend *backend;
    ep_error error;
    ASSERT_OK(ep_backend_by_name("cpu")->open(&config, &backend, &error), error);
    for (unsigned f = EP_WEIGHTS_NONE + 1; f < EP_WEIGHTS_COUNT; f++) {
        const ep_expert_source source = {
            .hidden = 2048, .inner = 768, .format = (ep_weight_format)f};
        const size_t bytes = backend->ops->weights_bytes(backend, &source);
        const size_t in_file = 2 * ep_weight_matrix_bytes(source.format, 768, 2048) +
                               ep_weight_matrix_bytes(source.format, 2048, 768);
        cr_expect(bytes >= in_file / 2 && (double)bytes <= 1.05 * (double)in_file,
                  "%s: %zu bytes of %zu", ep_weight_format_name(source.format), bytes, in_file);
    }
    backend->ops->close(backend);
}

static const ep_format_case *case_of(const char *name)
{
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        if (strcmp(ep_format_cases[i].name, name) == 0) {
            return &ep_format_cases[i];
        }
    }
    cr_assert_fail("no case %s", name);
    return NULL;
}

static void leave_out(ep_format_tensor *t)
{
    t->name[0] = 0;
}

static void another_type(ep_format_tensor *t)
{
    snprintf(t->dtype, sizeof(t->dtype), "%s",
             strcmp(t->dtype, "U8") == 0    ? "I8"
             : strcmp(t->dtype, "F32") == 0 ? "I32"
                                            : "U8");
    t->bytes =
        t->bytes /
        (strcmp(t->dtype, "U8") == 0 && t->rank == 2 ? t->bytes / (t->dims[0] * t->dims[1]) : 1);
}

static void one_row_less(ep_format_tensor *t)
{
    t->bytes -= t->bytes / t->dims[t->rank - 1];
    t->dims[t->rank - 1]--;
}

static void one_expert_less(ep_format_tensor *t)
{
    t->bytes -= t->bytes / t->dims[0];
    t->dims[0]--;
}

static void all_ones(ep_format_tensor *t)
{
    memset(t->data, 0xff, t->bytes);
}

static void one_last_byte(ep_format_tensor *t)
{
    t->data[t->bytes - 1] = 0xff;
}

static void one_of_expert_2(ep_format_tensor *t)
{
    t->data[2 * t->bytes / t->dims[0] + 5] = 0xff;
}

static void one_infinite(ep_format_tensor *t)
{
    memcpy(t->data + t->bytes - 4, "\x00\x00\x80\x7f", 4);
}

static void one_not_zero(ep_format_tensor *t)
{
    t->data[t->bytes - 1] = 0x3f;
}

static void one_zero(ep_format_tensor *t)
{
    memset(t->data, 0, 4);
}

/* In f32, a bit more than 16 hold. */
static void one_with_many_bits(ep_format_tensor *t)
{
    t->data[0] |= 1;
}

/* The first column's group and the last one's. */
static void swap_ends(ep_format_tensor *t)
{
    uint8_t first[4];
    memcpy(first, t->data, 4);
    memcpy(t->data, t->data + t->bytes - 4, 4);
    memcpy(t->data + t->bytes - 4, first, 4);
}

static void one_more_of_group_1(ep_format_tensor *t)
{
    t->data[0] = 1;
}

static void swap_sides(ep_format_tensor *t)
{
    uint64_t d = t->dims[1];
    t->dims[1] = t->dims[2];
    t->dims[2] = d;
}

/* "model-00001-of-00002.safetensors: tensor NAME: reason". */
static void expect_place(const char *text, const char *tensor_end)
{
    static const char between[] = ".safetensors: tensor ";
    const char *name = strstr(text, between);
    cr_assert(strncmp(text, "model-0000", 10) == 0 && name != NULL, "no file: %s", text);
    name += strlen(between);
    const size_t length = strcspn(name, ":");
    const size_t end_length = strlen(tensor_end);
    cr_expect(length > end_length &&
                  strncmp(name + length - end_length, tensor_end, end_length) == 0,
              "not %s: %s", tensor_end, text);
    cr_expect(strlen(name + length) > 10, "no reason: %s", text);
}

Test(formats, what_is_wrong_is_refused_with_file_tensor_and_reason)
{
    static const struct {
        const char *form;
        const char *tensor;
        void (*damage)(ep_format_tensor *t);
        ep_err code;
        const char *text;
        const char *also;
    } cases[] = {
        {"n1-f8-block", "experts.2.up_proj.weight_scale_inv", leave_out, EP_ERR_NOT_FOUND,
         ".safetensors: tensor ", "experts.2.up_proj.weight: has no scales: "},
        {"n1-f8-block", "experts.2.up_proj.weight_scale_inv", one_row_less, EP_ERR_BAD_FILE,
         "experts.2.up_proj.weight_scale_inv: shape is [2,1], allowed [2,2]", ".safetensors"},
        {"n1-f8-block", "experts.2.down_proj.weight", all_ones, EP_ERR_BAD_FILE,
         "down_proj.weight: a value is NaN at element 0", ".safetensors"},
        {"n1-f8-block", "experts.2.down_proj.weight_scale_inv", one_infinite, EP_ERR_BAD_FILE,
         "down_proj.weight_scale_inv: a scale is not finite at element 3", ".safetensors"},
        {"n1-f8-channel", "experts.2.gate_proj.weight_scale", another_type, EP_ERR_BAD_FILE,
         "dtype is I32, allowed F32, BF16", ".safetensors"},
        {"n1-f8-channel-bf16", "experts.2.gate_proj.weight_scale", one_row_less, EP_ERR_BAD_FILE,
         "shape is [64]", "allowed"},
        {"n6-mxfp4-situ", "experts.2.w1.weight_scale", all_ones, EP_ERR_BAD_FILE,
         "w1.weight_scale: a scale is 255 (e8m0's NaN), allowed 0..254, at element 0",
         ".safetensors"},
        {"n2-mxfp8-oai", "experts.2.w2.weight_scale_inv", one_last_byte, EP_ERR_BAD_FILE,
         "allowed 0..254, at element 191", ".safetensors"},
        {"n7-mxfp4", "down_proj_scales", one_of_expert_2, EP_ERR_BAD_FILE,
         "down_proj_scales: a scale is 255 (e8m0's NaN), allowed 0..254, at element 261",
         ".safetensors"},
        {"n6-mxfp4-situ", "experts.2.w2.weight_packed", one_row_less, EP_ERR_BAD_FILE,
         "shape is [96,31], allowed [96,32]", ".safetensors"},
        {"n6-mxfp4-situ", "experts.2.w2.weight_scale", leave_out, EP_ERR_NOT_FOUND, "has no scales",
         "w2.weight"},
        {"n4-mxfp4-limit", "experts.2.w3.scale", one_row_less, EP_ERR_BAD_FILE,
         "w3.scale: shape is [96,1], allowed [96,2]", ".safetensors"},
        {"n5-int4", "experts.2.down_proj.weight_packed", one_row_less, EP_ERR_BAD_FILE,
         "shape is [96,7], allowed [96,8]", ".safetensors"},
        {"n5-int4", "experts.2.up_proj.weight_scale", another_type, EP_ERR_BAD_FILE,
         "dtype is U8, allowed F32, BF16, F16", ".safetensors"},
        {"n1-w8a8", "experts.2.up_proj.weight_offset", one_not_zero, EP_ERR_BAD_FILE,
         "an offset is not zero", ".safetensors"},
        {"n1-w8a8", "experts.2.up_proj.weight_scale", one_infinite, EP_ERR_BAD_FILE,
         "a scale is not finite at element 49", ".safetensors"},
        {"n2-mxfp8-oai", "experts.2.w2.weight_scale_inv", one_row_less, EP_ERR_BAD_FILE,
         "shape is [96,1], allowed [96,2]", ".safetensors"},
        {"n7-mxfp4", "gate_up_proj_blocks", one_row_less, EP_ERR_BAD_FILE,
         "shape is [4,128,2,15], allowed [4,128,2,16]", ".safetensors"},
        {"n7-mxfp4", "down_proj_scales", leave_out, EP_ERR_NOT_FOUND, "has no scales",
         "down_proj_blocks"},
        {"n7-mxfp4", "gate_up_proj_bias", one_row_less, EP_ERR_BAD_FILE,
         "gate_up_proj_bias: shape is [4,127], allowed [4,128]", ".safetensors"},
        {"n7-mxfp4", "down_proj_blocks", another_type, EP_ERR_BAD_FILE, "dtype is I8, allowed U8",
         ".safetensors"},
        {"n3-bf16", "gate_up_proj", one_expert_less, EP_ERR_BAD_FILE,
         "shape is [3,40,48], allowed [4,40,48]", ".safetensors"},
        {"n3-bf16", "down_proj", swap_sides, EP_ERR_BAD_FILE,
         "down_proj: is [E,I,H], the layer's gate and up are [E,2I,H]", ".safetensors"},
        {"n3-bf16", "down_proj", leave_out, EP_ERR_NOT_FOUND,
         "tensor model.language_model.layers.1.mlp.experts.down_proj", "none"},
        {"n9-bf16", "output_linear.weight", swap_sides, EP_ERR_BAD_FILE,
         "shape is [4,24,40], allowed [4,40,24]", ".safetensors"},
        {"n1-f32-bias", "experts.2.up_proj.bias", one_row_less, EP_ERR_BAD_FILE,
         "up_proj.bias: shape is [23], allowed [24]", ".safetensors"},
        {"n1-f32-bias", "experts.2.up_proj.bias", leave_out, EP_ERR_NOT_FOUND,
         "experts.2.up_proj.bias: is missing", "the expert's other matrices have a bias"},
        {"n7-bf16", "gate_up_proj_bias", leave_out, EP_ERR_NOT_FOUND,
         "gate_up_proj_bias: is missing", "have a bias"},
        {"ct-int4-g128", "experts.2.up_proj.weight_scale", one_row_less, EP_ERR_BAD_FILE,
         "shape is [136,1], allowed [136,2]", ".safetensors"},
        {"ct-int4-g128-asym", "experts.2.up_proj.weight_zero_point", one_row_less, EP_ERR_BAD_FILE,
         "shape is [17,1], allowed [17,2]", ".safetensors"},
        {"ct-int4-g128-asym", "experts.2.up_proj.weight_zero_point", leave_out, EP_ERR_NOT_FOUND,
         "has no zero points, which the config says it has", "weight_zero_point is missing"},
        {"ct-int8-plain-asym", "experts.2.up_proj.weight_zero_point", leave_out, EP_ERR_NOT_FOUND,
         "has no zero points", "up_proj.weight"},
        {"ct-int4-g128-asym", "experts.2.up_proj.weight_zero_point", another_type, EP_ERR_BAD_FILE,
         "dtype is U8, allowed I32", ".safetensors"},
        {"ct-int8-channel", "experts.2.up_proj.weight_packed", one_row_less, EP_ERR_BAD_FILE,
         "shape is [70,49], allowed [70,25]", ".safetensors"},
        {"ct-int8-plain-asym", "experts.2.up_proj.weight_scale", one_with_many_bits,
         EP_ERR_BAD_FILE,
         "a scale beside a zero point has more than 16 significant bits, at element 0",
         ".safetensors"},
        {"ct-int8-plain-asym", "experts.2.up_proj.weight_zero_point", one_row_less, EP_ERR_BAD_FILE,
         "shape is [48,0], allowed [48,1]", ".safetensors"},
        {"f8-block64", "experts.2.down_proj.weight_scale_inv", one_row_less, EP_ERR_BAD_FILE,
         "shape is [4,2], allowed [4,3]", ".safetensors"},
        {"nvfp4-ct", "experts.2.up_proj.weight_scale", all_ones, EP_ERR_BAD_FILE,
         "a scale is NaN at element 0", ".safetensors"},
        {"nvfp4-ct", "experts.2.up_proj.weight_global_scale", one_zero, EP_ERR_BAD_FILE,
         "a scale is zero, not finite", ".safetensors"},
        {"nvfp4-ct", "experts.2.up_proj.weight_global_scale", leave_out, EP_ERR_NOT_FOUND,
         "has no scale of the whole matrix", "up_proj.weight_packed"},
        {"nvfp4-modelopt", "experts.2.up_proj.weight_scale_2", another_type, EP_ERR_BAD_FILE,
         "dtype is I32, allowed F32", ".safetensors"},
        {"gptq-g128", "experts.2.up_proj.qzeros", all_ones, EP_ERR_BAD_FILE,
         "a zero point is not the middle of the range", ".safetensors"},
        {"gptq-g128", "experts.2.up_proj.qzeros", leave_out, EP_ERR_NOT_FOUND,
         "has no zero points: qzeros is missing", "up_proj.qweight"},
        {"gptq-g128", "experts.2.up_proj.scales", one_row_less, EP_ERR_BAD_FILE,
         "shape is [2,135], allowed [2,136]", ".safetensors"},
        {"gptq-g128", "experts.2.up_proj.g_idx", swap_ends, EP_ERR_BAD_FILE,
         "groups do not follow each other", "desc_act"},
        {"gptq-g128", "experts.2.up_proj.g_idx", one_more_of_group_1, EP_ERR_BAD_FILE,
         "a group has more columns than the others at element 255", ".safetensors"},
        {"gptq-g128", "experts.2.up_proj.g_idx", all_ones, EP_ERR_BAD_FILE,
         "a group does not exist at element 0", ".safetensors"},
        {"gptq-order", "experts.2.up_proj.g_idx", swap_ends, EP_ERR_UNIMPLEMENTED,
         "gate and up have their columns in groups in unlike orders", ".safetensors"},
        {"gptq-order", "experts.2.down_proj.g_idx", leave_out, EP_ERR_NOT_FOUND,
         "has no order of columns, which the config says it has", "g_idx is missing"},
        {"ct-int4-g32-order", "experts.2.down_proj.weight_g_idx", leave_out, EP_ERR_NOT_FOUND,
         "has no order of columns, which the config says it has", "weight_g_idx is missing"},
        {"gptq-int8-asym", "experts.2.up_proj.qzeros", all_ones, EP_ERR_BAD_FILE,
         "a zero point is beyond the range of codes", ".safetensors"},
        {"awq-g64", "experts.2.w3.qweight", one_row_less, EP_ERR_BAD_FILE,
         "shape is [72,7], allowed [72,8]", ".safetensors"},
        {"mixer-relu2", "experts.2.up_proj.weight", leave_out, EP_ERR_NOT_FOUND,
         "experts.2.up_proj.weight: is in none", "2 files"},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        ep_expert_data data = {0};
        ep_error error;
        ep_format_model *model = ep_format_model_make(case_of(cases[i].form), 3);
        ep_format_tensor *tensor = ep_format_model_find(model, cases[i].tensor);
        cr_assert_not_null(tensor, "%s %s", cases[i].form, cases[i].tensor);
        cases[i].damage(tensor);
        ep_checkpoint *checkpoint = open_written(model);
        ep_err err = ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, 2, &data, &error);
        cr_expect_eq(err, cases[i].code, "%s %s: %s %s", cases[i].form, cases[i].tensor,
                     ep_err_name(err), err == EP_OK ? "" : error.text);
        if (err != EP_OK) {
            cr_expect(strstr(error.text, cases[i].text) != NULL &&
                          strstr(error.text, cases[i].also) != NULL,
                      "%s %s: %s", cases[i].form, cases[i].tensor, error.text);
            if (cases[i].damage != leave_out) { /* what is in no file has none */
                expect_place(error.text, cases[i].tensor);
            }
            cr_expect_eq(error.expert, 2);
        }
        ep_expert_data_free(&data);
        if (strstr(cases[i].tensor, "experts.2.") != NULL) { /* the others are whole */
            EXPECT_OK(ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, 1, &data, &error),
                      error);
            ep_expert_data_free(&data);
        }
        ep_checkpoint_close(checkpoint);
        ep_format_model_free(model);
    }
}

/* The writer gives it a number that no type has. */
static void unknown_type(ep_format_tensor *t)
{
    snprintf(t->dtype, sizeof(t->dtype), "Q9_X");
}

/* Of 20 bytes for 32 columns instead of 18. */
static void to_q4_1(ep_format_tensor *t)
{
    uint8_t *data = calloc(1, t->bytes / 18 * 20);
    memcpy(data, t->data, t->bytes);
    free(t->data);
    t->data = data;
    t->bytes = t->bytes / 18 * 20;
    snprintf(t->dtype, sizeof(t->dtype), "Q4_1");
}

/* Expert 2's first d, of f16, becomes infinite. */
static void one_infinite_d(ep_format_tensor *t)
{
    memcpy(t->data + 2 * t->bytes / t->dims[0], "\x00\x7c", 2);
}

static void one_infinite_dmin(ep_format_tensor *t)
{
    memcpy(t->data + 2 * t->bytes / t->dims[0] + 2, "\x00\xfc", 2);
}

static void last_infinite_d(ep_format_tensor *t)
{
    memcpy(t->data + t->bytes - 2, "\x00\x7e", 2);
}

static void e8m0_nan(ep_format_tensor *t)
{
    t->data[2 * t->bytes / t->dims[0] + 17] = 0xff;
}

static void behind_all(ep_format_tensor *t)
{
    t->dims[0] = 4000;
}

Test(formats, what_is_wrong_in_gguf_is_refused_with_file_tensor_and_reason)
{
    static const struct {
        const char *form;
        const char *tensor;
        void (*damage)(ep_format_tensor *t);
        uint32_t expert;
        ep_err code;
        const char *text;
    } cases[] = {
        {"gguf-q4_0", "ffn_up_exps.weight", to_q4_1, 2, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_up_exps.weight: dtype is Q4_1, allowed BF16, F16, F32, "
         "Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4"},
        {"gguf-q4_0", "ffn_up_exps.weight", unknown_type, 2, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_up_exps.weight: type is 99, which this build does not know"},
        {"gguf-q4_0", "ffn_down_exps.weight", behind_all, 2, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_down_exps.weight: data at "},
        {"gguf-q4_0", "ffn_down_exps.weight", one_expert_less, 2, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_down_exps.weight: shape is [3,96,64], allowed [4,96,64]"},
        {"gguf-q4_0", "ffn_gate_exps.weight", leave_out, 2, EP_ERR_NOT_FOUND,
         "tensor blk.1.ffn_gate_exps.weight: is in none of the checkpoint's 1 files"},
        {"gguf-q4_0", "ffn_down_exps.weight", leave_out, 2, EP_ERR_NOT_FOUND,
         "tensor blk.1.ffn_down_exps.weight: is in none"},
        {"gguf-q4_0", "ffn_up_exps.weight", leave_out, 2, EP_ERR_UNIMPLEMENTED,
         "no expert tensors found"},
        {"gguf-q4_0", "ffn_up_exps.weight", one_infinite_d, 2, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_up_exps.weight: a scale is not finite in block 384"},
        {"gguf-q4_k-q6_k", "ffn_gate_exps.weight", one_infinite_dmin, 2, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_gate_exps.weight: a scale is not finite in block 512"},
        {"gguf-q4_k-q6_k", "ffn_down_exps.weight", last_infinite_d, 3, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_down_exps.weight: a scale is not finite in block 1023"},
        {"gguf-mxfp4", "ffn_down_exps.weight", e8m0_nan, 2, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_down_exps.weight: a scale is not finite in block 385"},
        {"gguf-mxfp4", "ffn_up_exps.bias", one_row_less, 2, EP_ERR_BAD_FILE,
         "model.gguf: tensor blk.1.ffn_up_exps.bias: shape is [4,95], allowed [4,96]"},
        {"gguf-f16", "ffn_down_exps.weight", swap_sides, 2, EP_ERR_BAD_FILE,
         "model-00002-of-00002.gguf: tensor blk.1.ffn_down_exps.weight: shape is [4,30,50], "
         "allowed [4,50,30]"},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        ep_expert_data data = {0};
        ep_error error = {0};
        ep_checkpoint *checkpoint = NULL;
        ep_format_model *model = ep_format_model_make(case_of(cases[i].form), 3);
        ep_format_tensor *tensor = ep_format_model_find(model, cases[i].tensor);
        cr_assert_not_null(tensor, "%s %s", cases[i].form, cases[i].tensor);
        cases[i].damage(tensor);
        ASSERT_OK(ep_format_model_write(model, dir, &error), error);
        ep_err err = ep_checkpoint_open(dir, &checkpoint, &error);
        if (err == EP_OK) {
            err = ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, cases[i].expert, &data,
                                            &error);
        }
        cr_expect_eq(err, cases[i].code, "%s %s: %s %s", cases[i].form, cases[i].tensor,
                     ep_err_name(err), error.text);
        cr_expect(strstr(error.text, cases[i].text) != NULL, "%s %s: %s", cases[i].form,
                  cases[i].tensor, error.text);
        ep_expert_data_free(&data);
        ep_checkpoint_close(checkpoint);
        ep_format_model_free(model);
    }
}

Test(formats, a_part_of_gguf_is_not_taken_for_the_whole)
{
    char from[EP_FIXTURE_PATH_BYTES + 64], to[EP_FIXTURE_PATH_BYTES + 64];
    ep_error error = {0};
    ep_checkpoint *checkpoint = NULL;
    ep_format_model *model = ep_format_model_make(case_of("gguf-f16"), 3);
    ASSERT_OK(ep_format_model_write(model, dir, &error), error);
    snprintf(from, sizeof(from), "%s/model-00001-of-00002.gguf", dir);
    snprintf(to, sizeof(to), "%s/model.gguf", dir);
    cr_assert_eq(rename(from, to), 0);
    EXPECT_FAILS(ep_checkpoint_open(to, &checkpoint, &error), EP_ERR_BAD_FILE, error,
                 "model.gguf: split.count is 2, allowed 1");
    ep_checkpoint_close(checkpoint);
    ep_format_model_free(model);
}

/* A tensor of that name beside all the others: opening, or reading expert 2, is refused by it. */
static void expect_unread(const ep_format_case *form, const char *name)
{
    ep_expert_data data = {0};
    ep_error error = {0};
    ep_checkpoint *checkpoint = NULL;
    ep_format_model *model = ep_format_model_make(form, 3);
    ep_format_tensor *tensor = ep_format_model_room(model);
    *tensor = (ep_format_tensor){
        .dtype = "BF16", .dims = {1}, .rank = 1, .bytes = 2, .data = calloc(1, 2)};
    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    ASSERT_OK(ep_format_model_write(model, dir, &error), error);
    ep_err err = ep_checkpoint_open(dir, &checkpoint, &error);
    if (err == EP_OK) {
        err = ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, 2, &data, &error);
    }
    cr_expect_eq(err, EP_ERR_UNIMPLEMENTED, "%s: %s: %s", form->name, name, error.text);
    cr_expect(err == EP_OK || strstr(error.text, name) != NULL, "%s: %s: %s", form->name, name,
              error.text);
    ep_expert_data_free(&data);
    ep_checkpoint_close(checkpoint);
    ep_format_model_free(model);
}

Test(formats, experts_that_are_called_otherwise_are_not_passed_over)
{
    expect_unread(case_of("n1-bf16"), "model.layers.0.block_sparse_moe.experts.0.w1.weight");
    expect_unread(case_of("n1-bf16"), "model.layers.0.mlp.experts.gate_up_proj");
    expect_unread(case_of("gguf-q4_0"), "blk.0.ffn_gate_up_exps.weight");
}

Test(formats, a_tensor_beside_an_experts_values_that_is_not_read_is_refused_by_name)
{
    static const char *const ends[] = {".codebook", "_codebook"};
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        const ep_format_case *form = &ep_format_cases[i];
        ep_format_model *model = ep_format_model_make(form, 3);
        const bool is_stacked = form->names >= EP_FORMAT_N3;
        int count = 0;
        for (size_t t = 0; t < model->tensors_count; t++) {
            char name[sizeof(model->tensors[t].name)];
            snprintf(name, sizeof(name), "%s", model->tensors[t].name);
            char *dot = strrchr(name, '.');
            if (is_stacked) {
                const bool is_linear = strcmp(dot, ".weight") == 0 || strcmp(dot, ".bias") == 0;
                char *end = is_linear ? dot : dot + strlen(dot);
                for (size_t e = 0; e < EP_ARRAY_COUNT(ends); e++, count++) {
                    snprintf(end, sizeof(name) - (size_t)(end - name), "%s", ends[e]);
                    expect_unread(form, name);
                }
            } else if (strstr(name, "experts.2.") != NULL &&
                       (strncmp(dot, ".weight", 7) == 0 || strcmp(dot, ".qweight") == 0)) {
                snprintf(dot, sizeof(name) - (size_t)(dot - name), "%s", ends[0]);
                expect_unread(form, name);
                char *word = strstr(name, "experts.2.") + strlen("experts.2.");
                snprintf(word, sizeof(name) - (size_t)(word - name), "codebook");
                expect_unread(form, name);
                count++;
            }
        }
        cr_expect_geq(count, 2, "%s: %d", form->name, count);
        ep_format_model_free(model);
    }
}

Test(formats, an_index_that_leads_out_of_the_directory_is_refused)
{
    char path[EP_FIXTURE_PATH_BYTES + 64];
    ep_error error;
    ep_checkpoint *checkpoint = NULL;
    ep_format_model *model = ep_format_model_make(case_of("n7-mxfp4"), 3);
    cr_assert_eq(ep_format_model_write(model, dir, &error), EP_OK);
    snprintf(path, sizeof(path), "%s/model.safetensors.index.json", dir);
    FILE *file = fopen(path, "we");
    fprintf(file, "{\"weight_map\":{\"%s\":\"../model-00001-of-00002.safetensors\"}}",
            model->tensors[0].name);
    fclose(file);
    ASSERT_FAILS(ep_checkpoint_open(dir, &checkpoint, &error), EP_ERR_BAD_FILE, error,
                 "../model-00001");
    ep_format_model_free(model);
}

/* Every activation that the matrices of a format's expert allow, in its best kernels: within the
 * bound of double precision. */
static void expect_activations_near(ep_backend *backend, ep_numerics numerics,
                                    const ep_format_case *form, const ep_expert_source *loaded)
{
    const ep_ffn_family family = ep_numerics_expert_family(numerics, form->format, form->down);
    const size_t count = (size_t)ROWS * form->hidden;
    float *x = malloc(count * sizeof(*x));
    float *out = malloc(count * sizeof(*out));
    uint64_t state = form->hidden;
    for (size_t k = 0; k < count; k++) {
        x[k] = (float)((int)(ep_splitmix64(&state) % 257) - 128) / 64.0f;
    }
    for (unsigned a = 0; a < EP_ACT_COUNT; a++) {
        ep_expert_source source = *loaded;
        source.activation = (ep_activation)a;
        source.numbers = (ep_activation_numbers){.alpha = 1.7f, .beta = 1.25f, .limit = 2.5f};
        if (ep_activation_has_gate(source.activation) && source.gate == NULL) {
            continue;
        }
        if (!ep_activation_has_gate(source.activation)) {
            source.gate = source.gate_scales = source.gate_bias = NULL;
        }
        source.shared_gate = NULL;
        run_rows(backend, &source, x, out);
        /* relu squared doubles errors */
        expect_near(form, &source, family, 3.0 * share_of(form->format, family), x, out);
    }
    free(x);
    free(out);
}

static void expect_all_activations_near(ep_numerics numerics)
{
    const ep_backend_config config = {.numerics = numerics, .threads = 2};
    bool has_gated[EP_WEIGHTS_COUNT] = {false};
    ep_error error;
    ep_backend *backend;
    ASSERT_OK(ep_backend_by_name("cpu")->open(&config, &backend, &error), error);
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        ep_format_model *model = ep_format_model_make(&ep_format_cases[i], 7 + i);
        has_gated[ep_format_cases[i].format] |= model->experts[2].gate != NULL;
        expect_activations_near(backend, numerics, &ep_format_cases[i], &model->experts[2]);
        ep_format_model_free(model);
    }
    for (unsigned f = EP_WEIGHTS_NONE + 1; f < EP_WEIGHTS_COUNT; f++) {
        cr_expect(has_gated[f], "no expert of %s has a gate",
                  ep_weight_format_name((ep_weight_format)f));
    }
    backend->ops->close(backend);
}

Test(formats, every_format_and_activation_is_near_double)
{
    expect_all_activations_near(EP_NUMERICS_PORTABLE);
}

Test(formats, every_format_and_activation_is_near_double_in_bf16dp)
{
    expect_all_activations_near(EP_NUMERICS_BF16DP);
}

Test(formats, every_format_and_activation_is_near_double_in_bf16odd)
{
    expect_all_activations_near(EP_NUMERICS_BF16ODD);
}
