/* SPDX-License-Identifier: Apache-2.0 */
/* The dense part of the demo checkpoint against a plain forward pass in double, and what is
 * refused. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "dense/dense_model.h"
#include "cli/generate.h"
#include "model/model.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"

static ep_error error; /* of the last call */

#define DEMO EP_SOURCE_DIR "/deploy/demo-model/checkpoint"
enum { H = 128, HEADS = 4, KV = 2, D = 32, E = 16, LAYERS = 4, TOKENS = 6 };

/* ---- experts that need no service ---- */

typedef struct expert_log {
    uint32_t calls;
    uint32_t tokens;
    int32_t ids[LAYERS][TOKENS * 2];
    float scales[LAYERS][TOKENS * 2];
    float factor; /* the answer is this times the row, rounded */
    uint32_t fail_at;
} expert_log;

static ep_err answer(void *arg, const ep_layer_shape *shape, uint32_t tokens, const uint16_t *rows,
                     const int32_t *ids, const float *scales, uint16_t *out, ep_error *out_error)
{
    expert_log *log = arg;
    cr_assert(shape->hidden == H && shape->experts == E && shape->top_k == 2);
    if (++log->calls == log->fail_at) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "no expert today");
    }
    log->tokens = tokens;
    if (tokens <= TOKENS) {
        memcpy(log->ids[shape->layer], ids, tokens * 2 * sizeof(*ids));
        memcpy(log->scales[shape->layer], scales, tokens * 2 * sizeof(*scales));
    }
    for (size_t i = 0; i < (size_t)tokens * H; i++) {
        out[i] = ep_f32_to_bf16(ep_bf16_to_f32(rows[i]) * log->factor);
    }
    return EP_OK;
}

/* ---- the same in double ---- */

static double *load(const ep_checkpoint *checkpoint, const char *name, size_t count)
{
    uint16_t *bits = malloc(count * 2);
    double *values = malloc(count * sizeof(*values));
    ASSERT_OK(ep_checkpoint_read(checkpoint, name, bits, count * 2, &error), error);
    for (size_t i = 0; i < count; i++) {
        values[i] = ep_bf16_to_f32(bits[i]);
    }
    free(bits);
    return values;
}

static double *load_part(const ep_checkpoint *checkpoint, int layer, const char *part, size_t count)
{
    char name[128];
    snprintf(name, sizeof(name), "model.layers.%d.%s.weight", layer, part);
    return load(checkpoint, name, count);
}

static void multiply(const double *w, const double *x, size_t rows, size_t columns, double *y)
{
    for (size_t r = 0; r < rows; r++) {
        y[r] = 0.0;
        for (size_t c = 0; c < columns; c++) {
            y[r] += w[r * columns + c] * x[c];
        }
    }
}

static void norm(const double *x, const double *w, double *y)
{
    double squares = 0.0;
    for (size_t i = 0; i < H; i++) {
        squares += x[i] * x[i];
    }
    for (size_t i = 0; i < H; i++) {
        y[i] = x[i] / sqrt(squares / H + 1e-5) * w[i];
    }
}

static void rotate(double *x, size_t count, size_t position)
{
    for (size_t h = 0; h < count; h++) {
        for (size_t j = 0; j < D / 2; j++) {
            double angle = (double)position * pow(10000.0, -2.0 * (double)j / D);
            double a = x[h * D + j];
            double b = x[h * D + j + D / 2];
            x[h * D + j] = a * cos(angle) - b * sin(angle);
            x[h * D + j + D / 2] = b * cos(angle) + a * sin(angle);
        }
    }
}

static void attend(const double *q, double keys[][KV * D], double values[][KV * D], size_t position,
                   double *o)
{
    for (size_t h = 0; h < HEADS; h++) {
        double weight[TOKENS], total = 0.0;
        size_t column = h / (HEADS / KV) * D;
        for (size_t p = 0; p <= position; p++) {
            double dot = 0.0;
            for (size_t i = 0; i < D; i++) {
                dot += q[h * D + i] * keys[p][column + i];
            }
            weight[p] = exp(dot / sqrt(D));
            total += weight[p];
        }
        for (size_t i = 0; i < D; i++) {
            o[h * D + i] = 0.0;
            for (size_t p = 0; p <= position; p++) {
                o[h * D + i] += weight[p] / total * values[p][column + i];
            }
        }
    }
}

/* One layer over all tokens; the experts answer factor times the row. Keeps the router's best two
 * per token.
 */
