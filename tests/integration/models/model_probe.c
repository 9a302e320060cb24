/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this build makes of a checkpoint, for a test in another language. A request is a line,
 * perhaps with bytes behind it; an answer is a line of JSON, perhaps with bytes behind it;
 * {"error": ...} where the request fails.
 *     open DIR
 *         -> {"model_type", "router", ..., "layers": [{"layer", "hidden", "experts", ...}]}
 *     rows LAYER INDEX T  x [T,H]
 *         -> {"columns": H}  y [T,H]                     expert INDEX of the layer on x, f32
 *     gate LAYER T N  logits [T,N], token ids [T] i32
 *         -> {"columns": K}  ids [T,K] i32, weights [T,K] f32
 */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/expert_ffn.h"
#include "model/model.h"

#define LINE_BYTES 4096

static void answer(json_t *object)
{
    EP_ASSERT(object != NULL && json_dumpf(object, stdout, JSON_COMPACT) == 0);
    putchar('\n');
    json_decref(object);
}

static void answer_error(ep_err err, const ep_error *error)
{
    answer(json_pack("{s:s, s:s}", "error", error->text, "code", ep_err_name(err)));
}

static void *allocate(size_t count, size_t bytes)
{
    void *memory = calloc(count + 1, bytes);
    EP_ASSERT(memory != NULL);
    return memory;
}

static void get(void *out, size_t count, size_t bytes)
{
    EP_ASSERT(fread(out, bytes, count, stdin) == count);
}

static void put(const void *values, size_t count, size_t bytes)
{
    EP_ASSERT(fwrite(values, bytes, count, stdout) == count);
}

static const ep_layer_shape *find_layer(const ep_model_info *info, uint32_t layer)
{
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        if (info->moe_layers[i].layer == layer) {
            return &info->moe_layers[i];
        }
    }
    return NULL;
}

static ep_checkpoint *do_open(const char *dir)
{
    ep_checkpoint *checkpoint = NULL;
    ep_error error;
    const ep_err err = ep_checkpoint_open(dir, &checkpoint, &error);
    if (err != EP_OK) {
        answer_error(err, &error);
        return NULL;
    }
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    json_t *layers = json_array();
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        const ep_layer_shape *s = &info->moe_layers[i];
        (void)json_array_append_new(
            layers,
            json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:s}", "layer", s->layer, "hidden",
                      s->hidden, "inner", s->inner, "experts", s->experts, "shared",
                      s->shared_experts, "top_k", s->top_k, "shared_inner", info->shared_inner[i],
                      "activation", ep_activation_name(s->activation)));
    }
    answer(json_pack("{s:s, s:b, s:s, s:i, s:i, s:b, s:s, s:o}", "model_type", info->model_type,
                     "known", info->model_type_known, "router", info->router.why_not, "zero",
                     info->router.zero_experts, "copy", info->router.copy_experts,
                     "weight_on_input", info->router.weight_on_input, "format",
                     ep_weight_format_name(info->format), "layers", layers));
    return checkpoint;
}

static void do_rows(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                    uint32_t tokens)
{
    const ep_layer_shape *shape = find_layer(ep_checkpoint_info(checkpoint), layer);
    EP_ASSERT(shape != NULL);
    const size_t hidden = shape->hidden;
    ep_expert_data expert;
    ep_error error;
    float *x = allocate(tokens * hidden, sizeof(*x));
    float *y = allocate(tokens * hidden, sizeof(*y));
    ep_ffn_row *rows = allocate(tokens, sizeof(*rows));
    get(x, tokens * hidden, sizeof(*x));
    const ep_err err = ep_checkpoint_read_expert(checkpoint, layer, index, &expert, &error);
    if (err != EP_OK) {
        answer_error(err, &error);
    } else {
        for (uint32_t t = 0; t < tokens; t++) {
            rows[t] = (ep_ffn_row){.x = x + t * hidden, .out = y + t * hidden};
        }
        float *scratch =
            allocate(ep_ffn_reference_scratch_floats(expert.source.hidden, expert.source.inner),
                     sizeof(*scratch));
        const ep_ffn_batch batch = {
            .rows = rows, .rows_count = tokens, .x_dtype = EP_DTYPE_F32, .out_dtype = EP_DTYPE_F32};
        ep_ffn_reference(&expert.source, &batch, scratch);
        free(scratch);
        ep_expert_data_free(&expert);
        answer(json_pack("{s:i}", "columns", (int)hidden));
        put(y, tokens * hidden, sizeof(*y));
    }
    free(rows);
    free(y);
    free(x);
}

