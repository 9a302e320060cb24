/* SPDX-License-Identifier: Apache-2.0 */
/* Shared experts as the name families call them, often of another width and format than the routed
 * ones: what is read is what was written. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/model.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/format_fixture.h"

static char dir[EP_FIXTURE_PATH_BYTES];

static void make_dir(void)
{
    ep_fixture_temp_dir(dir);
}

static void remove_dir(void)
{
    ep_fixture_remove(dir);
}

TestSuite(shared, .init = make_dir, .fini = remove_dir);

#define SHARED(inner) "\"shared_expert_intermediate_size\":" #inner ","
/* clang-format off */
#define PROJECTIONS {"gate_proj", "up_proj", "down_proj"}
#define NUMBERED {"w1", "w3", "w2"}
#define FUSED {"input_linear", "input_linear", "output_linear"} /* gate and up in one tensor */
/* clang-format on */

typedef struct shared_case {
    ep_format_case routed;
    ep_format_case shared; /* names of N1; expert 0 of it is taken */
    const char *stem;
    const char *words[3];
    /* e8m0 under this name, one for each 128 x 128 of f8_block or 32 x 32 of mxfp8; NULL: as the
     * format has them */
    const char *scales;
    const char *gate; /* [1,H] of bf16; NULL none */
} shared_case;