static void plain_layer(const ep_checkpoint *checkpoint, int l, double x[][H], double factor,
                        int32_t *out_ids)
{
    static double keys[TOKENS][KV * D], values[TOKENS][KV * D];
    double *in_norm = load_part(checkpoint, l, "input_layernorm", H),
           *post = load_part(checkpoint, l, "post_attention_layernorm", H);
    double *wq = load_part(checkpoint, l, "self_attn.q_proj", H * H),
           *wo = load_part(checkpoint, l, "self_attn.o_proj", H * H);
    double *wk = load_part(checkpoint, l, "self_attn.k_proj", KV * D * H),
           *wv = load_part(checkpoint, l, "self_attn.v_proj", KV * D * H);
    double *router = load_part(checkpoint, l, "block_sparse_moe.gate", E * H);
    for (size_t t = 0; t < TOKENS; t++) {
        double y[H], q[H], o[H], logits[E];
        norm(x[t], in_norm, y);
        multiply(wq, y, H, H, q);
        multiply(wk, y, KV * D, H, keys[t]);
        multiply(wv, y, KV * D, H, values[t]);
        rotate(q, HEADS, t);
        rotate(keys[t], KV, t);
        attend(q, keys, values, t, o);
        multiply(wo, o, H, H, y);
        for (size_t i = 0; i < H; i++) {
            x[t][i] += y[i];
        }
        norm(x[t], post, y);
        multiply(router, y, E, H, logits);
        for (int32_t k = 0; k < 2; k++) {
            int32_t best = 0;
            for (int32_t e = 1; e < E; e++) {
                best = logits[e] > logits[best] ? e : best;
            }
            out_ids[t * 2 + (size_t)k] = best;
            logits[best] = -INFINITY;
        }
        for (size_t i = 0; i < H; i++) {
            x[t][i] += factor * y[i];
        }
    }
    double *all[] = {in_norm, post, wq, wo, wk, wv, router};
    for (size_t i = 0; i < 7; i++) {
        free(all[i]);
    }
}

Test(dense_model, agrees_with_a_plain_pass_in_double)
{
    static const uint8_t text[TOKENS] = "Unix f";
    static expert_log log = {.factor = 0.25f};
    static double x[TOKENS][H];
    int32_t ids[LAYERS][TOKENS * 2];
    float logits[256];
    double expected[256], y[H];
    ep_checkpoint *checkpoint;
    ep_dense_model *model;
    ASSERT_OK(ep_checkpoint_open(DEMO, &checkpoint, &error), error);
    double *embedding = load(checkpoint, "model.embed_tokens.weight", 256 * H);
    double *last = load(checkpoint, "model.norm.weight", H);
    double *head = load(checkpoint, "lm_head.weight", 256 * H);
    for (size_t t = 0; t < TOKENS; t++) {
        memcpy(x[t], embedding + text[t] * H, sizeof(x[t]));
    }
    for (int l = 0; l < LAYERS; l++) {
        plain_layer(checkpoint, l, x, 0.25, ids[l]);
    }
    norm(x[TOKENS - 1], last, y);
    multiply(head, y, 256, H, expected);

    ASSERT_OK(ep_dense_model_open(DEMO, &model, &error), error);
    cr_assert_str_eq(ep_dense_model_shape(model)->version, ep_checkpoint_info(checkpoint)->version);
    ASSERT_OK(ep_dense_model_forward(model, text, TOKENS, 0, answer, &log, logits, &error), error);
    /* rows travel as bf16: 8 bits of mantissa through four layers */
    for (size_t i = 0; i < 256; i++) {
        cr_assert_float_eq((double)logits[i], expected[i], 0.1, "logit %zu is %g, expected %g", i,
                           (double)logits[i], expected[i]);
    }
    for (int l = 0; l < LAYERS; l++) {
        cr_assert_arr_eq(log.ids[l], ids[l], sizeof(ids[l]), "layer %d chose other experts", l);
        for (size_t t = 0; t < TOKENS; t++) {
            cr_assert_float_eq(log.scales[l][2 * t] + log.scales[l][2 * t + 1], 1.0f, 1e-6);
            cr_assert_geq(log.scales[l][2 * t], log.scales[l][2 * t + 1]);
        }
    }
    free(embedding);
    free(last);
    free(head);
    ep_dense_model_close(model);
    ep_checkpoint_close(checkpoint);
}