static void choose(const ep_checkpoint_gate *gate, uint32_t tokens, const int32_t *token_ids,
                   int32_t *out_chosen)
{
    const size_t top_k = gate->config.top_k;
    for (uint32_t t = 0; t < tokens; t++) {
        EP_ASSERT(token_ids[t] >= 0 && (uint32_t)token_ids[t] < gate->table_rows);
        memcpy(out_chosen + t * top_k, gate->table + (size_t)token_ids[t] * top_k,
               top_k * sizeof(*out_chosen));
    }
}

static void do_gate(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t tokens,
                    uint32_t columns)
{
    ep_checkpoint_gate gate;
    ep_error error;
    float *logits = allocate((size_t)tokens * columns, sizeof(*logits));
    int32_t *token_ids = allocate(tokens, sizeof(*token_ids));
    get(logits, (size_t)tokens * columns, sizeof(*logits));
    get(token_ids, tokens, sizeof(*token_ids));
    ep_err err = ep_checkpoint_read_gate(checkpoint, layer, &gate, &error);
    if (err == EP_OK && gate.config.experts != columns) {
        err = ep_error_set(&error, EP_ERR_INVALID_ARGUMENT,
                           "the gate has %" PRIu32 " logits, given %" PRIu32, gate.config.experts,
                           columns);
        ep_checkpoint_gate_fini(&gate);
    }
    if (err == EP_OK) {
        const size_t slots = (size_t)tokens * gate.config.top_k;
        int32_t *ids = allocate(slots, sizeof(*ids));
        int32_t *chosen = allocate(slots, sizeof(*chosen));
        float *weights = allocate(slots, sizeof(*weights));
        if (gate.table != NULL) {
            choose(&gate, tokens, token_ids, chosen);
            gate.config.chosen = chosen;
        }
        err = ep_gate(&gate.config, tokens, logits, ids, weights, &error);
        if (err == EP_OK) {
            answer(json_pack("{s:i}", "columns", gate.config.top_k));
            put(ids, slots, sizeof(*ids));
            put(weights, slots, sizeof(*weights));
        }
        free(weights);
        free(chosen);
        free(ids);
        ep_checkpoint_gate_fini(&gate);
    }
    if (err != EP_OK) {
        answer_error(err, &error);
    }
    free(token_ids);
    free(logits);
}

static bool serve(const char *line, ep_checkpoint **checkpoint)
{
    uint32_t a;
    uint32_t b;
    uint32_t c;
    if (strncmp(line, "open ", 5) == 0) {
        ep_checkpoint_close(*checkpoint);
        *checkpoint = do_open(line + 5);
    } else if (*checkpoint != NULL &&
               sscanf(line, "rows %" SCNu32 " %" SCNu32 " %" SCNu32, &a, &b, &c) == 3) {
        do_rows(*checkpoint, a, b, c);
    } else if (*checkpoint != NULL &&
               sscanf(line, "gate %" SCNu32 " %" SCNu32 " %" SCNu32, &a, &b, &c) == 3) {
        do_gate(*checkpoint, a, b, c);
    } else {
        return false;
    }
    fflush(stdout);
    return true;
}

int main(void)
{
    char line[LINE_BYTES];
    ep_checkpoint *checkpoint = NULL;
    bool good = true;
    while (good && fgets(line, sizeof(line), stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        good = serve(line, &checkpoint);
    }
    ep_checkpoint_close(checkpoint);
    return good ? 0 : 2;
}