/* clang-format off */
static const shared_case cases[] = {
    {{"qwen3.5", EP_FORMAT_N3, EP_WEIGHTS_BF16, 48, 20, SHARED(36), EP_ACT_SILU, {0, 0, 0}, false,
      false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_BF16, 48, 36, "", EP_ACT_SILU, {0, 0, 0}, false, false,
      EP_FORMAT_AS_USUAL},
     "model.language_model.layers.1.mlp.shared_expert", PROJECTIONS, NULL,
     "model.language_model.layers.1.mlp.shared_expert_gate.weight"},
    {{"kimi k2 thinking", EP_FORMAT_N1_DEEP, EP_WEIGHTS_INT4, 96, 64, SHARED(128), EP_ACT_SILU,
      {0, 0, 0}, false, false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_BF16, 96, 128, "", EP_ACT_SILU, {0, 0, 0}, false, false,
      EP_FORMAT_AS_USUAL},
     "language_model.model.layers.1.mlp.shared_experts", PROJECTIONS, NULL, NULL},
    {{"deepseek v4", EP_FORMAT_N4, EP_WEIGHTS_MXFP4, 160, 96, SHARED(130) "\"swiglu_limit\":0.5,",
      EP_ACT_SWIGLU_LIMIT, {0, 0, 0.5f}, false, false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_F8_BLOCK, 160, 130, "", EP_ACT_SWIGLU_LIMIT, {0, 0, 0.5f}, false,
      false, EP_FORMAT_AS_USUAL},
     "layers.1.ffn.shared_experts", NUMBERED, "scale", NULL},
    {{"deepseek v4.1", EP_FORMAT_N4, EP_WEIGHTS_MXFP4, 160, 96, SHARED(130) "\"swiglu_limit\":0.5,",
      EP_ACT_SWIGLU_LIMIT, {0, 0, 0.5f}, false, false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_MXFP8, 160, 130, "", EP_ACT_SWIGLU_LIMIT, {0, 0, 0.5f}, false,
      false, EP_FORMAT_AS_USUAL},
     "layers.1.ffn.shared_experts", NUMBERED, "scale", NULL},
    {{"minimax m3", EP_FORMAT_N2, EP_WEIGHTS_MXFP8, 96, 64,
      SHARED(65) "\"swiglu_limit\":0.5,\"swiglu_alpha\":1.702,", EP_ACT_SWIGLU_OAI,
      {1.702f, 1, 0.5f}, false, false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_MXFP8, 96, 65, "", EP_ACT_SWIGLU_OAI, {1.702f, 1, 0.5f}, false,
      false, EP_FORMAT_AS_USUAL},
     "model.layers.1.block_sparse_moe.shared_experts", PROJECTIONS, NULL, NULL},
    {{"mistral", EP_FORMAT_N2M, EP_WEIGHTS_F8_BLOCK, 130, 64, SHARED(40), EP_ACT_SILU, {0, 0, 0},
      false, false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_F8_BLOCK, 130, 40, "", EP_ACT_SILU, {0, 0, 0}, false, false,
      EP_FORMAT_AS_USUAL},
     "layers.1.shared_experts", NUMBERED, NULL, NULL},
    {{"llama 4", EP_FORMAT_N8, EP_WEIGHTS_BF16, 40, 72, SHARED(72), EP_ACT_SILU, {0, 0, 0}, false,
      false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_BF16, 40, 72, "", EP_ACT_SILU, {0, 0, 0}, false, false,
      EP_FORMAT_AS_USUAL},
     "language_model.model.layers.1.feed_forward.shared_expert", PROJECTIONS, NULL, NULL},
    {{"granite 4", EP_FORMAT_N9, EP_WEIGHTS_BF16, 40, 24,
      "\"model_type\":\"granitemoehybrid\",\"shared_intermediate_size\":56,", EP_ACT_SILU,
      {0, 0, 0}, false, false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_BF16, 40, 56, "", EP_ACT_SILU, {0, 0, 0}, false, false,
      EP_FORMAT_AS_USUAL},
     "model.language_model.layers.1.shared_mlp", FUSED, NULL, NULL},
    {{"step 3.5", EP_FORMAT_N11, EP_WEIGHTS_BF16, 40, 24,
      SHARED(32) "\"swiglu_limits\":[0,0.25],\"swiglu_limits_shared\":[0,0.75],",
      EP_ACT_SWIGLU_STEP, {0, 0, 0.25f}, false, false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_BF16, 40, 32, "", EP_ACT_SWIGLU_STEP, {0, 0, 0.75f}, false,
      false, EP_FORMAT_AS_USUAL},
     "model.language_model.layers.1.share_expert", PROJECTIONS, NULL, NULL},
    {{"w8a8", EP_FORMAT_N1, EP_WEIGHTS_W8A8, 96, 50, SHARED(70), EP_ACT_SILU, {0, 0, 0}, false,
      false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_W8A8, 96, 70, "", EP_ACT_SILU, {0, 0, 0}, false, false,
      EP_FORMAT_AS_USUAL},
     "model.layers.1.mlp.shared_experts", PROJECTIONS, NULL, NULL},
    {{"nemotron 3", EP_FORMAT_MIXER, EP_WEIGHTS_BF16, 64, 40,
      SHARED(80) "\"mlp_hidden_act\":\"relu2\",", EP_ACT_RELU2_NO_GATE, {0, 0, 0}, false,
      false, EP_FORMAT_AS_USUAL},
     {"", EP_FORMAT_N1, EP_WEIGHTS_BF16, 64, 80, "", EP_ACT_RELU2_NO_GATE, {0, 0, 0}, false, false,
      EP_FORMAT_AS_USUAL},
     "backbone.layers.1.mixer.shared_experts", PROJECTIONS, NULL, NULL},
    /* clang-format on */
};

/* Scales of f32 become powers of two, in the expert and, one byte each, in the file. */
static void to_e8m0(ep_format_tensor *t, float *scales, const char *part, size_t stem_length)
{
    t->bytes /= 4;
    for (size_t i = 0; i < t->bytes; i++) {
        t->data[i] = (uint8_t)(117 + i % 5);
        const uint32_t bits = (uint32_t)t->data[i] << 23;
        memcpy(&scales[i], &bits, sizeof(bits));
    }
    snprintf(t->dtype, sizeof(t->dtype), "F8_E8M0");
    snprintf(t->name + stem_length, sizeof(t->name) - stem_length, "%s", part);
}

