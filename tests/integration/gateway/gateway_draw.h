/* SPDX-License-Identifier: Apache-2.0 */
/* One drawn call of the fixture's model "deepseek", layer 1, from the tables of parameters. */
#ifndef GATEWAY_DRAW_H
#define GATEWAY_DRAW_H

#include "batch_file.h"
#include "gateway_fixture.h"
#include "model/safetensors.h"
#include "model/safetensors_writer.h"
#include "wire/gateway_codec.h"
#include "wire/moe_parameters.h"

enum {
    DRAW_TOKENS_MAX = 300,
    DRAW_TOP_K_MAX = 6,
    DRAW_SPECIAL_MAX = 3, /* of each kind */
    DRAW_SMOOTH_ROWS = GATEWAY_EXPERTS + 1,
    DRAW_LINE_BYTES = 2048,
    DRAW_TENSORS_MAX = 24,
    DRAW_ROWS_MAX = 48,
    DRAW_OUT_BYTES = DRAW_TOKENS_MAX * DRAW_TOP_K_MAX * GATEWAY_HIDDEN * 4
};

typedef struct draw_call {
    ep_moe_args args;
    ep_gate_config gate;
    ep_tensor logits;
    bool gated;
    bool free_gate;    /* its fields are drawn too */
    bool must_succeed; /* nothing of it may be refused */
    ep_dtype out_dtype;
    uint32_t tokens;
    uint32_t top_k;
    uint8_t x[DRAW_TOKENS_MAX * GATEWAY_HIDDEN * 4];
    uint8_t shared[DRAW_TOKENS_MAX * GATEWAY_HIDDEN * 4];
    uint8_t tables[3][DRAW_SPECIAL_MAX * GATEWAY_HIDDEN * 4];
    float smooth[DRAW_SMOOTH_ROWS * GATEWAY_HIDDEN];
    float x_scales[DRAW_TOKENS_MAX];
    uint8_t ids[DRAW_TOKENS_MAX * DRAW_TOP_K_MAX * 8];
    uint8_t scales[DRAW_TOKENS_MAX * DRAW_TOP_K_MAX * 4];
    uint8_t mask[DRAW_TOKENS_MAX * DRAW_TOP_K_MAX];
    uint8_t partial[DRAW_TOKENS_MAX * DRAW_TOP_K_MAX];
    float logit_rows[DRAW_TOKENS_MAX * GATEWAY_EXPERTS];
    float bias[GATEWAY_EXPERTS];
    float factors[GATEWAY_EXPERTS];
    int32_t chosen[DRAW_TOKENS_MAX * DRAW_TOP_K_MAX];
} draw_call;

/* Calls that succeeded, by what they had; but for the gate those that went all ways. */
typedef struct draw_coverage {
    uint32_t moe[DRAW_ROWS_MAX]; /* another value than 0, per row of the table */
    uint32_t words[DRAW_ROWS_MAX][8];
    uint32_t gate[DRAW_ROWS_MAX];
    uint32_t tensors[DRAW_ROWS_MAX];
    uint32_t gate_arrays[3]; /* bias, expert_factors, chosen */
} draw_coverage;

/* A pure function of number. gate: of the layer, for calls with logits. */
void draw_call_make(draw_call *c, uint64_t number, const ep_gate_config *gate);
/* What expertctl forward takes for it, beside files: " --mode=decode ..." */
void draw_options(const draw_call *c, char out[DRAW_LINE_BYTES]);
/* The tensors of its file; how many. */
size_t draw_tensors(draw_call *c, ep_named_tensor out[DRAW_TENSORS_MAX]);
void draw_cover(draw_call *c, draw_coverage *covered);
/* Prints all counts. must: a count of 0 ends the test. */
void draw_report(const draw_coverage *covered, bool must);

#endif