Test(dense_model, a_batch_and_single_steps_give_the_same_bits)
{
    static const uint8_t text[] = "The file descriptor is";
    static expert_log log = {.factor = -0.5f};
    const uint32_t tokens = sizeof(text) - 1;
    float whole[256], steps[256];
    ep_dense_model *model;
    ASSERT_OK(ep_dense_model_open(DEMO, &model, &error), error);
    cr_assert_eq(ep_dense_model_forward(model, text, tokens, 0, answer, &log, whole, &error),
                 EP_OK);
    cr_assert_eq(log.calls, LAYERS);
    for (uint32_t t = 0; t < tokens; t++) {
        cr_assert_eq(ep_dense_model_forward(model, text + t, 1, t, answer, &log, steps, &error),
                     EP_OK);
    }
    cr_assert_arr_eq(whole, steps, sizeof(whole));
    ep_dense_model_close(model);
}

Test(dense_model, positions_are_checked_and_errors_of_experts_come_back)
{
    static const uint8_t text[300];
    static expert_log log = {.fail_at = 3};
    float logits[256];
    ep_dense_model *model;
    ASSERT_OK(ep_dense_model_open(DEMO, &model, &error), error);
    cr_assert_eq(ep_dense_model_forward(model, text, 0, 0, answer, &log, logits, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_dense_model_forward(model, text, 257, 0, answer, &log, logits, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(ep_dense_model_forward(model, text, 1, 256, answer, &log, logits, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text,
                     "1 tokens at position 256, allowed: at least 1, and positions 0..255");
    cr_assert_eq(ep_dense_model_forward(model, text, 2, 254, answer, &log, logits, &error),
                 EP_ERR_UNAVAILABLE);
    cr_assert_str_eq(error.text, "no expert today");
    cr_assert_eq(log.calls, 3);
    ep_dense_model_close(model);
}

Test(dense_model, prompt_and_bytes_must_fit)
{
    const ep_dense_shape shape = {.positions_max = 16};
    ep_cli_generate_request request = {.prompt = "12345678", .bytes = 8};
    char text[256];
    ep_cli_generate_check(&request, &shape, text, sizeof(text));
    cr_assert_str_eq(text, "");
    request.bytes = 9;
    ep_cli_generate_check(&request, &shape, text, sizeof(text));
    cr_assert_str_eq(text, "--prompt has 8 bytes and --bytes is 9, allowed: a prompt of at least 1 "
                           "byte, and 16 together");
    request.prompt = "";
    request.bytes = 1;
    ep_cli_generate_check(&request, &shape, text, sizeof(text));
    cr_assert_neq(text[0], '\0');
}

Test(dense_model, refuses_other_models_by_name)
{
    static const struct {
        ep_fixture_router router;
        ep_name_family names;
        uint32_t vocab;
        const char *text;
    } cases[] = {
        {EP_ROUTER_R1, EP_NAMES_N2, 0,
         "config.json: vocab_size is 0, allowed here: 256 (a byte-level model)"},
        {EP_ROUTER_R1, EP_NAMES_N2, 300,
         "config.json: vocab_size is 300, allowed here: 256 (a byte-level model)"},
        {EP_ROUTER_R1, EP_NAMES_N2, 256,
         "config.json: max_position_embeddings is 0, allowed here: 1..8192"},
        {EP_ROUTER_R2, EP_NAMES_N1, 256, "allowed here: mixtral"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char dir[EP_FIXTURE_PATH_BYTES];
        ep_fixture_config config = ep_fixture_default();
        ep_dense_model *model = NULL;
        ep_fixture_temp_dir(dir);
        config.router = cases[i].router;
        config.names = cases[i].names;
        config.vocab = cases[i].vocab;
        config.heads = 2;
        config.kv_heads = 1;
        config.head_dim = 16;
        ASSERT_OK(ep_fixture_write(&config, dir, &error), error);
        cr_assert_eq(ep_dense_model_open(dir, &model, &error), EP_ERR_UNIMPLEMENTED, "case %zu: %s",
                     i, error.text);
        cr_assert_null(model);
        cr_assert_not_null(strstr(error.text, cases[i].text), "case %zu: %s", i, error.text);
        ep_fixture_remove(dir);
    }
    ep_dense_model *model = NULL;
    cr_assert_eq(ep_dense_model_open("/nonexistent", &model, NULL), EP_ERR_NOT_FOUND);
    ep_dense_model_close(NULL);
}