/* Rows of scales that stand for 32 rows of weights: in the expert each repeats the first of its 32,
 * in the file it stands once. */
static void to_square_blocks(ep_format_tensor *t, uint8_t *scales, const char *part,
                             size_t stem_length)
{
    const size_t columns = t->dims[1];
    for (size_t n = 0; n < t->dims[0]; n++) {
        memmove(scales + n * columns, scales + n / 32 * 32 * columns, columns);
        memcpy(t->data + n / 32 * columns, scales + n * columns, columns);
    }
    t->dims[0] = (t->dims[0] + 31) / 32;
    t->bytes = t->dims[0] * columns;
    snprintf(t->name + stem_length, sizeof(t->name) - stem_length, "%s", part);
}

/* up's rows go behind gate's, which has the name already. */
static bool append_up(ep_format_model *model, const shared_case *c, int matrix,
                      const ep_format_tensor *up)
{
    if (matrix != 1 || strcmp(c->words[0], c->words[1]) != 0) {
        return false;
    }
    ep_format_tensor *gate = &model->tensors[model->tensors_count - 1];
    gate->data = realloc(gate->data, gate->bytes + up->bytes);
    memcpy(gate->data + gate->bytes, up->data, up->bytes);
    gate->bytes += up->bytes;
    gate->dims[0] += up->dims[0];
    return true;
}

/* Tensors of `from`'s expert 0 go to the model under their shared names. */
static void add_shared(ep_format_model *model, ep_format_model *from, const shared_case *c)
{
    static const char *const words[] = PROJECTIONS;
    for (size_t i = 0; i < from->tensors_count; i++) {
        ep_format_tensor *t = &from->tensors[i];
        char stem[160];
        for (int m = 0; m < 3; m++) {
            const int length =
                snprintf(stem, sizeof(stem), "model.layers.1.mlp.experts.0.%s.", words[m]);
            if (strncmp(t->name, stem, (size_t)length) == 0 && !append_up(model, c, m, t)) {
                ep_format_tensor *to = ep_format_model_room(model);
                char name[sizeof(to->name)];
                *to = *t;
                t->data = NULL; /* it is the model's */
                const int at = snprintf(name, sizeof(name), "%s.%s.", c->stem, c->words[m]);
                snprintf(name + at, sizeof(name) - (size_t)at, "%s", t->name + length);
                memcpy(to->name, name, sizeof(name));
                if (c->scales != NULL && strcmp(to->dtype, "F32") == 0) {
                    to_e8m0(to, (float *)(void *)from->parts[0][3 * m + 1], c->scales, (size_t)at);
                } else if (c->scales != NULL && strstr(t->name + length, "scale") != NULL) {
                    to_square_blocks(to, from->parts[0][3 * m + 1], c->scales, (size_t)at);
                }
                break;
            }
        }
    }
}

static void add_gate(ep_format_model *model, const shared_case *c, uint16_t *gate)
{
    if (c->gate != NULL) {
        ep_format_tensor *t = ep_format_model_room(model);
        *t = (ep_format_tensor){.dtype = "BF16",
                                .dims = {1, c->routed.hidden},
                                .rank = 2,
                                .bytes = 2 * (size_t)c->routed.hidden};
        snprintf(t->name, sizeof(t->name), "%s", c->gate);
        for (uint32_t i = 0; i < c->routed.hidden; i++) {
            gate[i] = (uint16_t)(0x3f00u + 3 * i);
        }
        t->data = malloc(t->bytes);
        memcpy(t->data, gate, t->bytes);
    }
}

static void expect_part(const char *name, const char *what, const void *got, const void *want,
                        size_t bytes)
{
    cr_assert_eq(got == NULL, want == NULL, "%s: %s is %s", name, what,
                 got == NULL ? "missing" : "there");
    cr_expect(want == NULL || memcmp(got, want, bytes) == 0, "%s: %s differs", name, what);
}

static void expect_shared(const shared_case *c, const ep_expert_source *got,
                          const ep_expert_source *want, const uint16_t *gate)
{
    const ep_format_case *form = &c->shared;
    const char *name = c->routed.name;
    const size_t wide = form->inner * ep_weight_row_bytes(form->format, form->hidden);
    const size_t scales = ep_weight_scales_bytes(form->format, form->inner, form->hidden);
    cr_assert(got->hidden == form->hidden && got->inner == form->inner, "%s: %u x %u", name,
              got->hidden, got->inner);
    cr_assert_eq(got->format, form->format, "%s is %s", name, ep_weight_format_name(got->format));
    cr_expect_eq(got->activation, form->activation, "%s: %s", name,
                 ep_activation_name(got->activation));
    cr_expect_eq(got->numbers.limit, form->numbers.limit, "%s: limit %g", name,
                 (double)got->numbers.limit);
    expect_part(name, "gate", got->gate, want->gate, wide);
    expect_part(name, "up", got->up, want->up, wide);
    expect_part(name, "down", got->down, want->down,
                form->hidden * ep_weight_row_bytes(form->format, form->inner));
    expect_part(name, "gate scales", got->gate_scales, want->gate_scales, scales);
    expect_part(name, "up scales", got->up_scales, want->up_scales, scales);
    expect_part(name, "down scales", got->down_scales, want->down_scales,
                ep_weight_scales_bytes(form->format, form->hidden, form->inner));
    expect_part(name, "shared gate", got->shared_gate, c->gate != NULL ? gate : NULL,
                2 * (size_t)form->hidden);
}

static void check(const shared_case *c, uint64_t seed)
{
    uint16_t gate[256];
    ep_error error;
    ep_checkpoint *checkpoint = NULL;
    ep_expert_data data = {0};
    ep_format_model *model = ep_format_model_make(&c->routed, seed);
    ep_format_model *from = ep_format_model_make(&c->shared, seed + 1);
    add_shared(model, from, c);
    add_gate(model, c, gate);
    ASSERT_OK(ep_format_model_write(model, dir, &error), error);
    cr_assert_eq(ep_checkpoint_open(dir, &checkpoint, &error), EP_OK, "%s: %s", c->routed.name,
                 error.text);
    cr_assert_eq(ep_checkpoint_info(checkpoint)->moe_layers[0].shared_experts, 1, "%s",
                 c->routed.name);
    for (uint32_t e = 0; e < EP_FORMAT_EXPERTS; e++) { /* the routed ones are there as before */
        const ep_err err = ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, e, &data, &error);
        cr_assert_eq(err, EP_OK, "%s: %s", c->routed.name, error.text);
        cr_expect_eq(data.source.format, c->routed.format, "%s", c->routed.name);
        ep_expert_data_free(&data);
    }
    const ep_err err =
        ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, EP_FORMAT_EXPERTS, &data, &error);
    cr_assert_eq(err, EP_OK, "%s: %s", c->routed.name, error.text);
    expect_shared(c, &data.source, &from->experts[0], gate);
    ep_expert_data_free(&data);
    ep_checkpoint_close(checkpoint);
    ep_format_model_free(from);
    ep_format_model_free(model);
}

Test(shared, experts_of_every_family_are_read_in_their_own_format)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        check(&cases[i], 40 + i);
    }
}

/* Of Granite 4's shared expert, H 40 and I 56: the tensor named "input_linear" plus part gets this
 * type and these dimensions. */
typedef struct fused_case {
    const char *part;
    const char *dtype;
    uint32_t rows;
    uint32_t columns; /* 0: a vector */
    ep_err err;
    const char *text;
} fused_case;

/* The tensor of that name, a new one if there is none, with bytes that count up. */
static void set_tensor(ep_format_model *model, const char *name, const fused_case *c)
{
    ep_format_tensor *t = ep_format_model_find(model, name);
    const bool is_new = t == NULL;
    t = is_new ? ep_format_model_room(model) : t;
    if (!is_new) {
        free(t->data);
    }
    *t = (ep_format_tensor){.dims = {c->rows, c->columns}, .rank = c->columns == 0 ? 1 : 2};
    snprintf(t->name, sizeof(t->name), "%s", name);
    snprintf(t->dtype, sizeof(t->dtype), "%s", c->dtype);
    t->bytes = (size_t)c->rows * (c->columns == 0 ? 1 : c->columns) *
               (strcmp(c->dtype, "BF16") == 0 ? 2 : 1);
    t->data = malloc(t->bytes);
    for (size_t i = 0; i < t->bytes; i++) {
        t->data[i] = (uint8_t)(i % 100);
    }
}

Test(shared, a_gate_and_up_in_one_tensor_has_the_rows_of_both)
{
    static const fused_case fused[] = {
        {"weight", "BF16", 56, 40, EP_ERR_BAD_FILE, "shape is [56,40], allowed [112,40]"},
        {"weight", "F8_E4M3", 56, 40, EP_ERR_BAD_FILE, "dtype is F8_E4M3, allowed"},
        {"weight", "F8_E4M3", 112, 40, EP_ERR_BAD_FILE, "dtype is F8_E4M3, allowed"},
        {"bias", "BF16", 56, 0, EP_ERR_BAD_FILE, "shape is [56], allowed [112]"},
        {"bias", "BF16", 112, 0, EP_OK, ""},
        {"weight_scale", "BF16", 112, 1, EP_ERR_UNIMPLEMENTED,
         "input_linear.weight_scale: belongs to an expert"},
    };
    static const char stem[] = "model.language_model.layers.1.shared_mlp.input_linear";
    const shared_case *granite = &cases[0];
    while (strcmp(granite->routed.name, "granite 4") != 0) {
        granite++;
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(fused); i++) {
        char name[160];
        ep_error error;
        ep_checkpoint *checkpoint = NULL;
        ep_expert_data data = {0};
        ep_format_model *model = ep_format_model_make(&granite->routed, 70);
        ep_format_model *from = ep_format_model_make(&granite->shared, 71);
        add_shared(model, from, granite);
        snprintf(name, sizeof(name), "%s.%s", stem, fused[i].part);
        set_tensor(model, name, &fused[i]);
        if (strcmp(fused[i].part, "bias") == 0) {
            set_tensor(model, "model.language_model.layers.1.shared_mlp.output_linear.bias",
                       &(fused_case){.dtype = "BF16", .rows = 40});
        }
        if (strcmp(fused[i].dtype, "F8_E4M3") == 0) {
            snprintf(name, sizeof(name), "%s.weight_scale", stem);
            set_tensor(model, name,
                       &(fused_case){.dtype = "BF16", .rows = fused[i].rows, .columns = 1});
        }
        ASSERT_OK(ep_format_model_write(model, dir, &error), error);
        cr_assert_eq(ep_checkpoint_open(dir, &checkpoint, &error), EP_OK, "%zu: %s", i, error.text);
        const ep_err err = ep_checkpoint_read_expert(checkpoint, EP_FORMAT_LAYER, EP_FORMAT_EXPERTS,
                                                     &data, &error);
        cr_expect_eq(err, fused[i].err, "%zu: %s %s", i, ep_err_name(err),
                     err == EP_OK ? "" : error.text);
        cr_expect(err == EP_OK || strstr(error.text, fused[i].text) != NULL, "%zu: %s", i,
                  error.text);
        if (err == EP_OK) {
            const uint8_t *bias = ep_format_model_find(model, "input_linear.bias")->data;
            expect_part("granite 4", "gate bias", data.source.gate_bias, bias, 56 * 2);
            expect_part("granite 4", "up bias", data.source.up_bias, bias + 56 * 2, 56 * 2);
        }
        ep_expert_data_free(&data);
        ep_checkpoint_close(checkpoint);
        ep_format_model_free(from);
        ep_format_model_free(model);
    }
}
